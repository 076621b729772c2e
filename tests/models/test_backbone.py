"""Masks over pretrained weights: the stock checkpoint as oracle, in a folder and on a Hub."""

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from architectures import BATCHES, CASES, IDS, logits_of
from loopback_hub import LoopbackHub
from safetensors.numpy import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import hf_slt
from hf_slt import cli
from hf_slt.masks.modules import masked_parameters
from hf_slt.models import backbone

ROOT = Path(__file__).parents[2]


def pretrain(name: str, folder: Path):
    """A stock checkpoint with norms and biases that are no constants."""
    stock, sizes, auto, _ = CASES[name]
    torch.manual_seed(0)
    model = auto.from_config(getattr(transformers, f"{stock}Config")(**sizes)).eval()
    with torch.no_grad():
        for one in model.parameters():
            one.add_(0.1 * torch.randn_like(one))
    model.save_pretrained(folder)
    return model


def learn(model, name: str):
    model.train()(**BATCHES[CASES[name][3]]).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.01).step()
    return model.eval()


@pytest.fixture(autouse=True)
def nothing_in_memory():
    backbone._load.cache_clear()
    yield
    backbone._load.cache_clear()


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "phi3", "gpt_neox", "mixtral", "bert", "vit", "t5"])
def test_it_is_the_checkpoint_times_masks(tmp_path, name):
    stock = pretrain(name, tmp_path / "stock")
    auto = CASES[name][2]
    whole = auto.from_config(hf_slt.supermask_config(backbone=str(tmp_path / "stock"), density=1.0)).eval()
    assert_close(logits_of(whole, name), logits_of(stock, name), rtol=1e-5, atol=1e-5)  # all of it kept
    model = auto.from_config(hf_slt.supermask_config(backbone=str(tmp_path / "stock"), density=0.75))
    _, module, leaf, plan = next(masked_parameters(model))
    kept, weights = plan.codes(module, leaf)[0], torch.from_numpy(plan.tensors[0].draw()).abs()
    assert weights[kept].min() >= weights[~kept].max()  # at first the smallest weights are dropped
    learn(model, name)
    assert all(key.endswith("scores") for key, one in model.named_parameters() if one.requires_grad)
    expected, merged = logits_of(model, name), model.merge_and_unload()
    there = dict(stock.named_parameters())
    for path, one in merged.named_parameters():  # each weight is the checkpoint's, or zero where it is masked
        assert ((one == there[path]) | ((one == 0) & (one.dim() > 1))).all(), path
    assert_close(logits_of(merged, name), expected, rtol=1e-5, atol=1e-5)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits_of(twin, name), expected)
    header = model.save_ticket(tmp_path / "ticket", encoding="entropy")
    size = sum(one.numel() for one in stock.parameters())
    arrays = load_file(tmp_path / "ticket" / "mask.safetensors")
    assert sum(one.nbytes for one in arrays.values()) < size / 4  # masks only
    backbone._load.cache_clear()
    ticket = auto.from_pretrained(tmp_path / "ticket")
    assert torch.equal(logits_of(ticket, name), expected)
    assert not [key for key, one in ticket.named_parameters() if one.requires_grad]
    assert hf_slt.verify_ticket(tmp_path / "ticket").digest == header.digest
    digests = [one for one in header.tensors.values() if one.law == "pretrained"]
    assert all(one.weight_sha256 for one in digests)
    model.save_pretrained(tmp_path / "scores")
    again = auto.from_pretrained(tmp_path / "scores").eval()
    assert torch.equal(logits_of(again, name), expected)


def test_another_checkpoint_is_refused_and_the_right_one_may_have_moved(tmp_path, capsys):
    pretrain("gpt2", tmp_path / "stock")
    config = hf_slt.supermask_config(backbone=str(tmp_path / "stock"), density=0.9)
    model = learn(AutoModelForCausalLM.from_config(config), "gpt2")
    assert not model.save_ticket(tmp_path / "ticket").is_strict  # no seed drew these weights
    with pytest.raises(hf_slt.SLTError, match="a path through a trellis chooses among drawn numbers"):
        hf_slt.supermask_config(backbone=str(tmp_path / "stock"), rule="trellis")
    expected = logits_of(model, "gpt2")
    shutil.move(tmp_path / "stock", tmp_path / "moved")
    backbone._load.cache_clear()
    with pytest.raises(
        hf_slt.SLTError, match=r"the pretrained weights '.*stock' cannot be loaded as GPT2LMHeadModel"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path / "ticket")
    assert cli.main(["verify", str(tmp_path / "ticket")]) == 1
    assert "stock' cannot be loaded" in capsys.readouterr().err
    moved = AutoModelForCausalLM.from_pretrained(tmp_path / "ticket", backbone=str(tmp_path / "moved"))
    assert torch.equal(logits_of(moved, "gpt2"), expected)
    with pytest.raises(hf_slt.SLTError, match="vocabulary of pretrained weights cannot be resized"):
        moved.resize_token_embeddings(80)
    # Masks of one checkpoint, which two tickets name differently.
    moved.save_ticket(tmp_path / "elsewhere")
    moved.load_mask(tmp_path / "ticket", "first")
    moved.set_mask("first")
    assert torch.equal(logits_of(moved, "gpt2"), expected)
    assert hf_slt.compare_tickets(tmp_path / "ticket", tmp_path / "elsewhere")["all"].hamming == 0
    # One bit of one weight.
    path = tmp_path / "moved" / "model.safetensors"
    weights = load_file(path)
    weights["transformer.h.0.attn.c_attn.weight"].view("uint32")[0, 3] ^= 1
    save_file(weights, path, {"format": "pt"})
    backbone._load.cache_clear()
    with pytest.raises(
        hf_slt.TicketError, match=r"c_attn.query of the pretrained weights .*another checkpoint"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path / "ticket", backbone=str(tmp_path / "moved"))
    with pytest.raises(hf_slt.TicketError, match="of the pretrained weights has digest"):
        moved.load_mask(tmp_path / "ticket", "second")
    pretrain("llama", tmp_path / "llama")
    with pytest.raises(hf_slt.SLTError, match="is of model_type 'llama', not 'gpt2'"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "ticket", backbone=str(tmp_path / "llama"))


