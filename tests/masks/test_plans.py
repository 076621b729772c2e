"""Plans of parameters: the masked weight and its gradient against a hand derivation and plain autograd."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import logits_of, make
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn
from torch.testing import assert_close
from transformers.pytorch_utils import Conv1D

from hf_slt.masks import selection
from hf_slt.masks.gradients import RoundedWeight
from hf_slt.masks.modules import MaskedModule, install_plans, masked_class, masked_parameters
from hf_slt.masks.plans import FixedPlan, MaskedPlan, TiedPlan, TrainedPlan
from hf_slt.masks.rules import EdgePopup, Global, Multibit, Signed
from hf_slt.weights.codes import search_pattern
from hf_slt.weights.quantisation import BITS, dequantise, quantise
from hf_slt.weights.random_weights import TensorSpec, digest

HALF = EdgePopup(density=0.5)


def naive_mask(scores: torch.Tensor, share: float = 0.5) -> torch.Tensor:
    flat = scores.detach().abs().flatten().numpy()
    mask = np.zeros(flat.size, bool)
    mask[np.argsort(-flat, kind="stable")[: round(share * flat.size)]] = True
    return torch.from_numpy(mask).view(scores.shape)


def no_bias(width: int) -> FixedPlan:
    return FixedPlan(TensorSpec("bias", (width,), law="constant", scale=0.0), (width,))


@pytest.fixture(params=[1 << 19, 7], ids=["at_once", "in_pieces"])
def layer(request, monkeypatch):
    """Three tensors side by side; their work may be done a few rows at a time."""
    monkeypatch.setattr(selection, "_PIECE", request.param)
    widths = {"query": 4, "key": 4, "value": 2}
    tensors = [TensorSpec(f"c_attn.{name}", (6, n)) for name, n in widths.items()]
    layer = Conv1D(10, 6)
    install_plans(layer, {"weight": MaskedPlan(tensors, HALF, axis=1), "bias": no_bias(10)})
    return layer


def test_weight_is_the_masked_one_and_its_gradient_is_edge_popup_by_hand(layer):
    torch.manual_seed(0)
    x, target = torch.randn(5, 6), torch.randn(5, 10)
    scores = [layer.query_scores, layer.key_scores, layer.value_scores]
    assert [*map(id, layer.parameters())] == [*map(id, scores)]
    tensors = layer.parameter_plans["weight"].tensors
    drawn = torch.from_numpy(np.concatenate([tensor.draw() for tensor in tensors], 1))
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


def test_the_density_may_be_changed_between_steps(layer):
    plan = layer.parameter_plans["weight"]
    for share in (1.0, 0.25):
        plan.rule = replace(plan.rule, density=share)
        kept = [int(codes.sum()) for codes in plan.codes(layer, "weight")]
        assert kept == [round(share * tensor.size) for tensor in plan.tensors]
        assert int(layer.weight.ne(0).sum()) == sum(kept)


def test_what_is_kept_of_chance_does_not_depend_on_the_mode():
    """A model in training mode, as a loop has it, is saved and merged as it is evaluated."""
    model = make(rule="bernoulli", density=None)
    expected = logits_of(model)
    assert not torch.equal(logits_of(model.train()), expected)
    assert torch.equal(logits_of(model.to_ticket()), expected)
    assert_close(logits_of(model.merge_and_unload().eval()), expected, rtol=1e-5, atol=1e-5)
    assert model.training


# -- parameters of any module and shape -------------------------------------------------------------------


class Experts(nn.Module):
    """Matrices side by side in one parameter of three dimensions, which is not called weight."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(experts, inputs, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ni,eio->neo", x, self.gate_up)


# By kind: module, input, parameter, axes of inputs, axis along which tensors lie, extents along that axis.
MODULES = {
    "conv1d": (lambda: Conv1D(6, 8), (3, 8), "weight", (0,), 1, (6,)),
    "conv1d-three": (lambda: Conv1D(6, 8), (3, 8), "weight", (0,), 1, (1, 3, 2)),
    "linear": (lambda: nn.Linear(6, 8), (3, 6), "weight", (1,), 0, (8,)),
    "linear-two": (lambda: nn.Linear(6, 8), (3, 6), "weight", (1,), 0, (5, 3)),
    "embedding": (lambda: nn.Embedding(8, 6), None, "weight", (1,), 0, (8,)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 5, 5), "weight", (1, 2, 3), 0, (4,)),
    "conv2d-two": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 5, 5), "weight", (1, 2, 3), 0, (1, 3)),
    "experts": (lambda: Experts(3, 4, 6), (5, 4), "gate_up", (1,), 0, (3,)),
    "experts-two": (lambda: Experts(3, 4, 6), (5, 4), "gate_up", (1,), 2, (2, 4)),
}


