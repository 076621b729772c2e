"""Writes mask files, from arrays or from another ticket. `format.py` specifies the format.

header and arrays -> write_masks -> mask.safetensors, index; with config.json -> one rename
"""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from ..about import __version__
from ..weights.codes import count_codes
from ..weights.quantisation import BITS, quantise
from ..weights.random_weights import digest
from .coded_files import CODED_KEYS, deflate, encode_file
from .entries import SCALES
from .files import copy_own_file, staged
from .format import (
    CONFIG_FILE,
    DIGEST_KEY,
    ENCODINGS,
    FORMAT_VERSION,
    INDEX_FILE,
    MASK_FILE,
    METADATA_KEY,
    MODEL_FILE,
    VERSION_KEY,
    Header,
    Ticket,
    mask_digest,
    read_header,
    read_json,
    sha256,
    ticket_digest,
)
from .migrations import DIGITS, NESTED, nested_config
from .verify import verify_files


def sealed(header: Header, masks: str) -> Header:
    """Return a header with the digest of all stored data and, made from that, the digest of the ticket.

    Args:
        header ([`Header`]):
            A header whose digests are not computed yet.
        masks (`str`):
            Digest of all stored data.

    Returns:
        [`Header`]: the header with both digests.
    """
    options = {**header.options, "mask_digest": masks, "digest": None}
    config = {**header.config, NESTED: options}
    options["digest"] = whole = ticket_digest(config, header.tensors, masks)
    return replace(header, config=config, mask_digest=masks, digest=whole)


def rewrite_ticket(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    encoding: str = "packed",
    masks: Mapping[str, np.ndarray] | None = None,
    verified: Ticket | None = None,
    companions: Collection[str] | None = None,
) -> Header:
    """Write the ticket of one folder to another (or the same), in the present format.

    Args:
        source (`str` or `os.PathLike`):
            Folder of the ticket.
        target (`str` or `os.PathLike`):
            Folder to write to. Readers find a complete ticket there at every moment.
        encoding (`str`, defaults to `"packed"`):
            How the new file stores its masks: `"packed"` or `"entropy"`.
        masks (`Mapping[str, np.ndarray]`, *optional*):
            Packed codes by tensor name, in place of those in `source`.
        verified ([`Ticket`], *optional*):
            The ticket in `source`, if it was read and checked before.
        companions (`Collection[str]`, *optional*):
            Names of the other files to copy to `target`. Default: all files of `source`.

    Returns:
        [`Header`]: the header that was written.
    """
    source, target = Path(source), Path(target)
    check_encoding(encoding)
    ticket = verified or verify_files(source, weights=False)
    header, arrays = ticket.header, dict(ticket.arrays) | dict(masks or {})
    digests = {name: digest(array) for name, array in arrays.items()}
    entries = {}
    for name, entry in header.tensors.items():
        if entry.counts is not None:
            counts = tuple(count_codes(arrays[name], sum(entry.counts), len(entry.counts)))
            entry = replace(entry, counts=counts, data_sha256=digests[name][:DIGITS])
        entries[name] = replace(entry, key=None if entry.key is None else name)
    header = sealed(
        replace(header, tensors=entries, encoding=encoding, format_version=FORMAT_VERSION),
        mask_digest(digests),
    )
    config = nested_config(read_json(source / CONFIG_FILE))
    config |= {NESTED: dict(header.options), VERSION_KEY: __version__}
    with staged(target) as stage:
        if target.resolve() != source.resolve():
            for path in source.iterdir():
                written = path.name in (MASK_FILE, MODEL_FILE, INDEX_FILE, CONFIG_FILE)
                if not written and (companions is None or path.name in companions):
                    copy_own_file(path, stage)
        write_masks(stage, header, arrays)
        (stage / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return header


def check_encoding(encoding: str) -> None:
    """Raise `ValueError` for an unknown encoding.

    Args:
        encoding (`str`):
            How masks are stored: `"packed"` or `"entropy"`.

    Raises:
        `ValueError`: if it is neither.
    """
    if encoding not in ENCODINGS:
        raise ValueError(f"encoding {encoding!r} is not one of {', '.join(map(repr, ENCODINGS))}")


def write_masks(
    directory: str | os.PathLike, header: Header, arrays: Mapping[str, np.ndarray], file_name: str = MASK_FILE
) -> None:
    """Write the mask file, and the index it needs, into a (staged) folder.

    Args:
        directory (`str` or `os.PathLike`):
            The folder.
        header ([`Header`]):
            The header. Its `encoding` says how masks are stored.
        arrays (`Mapping[str, np.ndarray]`):
            By tensor name, packed masks and trained values in float32.
        file_name (`str`, defaults to `MASK_FILE`):
            Name of the mask file.
    """
    directory = Path(directory)
    stored: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        entry = header.tensors[name]
        key = str(entry.key)
        if entry.kind == "trained" and entry.bits in BITS:
            stored[key], stored[key + SCALES] = quantise(array, entry.bits)
        else:
            stored[key] = array.astype(np.float16) if entry.bits == 16 else array
    facts = asdict(header)
    for name, entry in facts["tensors"].items():  # fields that do not apply are left out, to save bytes
        facts["tensors"][name] = {key: one for key, one in entry.items() if one is not None}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    metadata = {"format": "pt", METADATA_KEY: text, DIGEST_KEY: sha256(text)}
    if header.encoding == "entropy":
        stored = {CODED_KEYS[0]: encode_file(stored, header.tensors)}
        metadata[METADATA_KEY] = deflate(text)
    (directory / file_name).write_bytes(_in_order(save(stored, metadata)))
    read_header(directory / file_name)  # fails here if the file would not load
    if file_name == MODEL_FILE:
        return  # transformers finds this name without an index
    index = {
        "metadata": {"total_size": sum(array.nbytes for array in stored.values())},
        "weight_map": dict.fromkeys(sorted(stored), MASK_FILE),
    }
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _in_order(data: bytes) -> bytes:
    """Return the same safetensors file with a sorted header: the library's order of metadata is random.

    One ticket is then one sequence of bytes, and saving or pushing it again changes nothing.
    """
    length = int.from_bytes(data[:8], "little")
    text = json.dumps(json.loads(data[8 : 8 + length]), sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors stay aligned
    return len(text).to_bytes(8, "little") + text + data[8 + length :]
