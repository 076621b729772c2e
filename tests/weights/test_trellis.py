"""Paths through a table of drawn numbers; and which weights masks can reach, from one seed and from another."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hf_slt.weights.codes import count_codes, factors_of, full_codes, pack_codes, weights_of
from hf_slt.weights.random_weights import TensorSpec
from hf_slt.weights.trellis import check_path, from_rows, memory_of, reachable_states, states_of, to_rows

FOUR = (1.0, 2.0, 3.0, 4.0)


def test_a_state_is_shifted_and_takes_up_a_code():
    codes = np.random.default_rng(0).integers(0, 4, (3, 9)).astype(np.uint8)
    found = states_of(codes, 2, 7)
    for row, states in zip(codes, found, strict=True):
        state = states[-1]  # a path bites its own tail
        for code, expected in zip(row, states, strict=True):
            state = (4 * state + code) % 128
            assert state == expected


@pytest.mark.parametrize("law", ["normal", "uniform", "xavier_uniform"])
@pytest.mark.parametrize("axes", [(0,), (1,)])
def test_weights_are_the_numbers_at_the_states(law, axes):
    tensor = TensorSpec("w", (6, 10), 3, law, 0.02, FOUR, input_axes=axes, state_bits=6)
    packed, table = full_codes(tensor), tensor.draw()
    assert table.shape == (64,)
    weights = weights_of(tensor, packed)
    assert set(weights.flat) <= set(table)
    assert len(set(weights.flat)) > 30  # a path of the seed is as random as its numbers
    # Training multiplies one number by those of a unit table: the same bits.
    assert np.array_equal(tensor.base() * factors_of(tensor, packed), weights)
    codes = np.arange(60, dtype=np.uint8).reshape(6, 10) % 4
    rows = to_rows(codes, axes)
    assert rows.shape[1] == tensor.fan_in
    assert np.array_equal(from_rows(rows, tensor.shape, axes), codes)
    by_hand = np.array([[table[state] for state in row] for row in states_of(rows, 2, 6)])
    expected = by_hand if axes == (1,) else by_hand.T
    assert np.array_equal(weights_of(tensor, pack_codes(codes, 4)), expected)


@pytest.mark.parametrize(("levels", "state_bits"), [(3, 6), (5, 6), (8, 7)])
def test_a_random_path_has_all_codes_that_exist_and_reaches_all_states_of_these(levels, state_bits):
    factors = tuple(map(float, range(1, levels + 1)))
    tensor = TensorSpec("w", (40, 50), 3, factors=factors, input_axes=(1,), state_bits=state_bits)
    counts = count_codes(full_codes(tensor), tensor.size, levels)  # raises for a code that does not exist
    assert min(counts) > 0.9 * tensor.size / levels
    used = set(weights_of(tensor, full_codes(tensor)).flat)
    assert used == set(tensor.draw()[reachable_states(levels, state_bits)])


@pytest.mark.parametrize(("levels", "state_bits"), [(2, 5), (3, 6), (5, 9), (6, 6), (8, 7), (16, 8)])
def test_reachable_states_are_those_of_all_paths(levels, state_bits):
    bits = (levels - 1).bit_length()
    memory = memory_of(bits, state_bits)
    every = np.array(list(product(range(levels), repeat=memory)), np.uint8)
    assert set(states_of(every, bits, state_bits).flat) == set(reachable_states(levels, state_bits))


@pytest.mark.parametrize(
    ("levels", "state_bits", "message"),
    [
        (17, 8, "a trellis of 17 codes; take 2 to 16"),
        (3, 7, "state_bits 7 of 3 codes"),
        (6, 8, "state_bits 8 of 6 codes, which take 3 bits each"),
        (3, 18, "state_bits 18 is not from 3"),
    ],
)
def test_what_is_no_path_is_refused(levels, state_bits, message):
    with pytest.raises(ValueError, match=message):
        check_path(levels, state_bits, 1, ("normal",))


def test_rows_of_a_convolution_are_its_outputs():
    weight = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    assert np.array_equal(to_rows(weight, (1, 2, 3)), weight.reshape(2, 60))
    assert np.array_equal(from_rows(weight.reshape(2, 60), weight.shape, (1, 2, 3)), weight)


def reachable(tensor: TensorSpec) -> set[tuple[float, ...]]:
    """All tensors that a mask can make of what the seed drew."""
    every = product(range(len(tensor.factors)), repeat=tensor.size)
    made = (weights_of(tensor, pack_codes(np.array(codes, np.uint8), len(tensor.factors))) for codes in every)
    return {tuple(weights.flat) for weights in made}


@pytest.mark.parametrize(
    ("law", "factors", "state_bits", "shared"),
    [
        ("normal", (0.0, 1.0), None, 1),  # strict: nothing in common but zero, where all is dropped
        ("signed_constant", (0.0, 1.0), None, None),
        ("normal", (1.0, 2.0), 3, 0),  # strict: other numbers
        ("normal", (1.0, 2.0, 3.0), 4, 0),
        ("normal", (-1.0, 0.0, 1.0), None, 1),  # magnitudes are drawn, signs are not
        ("signed_constant", (-1.0, 0.0, 1.0), None, 81),  # ternary: all there are, from every seed
        ("signed_constant", (-1.0, 1.0), None, 16),  # binary
        ("signed_constant", (-0.75, -0.25, 0.25, 0.75), None, 256),
    ],
    ids=str,
)
def test_what_another_seed_can_reach(law, factors, state_bits, shared):
    """What rule signed and others reach over +c and -c is {factors} ** n times c, whatever the seed."""
    tensor = TensorSpec("w", (1, 4), 0, law, 0.5, factors, input_axes=(1,), state_bits=state_bits)
    one, other = reachable(tensor), reachable(replace(tensor, seed=2))
    if shared is None:  # kept where both seeds drew the same sign
        agree = int((tensor.draw() == replace(tensor, seed=2).draw()).sum())
        assert agree < 4
        shared = 2**agree
    assert len(one & other) == shared
    if shared == len(factors) ** 4:
        assert one == other == set(product([0.5 * factor for factor in factors], repeat=4))
    else:
        assert one != other
