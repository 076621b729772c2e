"""Several masks on one backbone: each as if loaded alone, none out of date, no second copy of the weights."""

import copy
import shutil

import numpy as np
import pytest
import torch
from cases import every_case, logits_of, tiny_batch, tiny_config, train_a_little
from transformers import AutoModelForCausalLM

from hf_slt import SupermaskGPT2LMHeadModel, TicketError, combine_tickets, compare_tickets, verify_ticket
from hf_slt.sharing.mask_algebra import COMBINATIONS


def make_tickets(folder, names, **changes):
    """Tickets of one backbone, each trained a little further than the last; their logits by name."""
    model, logits = SupermaskGPT2LMHeadModel(tiny_config(**changes)), {}
    for name in names:
        ticket = train_a_little(model).to_ticket()
        ticket.save_ticket(folder / name)
        logits[name] = logits_of(ticket)
    return logits


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shelf")
    return folder, make_tickets(folder, ["one", "two", "three"])


@pytest.fixture
def model(shelf):
    return SupermaskGPT2LMHeadModel.from_pretrained(shelf[0] / "one")


# -- named masks ------------------------------------------------------------------------------------


@every_case
def test_switching_gives_the_logits_of_each_ticket_bit_for_bit(changes, tmp_path):
    logits = make_tickets(tmp_path, ["one", "two"], **changes)
    assert not torch.equal(logits["one"], logits["two"])
    model = SupermaskGPT2LMHeadModel.from_pretrained(tmp_path / "one")
    model.load_mask("two", tmp_path / "two")
    assert torch.equal(logits_of(model), logits["one"])  # loaded, not yet in use
    for name, expected in (("two", "two"), ("default", "one"), ("two", "two")):
        model.set_mask(name)
        assert torch.equal(logits_of(model), logits[expected])


def test_names(model, shelf):
    assert (model.active_mask, model.mask_names) == ("default", ["default"])
    model.load_mask("two", shelf[0] / "two" / "mask.safetensors")  # a file alone will do
    assert (model.active_mask, model.mask_names) == ("default", ["default", "two"])
    model.set_mask("two")
    assert model.active_mask == "two"
    model.delete_mask("default")
    assert model.mask_names == ["two"]
    model.set_mask(None)
    assert (model.active_mask, model.mask_names) == (None, ["two"])


def test_with_block_restores_what_was_there_even_after_an_error(model, shelf):
    model.load_mask("two", shelf[0] / "two")
    with model.mask("two"):
        assert torch.equal(logits_of(model), shelf[1]["two"])
        with model.mask(None):
            assert model.active_mask is None
        assert model.active_mask == "two"
    assert torch.equal(logits_of(model), shelf[1]["one"])
    with pytest.raises(KeyError), model.mask("two"):
        raise KeyError
    assert torch.equal(logits_of(model), shelf[1]["one"])


def test_no_mask_keeps_every_weight(model, tmp_path):
    frozen = SupermaskGPT2LMHeadModel(tiny_config(density=1))
    model.set_mask(None)
    assert torch.equal(logits_of(model), logits_of(frozen))
    assert all(mask.all() for mask in model.masks().values())
    model.save_ticket(tmp_path / "all")
    assert verify_ticket(tmp_path / "all").density == 1


def test_a_switch_writes_into_the_weights_that_are_there(model, shelf):
    model.load_mask("two", shelf[0] / "two")
    before = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    model.set_mask("two")
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == before
    resting = model._resting_masks["default"].stored.values()
    weights = sum(mask.size for mask in model.masks().values())
    assert sum(tensor.nbytes for tensor in resting) < weights / 8 + len(resting)


def test_only_layers_with_another_mask_are_drawn_again(model, shelf, monkeypatch):
    from hf_slt.model.layers import SupermaskLayer

    shutil.copytree(shelf[0] / "one", folder := shelf[0] / "same", dirs_exist_ok=True)
    model.load_mask("same", folder)
    drawn = []
    monkeypatch.setattr(SupermaskLayer, "materialise", lambda layer: drawn.append(layer))
    model.set_mask("same")
    assert not drawn


def test_what_is_saved_is_the_mask_in_use(model, shelf, tmp_path):
    model.load_mask("two", shelf[0] / "two")
    model.set_mask("two")
    model.save_ticket(tmp_path / "again")
    expected = (shelf[0] / "two" / "mask.safetensors").read_bytes()
    assert (tmp_path / "again" / "mask.safetensors").read_bytes() == expected
    assert model.config.mask_digest == verify_ticket(shelf[0] / "two").mask_digest


