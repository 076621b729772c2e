"""A random code over whole rows: every weight is one of few drawn numbers, and a path chooses which.

    state_i  = (state_(i-1) * 2**k + code_i) mod 2**L       k bits hold a code
    weight_i = table[state_i]                               2**L numbers, drawn from seed, name and law

A path runs along the inputs of one output (a row) and is closed: before the first weight of a row comes its last.
The state is just the last codes written one after the other, the newest in the lowest bits. All states can
be computed at once, and no initial state needs to be stored:

    state_i = sum over j of code_(i-j) * 2**(k*j),  mod 2**L,  i - j counted around the row

Each weight has only as many possible successors as there are codes: 2 to 16, which is 1 to 4 bits per weight. But all
numbers of the table occur. Where the number of codes is not a power of two, some values of the k bits are no code: 5
codes take 3 bits each in a state, and reach only the 5**(L/3) states without a code above 4 (`reachable_states`); the
other numbers are not used. A row is coded as a whole, which comes nearer to the wanted weights than any code for
single weights (Ungerboeck, 1982; Marcellin and Fischer, 1990; QTIP, 2024).
"""

import math
from collections.abc import Sequence

import numpy as np

from ..errors import require

LARGEST_STATE_BITS = 16
BRANCHES = range(2, 17)  # numbers of codes that a path may have


def memory_of(bits: int, state_bits: int) -> int:
    """Return how many codes a state consists of. No row may be shorter.

    Args:
        bits (`int`):
            Bits per code.
        state_bits (`int`):
            Bits of a state.

    Returns:
        `int`: number of codes.

    Example:

    >>> memory_of(2, 8), memory_of(2, 7)
    (4, 4)
    """
    return -(-state_bits // bits)


def check_path(levels: int, state_bits: int, search: float, laws: Sequence[str | None]) -> None:
    """Check that codes and table define a path.

    Args:
        levels (`int`):
            Number of codes.
        state_bits (`int`):
            Bits of a state.
        search (`float`):
            Fraction of each tensor that is searched.
        laws (`Sequence[str | None]`):
            Laws of the tensors.

    Raises:
        `ValueError`: if they do not. The message names the value and says what to do.
    """
    bits = (levels - 1).bit_length()
    require(levels in BRANCHES, f"a trellis of {levels} codes; take {BRANCHES[0]} to {BRANCHES[-1]}")
    fits = type(state_bits) is int and bits < state_bits <= LARGEST_STATE_BITS
    require(fits, f"state_bits {state_bits!r} is not from {bits + 1} to {LARGEST_STATE_BITS}")
    whole = levels.bit_count() == 1 or state_bits % bits == 0
    require(whole, f"state_bits {state_bits} of {levels} codes, which take {bits} bits each")
    require(search == 1, f"search {search}: a trellis codes whole rows; take search=1")
    few = "has only two numbers, too few for a trellis; take normal or uniform"
    require("signed_constant" not in laws, f"law signed_constant {few}")


def reachable_states(levels: int, state_bits: int) -> np.ndarray:
    """Return the states that a path can reach, the lowest first: those that consist of existing codes.

    Args:
        levels (`int`):
            Number of codes.
        state_bits (`int`):
            Bits of a state.

    Returns:
        `np.ndarray`: the states. With 2, 4, 8 or 16 codes these are all numbers below 2 ** state_bits.

    Example:

    >>> reachable_states(3, 4).tolist()
    [0, 1, 2, 4, 5, 6, 8, 9, 10]
    """
    states, bits = np.arange(2**state_bits), (levels - 1).bit_length()
    digits = (states >> place & (1 << bits) - 1 for place in range(0, state_bits, bits))
    return states[np.logical_and.reduce([digit < levels for digit in digits])]


def states_of(codes: np.ndarray, bits: int, state_bits: int) -> np.ndarray:
    """Return the state at every weight of rows of codes.

    Args:
        codes (`np.ndarray`):
            Codes in uint8, (rows, inputs).
        bits (`int`):
            Bits per code.
        state_bits (`int`):
            Bits per state.

    Returns:
        `np.ndarray`: states in int32, of the same shape.

    >>> states_of(np.array([[1, 0, 1, 1]], np.uint8), 1, 3).tolist()
    [[7, 6, 5, 3]]
    """
    states = np.zeros(codes.shape, np.int32)
    for back in range(memory_of(bits, state_bits)):
        states |= np.roll(codes, back, axis=-1).astype(np.int32) << (bits * back)
    return states & (2**state_bits - 1)


def to_rows(array: np.ndarray, input_axes: Sequence[int]) -> np.ndarray:
    """Return a tensor as (outputs, inputs): the rows that paths run along.

    Args:
        array (`np.ndarray`):
            An array in the shape of a tensor.
        input_axes (`Sequence[int]`):
            Axes that run over inputs, in the order of the path.

    Returns:
        `np.ndarray`: the same numbers, (outputs, inputs).
    """
    last = range(array.ndim - len(input_axes), array.ndim)
    inputs = math.prod(array.shape[axis] for axis in input_axes)
    return np.moveaxis(array, tuple(input_axes), tuple(last)).reshape(-1, inputs)


def from_rows(rows: np.ndarray, shape: Sequence[int], input_axes: Sequence[int]) -> np.ndarray:
    """Return rows as the tensor that they were: the inverse of `to_rows`.

    Args:
        rows (`np.ndarray`):
            What `to_rows` returned.
        shape (`Sequence[int]`):
            Shape of the tensor.
        input_axes (`Sequence[int]`):
            Axes that run over inputs, in the order of the path.

    Returns:
        `np.ndarray`: the tensor.
    """
    outputs = [extent for axis, extent in enumerate(shape) if axis not in input_axes]
    moved = rows.reshape(*outputs, *(shape[axis] for axis in input_axes))
    return np.moveaxis(moved, tuple(range(len(outputs), len(shape))), tuple(input_axes))
