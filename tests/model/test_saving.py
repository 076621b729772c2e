"""Saved and loaded, a model is the model it was: the same values, the same logits, the same bytes again."""

import json
import shutil

import pytest
import torch
from cases import (
    IDS,
    assert_equals_stock,
    assert_same_values,
    both_states,
    every_case,
    learned,
    logits_of,
    make,
    mergeable,
    these_cases,
    train_a_little,
)
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hf_slt import SupermaskGPT2Config, SupermaskGPT2LMHeadModel, SupermaskGPT2Model, verify_ticket


@every_case
def test_scores_are_saved_and_resumed(tmp_path, changes):
    model = make(**changes)
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is SupermaskGPT2Config
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["state"]) == ("supermask_gpt2", "scores")
    assert config["architectures"] == ["SupermaskGPT2LMHeadModel"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_values(learned(again), learned(model))
    assert torch.equal(logits_of(again), logits_of(model))
    assert {name for name, p in again.named_parameters() if p.requires_grad} == set(learned(model))
    # What is learned from there on is the same too.
    assert_same_values(learned(train_a_little(again)), learned(train_a_little(model)))


@every_case
def test_a_ticket_is_the_model_however_it_is_stored(tmp_path, changes):
    model = make(**changes)
    expected = logits_of(model)
    header = model.save_ticket(tmp_path / "ticket")
    mask_file = tmp_path / "ticket" / "mask.safetensors"
    shutil.copyfile(mask_file, tmp_path / "alone.safetensors")
    assert model.save_ticket(tmp_path / "coded", encoding="entropy").mask_digest == header.mask_digest
    model.to_ticket().save_pretrained(tmp_path / "pretrained")
    for source in ("ticket", "coded", "pretrained", "alone.safetensors"):
        ticket = SupermaskGPT2LMHeadModel.from_pretrained(tmp_path / source)
        assert ticket.config.state == "ticket"
        assert ticket.name_or_path == str(tmp_path / source)
        assert torch.equal(logits_of(ticket), expected), source
        assert not ticket.training
        assert not [name for name, parameter in ticket.named_parameters() if parameter.requires_grad]
        # Saved again it is the same file, to the last bit.
        ticket.save_ticket(tmp_path / "again")
        assert (tmp_path / "again" / "mask.safetensors").read_bytes() == mask_file.read_bytes(), source
        if source != "alone.safetensors":
            assert verify_ticket(tmp_path / source).tensors == header.tensors
    under_the_usual_name = (tmp_path / "pretrained" / "model.safetensors").read_bytes()
    assert under_the_usual_name == mask_file.read_bytes()
    if mergeable(changes):
        assert_equals_stock(expected, ticket)


@these_cases("normal", "normal-untied")
@both_states
def test_sharded_save(tmp_path, changes, state):
    model = make(state, **changes)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert_same_values(learned(again), learned(model))
    assert torch.equal(logits_of(again), logits_of(model))
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3 if state == "scores" else not shards  # a ticket is small: one file
    # A smaller save into the same folder leaves no shard behind.
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.safetensors*")} == {"model.safetensors"}


@both_states
def test_bare_model_and_language_model_load_each_other(tmp_path, state):
    model = make(state)
    model.save_pretrained(tmp_path / "lm")
    bare = AutoModel.from_pretrained(tmp_path / "lm")
    assert type(bare) is SupermaskGPT2Model
    assert torch.equal(logits_of(bare), model.transformer(IDS).last_hidden_state)
    bare.save_pretrained(tmp_path / "bare")
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "bare")), logits_of(model))


def test_a_key_that_is_no_option_is_kept(tmp_path):
    """A ticket is saved whatever else its configuration holds, as any model of transformers."""
    ticket = make("ticket")
    ticket.config.colour = "blue"
    ticket.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.colour == "blue"
    assert torch.equal(logits_of(again), logits_of(ticket))


@pytest.mark.parametrize("encoding", ["zip", ""])
def test_an_unknown_encoding_is_refused(tmp_path, encoding):
    with pytest.raises(ValueError, match="not one of 'packed', 'entropy'"):
        make().save_ticket(tmp_path / "ticket", encoding=encoding)
    assert not (tmp_path / "ticket").exists()
