"""Tickets of a Llama, a ViT and a BERT that are files in this repository: no version reads them otherwise.

Made by `golden_model(name).save_ticket(..., encoding="entropy")`; `logits.json` has what the model said then.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
)

import hf_slt

DATA = Path(__file__).parents[1] / "data" / "architectures"
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {**SIZES, "vocab_size": 32, "max_position_embeddings": 16, "pad_token_id": 0}
LEARNED = {"scales": "row", "layer_norm": "trained"}
GOLDEN = {
    "llama": (transformers.LlamaConfig(**TEXT), AutoModelForCausalLM, {"density": 0.4}),
    "bert": (
        transformers.BertConfig(**TEXT, num_labels=3),
        AutoModelForSequenceClassification,
        {"rule": "signed", "law": "signed_constant", "parameters": {"classifier": "trained", "*.pooler.*": "frozen"}},
    ),
    "vit": (
        transformers.ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=3),
        AutoModelForImageClassification,
        {"law": "uniform", "embedding": "trained", "embedding_bits": 8, **LEARNED},
    ),
}  # fmt: skip


def golden_model(name: str):
    stock, auto, options = GOLDEN[name]
    return auto.from_config(hf_slt.supermask_config(stock, seed=7, **options)).eval()


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    if name == "vit":
        return {"pixel_values": torch.arange(192).view(1, 3, 8, 8) / 96 - 1}
    return {"input_ids": torch.arange(8)[None]}


@pytest.mark.parametrize("name", GOLDEN)
@torch.no_grad()
def test_golden_files_of_other_architectures(name, tmp_path):
    folder, auto = DATA / name, GOLDEN[name][1]
    ticket, expected = auto.from_pretrained(folder), json.loads((folder / "logits.json").read_text())
    logits = ticket(**inputs_of(name)).logits
    assert_close(logits, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert torch.equal(golden_model(name)(**inputs_of(name)).logits, logits)  # the same weights
    header = hf_slt.verify_ticket(folder)
    assert ticket.save_ticket(tmp_path, encoding="entropy").mask_digest == header.mask_digest
    assert header.digest == json.loads((folder / "config.json").read_text())["supermask"]["digest"]
