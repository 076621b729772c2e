"""Copies, state dicts and models made on meta: each is a model of its own, the same to the last bit."""

import copy
import io

import numpy as np
import pytest
import torch
from cases import (
    assert_same_values,
    both_states,
    every_case,
    learned,
    logits_of,
    make,
    these_cases,
    tiny_config,
    train_a_little,
)

from hf_slt import SupermaskGPT2ForSequenceClassification, SupermaskGPT2LMHeadModel, SupermaskGPT2Model


@both_states
@every_case
def test_copies(changes, state):
    model = make(state, **changes)
    expected = logits_of(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    memory = {values.data_ptr() for values in (*model.parameters(), *model.buffers())}
    for twin in (model.to_ticket(), model.to_ticket().to_ticket()):
        assert torch.equal(logits_of(twin), expected)
        assert memory.isdisjoint(values.data_ptr() for values in (*twin.parameters(), *twin.buffers()))
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert_same_values(learned(twin), learned(model))
        assert torch.equal(logits_of(twin), expected)
        if state == "scores":  # and is a model of its own
            train_a_little(twin)
            assert not torch.equal(logits_of(twin), expected)
    assert torch.equal(logits_of(model), expected)


@both_states
@every_case
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(changes, state, assign):
    model = make(state, **changes)
    other = SupermaskGPT2LMHeadModel(tiny_config(state=state, **changes)).eval()
    before = logits_of(other)
    other.load_state_dict(copy.deepcopy(model.state_dict()), assign=assign)
    assert_same_values(learned(other), learned(model))
    assert torch.equal(logits_of(other), logits_of(model))
    assert not torch.equal(logits_of(other), before)
    if state == "scores":
        assert_same_values(learned(train_a_little(other)), learned(train_a_little(model)))


def check_made_on_meta(model_class, config) -> None:
    normal = model_class(config)
    with torch.device("meta"):
        model = model_class(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for values in (*model.parameters(), *model.buffers()):  # what an allocator may leave behind
            values.fill_(3)
    model.init_weights()
    assert_same_values(learned(model), learned(normal))
    assert_same_values(dict(model.named_buffers()), dict(normal.named_buffers()))
    assert torch.equal(logits_of(model.eval()), logits_of(normal.eval()))


@both_states
@these_cases("normal", "constant-frozen", "xavier-trained-untied", "theory")
def test_meta_then_empty_then_init_is_a_normal_model(changes, state):
    check_made_on_meta(SupermaskGPT2LMHeadModel, tiny_config(state=state, **changes))


@both_states
@pytest.mark.parametrize("model_class", [SupermaskGPT2Model, SupermaskGPT2ForSequenceClassification])
def test_and_so_are_the_other_classes(model_class, state):
    check_made_on_meta(model_class, tiny_config(state=state))


def test_an_untrained_ticket_keeps_every_weight():
    ticket = SupermaskGPT2LMHeadModel(tiny_config(state="ticket")).eval()
    assert all(mask.all() for mask in ticket.mask_arrays().values())
    assert torch.equal(logits_of(ticket), logits_of(SupermaskGPT2LMHeadModel(tiny_config(density=1)).eval()))


@every_case
def test_masks_make_the_ticket_that_they_come_from(changes):
    model = make(**changes)
    masks = model.mask_arrays()
    again = SupermaskGPT2LMHeadModel.from_mask_arrays(model.config, masks)
    for name, mask in again.mask_arrays().items():
        assert np.array_equal(mask, masks[name]), name
    if changes.get("embedding") != "trained":  # whose values are not masks
        assert torch.equal(logits_of(again), logits_of(model))
    name = next(iter(masks))
    for wrong, said in (
        ({**masks, "h.9.mlp.c_fc": masks[name]}, r"has no \['h\.9\.mlp\.c_fc'\]"),
        ({other: mask for other, mask in masks.items() if other != name}, f"no mask for .*{name}"),
        ({**masks, name: masks[name][1:]}, f"mask of {name} has shape"),
    ):
        with pytest.raises(ValueError, match=said):
            SupermaskGPT2LMHeadModel.from_mask_arrays(model.config, wrong)


def test_a_global_seed_has_no_say():
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the global one is meant
        models.append(make())
    assert_same_values(learned(models[0]), learned(models[1]))
