"""The paper's study: its commands, its cost, and the script itself at tiny sizes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import figures_gpt2
import pytest
import reproduce
import studies
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_slt.errors import SLTError
from hf_slt.training.arguments import parse_arguments
from hf_slt.training.run import Run, dense_twin

ROOT = Path(__file__).parents[2]


def arguments_of(plan, point):
    words = plan.command(point)
    words = words[words.index("recipes/train_gpt2_slt.py") + 1 :]
    return parse_arguments([words[0], str(ROOT / words[1]), *words[2:]])


def test_every_command_parses_and_has_its_own_folder():
    plan = reproduce.Plan()
    points = plan.points()
    assert len({plan.folder(point) for point in points}) == len(points) == 3 * (7 + 3 + 4) * 3
    for point in points[::7]:
        arguments = arguments_of(plan, point)
        assert arguments.model.n_embd // arguments.model.n_head == 64
        assert arguments.model.n_embd == point.settings["n_embd"]
        assert arguments.run.num_train_epochs == 50


@pytest.mark.parametrize(
    ("gpus", "at_once"), [(1, None), (2, None), (4, None), (64, None), (4, 1), (128, 2), (512, 1)]
)
def test_a_step_has_512_sequences_on_any_number_of_gpus(gpus, at_once):
    plan = reproduce.Plan(gpus=gpus, at_once=at_once)
    for point in plan.points()[::42]:  # one of each model
        run = arguments_of(plan, point).run
        assert gpus * run.per_device_train_batch_size * run.gradient_accumulation_steps == 512
        words = plan.command(point)
        assert words[words.index("--num_processes") + 1] == str(gpus)
        config = (ROOT / words[words.index("--config_file") + 1]).read_text()
        assert ("MULTI_GPU" in config) == (gpus > 1)
        assert "bf16" in config


@pytest.mark.parametrize(("gpus", "at_once"), [(3, None), (12, None), (128, None), (4, 3), (4, 256)])
def test_gpus_among_which_a_step_cannot_be_dealt_are_refused(gpus, at_once):
    plan = reproduce.Plan(gpus=gpus, at_once=at_once)
    with pytest.raises(SLTError, match=f"mini: 512 .* {gpus} GPUs"):
        plan.command(plan.points()[0])


@pytest.mark.parametrize("words", ["--gpus 0", "--seeds 0", "--at_once -1", "--gpus 1000", "--models tiny"])
def test_what_cannot_be_run_is_refused(words):
    with pytest.raises(SystemExit):
        reproduce.parse(words.split())


def test_what_is_left_is_run_and_drawn(tmp_path, monkeypatch, capsys):
    """Launches are replaced by tiny real runs in the folders that they name."""
    monkeypatch.chdir(tmp_path)
    plan = reproduce.Plan(("mini",), 1, (1, 2, "paper"), (0.5, 1), out=tmp_path)
    points, launched = plan.points(), []

    def launch(command):
        launched.append(command)
        if len(launched) == 5:
            return 3
        words = command[command.index("--config") + 2 :]
        tiny = "--n_layer 1 --n_embd 64 --n_head 1 --block_size 24 --max_steps 2"
        tiny += " --per_device_train_batch_size 2 --gradient_accumulation_steps 1"
        run = Run(parse_arguments([*words, *tiny.split()]), figures_gpt2.corpus_of("recall", 8))
        studies.train(run)
        run.finish()
        return 0

    assert reproduce.execute(plan, reproduce.records_of(plan), launch) == 3
    assert points[4].id in capsys.readouterr().err
    # Another part of the study does not lose the records of this one.
    other = replace(plan, models=("small",))
    found = {**reproduce.records_of(plan).get(points[0].settings)}
    del found["of"]
    reproduce.records_of(other).add(other.points()[0].settings, found)
    records = reproduce.records_of(plan)
    assert reproduce.execute(plan, records, launch) == 0
    assert len(launched) == len(points) + 1  # what was done is not done again
    stored = json.loads((tmp_path / "results" / "gpt2_paper.json").read_text())["records"]
    assert {json.dumps(record["of"], sort_keys=True) for record in stored} == {
        json.dumps(point.settings, sort_keys=True) for point in (*points, other.points()[0])
    }
    assert all(len(record["curve"]) == 1 and record["nonzero"] > 0 for record in records)
    assert not list(tmp_path.glob("runs/paper/*/checkpoints"))
    reproduce.draw(plan, records)
    assert {path.stem for path in (tmp_path / "figures" / "paper").glob("*.png")} == {"fig7", "fig8"}


# -- what it costs ------------------------------------------------------------------------------------


def test_operations_are_those_that_torch_counts():
    plan = replace(reproduce.DRY_RUN, widths=(2,))
    job = reproduce.job_of(plan, plan.points()[-1])
    config = job.arguments.model
    config.vocab_size, config.n_positions = job.shape.vocabulary, job.shape.length
    config._attn_implementation = "eager"  # of which every product is counted
    model = dense_twin(config)
    ids = torch.randint(job.shape.vocabulary, (2, job.shape.length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    assert job.shape.operations * ids.numel() == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_tokens_of_the_study_do_not_depend_on_the_gpus():
    counts = set()
    for gpus in (1, 4, 16):
        plan = reproduce.Plan(gpus=gpus)
        counts.add(sum(reproduce.job_of(plan, point).tokens for point in plan.points()[::14]))
    assert counts == {9 * 50 * 227 * 512 * 1024}


def test_hours_are_tokens_over_speed_times_factor(monkeypatch, capsys):
    def speed(job, device):
        if job.shape.width == 1024:
            raise torch.OutOfMemoryError("as of a GPU that is too small")
        return 1e9 / job.shape.operations

    monkeypatch.setattr(reproduce, "speed_of", speed)
    monkeypatch.setattr(reproduce, "FEW", 1e12)
    monkeypatch.setattr(reproduce, "product_rate", lambda device: 2e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plan = reproduce.Plan(("mini",), 1, gpus=2)
    jobs = [reproduce.job_of(plan, point) for point in plan.points()]
    # Every step reaches half of the rate of products here, so it is taken to reach half of the GPU's.
    right = sum(job.tokens * job.shape.operations for job in jobs) / (0.5 * 0.4 * 312e12) / 3600
    assert reproduce.tell_cost(plan, plan.points()) == pytest.approx(right)
    told = capsys.readouterr().out
    assert "estimate" in told
    assert sum(line.lstrip().startswith("4 x ") for line in told.splitlines()) == 3
    # What was run here costs what was measured here.
    monkeypatch.setattr(reproduce, "speed_of", lambda job, device: 100.0)
    tokens = 3 * 12 * 8 * 32
    assert reproduce.tell_cost(reproduce.DRY_RUN, reproduce.DRY_RUN.points()) == tokens / 100 / 3600
    assert "estimate" not in capsys.readouterr().out


def test_the_speed_of_the_smallest_shape_is_measured():
    point = reproduce.DRY_RUN.points()[0]
    assert reproduce.speed_of(reproduce.job_of(reproduce.DRY_RUN, point), torch.device("cpu")) > 0


# -- the script ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_is_stopped_goes_on_and_draws(tmp_path):
    """Three real runs of two processes each, in a folder of their own, as a clone would be."""
    unneeded = shutil.ignore_patterns("figures", "results", "__pycache__")
    for name in ("recipes", "model_cards"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=unneeded)
    words = ["bash", str(tmp_path / "recipes" / "reproduce.sh"), "--dry_run"]
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    runs, plan = tmp_path / "runs" / "dry_run", reproduce.DRY_RUN
    first, *others = (tmp_path / plan.folder(point) for point in plan.points())

    started = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    while not list(first.glob("checkpoints/step-*")):
        assert started.poll() is None, started.communicate()[1]
        time.sleep(0.02)
    started.send_signal(signal.SIGTERM)
    assert "the same command resumes from here" in started.communicate()[1]
    assert started.returncode == 130
    assert list(first.glob("checkpoints/step-*"))
    assert not (first / "report.json").exists()
    assert not any(map(Path.exists, others))

    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resumed after step" in done.stdout
    records = json.loads((runs / "results" / "gpt2_paper.json").read_text())["records"]
    assert [record["steps"] for record in records] == [12, 12, 12]
    assert all(path.stat().st_size for path in (runs / "figures" / "paper" / f"fig{n}.png" for n in (7, 8)))
    assert not (tmp_path / "recipes" / "results").exists()  # where those of the real study go
