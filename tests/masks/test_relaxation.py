"""Relaxed steps: factors that follow their scores while a model trains, and the mask everywhere else."""

import pytest
import torch
from cases import IDS, gradients, logits_of, tiny_config
from torch.testing import assert_close

from hf_slt import SupermaskGPT2LMHeadModel
from hf_slt.masks import modules, plans, trellis
from hf_slt.masks.modules import masked_parameters, set_rule
from hf_slt.masks.relaxation import Relaxed
from hf_slt.masks.rules import RULES, ScoreContext
from hf_slt.weights.random_weights import TensorSpec


def scores_like(rows: int = 64, columns: int = 32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) / columns**0.5


def context_of(rule, training: bool) -> ScoreContext:
    spec = TensorSpec("w", (64, 32), factors=rule.factors, input_axes=(1,), state_bits=rule.state_bits)
    return ScoreContext(spec, training)


def relaxed_model(name: str, **more) -> SupermaskGPT2LMHeadModel:
    law = "normal" if name == "trellis" else "signed_constant"
    model = SupermaskGPT2LMHeadModel(tiny_config(rule=name, density=None, law=law, **more))
    set_rule(model, Relaxed(RULES[name]()))
    return model


@pytest.mark.parametrize("name", RULES)
def test_a_factor_is_its_surrogate_in_the_size_of_the_rules_factors(name):
    rule, scores = RULES[name](), scores_like()
    found = Relaxed(rule).codes(scores, context_of(rule, True))
    naive = rule.surrogate(scores).double()
    naive *= rule.typical_size / naive.square().mean().sqrt()
    assert_close(found, naive.float())
    codes = rule.codes(scores, context_of(rule, False))
    assert torch.equal(Relaxed(rule).codes(scores, context_of(rule, False)), codes)


@pytest.mark.parametrize("name", ["edge_popup", "global", "signed", "sign", "multicoat", "n_m", "trellis"])
def test_the_size_is_that_of_a_mask(name):
    """Rules of a given density know it exactly. The numbers of a trellis are drawn, so theirs varies."""
    rule, scores = RULES[name](), scores_like()
    context = context_of(rule, False)
    codes = rule.codes_of_all([scores], [context])[0]
    if name == "trellis":
        factors = trellis.numbers_of_path(codes, context.tensor)
    else:
        factors = torch.tensor(rule.factors)[codes.long()]
    size = factors.square().mean().sqrt().item()
    assert rule.typical_size == pytest.approx(size, rel=0.15 if name == "trellis" else 2e-3)


@pytest.mark.parametrize("more", [{}, {"scales": "row", "layer_norm": "trained"}], ids=["plain", "scales"])
@pytest.mark.parametrize("name", RULES)
def test_gradients_are_those_of_plain_autograd(name, more, monkeypatch):
    model = relaxed_model(name, **more).train()
    ours = gradients(model, input_ids=IDS, labels=IDS)
    for room in (plans, modules):
        monkeypatch.setattr(room, "is_traced", lambda scores: True)
    theirs = gradients(model, input_ids=IDS, labels=IDS)
    for path, slope in ours.items():
        assert_close(slope, theirs[path], rtol=1e-3, atol=1e-7, msg=path)


@pytest.mark.parametrize("name", RULES)
def test_evaluation_and_ticket_use_the_mask(name, tmp_path):
    model = relaxed_model(name)
    free = logits_of(model.train())
    plain = SupermaskGPT2LMHeadModel(model.config).eval()
    assert torch.equal(logits_of(model.eval()), logits_of(plain))
    assert not torch.equal(free, logits_of(plain))
    for folder, one in (("relaxed", model), ("plain", plain)):
        one.save_ticket(tmp_path / folder)
    masks = [(tmp_path / folder / "mask.safetensors").read_bytes() for folder in ("relaxed", "plain")]
    assert masks[0] == masks[1]


def test_no_path_is_searched(monkeypatch):
    model = relaxed_model("trellis").train()
    monkeypatch.setattr("hf_slt.masks.rules.path_of_targets", lambda *_: pytest.fail("a path was searched"))
    model(IDS, labels=IDS).loss.backward()
    assert all(
        getattr(module, plan.attribute(name, tensor, "scores")).grad.abs().max() > 0
        for _, module, name, plan in masked_parameters(model)
        for tensor in plan.tensors
    )
