"""Entropy-coded files: the same ticket in as few bytes as possible.

    packed:   header as text, a tensor for every mask and every trained array
    entropy:  header deflated,    one tensor `coded` = trained arrays, raw | masks, entropy-coded

The header is deflated because it matters in small tickets: as text, it takes a tenth of one with learned scales.

1. Header. The metadata's `hf_slt` is the base64 of the zlib stream (RFC 1950) of the text that a packed file
   has there. A text begins with a brace, which base64 does not have. Its digest is of the text.
2. Trained arrays, sorted by tensor name, with the same bytes as in a packed file: values in float32 or float16,
   or codes and then the scales of their rows. Their lengths follow from the header.
3. Masks: all the rest; see entropy.py.

In files of version 1 the header is text, and the tensor `coded_masks` holds only the masks.
"""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from .entries import Entry
from .entropy import decode_codes, encode_codes

CODED_KEYS = ("coded", "coded_masks")  # the tensor with all data or, in version 1, with all masks


def deflate(text: str) -> str:
    """Compress a text.

    Args:
        text (`str`):
            Any text.

    Returns:
        `str`: a shorter text, in base64.

    Example:

    >>> inflate(deflate('{"seed": 7}'), 100)
    '{"seed": 7}'
    """
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def inflate(coded: str, most: int) -> str:
    """Return the text that `deflate` compressed.

    Args:
        coded (`str`):
            What `deflate` returned.
        most (`int`):
            Largest length in bytes that is accepted.

    Returns:
        `str`: the text.

    Raises:
        `ValueError`: if `coded` is damaged, or if the text is longer than `most`.
    """
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(base64.b64decode(coded, validate=True), most)
        if not stream.eof or stream.unused_data:
            raise ValueError("not a complete zlib stream, or the text is too long")
        return data.decode()
    except zlib.error as error:
        raise ValueError(str(error)) from None


def encode_file(stored: Mapping[str, np.ndarray], entries: Mapping[str, Entry]) -> np.ndarray:
    """Put the arrays of a packed file into one.

    Args:
        stored (`Mapping[str, np.ndarray]`):
            Arrays of a packed file, by their keys there.
        entries (`Mapping[str, Entry]`):
            The tensors of the ticket, by name.

    Returns:
        `np.ndarray`: bytes, a row.
    """
    parts = [stored[key] for key, _, _ in _trained(entries)]
    counts = _counts(entries)
    parts.append(encode_codes({name: stored[str(entries[name].key)] for name in counts}, counts))
    return np.concatenate([np.frombuffer(part.tobytes(), np.uint8) for part in parts])


def decode_file(stored: dict[str, np.ndarray], entries: Mapping[str, Entry]) -> dict[str, np.ndarray]:
    """Read the array of `encode_file`.

    Args:
        stored (`dict[str, np.ndarray]`):
            Arrays of the coded file by key. Trained arrays are added to it under their own keys.
        entries (`Mapping[str, Entry]`):
            The tensors of the ticket, by name.

    Returns:
        `dict[str, np.ndarray]`: packed codes by tensor name.
    """
    data = stored.get(CODED_KEYS[1])
    if data is None:
        data, start = stored[CODED_KEYS[0]], 0
        for key, shape, dtype in _trained(entries):
            part = data[start : (start := start + int(np.prod(shape)) * dtype.itemsize)]
            stored[key] = np.frombuffer(part.tobytes(), dtype).reshape(shape)
        data = data[start:]
    return decode_codes(data, _counts(entries))


def _counts(entries: Mapping[str, Entry]) -> dict[str, Any]:
    return {name: entry.counts for name, entry in entries.items() if entry.kind == "masked"}


def _trained(entries: Mapping[str, Entry]) -> list[tuple[str, tuple[int, ...], np.dtype]]:
    """Return keys, shapes and little-endian types of the trained arrays, in the order of the file."""
    return [
        (key, shape, dtype.newbyteorder("<"))
        for _, entry in sorted(entries.items())
        if entry.kind == "trained"
        for key, (shape, dtype) in entry.stored().items()
    ]
