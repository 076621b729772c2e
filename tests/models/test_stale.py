"""Nothing stale is ever used: however scores, masks or weights were changed, the next forward sees it.

The oracle knows none of the library's shortcuts: it sorts the scores, draws the weights, and puts their
product into stock GPT-2.
"""

import copy
import pickle

import numpy as np
import pytest
import torch
from cases import IDS, logits_of, make, tiny_config
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close
from transformers import GPT2LMHeadModel

from hf_slt import SupermaskGPT2LMHeadModel, fixed_masks
from hf_slt.masks import rules
from hf_slt.masks.modules import masked_parameters, set_rule_options
from hf_slt.masks.selection import keep_largest
from hf_slt.weights.random_weights import draw


@pytest.fixture(scope="module")
def blank() -> GPT2LMHeadModel:
    """A stock model to put weights into: no biases, no gains."""
    return SupermaskGPT2LMHeadModel(tiny_config()).merge_and_unload().eval()


def mask_of(scores: torch.Tensor) -> np.ndarray:
    """The larger half by magnitude, the lower index first among equals."""
    values = scores.detach().numpy().reshape(-1)
    mask = np.zeros(values.size)
    mask[np.argsort(-np.abs(values), kind="stable")[: values.size // 2]] = 1
    return mask.reshape(tuple(scores.shape))


def drawn(model, tensor) -> np.ndarray:
    return draw(7, tensor.name, tensor.shape, *model.config.law_of(tensor.name))


def oracle(blank: GPT2LMHeadModel, model, values: dict[str, torch.Tensor] | None = None) -> GPT2LMHeadModel:
    """Stock GPT-2 with the weights that follow from the model's scores (or from `values`), or its masks."""
    values, masks = model.state_dict() if values is None else values, None
    if model.config.state == "ticket":
        masks = model.mask_arrays()
    stock = copy.deepcopy(blank)
    for path, _, name, plan in masked_parameters(model):
        parts = []
        for tensor in plan.tensors:
            if masks is None:
                mask = mask_of(values[f"{path}.{plan.attribute(name, tensor, 'scores')}"])
            else:
                mask = masks[tensor.name]
            parts.append(drawn(model, tensor) * mask)
        stock.get_parameter(f"{path}.weight").data.copy_(torch.from_numpy(np.concatenate(parts, plan.axis)))
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
    for path, module, name, plan in masked_parameters(model):
        gradient = stock.get_parameter(f"{path}.weight").grad
        parts = gradient.split([tensor.shape[plan.axis] for tensor in plan.tensors], plan.axis)
        for tensor, part, scores in zip(plan.tensors, parts, plan.scores(module, name), strict=True):
            expected = part * torch.from_numpy(drawn(model, tensor)) * scores.sign()
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


def count_selections(monkeypatch) -> list:
    ranked = []
    monkeypatch.setattr(
        rules,
        "keep_largest",
        lambda *args, keep=keep_largest, **more: ranked.append(1) or keep(*args, **more),
    )
    return ranked


def test_a_tied_table_is_ranked_once_in_a_forward_and_anew_in_the_next(model, blank, monkeypatch):
    ranked = count_selections(monkeypatch)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("then", ["forward", "functional_call", "to_ticket"])
def test_cast_and_back(model, blank, dtype, then):
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


def test_masks_are_fixed_where_that_is_said_and_nowhere_else(model, blank):
    """Within `fixed_masks` a changed score has no effect, by design; after it, it has."""
    with torch.no_grad(), fixed_masks():
        before = model(IDS).logits
        swap_pair(model)
        assert torch.equal(model(IDS).logits, before)
    assert not torch.equal(logits_of(model), before)
    assert_current(blank, model)
    with fixed_masks():  # with gradients each forward has a graph of its own
        for _ in range(2):
            model(IDS, labels=IDS).loss.backward()
        swap_pair(model)
        assert_current(blank, model)


def test_generation_selects_once_for_all_tokens(model, monkeypatch):
    ranked = count_selections(monkeypatch)
    model.generate(IDS, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert len(ranked) == len(list(model.parameters()))


GENERATED = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}


def test_the_next_generation_selects_nothing_while_no_score_changes(model, monkeypatch):
    model.eval()
    first = model.generate(IDS, **GENERATED)
    ranked = count_selections(monkeypatch)
    assert torch.equal(model.generate(IDS, **GENERATED), first)
    assert not ranked
    model.train()  # training needs the memory
    assert model.kept_weights is None
    model.eval().generate(IDS, **GENERATED)
    assert len(ranked) == len(list(model.parameters()))


def change_rule(model):
    set_rule_options(model, density=0.2)


GENERATION_WAYS = SCORE_WAYS | {
    "set_rule_options": change_rule,
    "half": lambda model: model.half(),
    "drawn": lambda model: model.get_submodule("transformer.wte").drawn.neg_(),
}


@pytest.mark.parametrize("way", GENERATION_WAYS.values(), ids=GENERATION_WAYS.keys())
def test_generation_sees_every_change(model, way):
    model.eval()
    before = model.generate(IDS, output_logits=True, return_dict_in_generate=True, **GENERATED).logits
    way(model)
    found = model.generate(IDS, output_logits=True, return_dict_in_generate=True, **GENERATED).logits
    model.kept_weights = None
    expected = model.generate(IDS, output_logits=True, return_dict_in_generate=True, **GENERATED).logits
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not torch.equal(torch.stack(found), torch.stack(before))


def test_one_changed_score_makes_only_its_own_tensor_new(model, monkeypatch):
    model.eval().generate(IDS, **GENERATED)
    ranked = count_selections(monkeypatch)
    model.get_submodule("transformer.wte").scores.data[3, 5] += 1e-3
    model.generate(IDS, **GENERATED)
    assert len(ranked) == 1


def test_kept_weights_do_not_go_into_copies(model):
    model.eval().generate(IDS, **GENERATED)
    assert len(model.kept_weights)
    assert not len(copy.deepcopy(model).kept_weights)
    assert not len(pickle.loads(pickle.dumps(model)).kept_weights)


@pytest.mark.parametrize(("rule", "training"), [("global", False), ("edge_popup", True)])
def test_nothing_is_kept_of_joint_rules_and_in_training(rule, training):
    model = make(rule=rule).train(training)
    model.generate(IDS, **GENERATED)
    assert not len(model.kept_weights)


# -- masks of a ticket --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_change_of_masks_is_seen_by_the_one_that_was_changed(model, dtype):
    ticket = model.to_ticket().to(dtype)
    before = logits_of(ticket)
    twin = copy.deepcopy(ticket)
    twin.set_mask(None)
    changed = logits_of(twin)
    assert not torch.equal(changed, before)
    assert torch.equal(logits_of(ticket), before)
    twin.set_mask("default")
    assert torch.equal(logits_of(twin), before)


@pytest.mark.parametrize("warm", [False, True], ids=["before_any_forward", "after_a_forward"])
def test_a_compiled_ticket_is_current(model, blank, warm):
    ticket = model.to_ticket()
    if warm:
        logits_of(ticket)
    torch.compiler.reset()
    compiled = torch.compile(ticket, fullgraph=True, backend="eager")
    for name in ("default", None, "default"):
        ticket.set_mask(name)
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
