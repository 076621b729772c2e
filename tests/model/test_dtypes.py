"""Half precision rounds the weights and nothing else: scores and masks stay, and nothing is lost for good."""

import copy

import pytest
import torch
from cases import (
    CASES,
    IDS,
    assert_same_values,
    both_states,
    gradients,
    learned,
    logits_of,
    make,
    these_cases,
    tiny_config,
)
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from hf_slt import SupermaskGPT2LMHeadModel

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@both_states
@HALVES
@these_cases("normal", "normal-untied")
def test_half_precision(tmp_path, state, dtype, changes):
    model = make(state, **changes)
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert half.dtype == dtype
    assert_same_values(learned(half), learned(model))  # scores stay float32
    stock = model.merge_and_unload().to(dtype)
    found, expected = half(IDS, labels=IDS), stock(IDS, labels=IDS)
    assert found.logits.dtype == dtype
    assert_close(found.logits, expected.logits, rtol=0.02, atol=0.02)
    assert_close(found.loss.float(), expected.loss.float(), rtol=0.01, atol=0)
    cast = copy.deepcopy(model).to(dtype)
    assert_same_values(learned(cast), learned(model))
    assert torch.equal(logits_of(cast), logits_of(half))
    half.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert torch.equal(logits_of(again), logits_of(model))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").dtype == dtype


def test_who_tells_the_dtype_of_a_ticket(tmp_path):
    """The caller, else the file, else torch's default; masks, which are bytes, do not."""
    ticket = make("ticket").bfloat16()
    ticket.save_ticket(tmp_path)
    file, load = tmp_path / "mask.safetensors", SupermaskGPT2LMHeadModel.from_pretrained
    for source in (tmp_path, file):
        assert load(source).dtype == load(source, dtype="auto").dtype == torch.bfloat16
        assert load(source, dtype=torch.float16).dtype == torch.float16
        assert load(source, torch_dtype="float16").dtype == torch.float16
    config = tiny_config(state="ticket")
    assert config.dtype is None
    assert load(tmp_path, config=config).dtype == torch.float32
    assert load(None, config=config, state_dict=learned(ticket)).dtype == torch.float32
    assert config.dtype is None  # a copy was told


# A trained embedding is an ordinary parameter: it is rounded, as everywhere.
@both_states
@these_cases(*(name for name in CASES if CASES[name].get("embedding") != "trained"))
@HALVES
def test_cast_to_half_and_back_loses_nothing(changes, state, dtype):
    model = make(state, **changes)
    expected, values = logits_of(model), learned(model)
    model.to(dtype)
    assert_same_values(learned(model), values)
    model.float()
    assert_same_values(learned(model), values)
    assert torch.equal(logits_of(model), expected)


def test_training_in_bfloat16_moves_float32_scores():
    expected = gradients(make().train())
    model = make().to(torch.bfloat16).train()
    for name, gradient in gradients(model).items():
        assert gradient.dtype == torch.float32, name
        assert torch.cosine_similarity(gradient.flatten(), expected[name].flatten(), 0) > 0.99, name
    before = learned(model)
    torch.optim.AdamW(model.parameters(), lr=1e-4).step()  # a step that bfloat16 could not hold
    assert not any(torch.equal(values, before[name]) for name, values in learned(model).items())


def test_gradients_survive_a_cast():
    model = make().train()
    expected = gradients(model)
    model.to(torch.bfloat16)  # rounds them, but leaves them where the optimizer wants them
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name], rtol=0.01, atol=1e-9)
    torch.optim.AdamW(model.parameters(), lr=0.1).step()


@these_cases("normal", "normal-untied")
def test_autocast(changes):
    model = make(**changes).train()
    stock = model.merge_and_unload()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = model(IDS, labels=IDS), stock(IDS, labels=IDS)
    assert_close(found.logits, expected.logits, rtol=0.02, atol=0.02)
    found.loss.backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
