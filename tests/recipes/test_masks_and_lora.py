"""Masks and LoRA over one tiny checkpoint: what is counted, and that all of it learns."""

from types import SimpleNamespace

import masks_and_lora
import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

pytest.importorskip("peft")


class Blocks:
    """Sentences that count upwards."""

    def __len__(self):
        return 32

    def __getitem__(self, rows):
        return {"input_ids": (np.asarray(rows)[:, None] + np.arange(masks_and_lora.LENGTH)) % 50}


def test_each_way_learns_and_its_bytes_are_counted(tmp_path):
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 64}
    stock = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.1))
    stock.save_pretrained(tmp_path)
    text = SimpleNamespace(train=Blocks(), validation=Blocks())
    before = masks_and_lora.loss_of(stock.eval(), text.validation)
    rates = {"masks": 0.03, "lora": 0.03, "all": 0.01}
    sizes = {"masks": 0.9, "lora": 2, "all": None}
    runs = [masks_and_lora.adapt(way, sizes[way], tmp_path, text, 8, rate, 0) for way, rate in rates.items()]
    assert all(one["loss"] < before - 0.1 for one in runs)
    bytes_of = {one["way"]: one["bytes"] for one in runs}
    assert bytes_of["all"] == 2 * stock.num_parameters()
    assert bytes_of["lora"] == 2 * 2 * (32 + 96 + 32 + 32 + 32 + 128 + 128 + 32)
    least = 12 * 32 * 32 * (0.1 * np.log2(10) - 0.9 * np.log2(0.9)) / 8  # the entropy of the masks
    assert least < bytes_of["masks"] < least + 4000
    record = {"not_adapted": before, "runs": runs}
    assert "| LoRA, rank 2 | 2.0 kB |" in masks_and_lora.table(record)
