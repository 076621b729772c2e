"""What a ticket stores for a masked tensor: one small integer per weight, its code.

    weight = drawn * factors[code]        a mask of zeros and ones has the factors (0, 1)
    weight = drawn[state]                 for a trellis: codes are a path through its states (see trellis.py)

`weights_of` decides between the two. All code that computes masked weights calls it.

Codes of n weights with c factors are max(1, ceil(log2 c)) planes of ceil(n / 8) bytes, one after the other.
Plane j holds bit j of every code: bit i % 8 (least significant first) of byte i // 8 is weight i of the
row-major tensor; the bits after the last weight are zero.

If only a part of a tensor is searched, only the searched weights have codes, in row-major order. Each of the
others is always kept (factor 1) or always dropped (factor 0). The seed decides which weights these are:
order all weights by (word i of the generator under the name + ".search", i); the first `searched` of them are
searched, the next round(frozen_density * rest) are kept.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from .random_weights import TensorSpec, little_endian, words_of
from .trellis import from_rows, states_of, to_rows

Observer = Callable[[TensorSpec, str], None]  # called with every tensor that is drawn, and its digest


def only_chooses(factors: Sequence[float], state_bits: int | None) -> bool:
    """Return whether codes only keep, drop or choose drawn numbers, and never change a number.

    Args:
        factors (`Sequence[float]`):
            The factor of each code.
        state_bits (`int` or `None`):
            Bits of a state if codes are a path through a trellis, else None.

    >>> only_chooses((0.0, 1.0), None), only_chooses((-1.0, 0.0, 1.0), None)
    (True, False)

    Returns:
        `bool`: True for a strict ticket.
    """
    return state_bits is not None or {*factors} <= {0.0, 1.0}


def planes(levels: int) -> int:
    """Return the bits per code for `levels` codes.

    Args:
        levels (`int`):
            Number of codes.

    Returns:
        `int`: bits per code, at least 1.
    """
    return max(1, (levels - 1).bit_length())


def pack_codes(codes: np.ndarray, levels: int = 2) -> np.ndarray:
    """Turn codes into bytes, plane by plane.

    Args:
        codes (`np.ndarray`):
            Codes in any shape, in row-major order.
        levels (`int`, defaults to 2):
            Number of codes.

    Returns:
        `np.ndarray`: bytes, a row.

    Example:

    >>> pack_codes(np.array([2, 0, 1], np.uint8), 3).tolist()
    [4, 1]
    """
    flat = np.ascontiguousarray(codes, np.uint8).reshape(-1)
    return np.concatenate([np.packbits(flat >> j & 1, bitorder="little") for j in range(planes(levels))])


def unpack_codes(packed: np.ndarray, size: int, levels: int = 2) -> np.ndarray:
    """Turn bytes into codes, as a row: the inverse of `pack_codes`.

    Args:
        packed (`np.ndarray`):
            What `pack_codes` returned.
        size (`int`):
            Number of weights.
        levels (`int`, defaults to 2):
            Number of codes.

    Returns:
        `np.ndarray`: one code per weight.

    Example:

    >>> unpack_codes(np.array([4, 1], np.uint8), 3, 3).tolist()
    [2, 0, 1]
    """
    rows = packed.reshape(planes(levels), -1)
    codes = np.unpackbits(rows[0], count=size, bitorder="little")
    for j, row in enumerate(rows[1:], 1):
        codes |= np.unpackbits(row, count=size, bitorder="little") << j
    return codes


def count_codes(packed: np.ndarray, size: int, levels: int) -> list[int]:
    """Count how many weights have each code.

    Args:
        packed (`np.ndarray`):
            What `pack_codes` returned.
        size (`int`):
            Number of weights.
        levels (`int`):
            Number of codes.

    Returns:
        `list[int]`: a count for each code.

    Raises:
        `ValueError`: for a code that does not exist, or a bit that is set after the last weight.

    Example:

    >>> count_codes(pack_codes(np.array([2, 0, 1, 0], np.uint8), 3), 4, 3)
    [2, 1, 1]
    """
    rows = packed.reshape(planes(levels), -1)
    counts = []
    for code in range(levels):  # eight weights at a time: a bit of `same` is 1 if the weight has this code
        same = rows[0] if code & 1 else ~rows[0]
        for j, row in enumerate(rows[1:], 1):
            same = same & (row if code >> j & 1 else ~row)
        counts.append(int(np.bitwise_count(same).sum(dtype=np.int64)))
    counts[0] -= 8 * rows.shape[1] - size  # the bits after the last weight are zero
    if sum(counts) != size or (size % 8 and (rows[:, -1] >> size % 8).any()):
        raise ValueError(f"a code is not below {levels}, or a bit is set after the last weight")
    return counts


def full_codes(tensor: TensorSpec) -> np.ndarray:
    """Return the packed codes that leave every searched weight as it was drawn.

    These are the codes of factor 1, or of the last factor if none is 1. For a trellis they are the codes of a random
    path that the seed draws: its weights are as random as the table.

    Args:
        tensor ([`TensorSpec`]):
            Description of the tensor.

    Returns:
        `np.ndarray`: packed codes.
    """
    if tensor.state_bits is not None:
        words = words_of(tensor.seed, tensor.name + ".path", 0, tensor.size)
        levels = len(tensor.factors)
        return pack_codes(
            (words.astype(np.uint64) * np.uint64(levels) >> np.uint64(32)).astype(np.uint8), levels
        )
    code = tensor.factors.index(1.0) if 1.0 in tensor.factors else len(tensor.factors) - 1
    return pack_codes(np.full(tensor.searched, code, np.uint8), len(tensor.factors))


def factors_of(tensor: TensorSpec, packed: np.ndarray) -> np.ndarray:
    """Return the factor of every weight of a tensor. For a trellis: the weight in units of the law.

    Args:
        tensor ([`TensorSpec`]):
            Description of the tensor.
        packed (`np.ndarray`):
            Packed codes.

    Returns:
        `np.ndarray`: factors in float32, in the shape of the tensor.
    """
    if tensor.state_bits is not None:
        return tensor.draw_table()[_path_states(tensor, packed)]
    factors = np.array(tensor.factors, np.float32)[unpack_codes(packed, tensor.searched, len(tensor.factors))]
    if tensor.search < 1:
        searched, whole = search_pattern(tensor)
        whole[searched] = factors
        factors = whole
    return factors.reshape(tensor.shape)


def weights_of(
    tensor: TensorSpec, packed: np.ndarray | None = None, observe: Observer | None = None
) -> np.ndarray:
    """Draw a tensor in this thread, and return its masked weights in float32.

    If a law draws the numbers, each piece is drawn, hashed and multiplied by its factors while it is in the
    core's cache.

    Args:
        tensor (`TensorSpec`):
            Description of the tensor.
        packed (`np.ndarray`, *optional*):
            Packed codes. Default: no mask, all numbers as they are drawn.
        observe (`Callable`, *optional*):
            Called with the tensor and the digest of what was drawn, before any mask.

    Returns:
        `np.ndarray`: the masked weights, in the shape of the tensor.
    """
    # Pieces can be masked one by one only if every drawn number has a code of its own.
    codes = packed if tensor.search == 1 and tensor.state_bits is None else None
    drawn = np.empty(tensor.size if tensor.state_bits is None else 2**tensor.state_bits, np.float32)
    found = None if observe is None else hashlib.sha256()
    for start, piece in tensor.draw_in_pieces(drawn):
        if found is not None:
            found.update(little_endian(piece))
        if codes is not None:
            piece *= _factors_between(tensor, codes, start, start + piece.size)
    if observe is not None and found is not None:
        observe(tensor, found.hexdigest())
    if packed is not None and tensor.state_bits is not None:
        return drawn[_path_states(tensor, packed)]
    drawn = drawn.reshape(tensor.shape if tensor.state_bits is None else -1)
    if packed is not None and codes is None:
        drawn *= factors_of(tensor, packed)
    return drawn


def _factors_between(tensor: TensorSpec, packed: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return the factors of weights `start` (a multiple of 8) to `stop`. If they are 0 and 1: as bytes."""
    levels = len(tensor.factors)
    rows = packed.reshape(planes(levels), -1)[:, start // 8 : -(-stop // 8)]
    codes = unpack_codes(rows, stop - start, levels)
    return codes if tensor.factors == (0.0, 1.0) else np.array(tensor.factors, np.float32)[codes]


def _path_states(tensor: TensorSpec, packed: np.ndarray) -> np.ndarray:
    """Return the state at every weight, in the shape of the tensor."""
    bits, axes = planes(len(tensor.factors)), tensor.input_axes
    codes = unpack_codes(packed, tensor.size, len(tensor.factors)).reshape(tensor.shape)
    states = states_of(to_rows(codes, axes), bits, tensor.state_bits or 0)
    return from_rows(states, tensor.shape, axes)


def code_array(tensor: TensorSpec, packed: np.ndarray) -> np.ndarray:
    """Return the codes of a tensor in its shape, or as a row if only a part of it is searched.

    Codes of the factors (0, 1) are booleans.

    Args:
        tensor ([`TensorSpec`]):
            Description of the tensor.
        packed (`np.ndarray`):
            Packed codes.

    Returns:
        `np.ndarray`: the codes.
    """
    codes = unpack_codes(packed, tensor.searched, len(tensor.factors))
    codes = codes.view(bool) if tensor.factors == (0.0, 1.0) else codes
    return codes.reshape(tensor.shape) if tensor.search == 1 else codes


def search_pattern(tensor: TensorSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return which weights are searched, and which of the others are always kept.

    Args:
        tensor ([`TensorSpec`]):
            Description of the tensor, with a `search` below 1.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: indices of the searched weights in row-major order; and a row of factors,
        1 for the weights that are always kept.

    Example:

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
