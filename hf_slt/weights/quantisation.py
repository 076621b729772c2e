"""Rows of float32 numbers in 8 or 4 bits each, with one scale per row. Rounding a second time changes nothing.

    q     = 127 or 7                                             the largest code
    scale = max |row| / q, rounded up to float16, at least 2**-14
    code  = value / scale, rounded to the nearest integer (a half to the even one), in -q .. q
    value = code * scale                                         exact: 8 bits times 11 fit in float32

The largest value of a row gets code q, unless the scale has its minimum, 2**-14. In both cases, quantising the
values again gives the same scale and the same codes. A ticket can therefore be loaded and saved any number of times.
"""

import numpy as np

BITS = (8, 4)
_SMALLEST = np.float32(2**-14)  # the smallest normal float16
_DROPPED = np.int32((1 << 13) - 1)  # bits of a float32 significand that float16 does not have


def dequantise(codes: np.ndarray, scales: np.ndarray, shape: tuple[int, ...], bits: int) -> np.ndarray:
    """Return the float32 values of codes and scales.

    Args:
        codes (`np.ndarray`):
            What `quantise` returned first.
        scales (`np.ndarray`):
            The scale of each row, in float16.
        shape (`tuple[int, ...]`):
            Shape of the table.
        bits (`int`):
            8 or 4.

    Returns:
        `np.ndarray`: the values, in that shape.

    Example:

    >>> dequantise(np.array([95, 8], np.uint8), np.array([1], np.float16), (1, 3), 4)
    array([[ 7., -3.,  0.]], dtype=float32)
    """
    if bits == 4:
        halves = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1)[: int(np.prod(shape))]
        codes = halves.astype(np.int8) - np.int8(8)
    return codes.reshape(shape).astype(np.float32) * scales.astype(np.float32)[:, None]


def stored_form(shape: tuple[int, ...], bits: int) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and type of the codes of a table.

    Args:
        shape (`tuple[int, ...]`):
            Shape of the table.
        bits (`int`):
            8 or 4.

    Returns:
        `tuple[tuple[int, ...], np.dtype]`: shape and type.
    """
    if bits == 4:
        return (-(-int(np.prod(shape)) // 2),), np.dtype(np.uint8)
    return shape, np.dtype(np.int8)


def largest_code(bits: int) -> int:
    """Return 127 for 8 bits, 7 for 4.

    Args:
        bits (`int`):
            8 or 4.

    Returns:
        `int`: the largest code.
    """
    return 2 ** (bits - 1) - 1


def quantise(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Round a table to codes with a scale for each row.

    Args:
        values (`np.ndarray`):
            A table in float32.
        bits (`int`):
            8 or 4.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: the codes, and the scales of rows in float16. Codes of 8 bits are int8. Of
        4 bits, each byte holds two codes, plus 8 each, the first in its low half.

    Raises:
        `ValueError`: for values that are not finite.

    Example:

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


def as_stored(values: np.ndarray, bits: int) -> np.ndarray:
    """Return float32 values rounded as a file with `bits` bits per value stores them.

    Args:
        values (`np.ndarray`):
            Trained values in float32.
        bits (`int`):
            Bits per value in the file: 32, 16, 8 or 4.

    Returns:
        `np.ndarray`: the rounded values.
    """
    if bits in BITS:
        return dequantise(*quantise(values, bits), values.shape, bits)
    return values.astype(np.float16).astype(np.float32) if bits == 16 else values
