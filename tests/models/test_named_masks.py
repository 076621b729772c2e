"""Several masks on one backbone: each as if loaded alone, none out of date, no second copy of the weights."""

import copy
import gc
import inspect
import sys

import pytest
import torch
from cases import every_case, logits_of, make, save_tickets, tiny_config, train_a_little
from transformers import AutoModelForCausalLM

from hf_slt import SupermaskGPT2LMHeadModel, SupermaskGPT2Model, TicketError, verify_ticket
from hf_slt.masks.plans import MaskedPlan
from hf_slt.models import modeling, named_masks
from hf_slt.sharing.card import kept_of


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shelf")
    return folder, save_tickets(folder, ["one", "two"])


@pytest.fixture
def model(shelf):
    """The ticket `one`, with the mask of `two` beside it."""
    model = SupermaskGPT2LMHeadModel.from_pretrained(shelf[0] / "one")
    model.load_mask(shelf[0] / "two" / "mask.safetensors", "two")  # a file alone will do
    return model


@every_case
def test_switching_gives_the_logits_of_each_ticket_bit_for_bit(changes, tmp_path):
    logits = save_tickets(tmp_path, ["one", "two"], **changes)
    assert not torch.equal(logits["one"], logits["two"])
    model = SupermaskGPT2LMHeadModel.from_pretrained(tmp_path / "one")
    model.load_mask(tmp_path / "two", "two")
    assert torch.equal(logits_of(model), logits["one"])  # loaded, not yet in use
    for name, expected in (("two", "two"), ("default", "one"), ("two", "two")):
        model.set_mask(name)
        assert torch.equal(logits_of(model), logits[expected])


def test_names(model):
    assert (model.active_mask, model.mask_names) == ("default", ["default", "two"])
    model.set_mask("two")
    assert model.active_mask == "two"
    model.delete_mask("default")
    assert model.mask_names == ["two"]
    model.set_mask(None)
    assert (model.active_mask, model.mask_names) == (None, ["two"])


def test_with_block_restores_what_was_there_even_after_an_error(model, shelf):
    with model.using_mask("two"):
        assert torch.equal(logits_of(model), shelf[1]["two"])
        with model.using_mask(None):
            assert model.active_mask is None
        assert model.active_mask == "two"
    assert torch.equal(logits_of(model), shelf[1]["one"])
    with pytest.raises(KeyError), model.using_mask("two"):
        raise KeyError
    assert torch.equal(logits_of(model), shelf[1]["one"])


def test_no_mask_keeps_every_weight(model, tmp_path):
    model.set_mask(None)
    assert torch.equal(logits_of(model), logits_of(SupermaskGPT2LMHeadModel(tiny_config(density=1)).eval()))
    model.save_ticket(tmp_path / "all")
    header = verify_ticket(tmp_path / "all")
    assert all(kept_of(header, entry) == entry.size for entry in header.tensors.values())


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("place", [0, 3, 9])
def test_a_switch_that_fails_is_undone(model, shelf, monkeypatch, error, place):
    """In the middle: some weights are of the new mask, others of the old."""
    config = model.config.to_dict()
    weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    dense, calls = MaskedPlan.dense, []

    def fail(plan, *args):
        calls.append(plan)
        if len(calls) == place + 1:
            raise error
        return dense(plan, *args)

    monkeypatch.setattr(MaskedPlan, "dense", fail)
    with pytest.raises(error):
        model.set_mask("two")
    monkeypatch.undo()
    assert len(calls) > place
    assert (model.active_mask, model.mask_names) == ("default", ["default", "two"])
    assert model.config.to_dict() == config
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    model.set_mask("two")
    assert torch.equal(logits_of(model), shelf[1]["two"])


def test_a_switch_interrupted_anywhere_is_undone_or_done(model, shelf):
    """Ctrl-C comes between any two lines; what the model then says of itself is what it computes."""
    mixin = named_masks.NamedMasksMixin
    parts = (mixin.set_mask, mixin._use, modeling.SupermaskMixin.fill_parameters)
    code = {inspect.unwrap(part).__code__ for part in parts}

    def interrupt(frame, event, arg):
        nonlocal lines
        if frame.f_code not in code or undoing(frame):
            return None if frame.f_code not in code else interrupt
        if event == "line":
            lines += 1
            if lines == stop:
                raise KeyboardInterrupt
        return interrupt

    def undoing(frame) -> bool:  # a second interrupt, of the undoing itself, is more than is promised
        return lines >= stop

    stop, lines = 0, 1
    while lines >= stop:
        stop, lines = stop + 1, 0
        sys.settrace(interrupt)
        try:
            model.set_mask("two")
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert model.mask_names == ["default", "two"]
        active = "one" if model.active_mask == "default" else "two"
        assert torch.equal(logits_of(model), shelf[1][active])
        model.set_mask("two")
        assert torch.equal(logits_of(model), shelf[1]["two"])
        model.set_mask("default")
        assert torch.equal(logits_of(model), shelf[1]["one"])
    assert stop > 20


def live_bytes() -> int:
    """Of all tensors that anything in this process still holds."""
    gc.collect()
    storages = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter) and not one.is_meta:
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(storages.values())


def test_a_switch_writes_into_the_weights_that_are_there(model):
    """No second copy of them, whoever might hold it."""
    pointers, before = {name: one.data_ptr() for name, one in model.named_parameters()}, live_bytes()
    for name in ("two", None, "default", "two"):
        model.set_mask(name)
        logits_of(model)
    assert {name: one.data_ptr() for name, one in model.named_parameters()} == pointers
    assert live_bytes() == before  # one mask in use and one at rest, as at the start
    kept = model.transformer.h[0].mlp.c_fc.weight.clone()
    assert live_bytes() == before + kept.nbytes  # a copy of one weight would be seen


