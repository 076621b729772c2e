"""Tickets: what is in the files, what happens when they are damaged, and loading without the package."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import hf_slt
from hf_slt import TicketError, verify_ticket
from hf_slt.sharing.files import staged
from hf_slt.model.random_weights import GENERATOR, draw
from hf_slt.model.ticket import find_faults, pack_mask, rewrite_ticket, unpack_mask


def make_config(**options) -> hf_slt.SupermaskGPT2Config:
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 67, "n_positions": 16}
    return hf_slt.SupermaskGPT2Config(
        **{**sizes, "density": 0.3, "seed": 7, "scale_with_width": True, **options}
    )


def make_model(**options) -> hf_slt.SupermaskGPT2LMHeadModel:
    model = AutoModelForCausalLM.from_config(make_config(**options))
    with torch.no_grad():  # not the first scores: something was learned
        for index, parameter in enumerate(model.parameters()):
            noise = draw(index, "noise", parameter.shape, "normal", 0.1)
            parameter.add_(torch.from_numpy(noise))
    return model.eval()


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(12).view(1, 12)).logits


@pytest.fixture(scope="module")
def model():
    return make_model()


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


def test_same_logits_bit_for_bit(model, saved):
    again = AutoModelForCausalLM.from_pretrained(saved)
    assert torch.equal(logits_of(again), logits_of(model))
    assert not [name for name, _ in again.named_parameters()]


@pytest.mark.parametrize("save", ["save_ticket", "save_pretrained"])
def test_saving_again_changes_no_byte_of_the_masks(saved, tmp_path, save):
    again = AutoModelForCausalLM.from_pretrained(saved)
    getattr(again, save)(tmp_path / "again")
    name = "mask.safetensors" if save == "save_ticket" else "model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (saved / "mask.safetensors").read_bytes()
    verify_ticket(tmp_path / "again")
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits_of(again))


def test_the_folder_holds_what_it_should(saved):
    names = {path.name for path in saved.iterdir()}
    assert {
        "config.json",
        "mask.safetensors",
        "model.safetensors.index.json",
        "generation_config.json",
    } <= names
    assert {path for path in names if path.endswith(".py")} == {
        "configuration_supermask_gpt2.py",
        "cross_entropy.py",
        "entropy.py",
        "files.py",
        "layers.py",
        "masking.py",
        "modeling_supermask_gpt2.py",
        "named_masks.py",
        "quantisation.py",
        "random_weights.py",
        "ticket.py",
    }
    assert not [name for name in names if name.startswith(".")]


@pytest.mark.parametrize("embedding", ["masked", "trained"])
def test_an_entropy_coded_ticket_is_the_same_ticket(tmp_path, embedding):
    model = make_model(embedding=embedding)
    packed = model.save_ticket(tmp_path / "packed")
    coded = model.save_ticket(tmp_path / "coded", encoding="entropy")
    assert coded.mask_digest == packed.mask_digest == verify_ticket(tmp_path / "coded").mask_digest
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "coded")  # without being told
    assert torch.equal(logits_of(again), logits_of(model))
    assert again.name_or_path == str(tmp_path / "coded")
    again.save_ticket(tmp_path / "back")
    first, back = ((tmp_path / name / "mask.safetensors").read_bytes() for name in ("packed", "back"))
    assert back == first
    sub = AutoModel.from_pretrained(tmp_path / "coded")
    assert torch.equal(sub.wte.weight, again.transformer.wte.weight)
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "coded", dtype=torch.float16).dtype == torch.float16
    )


def test_an_entropy_coded_file_is_near_its_bound(tmp_path):
    """Stored bits against log2(n choose kept), by a sum of logarithms."""
    model = AutoModelForCausalLM.from_config(make_config(n_embd=128, vocab_size=500, density=0.2))
    header = model.save_ticket(tmp_path, encoding="entropy")
    bits = 0.0
    for entry in header.tensors.values():
        places = np.arange(1, entry.kept + 1)
        bits += float(np.log2((entry.size - entry.kept + places) / places).sum())
    assert sum(entry.entropy_bits for entry in header.tensors.values()) == pytest.approx(bits, rel=1e-9)
    assert bits <= 8 * load_file(tmp_path / "mask.safetensors")["coded_masks"].nbytes < 1.001 * bits


@pytest.mark.parametrize("encoding", ["packed", "entropy"])
def test_rewriting_changes_the_encoding_and_nothing_else(saved, tmp_path, encoding):
    rewrite_ticket(saved, tmp_path / "coded", encoding="entropy")
    rewrite_ticket(tmp_path / "coded", tmp_path / "new", encoding=encoding)
    assert verify_ticket(tmp_path / "new").encoding == encoding
    for path in saved.iterdir():
        if encoding == "packed" or path.name not in ("mask.safetensors", "model.safetensors.index.json"):
            assert (tmp_path / "new" / path.name).read_bytes() == path.read_bytes(), path.name
    rewrite_ticket(tmp_path / "new", tmp_path / "new", encoding="packed")  # in place
    assert (tmp_path / "new" / "mask.safetensors").read_bytes() == (saved / "mask.safetensors").read_bytes()


@pytest.mark.parametrize("where", [0.3, 0.6, 0.999])
def test_a_damaged_entropy_coded_ticket_is_refused(saved, tmp_path, where):
    rewrite_ticket(saved, tmp_path / "coded", encoding="entropy")
    path = tmp_path / "coded" / "mask.safetensors"
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 16
    path.write_bytes(data)
    with pytest.raises(TicketError, match=r"mask\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "coded")
    with pytest.raises(TicketError):
        verify_ticket(tmp_path / "coded")


def test_all_faults_are_found(folder):
    stored = load_file(folder / "mask.safetensors")
    with safe_open(folder / "mask.safetensors", "np") as file:
        metadata = file.metadata()
    for key in list(stored)[:2]:
        stored[key][0] ^= 1
    del stored[list(stored)[2]]
    save_file(stored, folder / "mask.safetensors", metadata)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").unlink()
    faults = [str(fault) for fault in find_faults(folder)]
    words = (": damaged;", "is missing", "no such file")
    assert [sum(word in fault for fault in faults) for word in words] == [2, 1, 1]
    assert any("config.json" in fault for fault in faults)


def test_a_bit_a_weight_and_nothing_more(model, saved):
    weights = sum(parameter.numel() for parameter in model.parameters())
    stored = load_file(saved / "mask.safetensors")
    assert {array.dtype for array in stored.values()} == {np.dtype(np.uint8)}
    assert weights / 8 <= sum(array.nbytes for array in stored.values()) < weights / 8 + len(stored)
    assert model.ledger() == {}


def test_the_file_alone_rebuilds_every_weight(model, saved):
    """What a stranger would do, with numpy and the README only."""
    with safe_open(saved / "mask.safetensors", "np") as file:
        facts = json.loads(file.metadata()["hf_slt"])
        assert (facts["format_version"], facts["generator"], facts["bit_order"]) == (1, GENERATOR, "little")
        assert (facts["seed"], facts["density"], facts["rule"]) == (7, 0.3, "edge_popup")
        merged = model.merge_and_unload().state_dict()
        for name, fact in facts["tensors"].items():
            size = int(np.prod(fact["shape"]))
            packed = file.get_tensor(fact["key"])
            bits = np.array([packed[i // 8] >> (i % 8) & 1 for i in range(size)]).reshape(fact["shape"])
            assert bits.sum() == fact["kept"] == round(0.3 * size)
            weight = bits * draw(facts["seed"], name, fact["shape"], fact["law"], fact["scale"])
            stock = (
                name if name.rsplit(".", 1)[-1] not in ("query", "key", "value") else name.rsplit(".", 1)[0]
            )
            expected = merged[f"transformer.{stock}.weight"].numpy()
            if stock != name:
                column = ("query", "key", "value").index(name.rsplit(".", 1)[1]) * 32
                expected = expected[:, column : column + 32]
            np.testing.assert_array_equal(weight.astype(np.float32), expected, err_msg=name)


def test_pack_is_little_endian_bits_with_zero_padding():
    mask = np.zeros((3, 7), bool)
    mask[0, 0] = mask[1, 2] = True  # flat 0 and 9
    packed = pack_mask(mask)
    assert packed.tolist() == [1, 2, 0]
    np.testing.assert_array_equal(unpack_mask(packed, (3, 7)), mask)
    np.testing.assert_array_equal(pack_mask(mask.T), pack_mask(np.ascontiguousarray(mask.T)))


@pytest.mark.parametrize("embedding", ["frozen", "trained"])
@pytest.mark.parametrize("tie", [True, False])
def test_embeddings_that_are_not_masked(tmp_path, embedding, tie):
    model = make_model(embedding=embedding, tie_word_embeddings=tie)
    model.save_ticket(tmp_path / "t")
    header = verify_ticket(tmp_path / "t")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "t")
    assert torch.equal(logits_of(again), logits_of(model))
    tables = {"wte", "wpe"} if tie else {"wte", "wpe", "lm_head"}
    assert {name for name, entry in header.tensors.items() if not entry.masked} == tables
    if embedding == "trained":
        assert model.ledger() == {name: 4 * header.tensors[name].size for name in tables}
        assert not any(parameter.requires_grad for parameter in again.parameters())
    else:
        assert model.ledger() == {}


def test_a_ticket_may_be_loaded_with_other_heads(saved):
    assert AutoModel.from_pretrained(saved)(torch.arange(5).view(1, 5)).last_hidden_state.shape == (1, 5, 32)
    classifier = AutoModelForSequenceClassification.from_pretrained(saved, num_labels=3)
    assert classifier(torch.arange(5).view(1, 5)).logits.shape == (1, 3)


# -- damage ---------------------------------------------------------------------------------------


def rewrite(folder: Path, change, facts_change=None, name="mask.safetensors"):
    """Store other tensors or metadata, with a valid safetensors file around them."""
    with safe_open(folder / name, "np") as file:
        metadata = file.metadata()
    arrays, facts = load_file(folder / name), json.loads(metadata["hf_slt"])
    change(arrays)
    if facts_change:
        facts_change(facts)
    text = json.dumps(facts)
    digest = hashlib.sha256(text.encode()).hexdigest()
    save_file(arrays, folder / name, metadata={**metadata, "hf_slt": text, "hf_slt_sha256": digest})


def flip_in_file(folder):
    path = folder / "mask.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)


def truncate(folder, share):
    path = folder / "mask.safetensors"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def edit_json(folder, name, **changes):
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def foreign_mask(folder, **options):
    make_model(**options).save_ticket(folder.parent / "other")
    shutil.copy(folder.parent / "other" / "mask.safetensors", folder)


QUERY = "transformer.h.0.attn.c_attn.query_mask"
DAMAGES = {
    "a flipped bit": (flip_in_file, "mask.safetensors: .* has digest .*, not the"),
    "a truncated file": (lambda folder: truncate(folder, 0.6), "mask.safetensors: .*(truncated|damaged)"),
    "a truncated header": (lambda folder: truncate(folder, 0.01), "a header of .* truncated"),
    "an empty file": (lambda folder: truncate(folder, 0), "a header of 0 bytes in a file of 0: truncated"),
    "no file": (lambda folder: (folder / "mask.safetensors").unlink(), "mask.safetensors"),
    "a missing tensor": (lambda f: rewrite(f, lambda a: a.pop(QUERY)), f"tensor {QUERY} is missing"),
    "another seed": (lambda folder: foreign_mask(folder, seed=8), "made for seed=8, but config.json says 7"),
    "another law": (lambda folder: foreign_mask(folder, law="uniform"), "made for law='uniform'"),
    "another shape": (lambda folder: foreign_mask(folder, n_embd=64), "made for n_embd=64"),
    "another vocabulary": (lambda folder: foreign_mask(folder, vocab_size=70), "vocab_size=70"),
    "another qk_scale": (lambda folder: foreign_mask(folder, qk_scale=1), "made for qk_scale=1"),
    "a mask of the same backbone": (
        lambda folder: foreign_mask(folder, resid_pdrop=0.1),
        None,  # the same model and masks: not damage at all
    ),
    "an unknown format": (
        lambda f: rewrite(f, lambda a: None, lambda facts: facts.update(format_version=99)),
        "format version 99 is unknown",
    ),
    "an unknown generator": (
        lambda f: rewrite(f, lambda a: None, lambda facts: facts.update(generator="x/9")),
        "generator 'x/9'",
    ),
    "weights of another scale": (
        lambda f: rewrite(f, lambda a: None, lambda facts: facts["tensors"]["wte"].update(scale=0.5)),
        "wte",
    ),
    "a config of another seed": (
        lambda folder: edit_json(folder, "config.json", seed=8),
        "seed|digest",
    ),
    "a config of another activation": (
        lambda folder: edit_json(folder, "config.json", activation_function="relu"),
        "made for activation_function='gelu_new', but config.json says 'relu'",
    ),
    "a config without LayerNorm": (
        lambda folder: edit_json(folder, "config.json", layer_norm=False),
        "made for layer_norm=True",
    ),
    "a config of another digest": (
        lambda folder: edit_json(folder, "config.json", mask_digest="0" * 64),
        "is not the 00000000... in config.json; the file is damaged or belongs to another ticket",
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
    with pytest.raises(TicketError, match=message):
        verify_ticket(folder)
    with pytest.raises(TicketError if damage != "no file" else OSError):
        AutoModelForCausalLM.from_pretrained(folder)


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
    with pytest.raises(TicketError, match=r"model.safetensors: would be loaded instead"):
        verify_ticket(folder)


def test_some_masks_without_metadata_are_refused(folder):
    arrays = load_file(folder / "mask.safetensors")
    arrays.pop(QUERY)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "mask.safetensors").unlink()
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(TicketError, match=r"h.0.attn.c_attn.query is missing"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_no_such_ticket(tmp_path):
    with pytest.raises(TicketError, match="no such folder"):
        verify_ticket(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TicketError, match=r"config.json: no such file; the ticket is incomplete"):
        verify_ticket(tmp_path / "empty")


# -- writing --------------------------------------------------------------------------------------


def test_a_failed_save_leaves_the_old_ticket_whole(model, folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_slt.model.modeling_supermask_gpt2.custom_object_save", full)
    with pytest.raises(OSError, match="No space left"):
        make_model(seed=9).save_ticket(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["ticket"]


def test_a_save_cut_between_two_files_is_noticed(folder, monkeypatch):
    replace, calls = os.replace, []

    def cut(source, target):
        calls.append(Path(target).name)
        if Path(target).name == "config.json":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr("hf_slt.sharing.files.os.replace", cut)
    with pytest.raises(KeyboardInterrupt):
        make_model(seed=9).save_ticket(folder)
    assert calls[-1] == "config.json"
    with pytest.raises(TicketError, match=r"made for seed=9, but config\.json says 7"):
        verify_ticket(folder)


def test_staged_refuses_a_file_and_keeps_strangers(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError), staged(tmp_path / "file"):
        pass
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "README.md").write_text("card")
    with staged(tmp_path / "dir") as stage:
        (stage / "config.json").write_text("{}")
    assert (tmp_path / "dir" / "README.md").read_text() == "card"


# -- without the package ---------------------------------------------------------------------------

STRANGER = """
import sys
sys.modules["hf_slt"] = None  # import hf_slt fails, as where it is not installed
import torch
from transformers import AutoModelForCausalLM, AutoConfig
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
with torch.no_grad():
    logits = model(torch.arange(12).view(1, 12)).logits
import numpy
numpy.save(sys.argv[2], logits.numpy())
model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False)
model.save_ticket(sys.argv[3])
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[4], trust_remote_code=True)
except Exception as error:
    assert type(error).__name__ == "TicketError", repr(error)
else:
    raise SystemExit("a damaged ticket was loaded")
"""


def test_trust_remote_code_where_the_package_is_not_installed(model, saved, folder, tmp_path):
    flip_in_file(folder)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    arguments = [saved, tmp_path / "logits.npy", tmp_path / "again", folder]
    run = subprocess.run(
        [sys.executable, "-c", STRANGER, *map(str, arguments)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "logits.npy"), logits_of(model).numpy())
    verify_ticket(tmp_path / "again")
