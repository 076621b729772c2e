"""The search for the nearest path: against all paths there are, and the compiled loop against torch."""

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from hf_slt.masks import viterbi
from hf_slt.masks.any_module import supermask_
from hf_slt.masks.rules import make_rule
from hf_slt.masks.trellis import numbers_of_path, path_of_targets
from hf_slt.masks.viterbi import nearest_path, search_groups, searched_by_torch, tail_biting
from hf_slt.weights.codes import planes
from hf_slt.weights.random_weights import TensorSpec
from hf_slt.weights.trellis import memory_of, reachable_states, states_of

SHAPES = [
    (2, 3),
    (2, 4),
    (4, 3),
    (4, 4),
    (4, 5),
    (3, 4),
    (5, 6),
    (6, 6),
    (8, 4),
]  # number of codes, bits of a state


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def squared_errors(row: torch.Tensor, weights: np.ndarray) -> np.ndarray:
    return ((weights - row.numpy()) ** 2).sum(-1)


@pytest.mark.parametrize(("levels", "state_bits"), SHAPES)
def test_no_path_of_all_is_nearer(levels, state_bits):
    """A free path is the best of all starts and codes; one with given ends, of all that end there."""
    length, bits, reached = 8 if levels == 2 else 5, planes(levels), reachable_states(levels, state_bits)
    whole, rows = numbers(2**state_bits, seed=1), numbers(6, length, seed=2)
    table = whole[reached]
    every = np.array(list(product(range(levels), repeat=length)), np.uint8)
    states = states_of(every, bits, state_bits)
    assert set(states.flat) == set(reached)
    ends = states[:, -1]
    found = tail_biting(searched_by_torch, rows, table, levels).numpy()
    weights = whole.numpy()[states]
    for row, codes in zip(rows, found, strict=True):
        own = states_of(codes[None], bits, state_bits)[0]
        rival = squared_errors(row, weights[ends == own[-1]]).min()
        assert squared_errors(row, whole.numpy()[own]) == pytest.approx(rival, rel=1e-5)
    free = searched_by_torch(rows, table, levels, None).numpy()
    starts = reached[:, None]
    for row, codes in zip(rows, free, strict=True):
        totals = []
        for some in (every, codes[None]):  # by the definition: a state is shifted, and takes up a code
            state = np.broadcast_to(starts, (len(starts), len(some)))
            total = np.zeros(state.shape)
            for place in range(length):
                state = (state * 2**bits + some[:, place]) % 2**state_bits
                total = total + (whole.numpy()[state] - row[place].item()) ** 2
            totals.append(total.min())
        assert totals[0] == pytest.approx(totals[1], rel=1e-5)
    assert length >= memory_of(bits, state_bits)


@pytest.mark.parametrize(
    ("levels", "states"), [(4, 256), (4, 128), (2, 64), (3, 243), (6, 216), (8, 512), (16, 256)]
)
def test_the_compiled_loop_finds_the_codes_of_torch(levels, states, monkeypatch):
    """Also where costs are equal, where a group of rows is not full, and on several threads."""
    table = numbers(states, seed=3)
    table[states // 2 : states // 2 * 2] = table[: states // 2]  # every number twice: ties
    rows = numbers(70, 40, seed=4)
    rows[5] = 0.0
    expected = tail_biting(searched_by_torch, rows, table, levels)
    assert torch.equal(nearest_path(rows, table, levels), expected)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(nearest_path(rows, table, levels), expected)
    monkeypatch.setattr(viterbi, "_kernel", lambda: search_groups)  # as Python runs it
    few = rows[:2, :8], table[: levels**2]
    assert torch.equal(nearest_path(*few, levels), tail_biting(searched_by_torch, *few, levels))


@pytest.mark.parametrize(
    ("levels", "state_bits", "bound", "reached", "single"),
    [
        (4, 8, 0.0625, 0.1, 0.118),
        (3, 10, 0.1111, 0.16, 0.19),
        (3, 12, 0.1111, 0.145, 0.19),
        (6, 12, 0.0278, 0.042, 0.058),
        (8, 12, 0.0156, 0.024, 0.0345),
    ],
)
def test_joint_coding_comes_nearer_than_single_weights(levels, state_bits, bound, reached, single):
    """Mean squared error of normal numbers: above Shannon's bound, below that of the best levels of single weights."""
    factors = tuple(range(1, levels + 1))
    tensor = TensorSpec("w", (64, 120), factors=factors, input_axes=(1,), state_bits=state_bits)
    targets = numbers(64, 120, seed=5)
    codes = path_of_targets(targets, tensor)
    assert int(codes.max()) == levels - 1
    found = numbers_of_path(codes, tensor)
    assert bound < float((found - targets).square().mean()) < reached < single
    usable = tensor.draw()[reachable_states(levels, state_bits)]
    assert set(found.flatten().tolist()) <= set(usable.tolist())


def rows_of_the_docs() -> list[tuple[int, float, dict[int, float], float]]:
    """Read the table of docs/rules.md: codes, error of single weights, errors of paths by states, bound."""
    found = []
    for line in (Path(__file__).parents[2] / "docs" / "rules.md").read_text().splitlines():
        if re.fullmatch(r"\| \d+ \| [\d.]+ \| [\d.]+ \| .*\) \| [\d.]+ \|", line):
            codes, _, single, paths, bound = line.strip("| ").split(" | ")
            by_states = re.findall(r"([\d.]+) \(([\d,]+)\)", paths)
            found.append((
                int(codes), float(single), {int(states.replace(",", "")): float(error) for error, states in by_states},
                float(bound),
            ))  # fmt: skip
    return found


def error_of_best_levels(count: int) -> float:
    """The error if each normal number is rounded to the best levels (Lloyd's iteration on quantiles)."""
    points = torch.distributions.Normal(0, 1).icdf(
        (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    )
    levels = torch.linspace(-2, 2, count, dtype=torch.float64)
    for _ in range(200):
        nearest = (points[:, None] - levels).abs().argmin(1)
        levels = torch.stack([points[nearest == one].mean() for one in range(count)])
    return float((points - levels[nearest]).square().mean())


def test_the_table_of_the_docs():
    rows = rows_of_the_docs()
    assert [codes for codes, *_ in rows] == [3, 4, 6, 8]
    targets = numbers(480, 120, seed=5)
    for codes, single, paths, bound in rows:
        assert bound == pytest.approx(codes**-2, rel=0.01)
        assert single == pytest.approx(error_of_best_levels(codes), rel=0.01)
        for states, stated in paths.items():
            rule = make_rule("trellis", {"branches": codes, "states": states})
            errors = []
            for seed in range(3):
                shape = {"factors": rule.factors, "input_axes": (1,), "state_bits": rule.state_bits}
                tensor = TensorSpec(f"w{seed}", (480, 120), **shape)
                found = numbers_of_path(path_of_targets(targets, tensor), tensor)
                errors.append(float((found - targets).square().mean()))
            assert stated == pytest.approx(sum(errors) / 3, rel=0.02), (codes, states)


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
