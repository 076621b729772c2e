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

# -- classification -----------------------------------------------------------------------------------


@both_states
def test_sequence_classification(tmp_path, state):
    model = make(state, SupermaskGPT2ForSequenceClassification, num_labels=3)
    assert ("score.scores" if state == "scores" else "score.weight") in model.state_dict()
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


TABLES = ("transformer.wte", "lm_head")


@every_case
@pytest.mark.parametrize("rows", [80, 50])
def test_resize_token_embeddings(tmp_path, changes, rows):
    """Rows in both keep what they have; new ones are as in a fresh model, or the mean of what is trained."""
    model = make(**changes)
    before = learned(model)
    assert model.resize_token_embeddings(rows) is model.get_input_embeddings()
    assert model.config.vocab_size == rows
    fresh = SupermaskGPT2LMHeadModel(tiny_config(**changes | {"vocab_size": rows}))
    found, new, both = learned(model), learned(fresh), min(64, rows)
    assert found.keys() == before.keys()
    for name, values in found.items():
        if values.shape == before[name].shape:
            assert torch.equal(values, before[name]), name
            continue
        assert name.startswith(TABLES)
        assert torch.equal(values[:both], before[name][:both])
        more = new[name][both:]
        if name.endswith("values"):
            more = before[name].mean(0).expand_as(more)
        assert torch.equal(values[both:], more)
    assert_same_values(dict(model.named_buffers()), dict(fresh.named_buffers()))  # drawn as for this size
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert set(model._ddp_params_and_buffers_to_ignore) == {name for name, _ in model.named_buffers()}
    check_resized(tmp_path, model, changes, rows)


@every_case
@pytest.mark.parametrize("rows", [80, 50])
def test_resize_token_embeddings_of_a_ticket(tmp_path, changes, rows):
    """Nothing was learned of a new row, so all of it is kept; what is trained is the mean of the others."""
    model = make("ticket", **changes)
    masks, before, both = model.mask_arrays(), learned(model), min(64, rows)
    assert model.resize_token_embeddings(rows) is model.get_input_embeddings()
    for name, mask in model.mask_arrays().items():
        assert np.array_equal(mask[:both], masks[name][:both])
        assert mask[len(masks[name]) :].all()
    for name, values in learned(model).items():
        if values.shape != before[name].shape and changes.get("law") == "xavier_uniform":
            continue  # the bound of this law depends on the number of rows
        kept = values[:both] if values.shape != before[name].shape else values
        assert torch.equal(kept, before[name][: len(kept)]), name
    assert not [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    check_resized(tmp_path, model, changes, rows)


def check_resized(tmp_path, model, changes, rows) -> None:
    logits = logits_of(model, IDS % 50)
    assert logits.shape[-1] == rows
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


@both_states
def test_other_labels_with_scales_under_ignore_mismatched_sizes(tmp_path, state):
    """A head of another size starts anew, its scales too; all else is what was saved."""
    changes = {"scales": "row", "rule": "signed", "law": "signed_constant", "num_labels": 3}
    model = make(state, SupermaskGPT2ForSequenceClassification, **changes)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError):
        SupermaskGPT2ForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    again = SupermaskGPT2ForSequenceClassification.from_pretrained(
        tmp_path, num_labels=5, ignore_mismatched_sizes=True
    )
    found = learned(again)
    for name, values in learned(model).items():
        if not name.startswith("score"):
            assert torch.equal(found[name], values), name
    assert logits_of(again).shape[-1] == 5
    assert torch.isfinite(logits_of(again)).all()
    fresh = SupermaskGPT2ForSequenceClassification(again.config)
    for name, values in learned(fresh).items():
        if name.startswith("score"):
            assert torch.equal(found[name], values), name
