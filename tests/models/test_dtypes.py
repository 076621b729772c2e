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

from hf_slt import SLTError, SupermaskGPT2LMHeadModel

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@both_states
@HALVES
@these_cases("normal", "normal-untied")
def test_half_precision(tmp_path, state, dtype, changes):
    model = make(state, **changes)
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert half.dtype == dtype
    if state == "scores":
        assert_same_values(learned(half), learned(model))  # scores stay float32
    else:
        assert_same_values(learned(half), learned(model.merge_and_unload().to(dtype)))
    stock = model.merge_and_unload().to(dtype)
    found, expected = half(IDS, labels=IDS), stock(IDS, labels=IDS)
    assert found.logits.dtype == dtype
    assert_close(found.logits, expected.logits, rtol=0.02, atol=0.02)
    assert_close(found.loss.float(), expected.loss.float(), rtol=0.01, atol=0)
    cast = copy.deepcopy(model).to(dtype)
    assert_same_values(learned(cast), learned(half))
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


@these_cases(*CASES)
@HALVES
def test_what_learns_loses_nothing_by_a_cast_to_half_and_back(changes, dtype):
    model = make(**changes)
    expected, values = logits_of(model), learned(model)
    model.to(dtype)
    assert_same_values(learned(model), values)
    model.float()
    assert_same_values(learned(model), values)
    assert torch.equal(logits_of(model), expected)


@HALVES
def test_a_ticket_that_was_rounded_is_not_saved_as_another(tmp_path, dtype):
    """Loaded in 16 bits it is the same ticket; cast to 16 bits and back, its weights are no longer its own."""
    model = make("ticket", scales="row", layer_norm="trained")
    digest = model.save_ticket(tmp_path / "first").digest
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=dtype)
    assert half.save_ticket(tmp_path / "half").digest == digest
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.float32)
    assert torch.equal(logits_of(again), logits_of(model))
    with pytest.raises(SLTError, match=r"rounded by a cast to 16 bits and back.*load the ticket again"):
        model.to(dtype).float().save_ticket(tmp_path / "again")


def test_what_is_trained_beside_the_masks_stays_in_float32():
    """In bfloat16, 1 + 1e-3 is 1: at a rate of 1e-3, scales and gains would never move."""
    model = make(scales="row", layer_norm="trained", embedding="trained").to(torch.bfloat16).train()
    before = learned(model)
    assert {values.dtype for values in before.values()} == {torch.float32}
    gradients(model)
    torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0).step()
    assert not [name for name, values in learned(model).items() if torch.equal(values, before[name])]


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
