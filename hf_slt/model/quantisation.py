"""Rows of float32 numbers in 8 or 4 bits each, with one scale a row; doing it twice changes nothing.

    q     = 127 or 7                                             the largest code
    scale = max |row| / q, rounded up to float16, at least 2**-14
    code  = value / scale, rounded to the nearest integer (a half to the even one), in -q .. q
    value = code * scale                                         exact: 8 bits times 11 fit in float32

The largest of a row gets code q (or the scale is 2**-14, which stands): quantising the values again finds the
same scale and the same codes. A ticket can thus be loaded and saved without end.
"""

import numpy as np

BITS = (8, 4)


def dequantise(codes: np.ndarray, scales: np.ndarray, shape: tuple[int, ...], bits: int) -> np.ndarray:
    """The float32 values of codes and scales.

    >>> dequantise(np.array([95, 8], np.uint8), np.array([1], np.float16), (1, 3), 4)
    array([[ 7., -3.,  0.]], dtype=float32)
    """
    if bits == 4:
        halves = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1)[: int(np.prod(shape))]
        codes = halves.astype(np.int8) - np.int8(8)
    return codes.reshape(shape).astype(np.float32) * scales.astype(np.float32)[:, None]


def stored_form(shape: tuple[int, ...], bits: int) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of the codes of a table."""
    if bits == 4:
        return (-(-int(np.prod(shape)) // 2),), np.dtype(np.uint8)
    return shape, np.dtype(np.int8)
