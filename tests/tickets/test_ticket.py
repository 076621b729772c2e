"""Tickets: what is in the files, what happens when they are damaged, and loading by trust_remote_code."""

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import logits_of, make, tiny_config, train_a_little
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hf_slt import SupermaskGPT2LMHeadModel, TicketError, verify_ticket
from hf_slt.models.checks import check_ticket
from hf_slt.tickets.coded_files import deflate, inflate
from hf_slt.tickets.files import staged
from hf_slt.tickets.verify import check_files
from hf_slt.tickets.writing import rewrite_ticket
from hf_slt.weights.codes import pack_codes, unpack_codes
from hf_slt.weights.random_weights import GENERATOR, draw

# No tensor but wpe fills its last byte.
ODD = {"n_embd": 15, "n_head": 3, "density": 0.3}
WIDTH = ODD["n_embd"]


@pytest.fixture(scope="module")
def model():
    return make(**ODD)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tickets") / "ticket"
    model.save_ticket(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "ticket"))


# -- what is written ------------------------------------------------------------------------------


def test_the_folder_holds_masks_configuration_and_one_import(saved):
    files = "config.json mask.safetensors model.safetensors.index.json generation_config.json".split()
    assert {path.name for path in saved.iterdir()} == {*files, "load_with_hf_slt.py"}
    (statement,) = [
        one for one in ast.parse((saved / "load_with_hf_slt.py").read_text()).body if not is_text(one)
    ]
    assert isinstance(statement, ast.ImportFrom)
    assert statement.module == "hf_slt"
    mapped = json.loads((saved / "config.json").read_text())["auto_map"]
    assert {f"load_with_hf_slt.{one.name}" for one in statement.names} == {*mapped.values()}


def is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def test_a_bit_a_weight_and_nothing_more(model, saved):
    weights = sum(parameter.numel() for parameter in model.parameters())
    stored = load_file(saved / "mask.safetensors")
    assert {array.dtype for array in stored.values()} == {np.dtype(np.uint8)}
    assert weights / 8 <= sum(array.nbytes for array in stored.values()) < weights / 8 + len(stored)


