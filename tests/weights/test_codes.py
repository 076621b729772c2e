"""Codes of a ticket against the formulas of the format: drawn, multiplied and counted at once, and by pieces."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slt.weights import random_weights
from hf_slt.weights.codes import count_codes, factors_of, pack_codes, planes, weights_of
from hf_slt.weights.random_weights import LAWS, TensorSpec, digest
from hf_slt.weights.threads import map_in_threads

FACTORS = [(0.0, 1.0), (-1.0, 1.0), (-1.0, 0.0, 1.0), (0.0, 1.0, 2.5, -3.0, 0.125)]


def codes_of(size: int, levels: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, levels, size).astype(np.uint8)


@pytest.mark.parametrize("search", [1.0, 0.4])
@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("law", LAWS)
def test_weights_are_drawn_times_factors(monkeypatch, law, factors, search):
    monkeypatch.setattr(random_weights, "_PIECE", 64)
    tensor = TensorSpec("w", (13, 21), 5, law, 0.3, factors, search, 0.5)  # five pieces, the last not full
    packed = pack_codes(codes_of(tensor.searched, len(factors)), len(factors))
    drawn, seen = tensor.draw(), {}
    found = weights_of(tensor, packed, lambda one, text: seen.update({one.name: text}))
    expected = drawn * factors_of(tensor, packed)
    assert found.tobytes() == expected.tobytes()  # also the sign of a zero
    assert seen == {"w": digest(drawn)}
    assert tensor.drawn_digest() == digest(drawn)
    assert np.array_equal(weights_of(tensor), drawn)  # without a mask


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 200), levels=st.integers(2, 16), seed=st.integers(0, 99))
def test_counts_are_those_of_a_histogram(size, levels, seed):
    codes = np.random.default_rng(seed).integers(0, levels, size).astype(np.uint8)
    packed = pack_codes(codes, levels)
    assert count_codes(packed, size, levels) == np.bincount(codes, minlength=levels).tolist()
    if size % 8:
        behind = packed.copy()
        behind[-1] |= 0x80
        with pytest.raises(ValueError, match="bit is set after the last weight"):
            count_codes(behind, size, levels)
    if levels < 2 ** planes(levels):
        codes[size // 2] = levels  # a code that stands for nothing
        with pytest.raises(ValueError, match="a code is not below"):
            count_codes(pack_codes(codes, levels), size, levels)


@pytest.mark.parametrize("cores", [1, 3])
def test_threads_keep_the_order_and_the_first_error(monkeypatch, cores):
    monkeypatch.setattr("hf_slt.weights.threads.core_count", lambda: cores)

    def work(number: int) -> int:
        if number in (5, 7):
            raise ValueError(f"item {number}")
        return sum(map_in_threads(int, range(number)))  # from within a thread, in that thread

    assert map_in_threads(work, range(5)) == [0, 0, 1, 3, 6]
    with pytest.raises(ValueError, match="item 5"):
        map_in_threads(work, range(9))


def test_no_thread_is_left_while_the_results_are_read(monkeypatch):
    """An error that keeps an unfinished result alive must not keep threads alive with it."""
    monkeypatch.setattr("hf_slt.weights.threads.core_count", lambda: 3)
    before = threading.active_count()
    for _, _ in zip(range(2), map_in_threads(str, range(9)), strict=False):
        assert threading.active_count() == before