def side_by_side(kind: str, rule, scales: str, search: float) -> tuple[nn.Module, MaskedPlan]:
    """A module with a masked parameter, all that is learned away from where it began."""
    make_module, _, name, input_axes, axis, extents = MODULES[kind]
    module = make_module()
    shape = list(getattr(module, name).shape)
    tensors, rows = [], []
    for extent, part in zip(extents, "abc", strict=False):
        shape[axis] = extent
        factors = tuple(rule.factors)
        common = {"factors": factors, "search": search, "frozen_density": 0.5, "input_axes": input_axes}
        tensor = TensorSpec(f"w.{part}", tuple(shape), **common)
        outputs = int(np.prod(tensor.scale_shape)) if scales == "row" else 1
        tensors.append(tensor)
        rows.append(TensorSpec(f"{tensor.name}.scale", (1, outputs), law="constant"))
    plan = MaskedPlan(tensors, rule, axis, rows if scales != "none" else ())
    install_plans(module, {name: plan})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one in plan._attributes(name, "scale") if plan.scales else ():
            values = getattr(module, one)
            values.copy_(1 + torch.rand(values.shape, generator=generator))
    return module, plan


def naive_codes(rule, scores: torch.Tensor, tensor: TensorSpec) -> torch.Tensor:
    match rule:
        case EdgePopup():
            return naive_mask(scores).long()
        case Signed():
            return 1 + naive_mask(scores).long() * scores.detach().sign().long()
        case Multibit():
            fan_in = np.prod([tensor.shape[axis] for axis in tensor.input_axes])
            return torch.bucketize(
                scores.detach(), torch.tensor([-0.5, 0.0, 0.5]) / float(np.sqrt(fan_in)), right=True
            )
    raise AssertionError(rule)


def naive_parameter(module: nn.Module, name: str, plan: MaskedPlan) -> torch.Tensor:
    """Plain products of plain tensors; a factor has the value of its code and the slope of its score."""
    parts = []
    for tensor in plan.tensors:
        part = tensor.name.rsplit(".", 1)[-1]
        words = [*([] if name == "weight" else [name]), *([part] if len(plan.tensors) > 1 else [])]
        scores = getattr(module, "_".join([*words, "scores"]))
        surrogate = scores.abs() if isinstance(plan.rule, EdgePopup) else scores
        factor = torch.tensor(plan.rule.factors)[naive_codes(plan.rule, scores, tensor)]
        factor = factor + surrogate - surrogate.detach()
        if tensor.search < 1:
            searched, kept = search_pattern(tensor)
            assert len(searched) == scores.numel()
            factor = torch.from_numpy(kept).index_put((torch.from_numpy(searched),), factor)
        weight = torch.from_numpy(tensor.draw()) * factor.view(tensor.shape)
        if plan.scales:
            scale = getattr(module, "_".join([*words, "scale"]))
            scale = scale + (scale.half().float() - scale).detach()  # as 16 bits hold it
            if scale.numel() > 1:
                extents = [
                    1 if axis in tensor.input_axes else extent for axis, extent in enumerate(tensor.shape)
                ]
                scale = scale.view(extents)
            weight = weight * scale
        parts.append(weight)
    return torch.cat(parts, plan.axis)


RULES = {"edge_popup": HALF, "signed": Signed(density=0.5), "multibit": Multibit()}


