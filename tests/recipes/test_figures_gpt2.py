"""The GPT-2 study: its exercises are what they say, its sizes have oracles, its points repeat exactly."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import figures_gpt2 as study
import numpy as np
import pytest
import studies

from hf_slt.training.arguments import Arguments

ROOT = Path(__file__).parents[2]


def short(task="recall", seed=0, experiments=("recall",), **changes):
    """A point of a few steps."""
    changes = study.settings_of(task, **{"max_steps": 2, "eval_steps": 2, **changes})
    return study.Point(task, changes, seed, experiments)


def test_induction_repeats_with_a_period_that_varies():
    made = study.make_induction(200, 0, tokens=1000, shortest=5, longest=9, length=24)
    periods = set()
    for row in made.array.astype(int):
        fits = [p for p in range(1, 12) if (row[p:] == row[:-p]).all()]
        periods.add(fits[0])
    assert periods == {5, 6, 7, 8, 9}
    block = made[3]
    assert (block["labels"][:12] == -100).all()
    assert (block["labels"][12:] == block["input_ids"][12:]).all()


def test_recall_asks_for_the_value_of_every_key():
    made = study.make_recall(50, 0, keys=4, values=3)
    assert made.array.shape == (50, 12)
    for place in range(50):
        block = made[place]
        ids, labels = block["input_ids"], block["labels"]
        pairs = dict(divmod(int(token), 3) for token in ids[:4])  # the naive reader
        assert sorted(pairs) == [0, 1, 2, 3]
        questions, answers = ids[4::2] - 12, ids[5::2] - 16
        assert sorted(questions) == [0, 1, 2, 3]
        assert [pairs[int(key)] for key in questions] == answers.tolist()
        assert np.flatnonzero(labels != -100).tolist() == [5, 7, 9, 11]
    assert len(np.unique(made.array[:, :4], axis=0)) > 40  # no order of the pairs is always the same


def test_points_are_named_once_and_their_settings_are_arguments():
    known = {*Arguments().flat(), "task", "quantised"}
    for preset in study.PRESETS.values():
        points = study.points(preset)
        assert len({point.id for point in points}) == len(points)
        assert {name for point in points for name in point.settings} <= known
    with pytest.raises(ValueError, match="unknown option --densty"):
        study.measure(**{**short().settings, "densty": 0.5})


def test_a_point_repeats_exactly_and_another_loss_is_told(tmp_path, monkeypatch, capsys):
    def at_once(measure, points, workers):
        return [(point, measure(**point)) for point in points]

    monkeypatch.setattr(studies, "measure_all", at_once)
    point = short(seed=3, max_steps=6)
    records = studies.Records(tmp_path / "records.json", [point.settings])
    assert study.repeat(point, records) == 0
    assert "no record of it yet" in capsys.readouterr().out
    records.add(point.settings, study.measure(**point.settings))
    records = studies.Records(tmp_path / "records.json", [point.settings])
    assert study.repeat(point, records) == 0
    assert "the same as recorded" in capsys.readouterr().out
    curve = records.get(point.settings)["curve"]
    assert [step for step, _ in curve] == [2, 4, 6]
    curve[-1][1] += 1e-9
    assert study.repeat(point, records) == 1


def test_an_exercise_ends_when_it_is_solved(monkeypatch):
    monkeypatch.setitem(study.TASKS, "recall", replace(study.TASKS["recall"], solved=50.0))
    found = study.measure(**short(max_steps=8).settings)
    assert found["solved"] is True
    assert found["steps"] == 2


def test_the_step_of_the_switch_lies_between_two_evaluations():
    half = math.log(8) / 2
    record = {"of": {"task": "recall"}, "curve": [[25, half + 1], [50, half - 0.25], [75, half + 1]]}
    assert study.taken(record) == pytest.approx(45)  # where the line crosses half
    assert study.taken({**record, "curve": [[25, half + 1], [50, half]]}) == math.inf
    assert study.taken({**record, "curve": [[25, 0.1]]}) == 25


def test_the_quickest_factor_is_the_bottom_of_a_parabola():
    def record(factor):
        step = 100 * math.exp((math.log(factor) - math.log(3)) ** 2)
        return {"of": {"task": "recall", "qk_scale": factor, "n_qk": 64}, "curve": [[step, 0.1]]}

    assert study.quickest_factor([record(f) for f in (1, 2, 4, 8)]) == pytest.approx(3)
    never = {**record(16), "curve": [[100, 2.0]]}  # has no place on the parabola
    assert study.quickest_factor([*(record(f) for f in (1, 2, 4, 8)), never]) == pytest.approx(3)
    assert study.quickest_factor([record(f) for f in (1, 2, 4)]) is None


def test_the_lowest_factor_is_the_bottom_of_a_parabola_if_enclosed():
    def records(factors):
        losses = [(f, 1 + (math.log(f) - math.log(3)) ** 2) for f in factors for _ in range(2)]
        return [{"of": {"qk_scale": f, "n_qk": 64}, "best_loss": loss} for f, loss in losses]

    assert study.lowest_factor(records((1, 2, 4, 8))) == pytest.approx(3)
    assert study.lowest_factor(records((4, 8, 16))) is None


def test_sizes_of_a_ticket_and_of_stored_embeddings():
    point = short(experiments=("bytes",), embedding="trained", density=0.25, qk_scale=2)
    record = study.measure(**point.settings)
    masked = 64 * 2 * 2 * 64 + 64 * 64 + 64 * 64 + 2 * 64 * 64  # query and key, value, output, MLP
    trained = (80 + 24) * 64
    assert record["nonzero"] == masked // 4 + trained
    parts = [64 * 128, 64 * 128, 64 * 64, 64 * 64, 64 * 64, 64 * 64]
    bound = sum(math.log2(math.comb(size, size // 4)) / 8 for size in parts)
    assert record["mask_bytes"] == pytest.approx(bound, abs=1)
    sizes = {form["bits"]: form["bytes"] for form in record["stored"]}
    assert sizes[16] == record["mask_bytes"] + 2 * trained
    assert sizes[4] == record["mask_bytes"] + trained // 2 + 2 * trained // 64
    assert record["stored"][0]["loss"] == pytest.approx(record["loss"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_under_accelerate_launch_one_process_makes_the_study(tmp_path):
    flags = ["--config_file", str(ROOT / "recipes" / "accelerate" / "cpu_ddp.yaml")]  # of two
    recipe = [str(ROOT / "recipes" / "figures_gpt2.py"), "--preset", "quick", "--only", "fig8"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags, *recipe, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("drew") == 1
    assert len(json.loads((tmp_path / "results" / "gpt2_quick.json").read_text())["records"]) == 2


def test_committed_curves_end_where_their_runs_did():
    stored = json.loads((ROOT / "recipes" / "results" / "gpt2_cpu.json").read_text())["records"]
    for record in stored:
        assert record["curve"][-1] == [record["steps"], record["loss"]]
        assert math.isfinite(record["loss"])