def test_the_file_alone_rebuilds_every_weight(model, saved):
    """What a stranger would do, with numpy and the README only."""
    with safe_open(saved / "mask.safetensors", "np") as file:
        facts = json.loads(file.metadata()["hf_slt"])
        options = facts["config"]["supermask"]
        assert (facts["format_version"], options["weight_generator"]) == (3, GENERATOR)
        assert (options["seed"], options["rule"], options["rule_options"]) == (
            7,
            "edge_popup",
            {"density": 0.3},
        )
        merged = model.merge_and_unload().state_dict()
        for name, fact in facts["tensors"].items():
            size = int(np.prod(fact["shape"]))
            assert fact["key"] == name
            packed = file.get_tensor(name)
            bits = np.array([packed[i // 8] >> (i % 8) & 1 for i in range(size)]).reshape(fact["shape"])
            assert fact["counts"] == [size - bits.sum(), bits.sum()]
            assert bits.sum() == round(0.3 * size)
            weight = bits * draw(options["seed"], name, fact["shape"], fact["law"], fact["scale"])
            stock, _, part = name.rpartition(".")
            if part in ("query", "key", "value"):
                start = ("query", "key", "value").index(part) * WIDTH
                expected = merged[f"transformer.{stock}.weight"][:, start : start + WIDTH]
            else:
                expected = merged[f"transformer.{name}.weight"]
            np.testing.assert_array_equal(weight.astype(np.float32), expected, err_msg=name)


def test_pack_is_little_endian_bits_with_zero_padding():
    mask = np.zeros((3, 7), bool)
    mask[0, 0] = mask[1, 2] = True  # flat 0 and 9
    packed = pack_codes(mask)
    assert packed.tolist() == [1, 2, 0]
    np.testing.assert_array_equal(unpack_codes(packed, 21).reshape(3, 7), mask)
    np.testing.assert_array_equal(pack_codes(mask.T), pack_codes(np.ascontiguousarray(mask.T)))
    codes = np.arange(21) % 5
    assert pack_codes(codes, 5).tolist() == [
        sum((codes[i] >> plane & 1) << (i % 8) for i in range(8 * byte, min(21, 8 * byte + 8)))
        for plane in range(3)
        for byte in range(3)
    ]
    np.testing.assert_array_equal(unpack_codes(pack_codes(codes, 5), 21, 5), codes)


def test_the_faults_of_a_damaged_ticket_keep_no_thread_alive(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_slt.weights.threads.core_count", lambda: 3)
    folder = shutil.copytree(saved, tmp_path / "damaged")
    (folder / "generation_config.json").write_text(
        "{"
    )  # its error refers to what the check has computed since
    before = threading.active_count()
    faults, _ = check_files(folder)
    assert faults
    assert threading.active_count() == before


@pytest.mark.parametrize("name", ["supermask_gtt2", "supermask_", "gpt2", 5])
def test_an_unknown_model_type_is_a_fault_of_the_ticket(saved, tmp_path, name):
    folder = shutil.copytree(saved, tmp_path / "ticket")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": name}))
    for load in (verify_ticket, SupermaskGPT2LMHeadModel.from_pretrained):
        with pytest.raises(TicketError, match=r'made for model_type="supermask_gpt2", but config\.json says'):
            load(folder)


# -- version 0.1.0 --------------------------------------------------------------------------------

DATA = Path(__file__).parents[1] / "data"
OLD = {  # after train_a_little
    "packed": tiny_config(),
    "entropy": tiny_config(
        embedding="trained", embedding_bits=4, law="signed_constant", tie_word_embeddings=False
    ),
}


@pytest.mark.parametrize("encoding", OLD)
def test_tickets_of_0_1_0_load_and_become_tickets_of_today(tmp_path, encoding):
    old = DATA / f"ticket_0_1_0_{encoding}"
    header = verify_ticket(old)
    assert header.encoding == encoding
    ticket = AutoModelForCausalLM.from_pretrained(old)
    assert ticket.config.mask_digest == header.mask_digest
    ticket.save_ticket(tmp_path / "saved", encoding=encoding)
    rewrite_ticket(old, tmp_path / "packed", encoding="packed")
    for new in ("saved", "packed"):
        now = verify_ticket(tmp_path / new)
        assert (now.format_version, now.mask_digest) == (3, header.mask_digest)
        assert now.digest == header.digest
        assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / new)), logits_of(ticket))
        ticket.load_mask(tmp_path / new, new)  # old and new are masks of one backbone


@pytest.mark.parametrize("encoding", OLD)
def test_what_0_1_0_learned_is_learned_again(encoding):
    """All of training by the same steps: first scores, masks and gradients."""
    model = train_a_little(SupermaskGPT2LMHeadModel(OLD[encoding]))
    ticket = AutoModelForCausalLM.from_pretrained(DATA / f"ticket_0_1_0_{encoding}")
    assert torch.equal(logits_of(ticket), logits_of(model))


# -- damage ---------------------------------------------------------------------------------------


LOADING = ("transformers_version", "architectures", "auto_map", "_name_or_path", "use_cache", "dtype")
ENTRY = ("shape", "key", "law", "scale", "counts", "data_sha256", "weight_sha256", "bits")


def naive_digest(facts: dict) -> str:
    """The digest of a ticket, of the JSON in its header: all but how it is loaded and coded."""
    config = {key: one for key, one in facts["config"].items() if key not in LOADING}
    config["supermask"] = {
        key: one for key, one in config["supermask"].items() if key not in ("digest", "mask_digest")
    }
    tensors = {
        name: {**dict.fromkeys(ENTRY), "bits": 1, **entry, "key": None}
        for name, entry in facts["tensors"].items()
    }
    covered = {"config": config, "tensors": tensors, "masks": facts["mask_digest"]}
    text = json.dumps(covered, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_facts(path: Path) -> dict:
    with safe_open(path, "np") as file:
        text = file.metadata()["hf_slt"]
    return json.loads(text if text.startswith("{") else inflate(text, 1 << 20))


def rewrite(folder: Path, change, facts_change=None, name="mask.safetensors", forged=True):
    """Store other tensors or metadata, with a valid safetensors file around them.

    forged: whether the digest of the ticket is made to fit, in the header and in config.json.
    """
    with safe_open(folder / name, "np") as file:
        metadata = file.metadata()
    arrays, coded = load_file(folder / name), not metadata["hf_slt"].startswith("{")
    facts = read_facts(folder / name)
    change(arrays)
    if facts_change:
        facts_change(facts)
        if forged:
            facts["digest"] = facts["config"]["supermask"]["digest"] = naive_digest(facts)
            edit_config(folder, digest=facts["digest"])
    text = json.dumps(facts)
    digest = hashlib.sha256(text.encode()).hexdigest()
    stored = {"hf_slt": deflate(text) if coded else text, "hf_slt_sha256": digest}
    save_file(arrays, folder / name, metadata=metadata | stored)


def flip_in_file(folder, place=-100):
    path = folder / "mask.safetensors"
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def flip_in_code(folder, place):
    rewrite_ticket(folder, folder, encoding="entropy")
    flip_in_file(folder, place)


def truncate(folder, share):
    path = folder / "mask.safetensors"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def edited(config: dict, changes: dict) -> dict:
    """A configuration with other options: ours are in one object within it."""
    ours = {key: one for key, one in changes.items() if key in config["supermask"]}
    others = {key: one for key, one in changes.items() if key not in ours}
    return {**config, **others, "supermask": {**config["supermask"], **ours}}


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(edited(json.loads(path.read_text()), changes)))


def edit_json(folder, name, **changes):
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def foreign_mask(folder, **options):
    make(**(ODD | options)).save_ticket(folder.parent / "other")
    shutil.copy(folder.parent / "other" / "mask.safetensors", folder)


def drop_key(folder, key):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del (config if key in config else config["supermask"])[key]
    path.write_text(json.dumps(config))


def edit_both(folder, changes, entries=()):
    """config.json and the header say the same, and all digests are true."""
    edit_config(folder, **changes)

    def change(facts):
        facts["config"] = edited(facts["config"], changes)
        for entry in facts["tensors"].values():
            for one in entries:
                entry |= one(entry)

    rewrite(folder, lambda arrays: None, change)


def add_frozen(facts, width):
    entry = {"shape": [width, width], "law": "normal", "scale": 1.0, "weight_sha256": "0" * 16}
    facts["tensors"]["h.9.mlp.c_fc"] = entry


def huge_and_empty(folder):
    """Masks that keep nothing take no bytes when coded, whatever their size."""
    rewrite_ticket(folder, folder, encoding="entropy")
    changes = {"n_embd": 15 * 2**12, "n_positions": 2**16}
    config = tiny_config(**ODD | changes)
    edit_both(folder, changes)

    def change(facts):
        for name, entry in facts["tensors"].items():
            spec = config.tensor(name)
            entry |= {
                "shape": list(spec.shape),
                "law": spec.law,
                "scale": spec.scale,
                "counts": [spec.size, 0],
            }

    rewrite(folder, lambda arrays: None, change)


def dense_in_place(folder):
    (folder / "mask.safetensors").unlink()
    save_file({"transformer.wte.weight": np.ones((64, 15), np.float32)}, folder / "model.safetensors")


def in_place_of(folder, name, put):
    (folder / name).unlink()
    put(folder / name)


QUERY = "h.0.attn.c_attn.query"
DAMAGES = {
    "a flipped bit": (flip_in_file, "mask.safetensors: .* has digest .*, not the"),
    "a flipped bit of a code": (lambda folder: flip_in_code(folder, -100), r"damaged|has digest"),
    "a flipped bit at its end": (lambda folder: flip_in_code(folder, -3), r"damaged|has digest"),
    "a truncated file": (lambda folder: truncate(folder, 0.6), "mask.safetensors: .*(truncated|damaged)"),
    "a truncated header": (lambda folder: truncate(folder, 0.01), "a header of .* truncated"),
    "an empty file": (lambda folder: truncate(folder, 0), "a header of 0 bytes in a file of 0: truncated"),
    "no file": (lambda folder: (folder / "mask.safetensors").unlink(), "mask.safetensors"),
    "a missing tensor": (lambda f: rewrite(f, lambda a: a.pop(QUERY)), f"tensor {QUERY} is missing"),
    "another seed": (lambda folder: foreign_mask(folder, seed=8), "made for seed=8, but config.json says 7"),
    "another law": (lambda folder: foreign_mask(folder, law="uniform"), "made for law=.uniform"),
    "another shape": (lambda folder: foreign_mask(folder, n_embd=18), "made for n_embd=18"),
    "another vocabulary": (lambda folder: foreign_mask(folder, vocab_size=70), "vocab_size=70"),
    "another qk_scale": (lambda folder: foreign_mask(folder, qk_scale=1), "made for qk_scale=1"),
    "a mask of the same backbone": (
        lambda folder: foreign_mask(folder, use_cache=False),
        None,  # the same model and masks: not damage at all
    ),
    "an unknown format": (
        lambda f: rewrite(f, lambda a: None, lambda facts: facts.update(format_version=99)),
        "this file has format version 99; hf_slt .* reads 1 to 3; upgrade hf_slt: pip install",
    ),
    "an unknown generator": (
        lambda folder: edit_both(folder, {"weight_generator": "x/9"}),
        "generator 'x/9'",
    ),
    "weights of another scale": (
        lambda f: rewrite(f, lambda a: None, lambda facts: facts["tensors"]["wte"].update(scale=0.5)),
        "wte",
    ),
    "a config of another seed": (
        lambda folder: edit_config(folder, seed=8),
        "seed|digest",
    ),
    "a config of another activation": (
        lambda folder: edit_config(folder, activation_function="relu"),
        "made for activation_function=.gelu_new., but config.json says .relu",
    ),
    "a config without LayerNorm": (
        lambda folder: edit_config(folder, layer_norm=False),
        "made for layer_norm=true, but config.json says false",
    ),
    "a state misspelled": (
        lambda f: (f / "config.json").write_text(
            (f / "config.json").read_text().replace('"state"', '"statd"')
        ),
        "statd",
    ),
    "a state of scores": (lambda folder: edit_config(folder, state="scores"), "state"),
    "an alias": (lambda f: edit_config(f, num_attention_heads=5), "num_attention_heads"),
    "another padding": (lambda f: edit_config(f, pad_token_id=5), "pad_token_id"),
    "another dtype": (lambda f: edit_config(f, dtype="bfloat16"), "dtype"),
    "labels exchanged": (lambda f: edit_config(f, id2label={"0": "b", "1": "a"}), "id2label"),
    **{
        f"no {key} in config": (lambda folder, key=key: drop_key(folder, key), key)
        for key in "layer_norm layer_norm_epsilon activation_function scale_attn_weights n_head n_embd "
        "scale_attn_by_inverse_layer_idx tie_word_embeddings weight_generator".split()
    },
    "a width that both say": (lambda folder: edit_both(folder, {"n_embd": 131073}), "shape"),
    "a width that all say": (
        lambda f: edit_both(
            f, {"vocab_size": 128}, [lambda one: {"shape": [128, 15]} if one["shape"][0] == 64 else {}]
        ),
        "wte|wpe",
    ),
    "many layers": (lambda folder: edit_both(folder, {"n_layer": 10**9}), "layers"),
    "many labels": (lambda folder: edit_both(folder, {"num_labels": 10**9}), "num_labels"),
    "a frozen tensor more": (
        lambda f: rewrite(f, lambda a: None, lambda facts: add_frozen(facts, 10)),
        "h.9.mlp.c_fc",
    ),
    "a large frozen tensor more": (
        lambda f: rewrite(f, lambda a: None, lambda facts: add_frozen(facts, 10**5)),
        "too many",
    ),
    "huge masks that keep nothing": (huge_and_empty, "too many"),
    "an infinite scale": (
        lambda f: rewrite(
            f, lambda a: None, lambda facts: facts["tensors"]["wte"].update(scale=float("inf"))
        ),
        "not a number",
    ),
    "more kept than there are": (
        lambda f: rewrite(
            f, lambda a: None, lambda facts: facts["tensors"]["wte"].update(counts=[0, 10**18])
        ),
        "has codes",
    ),
    "three factors that both say": (
        lambda folder: edit_both(folder, {"factors": [0.0, 1.0, 2.0]}),
        "codes|bits",
    ),
    "a search that both say": (
        lambda folder: edit_both(folder, {"search": 0.5, "frozen_density": 0.5}),
        "codes",
    ),
    "a number too large": (
        lambda f: (f / "config.json").write_text((f / "config.json").read_text().replace("1e-05", "1e999")),
        "not a number",
    ),
    "JSON that is deep": (
        lambda f: (f / "config.json").write_text(
            '{"model_type": "supermask_gpt2", "a": ' + "[" * 90 + "]" * 90 + "}"
        ),
        "JSON",
    ),
    "a key twice": (
        lambda f: (f / "config.json").write_text(
            '{"n_embd": 8,' + (f / "config.json").read_text().strip()[1:]
        ),
        "twice",
    ),
    "an option of ours twice": (
        lambda f: (f / "config.json").write_text(
            (f / "config.json").read_text().replace('"supermask": {', '"supermask": {"seed": 8, ')
        ),
        "twice",
    ),
    "dense weights in place of masks": (dense_in_place, "no masks|not written by hf_slt"),
    "a pipe in place of masks": (
        lambda f: in_place_of(f, "mask.safetensors", os.mkfifo),
        "not a regular file",
    ),
    "a device in place of masks": (
        lambda f: in_place_of(f, "mask.safetensors", lambda path: path.symlink_to("/dev/zero")),
        "not a regular file",
    ),
    "a folder in place of masks": (
        lambda f: in_place_of(f, "mask.safetensors", os.mkdir),
        "not a regular file",
    ),
    "a generation_config that cannot be": (
        lambda f: (f / "generation_config.json").write_text(
            '{"max_new_tokens": -5, "watermarking_config": 5}'
        ),
        "generation_config",
    ),
    "a config of another digest": (
        lambda folder: edit_config(folder, mask_digest="0" * 64),
        "is not the 00000000... in config.json; the file is damaged or belongs to another ticket",
    ),
    "a config of another digest of all": (
        lambda folder: edit_config(folder, digest="0" * 64),
        "is not the 00000000... in config.json; the file is damaged or belongs to another ticket",
    ),
    "a supermask that is no object": (
        lambda folder: edit_json(folder, "config.json", supermask=[1]),
        "supermask",
    ),
    "no supermask at all": (lambda folder: drop_key(folder, "supermask"), "made for|supermask"),
    "an unknown option of ours": (
        lambda f: (f / "config.json").write_text(
            (f / "config.json").read_text().replace('"supermask": {', '"supermask": {"sead": 8, ')
        ),
        "sead",
    ),
    "an option both nested and flat": (
        lambda folder: edit_json(folder, "config.json", seed=8),
        "made for seed=nothing, but config.json says 8",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_by_verify_and_by_from_pretrained(folder, damage):
    harm, message = DAMAGES[damage]
    harm(folder)
    if message is None:
        verify_ticket(folder)
        AutoModelForCausalLM.from_pretrained(folder)
        return
    for load in (
        verify_ticket,
        SupermaskGPT2LMHeadModel.from_pretrained,
        AutoModelForCausalLM.from_pretrained,
    ):
        tracemalloc.start()
        with pytest.raises(TicketError, match=message):
            load(folder)
        assert tracemalloc.get_traced_memory()[1] < 20e6  # a good one takes 2
        tracemalloc.stop()


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_what_is_no_file_is_not_read(folder, name, put):
    """AutoModel would: it reads config.json before it knows whose model it is."""
    in_place_of(folder, name, put)
    for load in (verify_ticket, SupermaskGPT2LMHeadModel.from_pretrained):
        with pytest.raises(TicketError, match=f"{name}: not a regular file"):
            load(folder)


def test_the_index_is_never_followed(model, folder):
    """Whatever it or a stray file of weights says, what is loaded is the mask file."""
    weights = {"transformer.wte.weight": np.ones((64, 15), np.float32)}
    save_file(weights, folder / "model.safetensors")
    save_file(weights, folder.parent / "elsewhere.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"transformer.wte.weight": "../elsewhere.safetensors"}}))
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(folder)), logits_of(model))
    faults = [str(fault) for fault in check_ticket(folder)[0]]
    assert any("model.safetensors: the folder also has" in fault for fault in faults)
    assert any("index.json: does not list" in fault for fault in faults)


def test_the_configuration_of_another_ticket_is_refused(model, folder):
    """As when a ticket is saved over between the reading of its configuration and of its masks."""
    config = AutoConfig.from_pretrained(folder)
    make(**ODD, layer_norm_epsilon=1e-3).save_ticket(folder)
    with pytest.raises(TicketError, match="load it again"):
        SupermaskGPT2LMHeadModel.from_pretrained(folder, config=config)


def test_all_faults_are_found(folder):
    def harm(arrays):
        keys = list(arrays)
        arrays[keys[0]][0] ^= 1
        arrays[keys[1]][0] ^= 1

    rewrite(folder, harm)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").unlink()
    faults = [str(fault) for fault in check_ticket(folder)[0]]
    assert sum(": damaged;" in fault for fault in faults) == 2
    assert sum("index.json: no such file" in fault for fault in faults) == 1
    assert sum("made for seed=7, but config.json says nothing" in fault for fault in faults) == 1


def test_every_flipped_bit_is_found(folder):
    """All bytes of the file, one bit each, on a coarse grid: header, metadata and masks."""
    path = folder / "mask.safetensors"
    whole = path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 400)):
        data = bytearray(whole)
        data[place] ^= 1 << (place % 8)
        path.write_bytes(data)
        with pytest.raises(TicketError):
            verify_ticket(folder, weights=False)