@pytest.mark.parametrize("piece", [1 << 19, 7], ids=["at_once", "in_pieces"])
@pytest.mark.parametrize("search", [1.0, 0.4])
@pytest.mark.parametrize("scales", ["none", "tensor", "row"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", MODULES)
def test_every_module_has_the_derivatives_of_plain_autograd(kind, rule, scales, search, piece, monkeypatch):
    """To the second order, of the parameter and of what the stock forward makes of it."""
    monkeypatch.setattr(selection, "_PIECE", piece)
    module, plan = side_by_side(kind, RULES[rule], scales, search)
    _, shape, name, *_ = MODULES[kind]
    x = torch.tensor([0, 5, 5]) if shape is None else torch.linspace(-1, 1, int(np.prod(shape))).view(shape)
    plain = naive_parameter(module, name, plan)
    assert_close(getattr(module, name), plain, rtol=1e-6, atol=1e-7)
    assert getattr(module, name).eq(0).any() == (rule != "multibit" or search < 1)

    stock = MODULES[kind][0]()
    stock.load_state_dict(
        {key: value.detach() for key, value in module.named_parameters() if key == "bias"}, strict=False
    )
    leaves = [*plan.scores(module, name)]
    leaves += [getattr(module, one) for one in plan._attributes(name, "scale")] if plan.scales else []
    learned = {id(one) for one in module.parameters()} - {id(getattr(module, "bias", None))}
    assert {id(one) for one in leaves} == learned
    if x.is_floating_point():
        leaves.append(x.requires_grad_())

    def by_stock() -> torch.Tensor:
        return torch.func.functional_call(stock, {name: naive_parameter(module, name, plan)}, (x,))

    found = []
    for forward in (lambda: module(x), by_stock):
        first = torch.autograd.grad(forward().pow(3).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(one.pow(2).sum() for one in first), leaves, retain_graph=True)
        once = torch.autograd.grad(forward().pow(3).sum(), leaves, retain_graph=True)  # and no more
        found.append([forward(), *first, *second, *once])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.detach().abs().max().item())


@pytest.mark.parametrize("search", [1.0, 0.4])
@pytest.mark.parametrize("scales", ["none", "tensor", "row"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", MODULES)
def test_what_a_ticket_stores_gives_the_same_bits(kind, rule, scales, search):
    module, plan = side_by_side(kind, RULES[rule], scales, search)
    name, drawn = MODULES[kind][2], {}
    stored = plan.stored(module, name)
    assert stored.keys() == {one.tensor.name for one in plan.stored_tensors()}
    dense = plan.dense(stored, lambda tensor, found: drawn.update({tensor.name: found}))
    assert torch.equal(dense, getattr(module, name))
    assert drawn.keys() == {tensor.name for tensor in plan.tensors}
    assert all(drawn[tensor.name] == digest(tensor.draw()) for tensor in plan.tensors)


# -- the swap of the class --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODULES)
def test_the_class_is_a_subclass_of_the_same_name(kind):
    make_module, _, name, *_ = MODULES[kind]
    stock = type(make_module())
    module, _ = side_by_side(kind, HALF, "row", 1.0)
    assert isinstance(module, stock)
    assert isinstance(module, MaskedModule)
    assert (type(module).__name__, type(module).__qualname__) == (stock.__name__, stock.__qualname__)
    assert type(module).__module__ == stock.__module__
    assert type(module) is masked_class(stock, (name,))  # one class for all modules of a kind
    assert name not in dict(module.named_parameters())
    assert name not in module.state_dict()
    assert type(make_module()) is stock  # others stay as they are
    assert repr(module).replace(", sparse=True", "") == repr(make_module())


def copied(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("copying", [copied, pickled])
@pytest.mark.parametrize("kind", [kind for kind in MODULES if "experts" not in kind])
@pytest.mark.parametrize("search", [1.0, 0.4])
def test_a_copy_computes_the_same_and_lives_by_itself(kind, search, copying):
    module, plan = side_by_side(kind, HALF, "row", search)
    other = copying(module)
    name = MODULES[kind][2]
    assert type(other) is type(module)
    assert other.parameter_plans[name] is not plan
    before = getattr(module, name).detach().clone()
    assert torch.equal(getattr(other, name), before)
    with torch.no_grad():
        for one in other.parameter_plans[name].scores(other, name):
            one.copy_(one.flip(0) * 3 + 0.01)
    assert not torch.equal(getattr(other, name), before)
    assert torch.equal(getattr(module, name), before)
    other.parameter_plans[name].rule = EdgePopup(density=1.0)
    assert plan.rule == HALF


@pytest.mark.parametrize("copying", [copied, pickled])
def test_a_copy_of_a_model_is_ranked_and_tied_within_itself(copying):
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 8, bias=False))
    rule = Global(density=0.5)
    table = MaskedPlan([TensorSpec("table", (8, 6), input_axes=(1,))], rule)
    hidden = MaskedPlan([TensorSpec("hidden", (6, 6), input_axes=(1,))], rule)
    bias = TrainedPlan(TensorSpec("b", (1, 6), law="constant", scale=0.5), (6,), 16)
    plans = {"0.weight": table, "1.weight": hidden, "1.bias": bias, "2.weight": TiedPlan(model[0])}
    install_plans(model, plans)
    x = torch.tensor([[1, 2, 7]])
    expected = model(x)
    other = copying(model)
    assert torch.equal(other(x), expected)
    inside = set(other.modules())
    for _, _, _, plan in masked_parameters(other):
        assert {module for module, _ in plan.siblings} <= inside
        assert len(plan.siblings) == 2
    assert other[2].parameter_plans["weight"].source is other[0]
    with torch.no_grad():
        other[0].scores.mul_(100)  # all that is kept is now in the table
        other[1].bias_values.add_(1)
    assert other[1].weight.ne(0).sum() == 0 < model[1].weight.ne(0).sum()
    assert torch.equal(other[1].bias, model[1].bias + 1)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("search", [1.0, 0.4])
def test_a_cast_keeps_what_is_trained_and_draws_again(kind, search):
    module, _ = side_by_side(kind, HALF, "row", search)
    name = MODULES[kind][2]
    before = getattr(module, name).detach()
    learned = {key: one.clone() for key, one in module.named_parameters()}
    module.to(torch.bfloat16)
    assert getattr(module, name).dtype == torch.bfloat16
    module.float()
    assert torch.equal(getattr(module, name), before)
    for key, one in module.named_parameters():
        assert one.dtype == torch.float32
        assert key == "bias" or torch.equal(one, learned[key])


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