def test_a_copy_of_the_model_has_masks_of_its_own(model, shelf):
    model.load_mask("two", shelf[0] / "two")
    other = copy.deepcopy(model)
    other.set_mask("two")
    assert model.active_mask == "default"
    assert torch.equal(logits_of(model), shelf[1]["one"])
    assert torch.equal(logits_of(other), shelf[1]["two"])


def test_generation_follows_the_mask(model, shelf):
    model.load_mask("two", shelf[0] / "two")
    other = AutoModelForCausalLM.from_pretrained(shelf[0] / "two")
    ids = tiny_batch(1, 4)
    with model.mask("two"):
        ours = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(ours, other.generate(ids, max_new_tokens=8, do_sample=False))


def test_a_mask_of_another_density_brings_its_density(shelf, tmp_path):
    thin = train_a_little(SupermaskGPT2LMHeadModel(tiny_config(density=0.2))).to_ticket()
    thin.save_ticket(tmp_path / "thin")
    model = SupermaskGPT2LMHeadModel.from_pretrained(shelf[0] / "one")
    model.load_mask("thin", tmp_path / "thin")
    with model.mask("thin"):
        assert model.config.density == 0.2
        assert torch.equal(logits_of(model), logits_of(thin))
    assert model.config.density == 0.5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 8}, "seed 7 and 8"),
        ({"law": "uniform"}, "law normal and uniform"),
        ({"qk_scale": 1}, r"h\.0\.attn\.c_attn\.key with scale"),
        ({"n_inner": 40}, r"h\.0\.mlp\.c_fc with shape \(32, 128\) and \(32, 40\)"),
        ({"n_layer": 1}, r"h\.1\.attn\.c_attn\.key is in only one"),
        ({"layer_norm": False}, "layer_norm True and False"),
        ({"embedding": "trained"}, r"wpe with law normal and None"),
        ({"activation_function": "relu"}, "activation_function 'gelu_new' and 'relu'"),
    ],
)
def test_a_mask_of_another_backbone_is_refused_by_name(model, tmp_path, changes, named):
    SupermaskGPT2LMHeadModel(tiny_config(**changes)).to_ticket().save_ticket(tmp_path / "other")
    with pytest.raises(TicketError, match=named):
        model.load_mask("other", tmp_path / "other")
    assert model.mask_names == ["default"]
    with pytest.raises(TicketError, match=named):
        SupermaskGPT2LMHeadModel.from_pretrained(model.name_or_path, mask=tmp_path / "other")


def test_wrong_use_is_named(model, shelf, tmp_path):
    with pytest.raises(ValueError, match=r"no mask 'poems'; there are \['default'\]"):
        model.set_mask("poems")
    with pytest.raises(ValueError, match="in use"):
        model.delete_mask("default")
    with pytest.raises(ValueError, match="already"):
        model.load_mask("default", shelf[0] / "two")
    with pytest.raises(ValueError, match="no name"):
        model.load_mask("", shelf[0] / "two")
    with pytest.raises(TicketError, match="no ticket found"):
        model.load_mask("two", tmp_path)
    with pytest.raises(ValueError, match="to_ticket"):
        SupermaskGPT2LMHeadModel(tiny_config()).load_mask("two", shelf[0] / "two")


def test_a_damaged_mask_is_not_taken(model, shelf, tmp_path):
    data = bytearray((shelf[0] / "two" / "mask.safetensors").read_bytes())
    data[-5] ^= 1
    (tmp_path / "mask.safetensors").write_bytes(data)
    with pytest.raises(TicketError, match="damaged"):
        model.load_mask("two", tmp_path / "mask.safetensors")
    assert model.mask_names == ["default"]


# -- a mask file alone, and another mask from the start -----------------------------------------------