def test_a_stale_file_of_weights_is_removed_and_refused(model, folder):
    scores = folder.parent / "scores"
    model.save_pretrained(scores)
    model.save_ticket(scores)  # over it
    assert not (scores / "model.safetensors").exists()
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(scores)), logits_of(model))
    model.save_pretrained(scores)  # and back
    assert not (scores / "mask.safetensors").exists()
    assert AutoModelForCausalLM.from_pretrained(scores).config.state == "scores"
    shutil.copy(scores / "model.safetensors", folder)
    with pytest.raises(
        TicketError, match=r"model.safetensors: the folder also has mask.safetensors; remove one"
    ):
        verify_ticket(folder)


def test_masks_without_their_metadata_are_refused(folder):
    arrays = load_file(folder / "mask.safetensors")
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "mask.safetensors").unlink()
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(TicketError, match=r"is of a ticket, but there are no masks"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_no_such_ticket(tmp_path):
    with pytest.raises(TicketError, match="no such folder"):
        verify_ticket(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TicketError, match=r"config.json: no such file; the ticket is incomplete"):
        verify_ticket(tmp_path / "empty")


# -- the digest of all of it ------------------------------------------------------------------------


def test_the_digest_is_of_all_that_is_computed_with(saved):
    facts = read_facts(saved / "mask.safetensors")
    assert facts["digest"] == naive_digest(facts) == facts["config"]["supermask"]["digest"]
    assert json.loads((saved / "config.json").read_text())["supermask"]["digest"] == facts["digest"]
    assert verify_ticket(saved).digest == facts["digest"] != facts["mask_digest"]


@pytest.mark.parametrize(
    "changes",
    [{}, {"embedding": "trained", "embedding_bits": 4}, {"scales": "row", "scale_bits": 8, "search": 0.5}],
    ids=["plain", "trained", "scales"],
)
def test_encoding_name_and_dtype_do_not_change_the_digest(tmp_path, changes):
    model = make(**ODD, **changes)
    headers = [model.save_ticket(tmp_path / one, encoding=one) for one in ("packed", "entropy")]
    model.to_ticket().save_pretrained(tmp_path / "usual")
    headers.append(verify_ticket(tmp_path / "usual"))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "entropy", dtype=dtype)
        assert loaded.config.digest == headers[0].digest
        headers.append(loaded.save_ticket(tmp_path / "cast"))
        assert headers[-1].config["dtype"] == str(dtype).removeprefix("torch.")
        assert verify_ticket(tmp_path / "cast").digest == headers[0].digest
        headers.append(rewrite_ticket(tmp_path / "cast", tmp_path / "again", encoding="entropy"))
    loaded.config.use_cache = False
    headers.append(loaded.save_ticket(tmp_path / "cast"))
    assert {(one.digest, one.mask_digest) for one in headers} == {(headers[0].digest, headers[0].mask_digest)}


