"""Masks of one backbone compared and combined: as by numpy, and what comes out is a ticket like any other."""

import numpy as np
import pytest
from cases import save_tickets, tiny_config

from hf_slt import SupermaskGPT2LMHeadModel, TicketError, combine_tickets, compare_tickets, verify_ticket
from hf_slt.sharing.card import kept_of, write_card
from hf_slt.sharing.mask_algebra import COMBINATIONS, compare_masks, ticket_factors
from hf_slt.tickets.format import read_ticket
from hf_slt.tickets.verify import mask_path
from hf_slt.tickets.writing import rewrite_ticket

NAIVE = {
    "intersection": lambda masks: masks.all(0),
    "union": lambda masks: masks.any(0),
    "majority": lambda masks: masks.sum(0) > len(masks) / 2,
}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shelf")
    save_tickets(folder, ["one", "two", "three"])
    return folder


def masks_of(folder) -> dict[str, np.ndarray]:
    return {name: factors != 0 for name, factors in ticket_factors(read_ticket(mask_path(folder))).items()}


def test_compared_as_counted_naively(shelf):
    one, two = masks_of(shelf / "one"), masks_of(shelf / "two")
    found = compare_tickets(shelf / "one", shelf / "two")
    assert found.keys() == {*one, "all"}
    for name, mask in one.items():
        assert found[name].hamming == (mask != two[name]).sum()
        assert found[name].overlap == (mask & two[name]).sum() / (mask | two[name]).sum()
        assert found[name].size == mask.size
    assert found["all"].hamming == sum(found[name].hamming for name in one)
    same = compare_tickets(shelf / "one", shelf / "one")["all"]
    assert (same.hamming, same.overlap) == (0, 1.0)


def test_chance_is_the_overlap_of_random_masks():
    generator = np.random.default_rng(0)
    one, two = (generator.random(400_000) < density for density in (0.3, 0.6))
    found = compare_masks({"w": one}, {"w": two})["w"]
    assert found.overlap == pytest.approx(found.chance, rel=0.01)
    assert found.chance == pytest.approx(0.18 / 0.72, rel=0.01)


@pytest.mark.parametrize("how", COMBINATIONS)
@pytest.mark.parametrize("names", [["one", "two"], ["one", "two", "three"]], ids=len)
@pytest.mark.parametrize("encoding", ["packed", "entropy"])
def test_combined_as_by_numpy(shelf, tmp_path, how, names, encoding):
    folders = [shelf / name for name in names]
    header = combine_tickets(folders, how, tmp_path / "new", encoding=encoding)
    assert verify_ticket(tmp_path / "new") == header
    found, masks = masks_of(tmp_path / "new"), [masks_of(folder) for folder in folders]
    for name, mask in found.items():
        assert np.array_equal(mask, NAIVE[how](np.stack([one[name] for one in masks])))
        assert kept_of(header, header.tensors[name]) == mask.sum()
    base = SupermaskGPT2LMHeadModel.from_pretrained(shelf / "one")
    base.load_mask(tmp_path / "new", "new")
    base.set_mask("new")
    assert base.config.density == header.options["rule_options"]["density"] == 0.5  # what was asked for
    assert all(np.array_equal(mask, found[name]) for name, mask in base.mask_arrays().items())


@pytest.mark.parametrize("place", ["one", "two/../two", "link"])
def test_what_is_combined_stays(tmp_path, place):
    save_tickets(tmp_path, ["one", "two"])
    (tmp_path / "link").symlink_to(tmp_path / "two")
    before = [masks_of(tmp_path / name) for name in ("one", "two")]
    with pytest.raises(TicketError, match="give another folder"):
        combine_tickets([tmp_path / "one", tmp_path / "two"], "union", tmp_path / place)
    for old, name in zip(before, ("one", "two"), strict=True):
        assert all(np.array_equal(mask, old[key]) for key, mask in masks_of(tmp_path / name).items())


def test_a_combined_ticket_has_a_card_of_its_own(tmp_path):
    save_tickets(tmp_path, ["one", "two", "new"])
    measures = {"loss": 4.25, "perplexity": 70.1, "bits_per_byte": 2.5}
    for name in ("one", "new"):  # the last is of an earlier combination
        (tmp_path / name / "comparison.png").write_bytes(b"a picture")
        write_card(tmp_path / name, measures=measures, training={"learning_rate": 0.125})
    header = combine_tickets([tmp_path / "one", tmp_path / "two"], "union", tmp_path / "new")
    card = (tmp_path / "new" / "README.md").read_text()
    for word in ("4.25", "0.125", "comparison.png", "/one"):
        assert word not in card
    assert not (tmp_path / "new" / "comparison.png").exists()
    assert header.mask_digest in card
    assert 'from_pretrained("new")' in card
    digests = [verify_ticket(tmp_path / name).mask_digest[:8] for name in ("one", "two")]
    assert "union of the masks `{}`, `{}`".format(*digests) in card


def test_what_cannot_be_combined_is_named(shelf, tmp_path):
    SupermaskGPT2LMHeadModel(tiny_config(seed=8)).save_ticket(tmp_path / "other")
    save_tickets(tmp_path, ["a", "b"], embedding="trained")
    for sources, how, said in (
        ([shelf / "one", tmp_path / "other"], "union", "different backbones: seed 7 and 8"),
        ([shelf / "one"], "union", "at least two"),
        ([shelf / "one", shelf / "two"], "xor", "'xor' is not one of"),
        ([tmp_path / "a", tmp_path / "b"], "union", "trained values of wpe"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            combine_tickets(sources, how, tmp_path / "new")
        assert isinstance(caught.value, TicketError) or how == "xor" or len(sources) == 1
    assert not (tmp_path / "new").exists()


# -- rewriting ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["packed", "entropy"])
def test_rewriting_changes_the_encoding_and_nothing_else(shelf, tmp_path, encoding):
    source = shelf / "one"
    rewrite_ticket(source, tmp_path / "coded", encoding="entropy")
    rewrite_ticket(tmp_path / "coded", tmp_path / "new", encoding=encoding)
    assert verify_ticket(tmp_path / "new").encoding == encoding
    for path in source.iterdir():
        if encoding == "packed" or path.name not in ("mask.safetensors", "model.safetensors.index.json"):
            assert (tmp_path / "new" / path.name).read_bytes() == path.read_bytes(), path.name
    rewrite_ticket(tmp_path / "new", tmp_path / "new", encoding="packed")  # in place
    assert (tmp_path / "new" / "mask.safetensors").read_bytes() == (source / "mask.safetensors").read_bytes()
    with pytest.raises(ValueError, match="'zip' is not one of"):
        rewrite_ticket(source, tmp_path / "zip", encoding="zip")