def test_a_new_head_and_a_mix_over_a_checkpoint(tmp_path):
    stock = pretrain("bert", tmp_path / "stock")
    mix = {
        "classifier": "trained",
        "*.embeddings.*": "frozen",
        "*LayerNorm.weight": "trained",
        "*.bias": "trained",
    }
    options = {"parameters": mix, "density": 0.9, "trained_bits": 16}
    config = hf_slt.supermask_config(backbone=str(tmp_path / "stock"), **options)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    assert model.config.new_parameters == ["bert.pooler.dense.weight", "bert.pooler.dense.bias"] or set(
        model.config.new_parameters
    ) >= {"classifier.weight", "classifier.bias"}
    own = model.bert.embeddings.word_embeddings.weight
    assert torch.equal(own, stock.bert.embeddings.word_embeddings.weight)
    bias = model.bert.encoder.layer[0].output.dense.bias
    assert_close(bias, stock.bert.encoder.layer[0].output.dense.bias, rtol=1e-3, atol=1e-3)  # in 16 bits
    model.save_ticket(tmp_path / "ticket")
    backbone._load.cache_clear()
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ticket")
    assert torch.equal(again(IDS)[0], model(IDS)[0])
    bare = AutoModel.from_pretrained(tmp_path / "ticket")
    assert torch.equal(bare(IDS)[0], model.bert(IDS)[0])
    with pytest.raises(hf_slt.TicketError, match="layer_norm False: a backbone has its norms"):
        hf_slt.supermask_config(backbone=str(tmp_path / "stock"), layer_norm=False)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_stock_checkpoint_is_no_supermask_model(tmp_path, name):
    pretrain(name, tmp_path)
    kind = getattr(hf_slt, f"Supermask{type(pretrain(name, tmp_path)).__name__}")
    with pytest.raises(hf_slt.SLTError, match=r"stock weights.*supermask_config\(backbone='"):
        kind.from_pretrained(tmp_path)


@pytest.mark.slow  # two processes that import everything
def test_a_hub_has_the_checkpoint_and_the_ticket_names_its_commit(tmp_path):
    pretrain("gpt2", tmp_path / "stock")
    files = {path.name: path.read_bytes() for path in (tmp_path / "stock").iterdir()}
    script = """
import sys, torch, hf_slt
from transformers import AutoModelForCausalLM
if sys.argv[1] == "make":
    model = AutoModelForCausalLM.from_config(hf_slt.supermask_config(backbone="me/stock", density=0.9)).eval()
    model.save_ticket("ticket")
else:
    model = AutoModelForCausalLM.from_pretrained("ticket")
torch.save(model(torch.arange(12).view(1, 12)).logits, sys.argv[1] + ".pt")
print(model.config.backbone, model.config.backbone_revision)
"""
    with LoopbackHub(tmp_path) as hub:
        hub.put("me/stock", files)
        first = hub.repos["me/stock"].commit_of("main")
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
        }
        for way in ("make", "load"):
            home = {"HF_HOME": str(tmp_path / way), "HF_HUB_CACHE": str(tmp_path / way / "hub")}
            options = {"cwd": tmp_path, "env": environment | home, "capture_output": True, "text": True}
            done = subprocess.run([sys.executable, "-c", script, way], **options, check=False)
            assert done.returncode == 0, done.stderr
            assert done.stdout.split() == ["me/stock", first]
            # A later commit, with other weights, does not matter: the ticket names the first.
            hub.put("me/other", {**files, "model.safetensors": b"of another time"})
            hub.repos["me/stock"].add("main", hub.files("me/other"), "worse")
    made, loaded = (torch.load(tmp_path / f"{way}.pt") for way in ("make", "load"))
    assert torch.equal(made, loaded)
    options = json.loads((tmp_path / "ticket" / "config.json").read_text())["supermask"]
    assert options["backbone"] == "me/stock"