FORGERIES = {
    "factors": {"factors": [0.0, 2.0]},
    "seed": {"seed": 8},
    "n_head": {"n_head": 5},
    "epsilon": {"layer_norm_epsilon": 1e-3},
    "activation": {"activation_function": "relu"},
    "attention": {"scale_attn_weights": False},
    "generator": {"weight_generator": "x/9"},
}


@pytest.mark.parametrize("name", FORGERIES)
def test_another_configuration_of_the_same_masks_has_another_digest(model, saved, folder, name):
    """Masks and their digest stay. Whoever keeps the digest of the ticket sees it, and so does the file."""
    changes, before = FORGERIES[name], read_facts(saved / "mask.safetensors")

    def change(facts):
        facts["config"] = edited(facts["config"], changes)

    # The header alone: it names a digest that it does not have.
    rewrite(folder, lambda arrays: None, change, forged=False)
    for load in (verify_ticket, SupermaskGPT2LMHeadModel.from_pretrained):
        with pytest.raises(TicketError, match="digest"):
            load(folder)
    with pytest.raises(TicketError, match="digest"):  # nor by itself
        SupermaskGPT2LMHeadModel.from_pretrained(folder / "mask.safetensors")
    # With a digest made to fit, but only in the header: config.json says another.
    shutil.rmtree(folder)
    shutil.copytree(saved, folder)
    rewrite(folder, lambda arrays: None, change)
    after = read_facts(folder / "mask.safetensors")
    assert after["digest"] != before["digest"]
    assert after["mask_digest"] == before["mask_digest"]
    shutil.copy(saved / "config.json", folder)
    for load in (
        verify_ticket,
        SupermaskGPT2LMHeadModel.from_pretrained,
        AutoModelForCausalLM.from_pretrained,
    ):
        with pytest.raises(TicketError, match=r"made for|digest"):
            load(folder)
    # Made to fit everywhere, it is another ticket, and says so: by its digest, or it is none.
    edit_both(folder, changes)
    if name in ("seed", "n_head", "generator"):  # of other weights than it was trained with
        with pytest.raises(TicketError, match=r"h\.0|wte|generator"):
            verify_ticket(folder)
    else:
        assert verify_ticket(folder).digest != before["digest"]


