"""Layers that learn: the masked weight and its gradient against a hand derivation and plain autograd."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import logits_of, make
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch.testing import assert_close

from hf_slt.model.quantisation import BITS, dequantise
from hf_slt.model.random_weights import TensorSpec
from hf_slt.sharing.saving import quantise
from hf_slt.training import selection
from hf_slt.training.scores import RoundedWeight, ScoresEmbedding, ScoresHead, ScoresLinear

HALF = (("density", 0.5),)


def naive_mask(scores: torch.Tensor, share: float = 0.5) -> torch.Tensor:
    flat = scores.detach().abs().flatten().numpy()
    mask = np.zeros(flat.size, bool)
    mask[np.argsort(-flat, kind="stable")[: round(share * flat.size)]] = True
    return torch.from_numpy(mask).view(scores.shape)


@pytest.fixture(params=[1 << 19, 7], ids=["at_once", "in_pieces"])
def layer(request, monkeypatch):
    """Three tensors side by side; their work may be done a few rows at a time."""
    monkeypatch.setattr(selection, "_PIECE", request.param)
    widths = {"query": 4, "key": 4, "value": 2}
    return ScoresLinear([TensorSpec(f"c_attn.{name}", (6, n), options=HALF) for name, n in widths.items()])


def test_weight_is_the_masked_one_and_its_gradient_is_edge_popup_by_hand(layer):
    torch.manual_seed(0)
    x, target = torch.randn(5, 6), torch.randn(5, 10)
    scores = [layer.query_scores, layer.key_scores, layer.value_scores]
    drawn = torch.from_numpy(np.concatenate([tensor.draw() for tensor in layer.tensors], 1))
    mask = torch.cat([naive_mask(one) for one in scores], 1)
    assert torch.equal(layer.weight, drawn * mask)
    assert torch.equal(layer(x), x @ (drawn * mask))
    ((x @ layer.weight - target) ** 2).sum().backward()
    residual = 2 * (x @ (drawn * mask) - target)
    # dL/dmask_ij = x_i . residual_j w_ij, straight through the step, and abs() brings the sign
    by_hand = (x.T @ residual) * drawn * torch.cat(scores, 1).sign()
    assert_close(torch.cat([one.grad for one in scores], 1), by_hand, rtol=1e-5, atol=1e-7)
    assert any((one < 0).any() for one in scores)
    assert not drawn[mask].eq(0).any()


@pytest.mark.parametrize(
    ("kind", "x", "use"),
    [
        (ScoresLinear, torch.linspace(-1, 1, 24).view(3, 8), lambda x, weight: x @ weight),
        (ScoresEmbedding, torch.tensor([0, 5, 5]), lambda x, weight: weight[x]),
        (ScoresHead, torch.linspace(-1, 1, 18).view(3, 6), lambda x, weight: x @ weight.T),
    ],
)
def test_every_use_has_the_derivatives_of_plain_autograd(kind, x, use):
    """To the second order. The oracle is a product with a factor of value `mask` and slope sign(score)."""
    layer = kind([TensorSpec("w", (8, 6), options=HALF)])
    leaves = [x.requires_grad_(), layer.scores] if x.is_floating_point() else [layer.scores]
    magnitude = layer.scores.abs()
    factor = naive_mask(layer.scores) + magnitude - magnitude.detach()
    plain = torch.from_numpy(layer.drawn_weight()) * factor
    found = []
    for forward in (lambda: layer(x), lambda: use(x, plain)):
        first = torch.autograd.grad(forward().pow(3).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(one.pow(2).sum() for one in first), leaves, retain_graph=True)
        once = torch.autograd.grad(forward().pow(3).sum(), leaves, retain_graph=True)  # and no more
        found.append([*first, *second, *once])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.detach().abs().max().item())


def test_the_density_may_be_changed_between_steps(layer):
    for share in (1.0, 0.25):
        layer.rule = replace(layer.rule, density=share)
        kept = [int(codes.sum()) for codes in layer.codes()]
        assert kept == [round(share * tensor.size) for tensor in layer.tensors]
        assert int(layer.weight.ne(0).sum()) == sum(kept)


def test_what_is_kept_of_chance_does_not_depend_on_the_mode():
    """A model in training mode, as a loop has it, is saved and merged as it is evaluated."""
    model = make(rule="bernoulli", density=None)
    expected = logits_of(model)
    assert not torch.equal(logits_of(model.train()), expected)
    assert torch.equal(logits_of(model.to_ticket()), expected)
    assert_close(logits_of(model.merge_and_unload().eval()), expected, rtol=1e-5, atol=1e-5)
    assert model.training


# -- trained values in few bits -------------------------------------------------------------------------

tables = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.integers(1, 9)),
    elements=st.floats(-1000, 1000, width=32, allow_subnormal=True),
)


def test_torch_rounds_scales_as_the_ticket_does():
    values = torch.randn(1, 100)
    assert torch.equal(RoundedWeight.apply(values, 16), values.half().float())


@pytest.mark.parametrize("bits", BITS)
@given(values=tables)
def test_torch_rounds_as_the_ticket_does(bits, values):
    ours = RoundedWeight.apply(torch.from_numpy(values), bits)
    assert ours.numpy().tobytes() == dequantise(*quantise(values, bits), values.shape, bits).tobytes()


def test_the_gradient_of_rounding_passes_straight_through():
    weight = torch.randn(3, 4, requires_grad=True)
    (RoundedWeight.apply(weight, 4) * torch.arange(12.0).view(3, 4)).sum().backward()
    assert torch.equal(weight.grad, torch.arange(12.0).view(3, 4))
