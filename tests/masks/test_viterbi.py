"""The search for the nearest path: against all paths there are, and the compiled loop against torch."""

from itertools import product

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from hf_slt.masks import viterbi
from hf_slt.masks.any_module import supermask_
from hf_slt.masks.trellis import numbers_of_path, path_of_targets
from hf_slt.masks.viterbi import nearest_path, search_groups, searched_by_torch, tail_biting
from hf_slt.weights.random_weights import TensorSpec
from hf_slt.weights.trellis import memory_of, states_of

SHAPES = [(1, 3), (1, 4), (2, 3), (2, 4), (2, 5)]  # bits per code, bits per state


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def squared_errors(row: torch.Tensor, weights: np.ndarray) -> np.ndarray:
    return ((weights - row.numpy()) ** 2).sum(-1)


@pytest.mark.parametrize(("bits", "state_bits"), SHAPES)
def test_no_path_of_all_is_nearer(bits, state_bits):
    """A free path is the best of all starts and codes; one with given ends, of all that end there."""
    length = 8 if bits == 1 else 5
    table, rows = numbers(2**state_bits, seed=1), numbers(6, length, seed=2)
    every = np.array(list(product(range(2**bits), repeat=length)), np.uint8)
    states = states_of(every, bits, state_bits)
    memory = memory_of(bits, state_bits)
    ends = states[:, -1]
    found = tail_biting(searched_by_torch, rows, table, bits).numpy()
    weights = table.numpy()[states]
    for row, codes in zip(rows, found, strict=True):
        own = states_of(codes[None], bits, state_bits)[0]
        rival = squared_errors(row, weights[ends == own[-1]]).min()
        assert squared_errors(row, table.numpy()[own]) == pytest.approx(rival, rel=1e-5)
    free = searched_by_torch(rows, table, bits, None).numpy()
    starts = np.arange(2**state_bits)[:, None]
    for row, codes in zip(rows, free, strict=True):
        totals = []
        for some in (every, codes[None]):  # by the definition: a state is shifted, and takes up a code
            state = np.broadcast_to(starts, (len(starts), len(some)))
            total = np.zeros(state.shape)
            for place in range(length):
                state = (state * 2**bits + some[:, place]) % 2**state_bits
                total = total + (table.numpy()[state] - row[place].item()) ** 2
            totals.append(total.min())
        assert totals[0] == pytest.approx(totals[1], rel=1e-5)
    assert length >= memory


@pytest.mark.parametrize(("bits", "state_bits"), [(2, 8), (2, 7), (1, 6)])
def test_the_compiled_loop_finds_the_codes_of_torch(bits, state_bits, monkeypatch):
    """Also where costs are equal, where a group of rows is not full, and on several threads."""
    table = numbers(2**state_bits, seed=3)
    table[2 ** (state_bits - 1) :] = table[: 2 ** (state_bits - 1)]  # every number twice: ties
    rows = numbers(70, 40, seed=4)
    rows[5] = 0.0
    expected = tail_biting(searched_by_torch, rows, table, bits)
    assert torch.equal(nearest_path(rows, table, bits), expected)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(nearest_path(rows, table, bits), expected)
    monkeypatch.setattr(viterbi, "_kernel", lambda: search_groups)  # as Python runs it
    few = rows[:2, :8], table[:16]
    assert torch.equal(nearest_path(*few, bits), tail_biting(searched_by_torch, *few, bits))


def test_joint_coding_comes_nearer_than_single_weights():
    """Mean squared error of normal numbers at 2 bits: 0.118 one by one, 0.0625 at the bound, about 0.09 here."""
    tensor = TensorSpec("w", (64, 120), factors=(1.0, 2.0, 3.0, 4.0), input_axes=(1,), state_bits=8)
    targets = numbers(64, 120, seed=5)
    found = numbers_of_path(path_of_targets(targets, tensor), tensor)
    assert 0.0625 < float((found - targets).square().mean()) < 0.1
    assert set(found.flatten().tolist()) <= set(tensor.draw().tolist())


def test_any_module_and_many_at_once():
    """Paths along the inputs of a convolution; torch.func finds what each model finds by itself."""
    layer = supermask_(torch.nn.Conv2d(3, 5, 3), rule="trellis", states=64, seed=3, scales=True)
    inputs, scores = numbers(2, 3, 6, 6, seed=6), numbers(2, 5, 3, 3, 3, seed=7)
    both = torch.func.vmap(lambda some: torch.func.functional_call(layer, {"scores": some}, (inputs,)))(
        scores
    )
    spec = layer.parameter_plans["weight"].tensors[0]
    for own, found in zip(scores, both, strict=True):
        with torch.no_grad():
            layer.scores.copy_(own)
        assert_close(found, layer(inputs))
        assert set(layer.weight.detach().flatten().tolist()) <= set(spec.draw().tolist())
    with pytest.raises(ValueError, match="only two numbers"):
        supermask_(torch.nn.Linear(8, 8), rule="trellis", law="signed_constant")


def test_what_no_path_can_follow_is_refused():
    tensor = TensorSpec("w", (2, 3), factors=(1.0, 2.0, 3.0, 4.0), input_axes=(1,), state_bits=8)
    with pytest.raises(ValueError, match="w has 3 inputs, fewer than the 4"):
        path_of_targets(torch.zeros(2, 3), tensor)
    with pytest.raises(ValueError, match="not finite"):
        path_of_targets(torch.full((4, 8), torch.nan), TensorSpec("w", (4, 8), state_bits=3))
