"""Saved and loaded, a model is the model it was: the same values, the same logits, the same bytes again."""

import json
import shutil
from pathlib import Path

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
    tiny_config,
    train_a_little,
)
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hf_slt import SLTError, SupermaskGPT2Config, SupermaskGPT2LMHeadModel, SupermaskGPT2Model, verify_ticket


@every_case
def test_scores_are_saved_and_resumed(tmp_path, changes):
    model = make(**changes)
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is SupermaskGPT2Config
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["supermask"]["state"]) == ("supermask_gpt2", "scores")
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


def test_a_blank_ticket_is_the_one_that_it_saves(tmp_path):
    """Before any training: values start as the ticket stores them, rounded to 8 bits or less."""
    options = {
        "scales": "row",
        "layer_norm": "trained",
        "head_bias": True,
        "scale_bits": 8,
        "embedding": "trained",
    }
    blank = SupermaskGPT2LMHeadModel(tiny_config(**options, embedding_bits=4, state="ticket")).eval()
    blank.save_ticket(tmp_path)
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path)), logits_of(blank))


@both_states
def test_a_replaced_table_computes_but_is_not_saved(tmp_path, state):
    model = make(state)
    table = torch.nn.Embedding(64, 32)
    model.set_input_embeddings(table)
    assert model.get_input_embeddings() is table
    if state == "scores":  # tied: both uses are of the new table
        hidden = model.transformer(IDS).last_hidden_state
        assert torch.allclose(model(IDS).logits, hidden @ table.weight.T, atol=1e-4)
    else:
        stock = make(state).merge_and_unload()
        stock.set_input_embeddings(table)
        assert torch.equal(logits_of(model), logits_of(stock))
    for save in (model.save_pretrained, model.save_ticket):
        with pytest.raises(SLTError, match=r"wte was replaced .* resize_token_embeddings"):
            save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


SCORES_OF_0_1 = sorted((Path(__file__).parents[1] / "data" / "scores_0_1_0").iterdir())
NAMES_OF_0_1 = [
    ("head_bias.values", "lm_head.bias_values"),
    ("wte.rows.values", "wte.rows_values"),
    ("wte.basis.", "wte.basis_"),
    ("scale.values", "scale"),
    (".gain.values", ".values"),
]


@pytest.mark.parametrize("folder", SCORES_OF_0_1, ids=lambda folder: folder.name)
def test_scores_of_version_0_1_load_and_are_saved_under_the_names_of_today(tmp_path, folder):
    """Files that version 0.1 wrote: learned scales, gains, a bias of the logits, tables of low rank."""
    expected = json.loads((folder / "expected.json").read_text())  # logits and mask_digest by version 0.1
    stored = {}
    for name, values in load_file(folder / "model.safetensors").items():
        for old, new in NAMES_OF_0_1:
            name = name.replace(old, new)
        stored[name] = values
    model, report = SupermaskGPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert_same_values(learned(model), stored)
    logits = logits_of(model, torch.tensor(expected["input_ids"]))
    assert_close(logits, torch.tensor(expected["logits"]), rtol=1e-5, atol=2e-6)
    assert model.save_ticket(tmp_path / "ticket").mask_digest == expected["mask_digest"]
    model.save_pretrained(tmp_path / "scores")
    assert_same_values(load_file(tmp_path / "scores" / "model.safetensors"), stored)
    assert_same_values(learned(AutoModelForCausalLM.from_pretrained(tmp_path / "scores")), stored)
    bare = SupermaskGPT2Model.from_pretrained(folder)
    inside = {name.removeprefix("transformer."): values for name, values in stored.items()}
    assert_same_values(learned(bare), {name: inside[name] for name in learned(bare)})
