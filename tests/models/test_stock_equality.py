"""What is learned, and that it computes what stock GPT-2 with the merged weights computes."""

import math

import numpy as np
import pytest
import torch
from cases import (
    CASES,
    IDS,
    assert_equals_stock,
    assert_same_values,
    both_states,
    every_case,
    learned,
    logits_of,
    make,
    mergeable,
    mergeable_cases,
    these_cases,
    tiny_config,
    train_a_little,
)
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, GPT2ForSequenceClassification, GPT2LMHeadModel, GPT2Model

from hf_slt import SupermaskGPT2ForSequenceClassification, SupermaskGPT2LMHeadModel, SupermaskGPT2Model
from hf_slt.masks.modules import parameter_plans
from hf_slt.masks.plans import MaskedPlan, TrainedPlan
from hf_slt.tickets.format import read_ticket
from hf_slt.weights.random_weights import draw


@every_case
def test_only_scores_and_trained_embeddings_are_learned(changes):
    model = AutoModelForCausalLM.from_config(tiny_config(**changes))
    assert type(model) is SupermaskGPT2LMHeadModel
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    tables = {"transformer.wte", "transformer.wpe"}
    if not changes.get("tie_word_embeddings", True):
        tables.add("lm_head")
    blocks = {name for name in trainable if name.startswith("transformer.h.")}
    assert len(blocks) == 2 * 6
    assert all(name.endswith("scores") for name in blocks)
    kind = changes.get("embedding", "masked")
    leaf = {"masked": "scores", "trained": "values"}.get(kind)
    expected = {f"{table}.{leaf}" for table in tables} if leaf else set()
    if "embedding_rank" in changes:
        parts = {"transformer.wte.rows_values", "transformer.wte.basis_scores"}
        expected = expected - {"transformer.wte.values"} | parts
    assert trainable - blocks == expected
    # What follows from the seed is in buffers, never saved, and stays out of what DDP sends round.
    drawn = {name for name, _ in model.named_buffers()}
    assert {name for name in drawn if name.endswith("drawn") and ".h." in name} == {
        f"transformer.h.{block}.{name}.drawn"
        for block in range(2)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert {f"{table}.weight" for table in tables} & drawn == (
        {f"{table}.weight" for table in tables} if kind == "frozen" else set()
    )
    assert set(model._ddp_params_and_buffers_to_ignore) == drawn
    before, first = {name: buffer.clone() for name, buffer in model.named_buffers()}, learned(model)
    train_a_little(model)
    assert_same_values(dict(model.named_buffers()), before)
    assert not [name for name, values in learned(model).items() if torch.equal(values, first[name])]
    assert not [name for name, parameter in model.to_ticket().named_parameters() if parameter.requires_grad]


def test_tied_embedding_is_masked_once_for_both_uses():
    tied, untied = make(), make(tie_word_embeddings=False)
    assert "lm_head" not in str(tied.state_dict().keys())
    assert torch.equal(tied.lm_head.weight, tied.transformer.wte.weight)
    assert not torch.equal(untied.lm_head.weight, untied.transformer.wte.weight)
    assert torch.equal(untied.merge_and_unload().lm_head.weight, untied.lm_head.weight)
    ticket = tied.to_ticket()
    assert ticket.lm_head.weight is ticket.transformer.wte.weight


@both_states
@mergeable_cases
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_loss_and_gradients_equal_stock(changes, state, attention):
    model = make(state, **changes)
    model.set_attn_implementation(attention)
    stock = model.merge_and_unload()
    assert stock.config._attn_implementation == attention
    options = {"labels": IDS, "attention_mask": torch.ones_like(IDS).index_fill_(1, torch.arange(4), 0)}
    ours, theirs = model(IDS, **options), stock(IDS, **options)
    assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-5)
    assert_close(ours.loss, theirs.loss, rtol=1e-6, atol=0)
    if state == "ticket":
        return
    ours.loss.backward()
    theirs.loss.backward()
    # The straight-through gradient of a score is that of its weight, times weight and sign.
    slopes = {name.removesuffix(".weight"): one.grad for name, one in stock.named_parameters()}
    if "embedding_rank" in changes:  # the chain rule of a product
        table, plan = model.transformer.wte, model.transformer.wte.parameter_plans["weight"]
        rows, basis = plan.rows.value(table, "rows"), plan.basis.value(table, "basis")
        of_table = slopes["transformer.wte"]
        assert_close(table.rows_values.grad, of_table @ basis.T, rtol=1e-4, atol=1e-6)
        slopes["transformer.wte"] = rows.T @ of_table
    for path, module, name, plan in parameter_plans(model):
        if isinstance(plan, TrainedPlan):
            assert_close(module.values.grad, slopes[path], rtol=1e-4, atol=1e-6)
        masked = getattr(plan, "basis", plan)
        if isinstance(masked, MaskedPlan):
            parts = slopes[path].split([one.shape[masked.axis] for one in masked.tensors], masked.axis)
            name = "basis" if masked is not plan else name
            scored = masked.scores(module, name)
            for tensor, part, scores in zip(masked.tensors, parts, scored, strict=True):
                expected = part * torch.from_numpy(tensor.draw()) * scores.sign()
                assert_close(scores.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scales", ["none", "row"])
@pytest.mark.parametrize("encoding", ["packed", "entropy"])
def test_a_table_of_low_rank_is_what_the_file_says(tmp_path, encoding, scales):
    """The oracle is stock GPT-2 with a table multiplied out by hand, from the arrays of the file."""
    model = make(embedding="trained", embedding_bits=4, embedding_rank=12, scales=scales)
    model.save_ticket(tmp_path, encoding=encoding)
    arrays = read_ticket(tmp_path / "mask.safetensors").arrays
    drawn = draw(7, "wte.basis", (12, 32), "normal", 1 / math.sqrt(12))
    basis = drawn * np.unpackbits(arrays["wte.basis"], bitorder="little").reshape(12, 32)
    if scales == "row":
        assert arrays["wte.basis.scale"].std() > 0
        basis = basis * arrays["wte.basis.scale"]
    table = torch.from_numpy(arrays["wte.rows"] @ basis)
    for found in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        stock = found.merge_and_unload()
        stock.transformer.wte.weight.data.copy_(table)
        assert_close(logits_of(found), logits_of(stock), rtol=1e-5, atol=1e-5)
        lookups = found.get_input_embeddings()(IDS)
        assert_close(lookups, table[IDS], rtol=1e-5, atol=1e-5)
        hidden = torch.randn(2, 3, 32)
        assert_close(found.get_output_embeddings()(hidden), hidden @ table.T, rtol=1e-5, atol=1e-5)
        assert (found.get_input_embeddings().num_embeddings, lookups.shape[-1]) == (64, 32)


@both_states
def test_attentions_and_hidden_states_equal_stock(state):
    model = make(state)
    model.set_attn_implementation("eager")
    found = model(IDS, output_attentions=True, output_hidden_states=True)
    expected = model.merge_and_unload()(IDS, output_attentions=True, output_hidden_states=True)
    assert len(found.attentions) == 2
    assert_close(found.attentions, expected.attentions, rtol=1e-5, atol=1e-6)
    assert_close(found.hidden_states, expected.hidden_states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"activation_function": "relu"},
        {"n_inner": 48},
        {"qk_scale": 0.5},
        {"layer_norm_epsilon": 0.1},
        {"embedding_law": "signed_constant", "embedding_range": 0.01},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_gpt2_equal_stock(options):
    model = make(**options)
    assert_equals_stock(logits_of(model), model)
    assert not torch.allclose(logits_of(model), logits_of(make()))


def test_positions_types_and_embeddings_as_input():
    model = make()
    stock = model.merge_and_unload()
    for options in (
        {"inputs_embeds": torch.randn(2, 5, 32)},
        {"input_ids": IDS, "position_ids": torch.arange(30, 42)[None]},
        {"input_ids": IDS, "token_type_ids": IDS % 3},
        {"input_ids": IDS, "logits_to_keep": 2},
        {"input_ids": IDS, "return_dict": False, "use_cache": False},
    ):
        assert_close(model(**options)[0], stock(**options)[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"input_ids.* inputs_embeds"):
        model()


# -- merging ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_class", "stock_class"),
    [
        (SupermaskGPT2Model, GPT2Model),
        (SupermaskGPT2LMHeadModel, GPT2LMHeadModel),
        (SupermaskGPT2ForSequenceClassification, GPT2ForSequenceClassification),
    ],
)
def test_each_class_merges_to_its_stock_class(tmp_path, model_class, stock_class):
    model = make(model_class=model_class, num_labels=3)
    stock = model.merge_and_unload()
    stock.save_pretrained(tmp_path)
    for merged in (stock, stock_class.from_pretrained(tmp_path)):
        assert type(merged) is stock_class
        assert_close(logits_of(model), logits_of(merged), rtol=1e-5, atol=1e-5)


@these_cases(*(name for name in CASES if not mergeable(CASES[name])))
def test_merge_refuses_what_stock_has_not(changes):
    with pytest.raises(ValueError, match="cannot be merged"):
        make(**changes).merge_and_unload()


# -- heads of widths that stock has not -----------------------------------------------------------------


def test_head_widths_equal_to_the_usual_ones_change_nothing():
    assert torch.equal(logits_of(make(n_qk=8, n_v=8)), logits_of(make()))


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_attention_of_free_head_widths_by_hand(kind):
    model = make(n_qk=3, n_v=5)
    model.set_attn_implementation(kind)
    attention, hidden = model.transformer.h[0].attn, torch.randn(1, 6, 32)
    query, key, value = (hidden[0] @ attention.c_attn.weight).split([12, 12, 20], -1)
    heads, causal = [], torch.full((6, 6), -torch.inf).triu(1)
    for head in range(4):
        q, k, v = (part[:, head * n : head * n + n] for part, n in ((query, 3), (key, 3), (value, 5)))
        heads.append(((q @ k.T) / 3**0.5 + causal).softmax(-1) @ v)
    expected = torch.cat(heads, -1) @ attention.c_proj.weight
    found = attention(hidden, attention_mask=causal[None, None])[0][0]
    assert_close(found, expected, rtol=1e-5, atol=1e-5)


@both_states
def test_free_head_widths_in_the_cache(state):
    model = make(state, n_qk=6, n_v=10)
    start = model(IDS[:, :8], use_cache=True)
    assert start.past_key_values.layers[0].keys.shape == (3, 4, 8, 6)
    assert start.past_key_values.layers[0].values.shape == (3, 4, 8, 10)
    rest = model(IDS[:, 8:], past_key_values=start.past_key_values)
    assert_close(torch.cat([start.logits, rest.logits], 1), logits_of(model), rtol=1e-5, atol=1e-5)
