"""A mix by name: some parameters masked, some random and frozen for good, some trained and stored."""

import json
import re

import pytest
import torch
import transformers
from architectures import CASES, IDS, TEXT, logits_of, make
from torch import nn
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import hf_slt
from hf_slt import cli
from hf_slt.masks.plans import FixedPlan, MaskedPlan, TrainedPlan
from hf_slt.sharing.card import measure_size, write_card

# MLP random, attention masked, and one part of the model trained; fused matrices of each kind are among them.
MIXES = {
    "gpt2": {"*.mlp.*": "frozen", "*.h.0.attn.c_attn": "frozen", "*.h.1.attn.c_attn": "trained"},
    "llama": {"*.mlp.*": "frozen", "lm_head": "trained", "*norm.weight": "trained"},
    "phi3": {"*.layers.0.self_attn.qkv_proj": "frozen", "*.layers.1.self_attn.qkv_proj": "trained"},
    "gpt_neox": {
        "*.layers.0.*query_key_value.weight": "frozen",
        "*.layers.1.*query_key_value.weight": "trained",
    },
    "mixtral": {"*.experts.*": "frozen", "*.gate.*": "trained"},
    "bert": {"*.attention.*": "masked", "*.layer.*": "frozen", "cls.*": "trained"},
}
PLANS = {"masked": MaskedPlan, "frozen": FixedPlan, "trained": TrainedPlan}


@pytest.mark.parametrize("name", MIXES)
def test_each_parameter_is_what_its_name_says(tmp_path, name):
    model, plain = make(name, parameters=MIXES[name], trained_bits=8), make(name)
    learns = {path for path, one in model.named_parameters() if one.requires_grad}
    assert not [path for path, one in model.named_parameters() if one.requires_grad and one.grad is None]
    before = dict(plain.named_modules())
    found = {"frozen": 0, "trained": 0}
    for path, module in model.named_modules():
        for leaf, plan in module.__dict__.get("parameter_plans", {}).items():
            kind = next((kind for kind, one in PLANS.items() if isinstance(plan, one)), None)
            own = {one for one in learns if one.rpartition(".")[0] == path}
            if kind == "frozen" and leaf == "weight" and module.weight.dim() > 1:
                assert not [one for one in own if not one.endswith("bias_values")]
                there = before[path].parameter_plans["weight"]
                assert_close(
                    module.weight, there.unmasked(), rtol=0, atol=0
                )  # the same random numbers, all kept
                found["frozen"] += 1
            if kind == "trained" and leaf == "weight":
                assert f"{path}.values" in own
                found["trained"] += 1
    assert all(found.values()) or name == "mixtral"  # whose experts are no weights by name
    expected = logits_of(model, name)
    header = model.save_ticket(tmp_path)
    ticket = CASES[name][2].from_pretrained(tmp_path)
    assert torch.equal(logits_of(ticket, name), expected)
    assert_close(logits_of(model.merge_and_unload(), name), expected, rtol=1e-5, atol=1e-5)
    assert hf_slt.verify_ticket(tmp_path).digest == header.digest
    counted = measure_size(tmp_path, header)["weights_by_kind"]
    by_hand = dict.fromkeys(counted, 0)
    for one in model.stored_tensors().values():
        by_hand[one.kind] += one.tensor.size
    assert counted == by_hand


def test_what_is_not_masked_has_no_path(tmp_path):
    """Of a model with rule `trellis`: frozen numbers are drawn one by one, also those of a fused matrix."""
    model = make("gpt2", parameters=MIXES["gpt2"], rule="trellis", density=None, states=16)
    assert_close(
        model.transformer.h[0].attn.c_attn.weight,
        make("gpt2").transformer.h[0].attn.c_attn.parameter_plans["weight"].unmasked(),
        rtol=0,
        atol=0,
    )
    assert len(model.transformer.h[0].attn.c_proj.weight.detach().unique()) <= 16  # masked: from a table
    header = model.save_ticket(tmp_path)
    assert header.is_strict
    hf_slt.verify_ticket(tmp_path)
    ticket = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits_of(ticket, "gpt2"), logits_of(model, "gpt2"))


def test_a_new_head_is_trained_and_the_ticket_counts_by_kind(tmp_path, capsys):
    config = transformers.BertConfig(**TEXT, num_labels=3)
    mix = {"classifier": "trained", "*.intermediate.*": "frozen", "*.output.dense.weight": "frozen"}
    model = AutoModelForSequenceClassification.from_config(hf_slt.supermask_config(config, parameters=mix))
    learns = [path for path, one in model.named_parameters() if not path.endswith("scores")]
    assert learns == ["classifier.values", "classifier.bias_values"]
    model.save_ticket(tmp_path)
    bare = AutoModel.from_pretrained(tmp_path)  # without the head that a pattern names
    assert torch.equal(bare(IDS)[0], model.eval().bert(IDS)[0])
    write_card(tmp_path)
    assert cli.main(["inspect", str(tmp_path)]) == 0
    shown, card = capsys.readouterr().out, (tmp_path / "README.md").read_text()
    frozen = 2 * (32 * 48 + 48 * 32 + 32 * 32)
    assert re.search(rf"frozen for good, not stored +{frozen:,} +0\n", shown)
    assert f"| frozen for good, not stored | {frozen:,} | 0 |" in card
    assert "text-classification" in card
    assert "A bert model whose weights" in card
    stored = json.loads((tmp_path / "config.json").read_text())["supermask"]["parameters"]
    assert stored == [f"{pattern}={kind}" for pattern, kind in mix.items()]  # in their order


def test_wrong_patterns_are_refused():
    config = transformers.LlamaConfig(**CASES["llama"][1])
    with pytest.raises(ValueError, match=r"'\*.mlp.\*=forzen' is not a pattern.*did you mean 'frozen'"):
        hf_slt.supermask_config(config, parameters={"*.mlp.*": "forzen"})
    wrong = hf_slt.supermask_config(config, parameters={"*.mlp.up_prj": "frozen"})
    with pytest.raises(
        hf_slt.SLTError, match=r"no parameter has a name like '\*.mlp.up_prj'; the nearest name is .*up_proj"
    ):
        AutoModelForCausalLM.from_config(wrong)
    with pytest.raises(hf_slt.SLTError, match="no parameter has a name like 'lm_head'"):
        make("llama-tied", parameters={"lm_head": "trained"})  # tied: it is the embedding


def test_any_module_takes_a_mix():
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    hf_slt.supermask_(module, seed=7, density=0.5, parameters={"1": "frozen", "2": "trained"})
    learns = [path for path, one in module.named_parameters() if one.requires_grad]
    assert learns == ["0.scores", "2.values", "2.bias_values"]
    assert (module[1].weight != 0).all()
    inputs = torch.randn(3, 8)
    expected = module(inputs)
    hf_slt.fix_masks_(module)
    assert torch.equal(module(inputs), expected)
    with pytest.raises(hf_slt.SLTError, match="no parameter has a name like 'head'"):
        hf_slt.supermask_(nn.Linear(2, 2), parameters={"head": "trained"})
