"""Nothing stale is ever used: however scores, masks or weights were changed, the next forward sees it.

The oracle knows none of the library's shortcuts: it sorts the scores, draws the weights, and puts their
product into stock GPT-2.
"""

import copy

import numpy as np
import pytest
import torch
from cases import IDS, both_states, logits_of, make, tiny_config
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close
from transformers import GPT2LMHeadModel

from hf_slt import SupermaskGPT2LMHeadModel
from hf_slt.model.random_weights import draw
from hf_slt.training import rules
from hf_slt.training.selection import keep_largest


@pytest.fixture(scope="module")
def blank() -> GPT2LMHeadModel:
    """A stock model to put weights into: no biases, no gains."""
    return SupermaskGPT2LMHeadModel(tiny_config()).merge_and_unload().eval()


def mask_of(stored: torch.Tensor, shape: tuple[int, int]) -> np.ndarray:
    """Of scores the larger half by magnitude, the lower index first among equals; or of packed bits."""
    values = stored.detach().numpy().reshape(-1)
    if values.dtype == np.uint8:
        return np.unpackbits(values, bitorder="little").reshape(shape)
    mask = np.zeros(values.size)
    mask[np.argsort(-np.abs(values), kind="stable")[: values.size // 2]] = 1
    return mask.reshape(shape)


def drawn(model, tensor) -> np.ndarray:
    return draw(7, tensor.name, tensor.shape, *model.config.law_of(tensor.name))


def oracle(blank: GPT2LMHeadModel, model, values: dict[str, torch.Tensor] | None = None) -> GPT2LMHeadModel:
    """Stock GPT-2 with the weights that follow from the model's state dict (or from `values`)."""
    values = model.state_dict() if values is None else values
    stock = copy.deepcopy(blank)
    for path, layer in model.supermask_layers():
        columns = []
        for tensor in layer.tensors:
            what = "scores" if model.config.state == "scores" else "mask"
            stored = values[f"{path}.{layer.attribute(tensor, what)}"]
            columns.append(drawn(model, tensor) * mask_of(stored, tensor.shape))
        stock.get_parameter(f"{path}.weight").data.copy_(torch.from_numpy(np.concatenate(columns, 1)))
    return stock


def assert_current(blank: GPT2LMHeadModel, model) -> None:
    """Logits, and gradients of scores, are those of the scores as they stand."""
    stock = oracle(blank, model)
    assert_close(logits_of(model), logits_of(stock), rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        assert_close(model(IDS).logits, stock(IDS).logits, rtol=1e-5, atol=1e-5)
    if model.config.state == "ticket":
        return
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    stock(IDS, labels=IDS).loss.backward()
    for path, layer in model.supermask_layers():
        gradient = stock.get_parameter(f"{path}.weight").grad
        for tensor, columns in layer.places():
            scores = getattr(layer, layer.attribute(tensor, "scores"))
            expected = gradient[:, columns] * torch.from_numpy(drawn(model, tensor)) * scores.sign()
            assert_close(scores.grad, expected, rtol=1e-4, atol=1e-6)


# -- scores, which are ranked anew in every forward ----------------------------------------------------


def other_scores(model) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def swap_pair(model):
    """Only the smallest and the largest score change places: the values are the same ones."""
    for parameter in model.parameters():
        flat = parameter.data.view(-1)
        pair = torch.stack([flat.abs().argmin(), flat.abs().argmax()])
        flat[pair] = flat[pair.flip(0)]


def assign_transposed(model):
    for name, other in other_scores(model).items():
        model.get_parameter(name).data = other.t().contiguous().t()


def replace_parameters(model):
    for name, other in other_scores(model).items():
        path, leaf = name.rsplit(".", 1)
        setattr(model.get_submodule(path), leaf, nn.Parameter(other))


@torch.inference_mode()
def in_inference_mode(model):
    for parameter in model.parameters():
        parameter.copy_(parameter.flip(0))


SCORE_WAYS = {
    "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step(),
    "swap_pair": swap_pair,
    "assign_transposed": assign_transposed,
    "replaced_parameters": replace_parameters,
    "load_state_dict-assign": lambda model: model.load_state_dict(other_scores(model), assign=True),
    "inference_mode": in_inference_mode,
}


@pytest.fixture
def model():
    """Scores that have been trained, with gradients, and with all that a layer may remember in place."""
    model = make()
    model(IDS, labels=IDS).loss.backward()
    return model


@pytest.mark.parametrize("way", SCORE_WAYS.values(), ids=SCORE_WAYS.keys())
def test_a_change_of_scores_is_seen(model, blank, way):
    before = logits_of(model)
    way(model)
    assert not torch.equal(logits_of(model), before)
    assert_current(blank, model)


def test_a_tied_table_is_ranked_once_in_a_forward_and_anew_in_the_next(model, blank, monkeypatch):
    ranked = []
    monkeypatch.setattr(
        rules,
        "keep_largest",
        lambda *args, keep=keep_largest, **more: ranked.append(1) or keep(*args, **more),
    )
    for step in (1, 2):
        logits_of(model)
        assert len(ranked) == step * len(list(model.parameters()))
        swap_pair(model)
    with pytest.raises(IndexError):
        model(IDS + 99)  # after the table was masked for its first use
    swap_pair(model)
    assert_current(blank, model)


def test_parameters_of_another_are_seen_between_forwards(model, blank):
    before = logits_of(model)
    values = {name: nn.Parameter(scores) for name, scores in other_scores(model).items()}
    found = functional_call(model, values, (IDS,)).logits
    assert_close(found, oracle(blank, model, values)(IDS).logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits_of(model), before)


# -- drawn weights --------------------------------------------------------------------------------------


WEIGHT_WAYS = {
    "zero_": lambda layer: layer.body.zero_(),
    "init": lambda layer: nn.init.normal_(layer.body),
    "replaced": lambda layer: setattr(layer, layer.body_name, torch.zeros_like(layer.body)),
    "not_a_number": lambda layer: layer.body.fill_(torch.nan),
}


@both_states
@pytest.mark.parametrize("way", WEIGHT_WAYS.values(), ids=WEIGHT_WAYS.keys())
def test_overwritten_weights_are_drawn_again(model, blank, state, way):
    model = model if state == "scores" else model.to_ticket()
    logits_of(model)
    with torch.no_grad():
        for _, layer in model.supermask_layers():
            way(layer)
    assert_current(blank, model)


@both_states
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("then", ["forward", "functional_call", "to_ticket"])
def test_cast_and_back(model, blank, state, dtype, then):
    model = model if state == "scores" else model.to_ticket()
    expected = logits_of(model)
    model.to(dtype)
    logits_of(model)
    model.float()
    if then == "functional_call":
        values = {name: values.detach() for name, values in model.state_dict().items()}
        assert torch.equal(functional_call(model, values, (IDS,)).logits, expected)
    if then == "to_ticket":
        model = model.to_ticket()
    assert torch.equal(logits_of(model), expected)
    assert_current(blank, model)


# -- masks of a ticket --------------------------------------------------------------------------------


def every_mask(change):
    """A change of one mask (layer, name of the buffer) as a change of all."""

    def change_all(ticket):
        for _, layer in ticket.supermask_layers():
            for tensor in layer.tensors:
                change(layer, layer.attribute(tensor, "mask"))

    return change_all


def load_masks(assign):
    def change(ticket):
        ticket.load_state_dict({name: ~mask for name, mask in ticket.state_dict().items()}, assign=assign)

    return change


MASK_WAYS = {
    "copy_": every_mask(lambda layer, name: getattr(layer, name).copy_(~getattr(layer, name))),
    "bitwise_not_": every_mask(lambda layer, name: getattr(layer, name).bitwise_not_()),
    "replaced_buffer": every_mask(lambda layer, name: setattr(layer, name, ~getattr(layer, name))),
    "load_state_dict": load_masks(assign=False),
    "load_state_dict-assign": load_masks(assign=True),
}
AT_ONCE = ("load_state_dict", "load_state_dict-assign")  # the library's own ways do not wait for a forward


@pytest.mark.parametrize("way", MASK_WAYS.values(), ids=MASK_WAYS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_change_of_masks_is_seen_by_the_one_that_was_changed(model, blank, way, dtype):
    ticket = model.to_ticket().to(dtype)
    before = logits_of(ticket)
    twin = copy.deepcopy(ticket)
    way(twin)
    changed = logits_of(twin)
    assert not torch.equal(changed, before)
    assert torch.equal(logits_of(ticket), before)
    assert_current(blank, copy.deepcopy(twin).float())
    way(twin)  # and back
    assert torch.equal(logits_of(twin), before)
    way(ticket)
    assert torch.equal(logits_of(ticket), changed)


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_change_in_inference_mode_is_seen(model, blank, name):
    with torch.inference_mode():
        ticket = model.to_ticket()
        assert_current(blank, ticket)
        MASK_WAYS[name](ticket)
        assert_current(blank, ticket)
    assert_current(blank, ticket)


@pytest.mark.parametrize("warm", [False, True], ids=["before_any_forward", "after_a_forward"])
def test_a_compiled_ticket_is_current(model, blank, warm):
    """A compiled forward cannot look whether a mask was replaced: what the library does is done at once."""
    ticket = model.to_ticket()
    if warm:
        logits_of(ticket)
    torch.compiler.reset()
    compiled = torch.compile(ticket, fullgraph=True, backend="eager")
    changes = [lambda one: None, *(MASK_WAYS[name] for name in AT_ONCE), lambda one: one.half().float()]
    for change in (*changes, lambda one: one.set_mask(None)):
        change(ticket)
        assert_close(logits_of(compiled), logits_of(oracle(blank, ticket)), rtol=1e-5, atol=1e-5)


def test_compiled_scores_are_current(model, blank):
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected = logits_of(model)
    model.half().float()
    assert torch.equal(logits_of(compiled), expected)
    for way in ("optimizer", "swap_pair", "load_state_dict-assign"):
        SCORE_WAYS[way](model)
        assert_close(logits_of(compiled), logits_of(oracle(blank, model)), rtol=1e-5, atol=1e-5)
