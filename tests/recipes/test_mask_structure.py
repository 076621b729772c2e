"""The recipe that looks for structure in masks: its urns are urns, and it finds what is there."""

import math
import sys

import mask_structure as recipe
import numpy as np
import pytest
from cases import tiny_config

from hf_slt import SupermaskGPT2LMHeadModel
from hf_slt.tickets.entries import Entry
from hf_slt.tickets.entropy import encode_masks
from hf_slt.tickets.format import Header
from hf_slt.weights.random_weights import draw


def test_an_urn_costs_what_coding_weight_by_weight_costs():
    mask = draw(7, "urn", (5, 13), "uniform") < np.float32(2 * 0.3 - 1)
    density, costs = mask.mean(), []
    for a in (2.0**power for power in range(1, 16)):
        nats = 0.0
        for row in mask:
            for seen, kept in enumerate(row):
                probability = (row[:seen].sum() + a * density) / (seen + a)
                nats -= math.log(probability if kept else 1 - probability)
        costs.append(nats / math.log(2))
    assert recipe.grouped_bits(mask, recipe.rows(mask)) == pytest.approx(min(costs), rel=1e-9)


def test_structure_is_found_where_it_is_and_only_there():
    """Masks of noise; of columns that each keep more weights of one sign; of rows with other densities."""
    shape = (150, 200)
    noise, weights = draw(3, "noise", shape, "uniform"), draw(7, "w", shape)
    favour = np.where(np.arange(200) % 2, 0.5, -0.5) * np.sign(weights)
    tilt = np.linspace(-0.5, 0.5, 150)[:, None]
    masks = {"noise": noise > 0.4, "signs": noise + favour > 0.4, "rows": noise + tilt > 0.4}
    gain = {}
    for kind, mask in masks.items():
        kept = int(mask.sum())
        entry = Entry(shape, "w_mask", "normal", 1.0, (mask.size - kept, kept))
        bits = recipe.measure(Header({"n_head": 4, "supermask": {"seed": 7}}, {"w": entry}), "w", mask)
        assert bits["bound"] == pytest.approx(math.log2(math.comb(30_000, int(mask.sum()))))
        gain[kind] = {model: 1 - bits[model] / bits["bound"] for model in bits}
    assert max(gain["noise"].values()) < 0.001
    assert gain["signs"]["columns x sign"] > 0.05 > 0.001 > gain["signs"]["rows or columns"]
    assert gain["rows"]["rows"] > 0.03 > 0.001 > gain["rows"]["columns"]


def test_the_report_is_of_all_masks_of_a_ticket(tmp_path, monkeypatch, capsys):
    model = SupermaskGPT2LMHeadModel(tiny_config())
    model.save_ticket(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mask_structure.py", str(tmp_path)])
    recipe.main()
    masks = model.mask_arrays()
    entropy = 8 * encode_masks(masks).nbytes / sum(mask.size for mask in masks.values())
    assert f"{entropy:.5f}" in capsys.readouterr().out
