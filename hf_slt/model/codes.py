"""What a ticket stores of a masked tensor: one small integer a weight, its code.

    weight = drawn * factors[code]        a mask of zeros and ones has the factors (0, 1)

Codes of n weights with c factors are max(1, ceil(log2 c)) planes of ceil(n / 8) bytes, one after the other.
Plane j holds bit j of every code: bit i % 8 (least significant first) of byte i // 8 is weight i of the
row-major tensor; the bits after the last are zero.

Where only a share of a tensor is searched, the codes are those of the searched weights alone, in row-major
order; the others are kept (factor 1) or dropped (factor 0) for good. Which is which follows from the seed:
order all weights by (word i of the generator under the name + ".search", i); the first `searched` of them are
searched, the next round(frozen_density * rest) are kept.
"""

import numpy as np

from .random_weights import TensorSpec, words_of


def planes(levels: int) -> int:
    """How many bits a code takes, of which there are so many."""
    return max(1, (levels - 1).bit_length())


def packed_bytes(tensor: TensorSpec) -> int:
    """How many bytes the packed codes of a tensor take."""
    return planes(len(tensor.factors)) * -(-tensor.searched // 8)


def pack_codes(codes: np.ndarray, levels: int = 2) -> np.ndarray:
    """Codes to bytes, plane by plane.

    >>> pack_codes(np.array([2, 0, 1], np.uint8), 3).tolist()
    [4, 1]
    """
    flat = np.ascontiguousarray(codes, np.uint8).reshape(-1)
    return np.concatenate([np.packbits(flat >> j & 1, bitorder="little") for j in range(planes(levels))])


def unpack_codes(packed: np.ndarray, size: int, levels: int = 2) -> np.ndarray:
    """Bytes to codes: the inverse of `pack_codes`, as a row.

    >>> unpack_codes(np.array([4, 1], np.uint8), 3, 3).tolist()
    [2, 0, 1]
    """
    rows = packed.reshape(planes(levels), -1)
    codes = np.unpackbits(rows[0], count=size, bitorder="little")
    for j, row in enumerate(rows[1:], 1):
        codes |= np.unpackbits(row, count=size, bitorder="little") << j
    return codes


def count_codes(packed: np.ndarray, size: int, levels: int) -> list[int]:
    """How many weights have each code; ValueError for a code or a bit that stands for nothing."""
    counts = np.bincount(unpack_codes(packed, size, levels), minlength=levels)
    last = packed.reshape(planes(levels), -1)[:, -1] if size % 8 else np.zeros(1, np.uint8)
    if len(counts) > levels or (last >> size % 8).any():
        raise ValueError(f"codes other than the {levels} there are, or bits after the last")
    return counts.tolist()


def full_codes(tensor: TensorSpec) -> np.ndarray:
    """The packed codes that leave every searched weight as it was drawn, where a factor is 1; or the last."""
    code = tensor.factors.index(1.0) if 1.0 in tensor.factors else len(tensor.factors) - 1
    return pack_codes(np.full(tensor.searched, code, np.uint8), len(tensor.factors))


def factors_of(tensor: TensorSpec, packed: np.ndarray) -> np.ndarray:
    """The factor of every weight of a tensor, in float32."""
    factors = np.array(tensor.factors, np.float32)[unpack_codes(packed, tensor.searched, len(tensor.factors))]
    if tensor.search < 1:
        searched, whole = search_pattern(tensor)
        whole[searched] = factors
        factors = whole
    return factors.reshape(tensor.shape)


def search_pattern(tensor: TensorSpec) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the searched weights, in row-major order; and a row of factors: 1 for what is kept for good.

    >>> searched, kept = search_pattern(TensorSpec("w", (2, 4), search=0.5, frozen_density=0.5))
    >>> len(searched), int(kept.sum())
    (4, 2)
    """
    words = words_of(tensor.seed, tensor.name + ".search", 0, tensor.size).astype(np.uint64)
    order = words << np.uint64(32) | np.arange(tensor.size, dtype=np.uint64)  # no two are equal
    kept = round(tensor.frozen_density * (tensor.size - tensor.searched))
    ends = [tensor.searched - 1, tensor.searched + kept - 1]
    first, second = np.partition(order, ends)[ends]
    return np.flatnonzero(order <= first), ((order > first) & (order <= second)).astype(np.float32)
