"""The recipe that looks for structure in masks: its urns are urns, and it finds what is there."""

import math
import sys

import mask_structure as recipe
import numpy as np
import pytest

from hf_slt.model.entropy import encode_masks
from hf_slt.model.random_weights import digest, draw
from hf_slt.model.ticket import Entry, Header, entropy_bits, mask_digest, pack_mask, write_masks


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


def test_structure_is_found_where_it_is_and_only_there(tmp_path, monkeypatch, capsys):
    """Masks of noise; of columns that each keep more weights of one sign; of rows with other densities."""
    shape = (150, 200)
    noise, weights = draw(3, "noise", shape, "uniform"), draw(7, "w", shape)
    favour = np.where(np.arange(200) % 2, 0.5, -0.5) * np.sign(weights)
    tilt = np.linspace(-0.5, 0.5, 150)[:, None]
    masks = {"noise": noise > 0.4, "signs": noise + favour > 0.4, "rows": noise + tilt > 0.4}
    for folder, mask in masks.items():
        packed, kept = pack_mask(mask), int(mask.sum())
        tensors = {"w": Entry(shape, "w_mask", "normal", 1.0, kept, digest(packed), digest(weights))}
        rest = {"density": 0.3, "rule": "edge_popup", "mask_digest": mask_digest(tensors)}
        (tmp_path / folder).mkdir()
        write_masks(tmp_path / folder, Header(7, {"n_head": 4}, tensors, **rest), {"w_mask": packed})
    monkeypatch.setattr(sys, "argv", ["mask_structure.py", *(str(tmp_path / folder) for folder in masks)])
    recipe.main()
    shown = capsys.readouterr().out
    found = {folder: recipe.report(tmp_path / folder) for folder in masks}
    for folder, bits in found.items():
        assert bits["bound"] == pytest.approx(entropy_bits(30_000, int(masks[folder].sum())) / 30_000)
        assert bits["entropy"] == 8 * encode_masks({"w": masks[folder]}).nbytes / 30_000
        assert f"{bits['bound']:.5f}" in shown
    gain = {
        folder: {model: 1 - bits[model] / bits["bound"] for model in bits} for folder, bits in found.items()
    }
    assert max(gain["noise"].values()) < 0.001
    assert gain["signs"]["columns x sign"] > 0.05 > 0.001 > gain["signs"]["rows or columns"]
    assert gain["rows"]["rows"] > 0.03 > 0.001 > gain["rows"]["columns"]
