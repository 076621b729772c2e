"""Selection against a naive sort, gradients against a hand derivation."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slt.model import masking
from hf_slt.model.masking import (
    MaskedLogits,
    MaskedRows,
    MaskedWeight,
    Selector,
    apply_mask,
    keep_largest,
    kept_count,
    traced_mask,
)


def naive_mask(values: torch.Tensor, count: int) -> torch.Tensor:
    """A stable sort of all values, descending: ties stay in row-major order."""
    flat = values.contiguous().view(-1).double().numpy()
    mask = np.zeros(flat.size, bool)
    mask[np.argsort(-flat, kind="stable")[:count]] = True
    return torch.from_numpy(mask).view(values.shape)


def make_values(size: int, levels: int, seed: int) -> torch.Tensor:
    """Few levels make many ties."""
    generator = torch.Generator().manual_seed(seed)
    if levels:
        return torch.randint(levels, (size,), generator=generator).float()
    return torch.randn(size, generator=generator).abs()


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 3000),
    levels=st.sampled_from([0, 1, 2, 5, 1000]),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
    sample=st.sampled_from([16, 64, 1 << 14]),
)
def test_exactly_the_largest_ties_to_the_lower_index(size, levels, share, seed, sample):
    values, count = make_values(size, levels, seed), max(1, round(share * size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masking, "_SAMPLE", sample)  # small: the sampled path at every size
        patch.setattr(masking, "_CHUNK", 4 * sample)
        assert torch.equal(keep_largest(values, count), naive_mask(values, count))


@settings(max_examples=100, deadline=None)
@given(
    levels=st.sampled_from([0, 2, 7, 300]),
    seed=st.integers(0, 999),
    step=st.sampled_from([0.0, 1e-4, 1e-2, 1.0]),
    sample=st.sampled_from([16, 1 << 14]),
    chunk=st.sampled_from([24, 100, 1 << 18]),
)
def test_a_remembered_threshold_is_only_a_guess(levels, seed, step, sample, chunk):
    selector, values = Selector(), make_values(500, levels, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masking, "_SAMPLE", sample)
        patch.setattr(masking, "_CHUNK", chunk)
        for again in range(6):
            count = 150 if again < 4 else 20  # the count may change too
            mask = selector.select(values - 1, count, torch.abs)
            assert torch.equal(mask, naive_mask((values - 1).abs(), count))
            assert selector.select(values - 1, count, torch.abs) is mask
            values = values + step * make_values(500, levels, seed + 1 + again)


def test_scores_that_move_little_are_found_near_the_last_threshold(monkeypatch):
    """Neither a sample nor a sort of all: one pass is enough."""
    selector, values = Selector(), make_values(1 << 16, 0, 0)
    selector.select(values, 20_000)
    monkeypatch.setattr(masking, "_brackets", None)
    for step in range(10):
        values += 1e-3 * make_values(1 << 16, 0, step)
        assert torch.equal(selector.select(values, 20_000), naive_mask(values, 20_000))


@pytest.mark.parametrize("place", [0, 5, 999])
def test_every_change_of_a_mask_is_seen(monkeypatch, place):
    """Two values change places across the threshold: as many are kept, but not the same ones."""
    monkeypatch.setattr(masking, "_CHUNK", 100)
    selector, values = Selector(), make_values(1000, 0, 0)
    selector.select(values, 300)
    values[place] = -1.0 if selector.mask[place] else 100.0
    assert torch.equal(selector.select(values, 300), naive_mask(values, 300))


def test_adversarial_order_is_still_exact():
    """A sample that is not typical: the values follow the stride of the sample."""
    size = 1 << 17
    values = torch.arange(size, dtype=torch.float32)
    values[:: masking.sample_stride(size)] = 1e9
    assert torch.equal(keep_largest(values, size // 3), naive_mask(values, size // 3))


def test_strides_do_not_matter():
    values = make_values(12 * 35, 5, 0).view(35, 12)
    for view in (values.t(), values[::2], values[:, 1::3], values.flip(0)):
        assert torch.equal(keep_largest(view, 40), naive_mask(view, 40))


def test_kept_count_rounds():
    assert kept_count(1 - 0.9, 10) == 1  # int() would give 0
    assert [kept_count(0.3, n) for n in (1, 10, 1000, 1_000_003)] == [1, 3, 300, 300_001]
    assert kept_count(1.0, 7) == 7


@pytest.mark.parametrize("size", [50, 100_000])
def test_scores_that_are_not_numbers_are_refused(size):
    values = torch.full((size,), float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        keep_largest(values, 10)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_score_among_many_is_refused(bad):
    values = make_values(100_000, 0, 1)
    values[77] = bad
    with pytest.raises(ValueError, match="not finite"):
        keep_largest(values, 10)


@pytest.mark.parametrize("count", [0, 6])
def test_impossible_counts(count):
    with pytest.raises(ValueError, match=f"cannot keep {count} of 5"):
        keep_largest(torch.ones(5), count)


# -- gradients ------------------------------------------------------------------------------------


def layer_output(scores, weight, x):
    masks = [keep_largest(part.detach().abs(), part.numel() // 2) for part in scores]
    masked = weight * torch.cat(masks, -1)
    return x @ MaskedWeight.apply(masked, weight, "edge_popup", *scores)


@pytest.fixture
def problem():
    torch.manual_seed(0)
    scores = [torch.randn(6, width, dtype=torch.float64, requires_grad=True) for width in (4, 4, 2)]
    return scores, torch.randn(6, 10, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)


def test_gradient_is_edge_popup_by_hand(problem):
    scores, weight, x = problem
    target = torch.randn(5, 10, dtype=torch.float64)
    ((layer_output(scores, weight, x) - target) ** 2).sum().backward()
    mask = torch.cat([naive_mask(part.detach().abs(), part.numel() // 2) for part in scores], -1)
    residual = 2 * (x @ (weight * mask) - target)
    # dL/dmask_ij = x_i . residual_j w_ij, straight through the step, and abs() brings the sign
    by_hand = (x.T @ residual) * weight * torch.cat(scores, -1).detach().sign()
    torch.testing.assert_close(torch.cat([part.grad for part in scores], -1), by_hand, rtol=1e-12, atol=0)


def test_gradient_of_negative_scores_has_the_other_sign():
    scores, weight = torch.tensor([[-3.0, 3.0]], requires_grad=True), torch.ones(1, 2)
    masked = weight * keep_largest(scores.detach().abs(), 2)
    MaskedWeight.apply(masked, weight, "edge_popup", scores).sum().backward()
    assert scores.grad.tolist() == [[-1.0, 1.0]]


def test_torch_func_grad_vmap_and_jvp(problem):
    scores, weight, x = problem
    (first, *rest), direction = [part.detach() for part in scores], torch.randn(6, 4, dtype=torch.float64)

    def loss(part):
        parts = (part, *rest)
        masked = weight * torch.cat([traced_mask(one.abs(), one.numel() // 2) for one in parts], -1)
        return (x @ MaskedWeight.apply(masked, weight, "edge_popup", *parts)).square().sum()

    eager = first.clone().requires_grad_()
    loss(eager).backward()
    gradient = torch.func.grad(loss)(first)
    torch.testing.assert_close(gradient, eager.grad, rtol=1e-12, atol=0)
    stacked = torch.stack([first, -first, first.flip(0)])
    batched = torch.func.vmap(torch.func.grad(loss))(stacked)
    torch.testing.assert_close(batched, torch.stack([torch.func.grad(loss)(one) for one in stacked]))
    _, slope = torch.func.jvp(loss, (first,), (direction,))
    torch.testing.assert_close(slope, (gradient * direction).sum(), rtol=1e-12, atol=0)


def test_traced_mask_is_keep_largest():
    values = make_values(1000, 3, 4).view(20, 50)
    torch.library.opcheck(torch.ops.hf_slt.keep_largest.default, (values, 300))
    assert torch.equal(traced_mask(values, 300), keep_largest(values, 300))


# -- tables: the same gradients as of MaskedWeight, in less memory ------------------------------------


IDS = torch.tensor([[1, 4, 4], [0, 1, 6]])


def logits_of_weight(x, masked, weight, rule, scores):
    return torch.nn.functional.linear(x, MaskedWeight.apply(masked, weight, rule, scores))


def rows_of_weight(x, masked, weight, rule, scores):
    """Rows, weighted by x, so that both have the same arguments."""
    rows = torch.nn.functional.embedding(IDS, MaskedWeight.apply(masked, weight, rule, scores))
    return rows * x[..., :1]


def rows(x, *arguments):
    return MaskedRows.apply(IDS, *arguments) * x[..., :1]


@pytest.fixture(
    params=[(MaskedLogits.apply, logits_of_weight), (rows, rows_of_weight)], ids=["logits", "rows"]
)
def pair(request, monkeypatch):
    """Two functions of (x, scores) that should be one; in pieces of few rows."""
    monkeypatch.setattr(masking, "_CHUNK", 12)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(9, 5, dtype=torch.float64, generator=generator)

    def bind(function):
        def call(x, scores):
            masked = weight * traced_mask(scores.abs(), 20)
            return function(x, masked, weight, "edge_popup", scores).pow(3).sum()

        return call

    values = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((2, 3, 5), (9, 5))]
    return [bind(function) for function in request.param], values


def test_tables_have_the_gradients_of_masked_weight(pair):
    functions, values = pair
    found = []
    for function in functions:
        x, scores = (value.clone().requires_grad_() for value in values)
        first = torch.autograd.grad(function(x, scores), (x, scores), create_graph=True)
        second = torch.autograd.grad(sum(one.pow(2).sum() for one in first), (x, scores))
        plain = torch.autograd.grad(function(x, scores), (x, scores))  # the path without a second derivative
        found.append([*first, *second, *plain])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0][4:], found[0][:2], rtol=1e-12, atol=1e-12)


def test_tables_under_torch_func(pair):
    (function, oracle), (x, scores) = pair
    stacked = torch.stack([scores, -scores, scores.flip(0)])
    for argument in (0, 1):
        gradients = [torch.func.grad(one, argument) for one in (function, oracle)]
        ours, theirs = (torch.func.vmap(one, (None, 0))(x, stacked) for one in gradients)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    moves = (torch.ones_like(x), torch.ones_like(scores))
    ours, theirs = (torch.func.jvp(one, (x, scores), moves)[1] for one in (function, oracle))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    x, scores = x.requires_grad_(), scores.requires_grad_()
    every = torch.eye(2, dtype=torch.float64)
    for ours, theirs in zip(
        *(
            torch.autograd.grad(
                torch.stack([one(x, scores), one(2 * x, scores)]), (x, scores), every, is_grads_batched=True
            )
            for one in (function, oracle)
        ),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_apply_mask_is_a_product(monkeypatch):
    monkeypatch.setattr(masking, "_CHUNK", 50)
    weight = torch.randn(33, 10)
    masks = [torch.rand(33, width) < 0.5 for width in (4, 4, 2)]
    expected = weight * torch.cat(masks, -1)
    out = torch.empty_like(weight)
    for found in (apply_mask(weight, masks), apply_mask(weight, masks, out), out):
        assert found.numpy().tobytes() == expected.numpy().tobytes()  # minus zero too
