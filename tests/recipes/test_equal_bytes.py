"""Equal bytes: roundings with oracles, files that hold the model, a search with equally many trials."""

import json
import math
from pathlib import Path

import equal_bytes as study
import numpy as np
import pytest
import rivals
import studies
import torch
import train_gpt2_slt
from torch import nn
from torch.nn.utils import parametrize
from transformers import GPT2Config, GPT2LMHeadModel

from hf_slt.tickets.entropy import decode_codes

RECIPES = Path(studies.__file__).parent
DOCS = RECIPES.parent / "docs"


def matrix(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_groups_are_rounded_to_levels_that_their_bytes_can_hold():
    weight = matrix(70, 33)
    for levels in (255, 15, 7, 4):
        values, codes, steps = rivals.round_groups(weight, levels)
        assert codes.unique().tolist() == sorted({*codes.flatten().tolist()} & {*map(float, range(levels))})
        assert len(steps) == math.ceil(weight.numel() / 64)
        whole = steps.flatten().repeat_interleave(64)[: weight.numel()].view_as(weight)
        assert ((values - weight).abs() <= whole * (0.5 + levels * 2.0**-11)).all()  # steps are float16
        torch.testing.assert_close(values, (codes - (levels - 1) / 2) * whole)
    again = rivals.round_groups(values, 4)[0]
    torch.testing.assert_close(again, values)


@pytest.mark.parametrize(("levels", "step"), [(7, "learned"), (4, "learned"), (3, "mean"), (2, "mean")])
def test_a_rounded_weight_is_what_its_codes_and_steps_give_and_has_the_gradients_of_lsq(levels, step):
    weight, axis = matrix(6, 40, seed=levels), 0 if step == "learned" else 1
    way = rivals.Rounded(weight, levels, step, axis)
    if step == "learned":
        nn.init.uniform_(way.gain, 0.5, 1.0)
    weight.requires_grad_()
    out = way(weight)
    codes, _ = way.stored(weight)
    steps, centre = way.steps(weight).detach(), (levels - 1) / 2
    torch.testing.assert_close(out, (torch.from_numpy(codes) - centre) * steps)
    nearest = min(range(levels), key=lambda code: abs((code - centre) * steps.flatten()[0] - weight[0, 0]))
    assert codes[0, 0] == nearest  # the naive search
    upstream = matrix(*weight.shape, seed=9)
    out.backward(upstream)
    place = weight.detach() / steps
    inside = place.abs() <= centre + 0.5
    torch.testing.assert_close(weight.grad, torch.where(inside, upstream, torch.zeros(())))
    if step == "learned":
        level = torch.from_numpy(codes) - centre
        slope = (upstream * torch.where(inside, level - place, level)).sum(0)
        torch.testing.assert_close(way.gain.grad, slope * way.first_step, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("step", ["learned", "largest", "mean"])
def test_a_relaxed_model_is_rounded_in_evaluation_only(step):
    weight = matrix(6, 40)
    way = rivals.Rounded(weight, 3, step, 1)
    rounded = way(weight).detach()
    way.relaxed = True
    assert torch.equal(way(weight), weight)
    assert torch.equal(way.eval()(weight), rounded)
    assert not torch.equal(rounded, weight)


def test_rounding_begins_when_the_relaxed_steps_are_over_with_steps_by_the_weights_of_then(tmp_path):
    some = study.Comparison(
        rivals.FlatRecords(tmp_path / "records.json", [], keep=True), ["dense int2"], True
    )
    (point,) = some.search("dense int2")[0]
    own = ("rounding", "step", "vector_bits", "step_learning_rate", "test_part")
    settings = {name: value for name, value in point.items() if name not in own}
    settings |= {"max_steps": 4, "relaxed_steps": 2, "output_dir": tmp_path / "run"}
    kind = {"rounding": "int2", "step": "learned", "vector_bits": 8}
    run = rivals.RoundedRun(studies.loop_arguments(**settings), **kind)
    holder = run.model.transformer.h[0].mlp.c_fc.parametrizations.weight
    states, firsts = [], []
    while run.done < run.steps:
        before = holder.original.detach().clone()
        train_gpt2_slt.optimizer_step(run)
        states.append(holder[0].relaxed)
        firsts.append((holder[0].first_step.clone(), holder[0].usual_step(before)))
    assert states == [True, True, False, False]
    assert torch.equal(firsts[2][0], firsts[2][1])  # of the weights before step 2
    assert torch.equal(firsts[3][0], firsts[2][0])
    assert not torch.equal(firsts[1][0], firsts[2][0])


def test_the_file_of_a_rounded_model_holds_its_codes_at_their_entropy():
    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=300, n_positions=16)
    model = GPT2LMHeadModel(config)
    table = model.transformer.wte
    parametrize.register_parametrization(table, "weight", rivals.Rounded(table.weight, 15, "learned", 1))
    codes, steps = table.parametrizations.weight[0].stored(table.parametrizations.weight.original)
    file = rivals.dense_file(model, vector_bits=8)
    counts = np.bincount(codes.ravel(), minlength=15)
    shares = counts[counts > 0] / codes.size
    entropy = -(shares * np.log2(shares)).sum() * codes.size / 8
    vectors = sum(
        one.numel() + 2 for name, one in model.named_parameters() if one.dim() == 1 and "gain" not in name
    )
    held = sum(one.nbytes for one in steps) + vectors
    assert held + entropy - 20 < len(file) < held + entropy + 1_200  # and the description
    head = 8 + int.from_bytes(file[:8], "little")
    name = "transformer.wte"
    found = decode_codes(np.frombuffer(file[head + held :], np.uint8), {name: counts.tolist()})
    assert rivals.pack_codes(codes, 15).tobytes() == found[name].tobytes()


def comparison(tmp_path, names=study.CONTESTANTS):
    return study.Comparison(rivals.FlatRecords(tmp_path / "records.json", [], keep=True), names)


def test_two_processes_that_measure_other_points_keep_each_others_records(tmp_path):
    one, two = comparison(tmp_path), comparison(tmp_path)
    points = [some.search(name)[0][0] for some, name in ((one, "dense int4"), (two, "dense int3"))]
    for some, point in zip((one, two), points, strict=True):
        some.records.add(point, {"loss": 4.0, "validation_loss": 4.0, "bytes": 1, "seconds": 1.0})
    assert len(json.loads((tmp_path / "records.json").read_text())) == 2
    assert len(two.known(points)) == 2


def test_every_contestant_has_as_many_trials_and_keeps_what_validates_best(tmp_path):
    searched = {1 + sum(len(values) for _, values in one.search) for one in study.CONTESTANTS.values()}
    assert searched == {study.TRIALS - 7}
    assert {len(one.last) for one in study.CONTESTANTS.values()} == {4}
    some = comparison(tmp_path, ["dense int4"])
    (name,) = some.names
    wanted = {
        "weight_learning_rate": 8e-3,
        "dense_std": 0.08,
        "weight_decay": 0.5,
        "step": "learned",
        "n_layer": 1,
    }

    def file_of(point):  # its codes take 3 bits, fewer than the study begins with
        weights, extras = study.weights_and_extras(point, point["n_embd"])
        return round(weights * 3 / 8) + extras

    while left := [one for one in some.search(name)[0] if some.records.get(one) is None]:
        for point in left:  # the options that are not as wanted; the test part says the reverse
            loss = sum(point[option] != value for option, value in wanted.items())
            found = {"loss": -loss, "validation_loss": loss, "bytes": file_of(point), "seconds": 1.0}
            some.records.add(point, found)
    points, best, bits = some.search(name)
    assert {option: best[option] for option in wanted} == wanted
    assert bits == pytest.approx(3, abs=0.001)
    # The first trial, and the first with another kind of step, are run again with the width that 3 bits allow.
    assert len(points) == study.TRIALS - 7 + 2
    assert points[1] == {**points[0], "n_embd": points[1]["n_embd"]}
    assert file_of(points[0]) < file_of(points[1]) <= 1.01 * 115_000
    assert points[1]["n_embd"] == study.width_for(points[0], bits, 115_000)

    assert [one["weight_learning_rate"] for one in some.lengths(name)[0]] == [8e-3, 4e-3, 2e-3]
    for place, point in enumerate(some.points("lengths")):
        some.records.add(
            point, {"loss": 1.0, "validation_loss": 2.0 - place, "bytes": 115_000, "seconds": 50.0}
        )
    assert {one["weight_learning_rate"] for one in some.row(name, study.ROWS["115"])} == {2e-3}

    last = some.points("last")
    assert {one["weight_learning_rate"] for one in last} == {2e-3}
    assert [one["weight_decay"] for one in last] == [1.0, 0.5, 0.5, 0.5]
    # The search ended without relaxed steps: a restart comes with some.
    assert [one.get("relaxed_steps") for one in last] == [None, 0.9, 0.5, 0.5]
    assert [one.get("weight_restart") for one in last] == [None, None, 0.01, 0.003]
    assert not some.has_all_trials(name)
    for loss, point in zip((0.5, -1.0, 0.4, 0.3), last, strict=True):  # the best before has 0
        found = {"loss": 1.0, "validation_loss": loss, "bytes": 115_000, "seconds": 50.0}
        some.records.add(point, found)
    seeds = some.row(name, study.ROWS["115"])
    assert [point["seed"] for point in seeds] == [0, 1, 2]
    assert {point["relaxed_steps"] for point in seeds} == {0.9}
    assert some.trials(name) == study.TRIALS + 2
    assert some.has_all_trials(name)


def test_records_say_what_a_run_is_and_repeat_it(tmp_path):
    some = comparison(tmp_path)
    kinds = ["strict", "strict", "ternary", "dense", "dense", "dense", "ternary", "binary"]
    for name in some.names:
        for point in some.row(name, study.ROWS["115"]):
            arguments = {
                key: one for key, one in point.items() if key not in ("rounding", "step", "vector_bits")
            }
            for own in ("test_part", "step_learning_rate"):
                arguments.pop(own, None)
            studies.loop_arguments(**arguments)  # every other setting is an option of the loop
            some.records.add(point, {"loss": 4.0, "validation_loss": 4.1, "bytes": 115_000, "seconds": 60.0})
    stored = json.loads((tmp_path / "records.json").read_text())
    assert [rivals.kind_of(some.row(name, study.ROWS["115"])[0]) for name in some.names] == kinds
    fields = ("kind", "bytes", "steps", "seed", "text", "loss", "validation_loss", "seconds", "settings")
    assert all(
        set(fields) <= record.keys() and ("rule" in record) != ("rounding" in record) for record in stored
    )
    page = study.page_of(some)
    assert "## embedded, 115 kB, 3,000 steps" in page
    assert "4.000 (4.000 to 4.000)" in page
    assert "`wiki_1000`: strict, edge_popup;" in page
    # Equal seconds: a contestant that is twice as slow as the reference gets half of the steps.
    slow = some.row("dense int4", study.ROWS["115"])[0]
    some.records.add(slow, {"loss": 4.0, "validation_loss": 4.1, "bytes": 115_000, "seconds": 120.0})
    (point,) = some.seconds("dense int4", study.ROWS["115"])
    assert point["max_steps"] == 1500


def test_the_committed_page_is_that_of_the_committed_records():
    path = RECIPES / "results" / "equal_bytes.json"
    records = rivals.FlatRecords(path, [], keep=True)
    assert (DOCS / "equal_bytes.md").read_text() == study.page_of(
        study.Comparison(records, study.CONTESTANTS)
    )
    if path.exists():
        assert records.text() == path.read_text()


@pytest.mark.slow
def test_a_run_of_each_side_is_measured_on_a_test_part_and_resumes_after_a_kill(tmp_path, monkeypatch):
    some = study.Comparison(
        rivals.FlatRecords(tmp_path / "records.json", [], keep=True), study.CONTESTANTS, True
    )
    for name in ("strict, edge_popup", "dense int2"):
        (point,) = some.search(name)[0]
        point = {**point, "max_steps": 4, "eval_steps": 2}
        whole = rivals.measure(None, **point)
        save = studies.TimedRun.save

        def killed(run, save=save):
            save(run)
            if run.done == 2:
                raise ConnectionError

        monkeypatch.setattr(studies.TimedRun, "save", killed)
        with pytest.raises(ConnectionError):
            rivals.measure(tmp_path / "runs", **point)
        monkeypatch.setattr(studies.TimedRun, "save", save)
        again = rivals.measure(tmp_path / "runs", **point)
        assert not list((tmp_path / "runs").iterdir())
        for key in ("loss", "validation_loss", "curve", "bytes"):
            assert again[key] == whole[key]
        assert whole["loss"] != whole["validation_loss"]
        assert 2_000 < whole["bytes"] < 9_000
