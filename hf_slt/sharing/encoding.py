"""Masks and values to bytes: the inverse of `model/entropy.py` and `model/quantisation.py`, which specify both."""

import math
from collections.abc import Mapping

import numpy as np

from ..model.entropy import MARK, constriction_library, count_ones, model_of, pieces, runs
from ..model.quantisation import largest_code

_SMALLEST = np.float32(2**-14)  # the least normal float16
_DROPPED = np.int32((1 << 13) - 1)  # bits of a float32 significand that float16 has not


def encode_masks(
    masks: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> np.ndarray:
    """All masks in one array of bytes.

    A mask is a boolean array of any shape, or (with its shape in `shapes`) the bytes of ticket.pack_mask.

    >>> mask = np.zeros(100, bool)
    >>> mask[[41, 59]] = True
    >>> encode_masks({"a": mask}).nbytes  # log2(100 choose 2) is 12.3 bits
    4
    """
    library = constriction_library()
    coder = library.stream.stack.AnsCoder(MARK)
    for name in sorted(masks, reverse=True):
        letters, size = _letters(name, masks[name], shapes)
        for run, left, kept in reversed(list(runs(letters, size, count_ones(letters)))):
            if 0 < kept < left:
                model = model_of(library, left, kept)
                for part in reversed(pieces(run)):
                    coder.encode_reverse(letters[part].astype(np.int32), model)
    coded = coder.get_compressed().astype("<u4").view(np.uint8)
    return coded[: coded.size - int(np.argmax(coded[::-1] != 0))].copy()


def _letters(
    name: str, mask: np.ndarray, shapes: Mapping[str, tuple[int, ...]] | None
) -> tuple[np.ndarray, int]:
    """The bytes of a mask, and its number of weights."""
    if mask.dtype == bool:
        return np.packbits(mask.reshape(-1), bitorder="little"), mask.size
    if shapes is None:
        raise ValueError(f"{name}: a packed mask needs its shape")
    size = math.prod(shapes[name])
    if mask.dtype != np.uint8 or mask.shape != (-(-size // 8),):
        raise ValueError(f"{name}: {mask.dtype} of shape {mask.shape} are not {size} packed bits")
    if size % 8 and mask[-1] >> size % 8:
        raise ValueError(f"{name}: bits are set after the last of {size}")
    return mask, size


def quantise(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes (int8, or for 4 bits two in a byte, the first in the low half, plus 8) and the scales of rows.

    >>> quantise(np.array([[7.0, -3.4, 0.0]], np.float32), 4)
    (array([95,  8], dtype=uint8), array([1.], dtype=float16))
    """
    largest = np.abs(values).max(axis=1, initial=0.0)
    if not np.isfinite(largest).all():
        raise ValueError("values that are not finite cannot be quantised")
    steps = (largest / np.float32(largest_code(bits))).astype(np.float32).view(np.int32)
    scales = np.maximum((((steps + _DROPPED) & ~_DROPPED).view(np.float32)), _SMALLEST)
    if scales.max(initial=0.0) > np.finfo(np.float16).max:
        raise ValueError(f"a value of {largest.max()} is too large for a scale in float16")
    codes = np.rint(values / scales[:, None]).astype(np.int8)
    if bits == 4:
        shifted = np.append((codes + 8).astype(np.uint8), np.zeros(codes.size % 2, np.uint8))
        codes = shifted[0::2] | shifted[1::2] << 4
    return codes, scales.astype(np.float16)
