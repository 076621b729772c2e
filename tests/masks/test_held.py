"""Steps that use the mask of an earlier step."""

import pytest
import torch
from cases import IDS, gradients, logits_of, tiny_config
from torch.testing import assert_close

from hf_slt import SupermaskGPT2LMHeadModel
from hf_slt.masks.held import Held
from hf_slt.masks.modules import masked_parameters, set_rule
from hf_slt.masks.rules import RULES

DETERMINED = [name for name in RULES if name != "bernoulli"]


def model_of(name: str) -> SupermaskGPT2LMHeadModel:
    law = "normal" if name == "trellis" else "signed_constant"
    return SupermaskGPT2LMHeadModel(tiny_config(rule=name, density=None, law=law)).train()


@torch.no_grad()
def change_scores(model) -> None:
    for name, one in model.named_parameters():
        if name.endswith("scores"):
            one.copy_(one.flip(0))
            one[::2].neg_()  # the first scores of threshold are all the same


@pytest.mark.parametrize("name", DETERMINED)
def test_training_keeps_the_first_mask_and_evaluation_does_not(name):
    model = model_of(name)
    first = logits_of(model)
    set_rule(model, Held(RULES[name]()))
    assert torch.equal(logits_of(model), first)
    change_scores(model)
    assert torch.equal(logits_of(model), first)
    fresh = model_of(name)
    change_scores(fresh)
    assert torch.equal(logits_of(model.eval()), logits_of(fresh.eval()))
    set_rule(model.train(), Held(RULES[name]()))  # an empty one makes a new mask
    assert torch.equal(logits_of(model), logits_of(fresh.train()))
    assert not torch.equal(logits_of(model), first)


@pytest.mark.parametrize("name", DETERMINED)
def test_gradients_are_those_of_the_same_mask(name):
    model = model_of(name)
    plain = gradients(model, input_ids=IDS, labels=IDS)
    set_rule(model, Held(RULES[name]()))
    for _ in range(2):  # the second time, no mask is made
        held = gradients(model, input_ids=IDS, labels=IDS)
        for path, slope in held.items():
            assert_close(slope, plain[path], msg=path)


def test_a_held_path_is_not_searched(monkeypatch):
    model = model_of("trellis")
    held = Held(RULES["trellis"]())
    set_rule(model, held)
    model(IDS, labels=IDS)
    names = {tensor.name for _, _, _, plan in masked_parameters(model) for tensor in plan.tensors}
    assert held.held.keys() == names
    monkeypatch.setattr("hf_slt.masks.rules.path_of_targets", lambda *_: pytest.fail("a path was searched"))
    model(IDS, labels=IDS).loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["edge_popup", "trellis"])
def test_compiled_steps_give_the_same_gradients(name):
    model = model_of(name)
    plain = gradients(model, input_ids=IDS, labels=IDS)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        set_rule(model, Held(RULES[name]()))
        for _ in range(2):
            model.zero_grad()
            compiled(input_ids=IDS, labels=IDS).loss.backward()
            for path, one in model.named_parameters():
                if one.grad is not None:
                    assert_close(one.grad, plain[path], rtol=1e-4, atol=1e-6, msg=path)