@every_case
def test_a_mask_file_alone_is_the_model(changes, tmp_path):
    logits = make_tickets(tmp_path, ["one"], **changes)["one"]
    shutil.copyfile(tmp_path / "one" / "mask.safetensors", tmp_path / "alone.safetensors")
    model = SupermaskGPT2LMHeadModel.from_mask(tmp_path / "alone.safetensors")
    assert torch.equal(logits_of(model), logits)
    assert not model.training
    assert not [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    half = SupermaskGPT2LMHeadModel.from_mask(tmp_path / "alone.safetensors", dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16


def test_another_mask_from_the_start(shelf):
    for other in (shelf[0] / "two", shelf[0] / "two" / "mask.safetensors"):
        model = AutoModelForCausalLM.from_pretrained(shelf[0] / "one", mask=other)
        assert torch.equal(logits_of(model), shelf[1]["two"])
    assert model.generation_config.eos_token_id == 62
    verified = verify_ticket(shelf[0] / "two").mask_digest
    assert model.config.mask_digest == verified


# -- compared and combined ------------------------------------------------------------------------------


def masks_of(folder):
    return SupermaskGPT2LMHeadModel.from_pretrained(folder).masks()


def test_compared_as_counted_naively(shelf):
    one, two = (masks_of(shelf[0] / name) for name in ("one", "two"))
    found = compare_tickets(shelf[0] / "one", shelf[0] / "two")
    assert found.keys() == {*one, "all"}
    for name, mask in one.items():
        assert found[name].hamming == (mask != two[name]).sum()
        assert found[name].overlap == (mask & two[name]).sum() / (mask | two[name]).sum()
        assert found[name].size == mask.size
    assert found["all"].hamming == sum(found[name].hamming for name in one)
    same = compare_tickets(shelf[0] / "one", shelf[0] / "one")["all"]
    assert (same.hamming, same.overlap) == (0, 1.0)


def test_chance_is_the_overlap_of_random_masks():
    from hf_slt.sharing.mask_algebra import compare_masks

    generator = np.random.default_rng(0)
    one, two = (np.packbits(generator.random(400_000) < density) for density in (0.3, 0.6))
    found = compare_masks({"w": one}, {"w": two}, {"w": 400_000})["w"]
    assert found.overlap == pytest.approx(found.chance, rel=0.01)
    assert found.chance == pytest.approx(0.18 / 0.72, rel=0.01)


@pytest.mark.parametrize(
    ("how", "naive"),
    [
        ("intersection", lambda masks: masks.all(0)),
        ("union", lambda masks: masks.any(0)),
        ("majority", lambda masks: masks.sum(0) > len(masks) / 2),
    ],
)
@pytest.mark.parametrize("names", [["one", "two"], ["one", "two", "three"]])
@pytest.mark.parametrize("encoding", ["packed", "entropy"])
def test_combined_as_by_numpy(shelf, tmp_path, how, naive, names, encoding):
    folders = [shelf[0] / name for name in names]
    header = combine_tickets(folders, how, tmp_path / "new", encoding=encoding)
    verify_ticket(tmp_path / "new")
    model, masks = (
        SupermaskGPT2LMHeadModel.from_pretrained(tmp_path / "new"),
        [masks_of(one) for one in folders],
    )
    for name, mask in model.masks().items():
        assert np.array_equal(mask, naive(np.stack([one[name] for one in masks])))
    kept = sum(mask.sum() for mask in model.masks().values()) / sum(mask.size for mask in masks[0].values())
    assert model.config.density == header.density == kept
    base = SupermaskGPT2LMHeadModel.from_pretrained(shelf[0] / "one")
    base.load_mask("new", tmp_path / "new")  # a ticket like any other


def test_every_combination_is_tested():
    assert set(COMBINATIONS) == {"intersection", "union", "majority"}


def test_what_cannot_be_combined_is_named(shelf, tmp_path):
    SupermaskGPT2LMHeadModel(tiny_config(seed=8)).to_ticket().save_ticket(tmp_path / "other")
    with pytest.raises(TicketError, match="different backbones: seed 7 and 8"):
        combine_tickets([shelf[0] / "one", tmp_path / "other"], "union", tmp_path / "new")
    with pytest.raises(ValueError, match="at least two"):
        combine_tickets([shelf[0] / "one"], "union", tmp_path / "new")
    with pytest.raises(ValueError, match="'xor' is not one of"):
        combine_tickets([shelf[0] / "one", shelf[0] / "two"], "xor", tmp_path / "new")
    make_tickets(tmp_path, ["a", "b"], embedding="trained")
    with pytest.raises(TicketError, match="trained values of wpe"):
        combine_tickets([tmp_path / "a", tmp_path / "b"], "union", tmp_path / "new")
    assert not (tmp_path / "new").exists()