def test_only_tensors_with_another_mask_are_drawn_again(model, shelf, monkeypatch):
    dense, drawn = MaskedPlan.dense, []
    monkeypatch.setattr(MaskedPlan, "dense", lambda plan, *args: drawn.append(plan) or dense(plan, *args))
    model.load_mask(shelf[0] / "one", "same")
    model.set_mask("same")
    assert not drawn
    model.set_mask("two")
    assert len(drawn) == 2 + 2 * 4  # tables, and the matrices of two blocks


def test_a_mask_without_a_head_leaves_nothing_of_the_head_before(tmp_path):
    """The bias of the logits belongs to a mask, too."""
    changes = {"head_bias": True}
    train_a_little(SupermaskGPT2LMHeadModel(tiny_config(**changes))).save_ticket(tmp_path / "head")
    train_a_little(SupermaskGPT2Model(tiny_config(**changes))).save_ticket(tmp_path / "bare")
    model = SupermaskGPT2LMHeadModel.from_pretrained(tmp_path / "head")
    assert model.lm_head.bias.abs().max() > 0
    model.load_mask(tmp_path / "bare", "bare")
    model.set_mask("bare")
    assert torch.equal(
        logits_of(model), logits_of(SupermaskGPT2LMHeadModel.from_pretrained(tmp_path / "bare"))
    )
    assert model.lm_head.bias.abs().max() == 0


def test_what_is_saved_is_the_mask_in_use(model, shelf, tmp_path):
    model.set_mask("two")
    model.save_ticket(tmp_path / "again")
    expected = (shelf[0] / "two" / "mask.safetensors").read_bytes()
    assert (tmp_path / "again" / "mask.safetensors").read_bytes() == expected
    assert model.config.mask_digest == verify_ticket(shelf[0] / "two").mask_digest


def test_a_copy_of_the_model_has_masks_of_its_own(model, shelf):
    other = copy.deepcopy(model)
    other.set_mask("two")
    assert model.active_mask == "default"
    assert torch.equal(logits_of(model), shelf[1]["one"])
    assert torch.equal(logits_of(other), shelf[1]["two"])


def test_a_mask_of_another_density_brings_its_density(model, tmp_path):
    thin = make(density=0.2)
    thin.save_ticket(tmp_path / "thin")
    model.load_mask(tmp_path / "thin", "thin")
    with model.using_mask("thin"):
        assert model.config.density == 0.2
        assert torch.equal(logits_of(model), logits_of(thin))
    assert model.config.density == 0.5


def test_another_mask_from_the_start(shelf):
    for other in (shelf[0] / "two", shelf[0] / "two" / "mask.safetensors"):
        model = AutoModelForCausalLM.from_pretrained(shelf[0] / "one", mask=other)
        assert torch.equal(logits_of(model), shelf[1]["two"])
    assert model.generation_config.eos_token_id == 62
    assert model.config.mask_digest == verify_ticket(shelf[0] / "two").mask_digest


# -- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 8}, "seed 7 and 8"),
        ({"law": "uniform"}, "law 'normal' and 'uniform'"),
        ({"qk_scale": 1}, "qk_scale 'paper' and 1"),
        ({"n_inner": 40}, "n_inner None and 40"),
        ({"n_layer": 1}, "n_layer 2 and 1"),
        ({"layer_norm": False}, "layer_norm True and False"),
        ({"embedding": "trained"}, "embedding 'masked' and 'trained'"),
        ({"activation_function": "relu"}, "activation_function 'gelu_new' and 'relu'"),
    ],
)
def test_a_mask_of_another_backbone_is_refused_by_name(model, tmp_path, changes, named):
    SupermaskGPT2LMHeadModel(tiny_config(**changes)).save_ticket(tmp_path / "other")
    with pytest.raises(TicketError, match=named):
        model.load_mask(tmp_path / "other", "other")
    assert model.mask_names == ["default", "two"]
    with pytest.raises(TicketError, match=named):
        SupermaskGPT2LMHeadModel.from_pretrained(model.name_or_path, mask=tmp_path / "other")


def test_wrong_use_is_named(model, shelf, tmp_path):
    with pytest.raises(ValueError, match=r"no mask 'poems'; there are \['default', 'two'\]"):
        model.set_mask("poems")
    with pytest.raises(ValueError, match="no mask 'poems'"):
        model.delete_mask("poems")
    with pytest.raises(ValueError, match="in use"):
        model.delete_mask("default")
    for name, said in (("default", "already"), ("two", "already"), ("", "not a name"), (None, "not a name")):
        with pytest.raises(ValueError, match=said):
            model.load_mask(shelf[0] / "two", name)
    with pytest.raises(TicketError, match="no ticket found"):
        model.load_mask(tmp_path, "three")
    scores = SupermaskGPT2LMHeadModel(tiny_config())
    for wrong in (lambda: scores.load_mask(shelf[0] / "two", "two"), lambda: scores.set_mask(None)):
        with pytest.raises(ValueError, match="to_ticket"):
            wrong()
    make().save_pretrained(tmp_path)
    with pytest.raises(TicketError, match="not a ticket"):
        SupermaskGPT2LMHeadModel.from_pretrained(tmp_path, mask=shelf[0] / "two")


def test_a_damaged_mask_is_not_taken(model, shelf, tmp_path):
    data = bytearray((shelf[0] / "two" / "mask.safetensors").read_bytes())
    data[-5] ^= 1
    (tmp_path / "mask.safetensors").write_bytes(data)
    with pytest.raises(TicketError, match="damaged"):
        model.load_mask(tmp_path / "mask.safetensors", "three")
    assert model.mask_names == ["default", "two"]
