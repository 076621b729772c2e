"""A classifier's head, a head on a model that had none, and tables of another length."""

import numpy as np
import pytest
import torch
from cases import (
    IDS,
    assert_same_values,
    both_states,
    every_case,
    learned,
    logits_of,
    make,
    mergeable,
    tiny_batch,
    tiny_config,
    train_a_little,
)
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2ForSequenceClassification,
)

from hf_slt import SupermaskGPT2ForSequenceClassification, SupermaskGPT2LMHeadModel
from hf_slt.model.quantisation import BITS
from hf_slt.training.scores import RoundedWeight

# -- classification -----------------------------------------------------------------------------------


@both_states
def test_sequence_classification(tmp_path, state):
    model = make(state, SupermaskGPT2ForSequenceClassification, num_labels=3)
    assert ("score.scores" if state == "scores" else "score.mask") in model.state_dict()
    mask = model.mask_arrays()["score"]
    assert (mask.shape, mask.sum()) == ((3, 32), 48)
    left, labels = IDS.clone(), torch.tensor([0, 2, 1])
    left[0, :5], left[1, :2] = 63, 63
    right = left.flip(1)
    stock = model.merge_and_unload()
    assert type(stock) is GPT2ForSequenceClassification
    for batch in ({"input_ids": right}, {"input_ids": left, "attention_mask": (left != 63).long()}):
        found, expected = model(**batch, labels=labels), stock(**batch, labels=labels)
        assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
        assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(logits_of(again, right), logits_of(model, right))
    assert again.config.num_labels == 3


def test_classifier_learns_through_its_mask_only():
    model = SupermaskGPT2ForSequenceClassification(tiny_config(num_labels=2)).train()
    assert all(name.endswith("scores") for name, _ in model.named_parameters())
    ids = tiny_batch(16, 8)
    labels = (ids[:, -1] > 30).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for _ in range(20):
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_new_head_on_a_trained_language_model(tmp_path):
    model = make()
    for save, kept in ((model.save_pretrained, 64), (model.save_ticket, 128)):  # a ticket's is not trained
        save(tmp_path)
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=4)
        hidden = classifier.transformer(IDS).last_hidden_state
        assert torch.equal(hidden, model.transformer(IDS).last_hidden_state)
        assert classifier.mask_arrays()["score"].sum() == kept


# -- resize -------------------------------------------------------------------------------------------


@both_states
@every_case
@pytest.mark.parametrize("rows", [80, 50])
def test_resize_token_embeddings(tmp_path, changes, state, rows):
    """Rows in both keep what they have; new ones are as in a fresh model, or the mean of what is trained."""
    model = make(state, **changes)
    old = {path: (layer, learned(layer)) for path, layer in model.supermask_layers()}
    masks = model.mask_arrays()
    assert model.resize_token_embeddings(rows) is model.get_input_embeddings()
    assert model.config.vocab_size == rows
    fresh = SupermaskGPT2LMHeadModel(tiny_config(state=state, **changes | {"vocab_size": rows}))
    layers, both = dict(model.supermask_layers()), min(64, rows)
    tables = {"transformer.wte", "transformer.wte.rows", "lm_head"} & set(old)
    for path in tables:
        table, drawn = layers[path], fresh.get_submodule(path)
        assert table.shape == (rows, changes.get("embedding_rank", 32))
        assert np.array_equal(table.drawn_weight(), drawn.drawn_weight())
        for name, values in learned(table).items():
            if values.is_floating_point():  # scores or values
                assert torch.equal(values[:both], old[path][1][name][:both])
                more = learned(drawn)[name][both:]
                if table.kind == "trained":
                    more = old[path][1][name].mean(0).expand_as(more)
                rounded = state == "ticket" and table.bits in BITS
                assert torch.equal(values[both:], RoundedWeight.apply(more, table.bits) if rounded else more)
                assert table.get_parameter(name).requires_grad == (state == "scores")
    if state == "ticket":
        for name, mask in model.mask_arrays().items():
            assert np.array_equal(mask[:both], masks[name][:both])
            assert mask[len(masks[name]) :].all()  # nothing was learned of them
    for path, (layer, values) in old.items():
        if path not in tables:
            assert layers[path] is layer
            assert_same_values(learned(layer), values)
    logits = logits_of(model, IDS % 50)
    assert logits.shape[-1] == rows
    drawn = {name for name, _ in model.named_buffers() if not name.endswith("mask")}
    assert set(model._ddp_params_and_buffers_to_ignore) == drawn
    if mergeable(changes):
        assert_close(logits, logits_of(model.merge_and_unload(), IDS % 50), rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path), IDS % 50), logits)
    # Nor does transformers draw anew what is there.
    model.post_init()
    assert torch.equal(logits_of(model, IDS % 50), logits)


@pytest.mark.parametrize("more", [{}, {"tie_word_embeddings": False}, {"embedding_rank": 12}], ids=str)
def test_new_rows_of_trained_tables_are_as_in_transformers(more):
    """The oracle is stock GPT-2, resized: the mean and a little noise."""
    changes = {"embedding": "trained", **more}
    stock = make(**changes).merge_and_unload()
    stock.resize_token_embeddings(70, mean_resizing=True)
    mean = make(**changes)
    mean.resize_token_embeddings(70, mean_resizing=True)
    spread = stock.get_input_embeddings().weight.std().item()
    for ours, theirs in (
        (mean.get_input_embeddings(), stock.get_input_embeddings()),
        (mean.get_output_embeddings(), stock.get_output_embeddings()),
    ):
        assert_close(ours.weight[64:], theirs.weight[64:], rtol=0, atol=1e-3 * spread)
        assert_close(ours.weight[:64], theirs.weight[:64], rtol=0, atol=1e-6)
        assert torch.equal(ours.weight[64], ours.weight[69])
    drawn = make(**changes)
    drawn.resize_token_embeddings(70, mean_resizing=False)
    fresh = SupermaskGPT2LMHeadModel(tiny_config(**changes | {"vocab_size": 70}))
    for name, values in learned(fresh).items():
        if values.shape[0] == 70:
            assert torch.equal(learned(drawn)[name][64:], values[64:])
            assert not torch.allclose(learned(mean)[name][64:], values[64:])


def test_training_goes_on_after_a_resize_to_a_multiple():
    model = make()
    model.resize_token_embeddings(65, pad_to_multiple_of=16)
    assert model.config.vocab_size == 80
    assert model.get_input_embeddings().weight.shape == (80, 32)
    before = learned(model)
    train_a_little(model)
    assert not any(torch.equal(values, before[name]) for name, values in learned(model).items())