@pytest.mark.parametrize("place", ["header", "its configuration"])
@pytest.mark.parametrize("digest", ["", None, 0, "0" * 64])
def test_a_header_names_its_digest(folder, digest, place):
    def change(facts):
        (facts if place == "header" else facts["config"]["supermask"])["digest"] = digest

    rewrite(folder, lambda arrays: None, change, forged=False)
    for load in (verify_ticket, SupermaskGPT2LMHeadModel.from_pretrained):
        with pytest.raises(TicketError, match="digest"):
            load(folder)


# -- writing --------------------------------------------------------------------------------------


def test_a_failed_save_leaves_the_old_ticket_whole(model, folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_slt.models.modeling.add_remote_code", full)
    with pytest.raises(OSError, match="No space left"):
        make(**ODD, seed=9).save_ticket(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["ticket"]


def test_staged_refuses_a_file_and_keeps_strangers(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError), staged(tmp_path / "file"):
        pass
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "README.md").write_text("card")
    with staged(tmp_path / "dir") as stage:
        (stage / "config.json").write_text("{}")
    assert (tmp_path / "dir" / "README.md").read_text() == "card"


# -- where hf_slt was not imported ------------------------------------------------------------------

STRANGER = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_slt":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

ticket, logits, damaged, scores, installed = sys.argv[1:]
if not int(installed):
    sys.meta_path.insert(0, Missing())
import numpy
import torch
from transformers import AutoModelForCausalLM
def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
def refused(folder):
    try:
        load(folder)
    except Exception as error:
        print(type(error).__name__, " ".join(str(error).split()))
    else:
        raise SystemExit("nothing was refused")
if not int(installed):
    refused(ticket)
    refused(scores)
    sys.exit()
assert "hf_slt" not in sys.modules
model = load(ticket)
assert type(model).__module__ == "hf_slt.models.gpt2", type(model)
with torch.no_grad():
    numpy.save(logits, model(torch.arange(12).view(1, 12)).logits.numpy())
model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False)
assert load(scores).config.state == "scores"
refused(damaged)
"""


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("encoding", ["packed", "entropy"])
def test_trust_remote_code_imports_the_package_and_runs_no_other_code(
    model, folder, tmp_path, encoding, installed
):
    flip_in_file(folder)
    model.save_pretrained(tmp_path / "scores")
    model.save_ticket(tmp_path / "whole", encoding=encoding)
    paths = [tmp_path / "whole", tmp_path / "logits.npy", folder, tmp_path / "scores", int(installed)]
    run = subprocess.run(
        [sys.executable, "-c", STRANGER, *map(str, paths)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    if not installed:  # transformers' own words
        assert len(lines) == 2
        assert all(line.startswith("ImportError") and "pip install hf_slt" in line for line in lines)
        return
    (line,) = lines
    assert line.startswith("TicketError")
    expected = logits_of(model, torch.arange(12).view(1, 12))
    np.testing.assert_array_equal(np.load(tmp_path / "logits.npy"), expected.numpy())
