"""What the studies share: a point is measured once, its record survives the study, its workers do not."""

import doctest
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import dense_twins
import figures_gpt2
import figures_hessian
import figures_theory
import pytest
import studies
import tables
from studies import Records, grid, select

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"


@pytest.mark.parametrize("module", [studies, tables, figures_hessian], ids=lambda module: module.__name__)
def test_examples_in_docstrings(module):
    failed, tried = doctest.testmod(module)
    assert (failed, tried > 0) == (0, True)


def test_a_point_is_measured_once_and_a_changed_one_is_left_out(tmp_path, capsys):
    path = tmp_path / "results" / "some.json"
    points = grid(n=(3, 1), x=(0.1 + 0.2, "a"))
    records = Records(path, points)
    records.add(points[1], {"loss": 1.0})
    records.measure(dict, points[:3], workers=1)  # a dictionary of the settings is what it finds
    assert [record["of"] for record in records] == points[:3]
    assert records.get(points[1]) == {"of": points[1], "loss": 1.0}
    assert records.get(points[2]) == {"of": points[2], **points[2]}
    records.conclude(fit=(1, 2))

    before = path.read_bytes()
    capsys.readouterr()
    again = Records(path, grid(n=(1, 3), x=(0.3, "a")))  # in another order, floats off by the last digit
    assert capsys.readouterr().err == ""
    assert len(select(again, n=3)) == 2
    assert again.facts["fit"] == [1, 2]
    again.conclude(fit=[1, 2])
    again.measure(dict, [], workers=2)
    assert path.read_bytes() == before

    changed = Records(path, grid(n=(3, 4), x=("a",)))
    assert [record["of"]["n"] for record in changed] == [3]
    assert "2 records are of no point" in capsys.readouterr().err
    assert not list(Records(path, points, fresh=True))


def test_settings_that_the_loop_refuses_are_an_error_with_its_words(tmp_path):
    """Not an exit: in a worker that would end the study without a message."""
    with pytest.raises(ValueError, match=r"weight_restart 0\.01 is for the steps that follow relaxed steps"):
        studies.loop_arguments(weight_restart=0.01, output_dir=tmp_path)


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    records = Records(tmp_path / "some.json", grid(n=(1, 2)))
    records.add({"n": 1}, {"loss": 1.0})
    before = records.path.read_bytes()
    with pytest.raises(TypeError):
        records.add({"n": 2}, {"loss": object()})
    assert records.path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["some.json"]


SCRIPT = """
import os, time
from pathlib import Path
from studies import Records, grid

HERE = Path(__file__).parent

def measure(n):
    (HERE / f"worker{n}").write_text(str(os.getpid()))
    if n == 13:
        raise ValueError("unlucky")
    print("not to be seen")
    time.sleep(0 if n == 0 else 600)
    return {"threads": os.environ["OMP_NUM_THREADS"]}

if __name__ == "__main__":
    Records(HERE / "some.json", grid(n=range(START, 20))).measure(measure, grid(n=range(START, 20)), 2)
"""


def start(folder, first):
    (folder / "study.py").write_text(SCRIPT.replace("START", str(first)))
    path = os.pathsep.join([str(RECIPES), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, folder / "study.py"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background ignores Ctrl-C for them, and they would pass that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(what, seconds=120):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.1)


def alive(worker):
    status = Path(f"/proc/{worker.read_text()}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks for processes in /proc")
@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT], ids=lambda end: end.name)
def test_a_study_that_is_ended_keeps_its_records_and_leaves_no_worker(tmp_path, end):
    study = start(tmp_path, first=0)
    wait_for(lambda: len(list(tmp_path.glob("worker*"))) >= 3 and (tmp_path / "some.json").exists())
    study.send_signal(end)
    out, error = study.communicate(timeout=60)
    workers = list(tmp_path.glob("worker*"))
    wait_for(lambda: not any(map(alive, workers)), 20)
    assert (study.returncode != 0, out) == (True, "")
    assert ("resumes from here" in error) == (end is signal.SIGINT)
    (record,) = json.loads((tmp_path / "some.json").read_text())["records"]
    assert record == {"of": {"n": 0}, "threads": "1"}


@pytest.mark.slow
def test_the_error_of_a_worker_ends_the_study(tmp_path):
    study = start(tmp_path, first=12)
    _, error = study.communicate(timeout=120)
    assert study.returncode == 1
    assert "ValueError: unlucky" in error
    workers = [path for path in tmp_path.glob("worker*") if path.name != "worker13"]
    wait_for(lambda: not any(map(alive, workers)), 20)


COMMITTED = {
    "dense_twins": lambda: [*dense_twins.points_of("nano"), *dense_twins.points_of("ternary")],
    "gpt2_cpu": lambda: [point.settings for point in figures_gpt2.points(figures_gpt2.PRESETS["cpu"])],
}
for recipe, name, preset in ((figures_theory, "theory", "paper"), (figures_hessian, "hessian", "full")):
    for key, part in recipe.PARTS.items():
        COMMITTED[f"{name}_{preset}_{key}"] = partial(part.points, recipe.PRESETS[preset])


@pytest.mark.parametrize("stem", COMMITTED)
def test_committed_records_are_of_the_study_as_it_is(stem, tmp_path, capsys):
    points = COMMITTED[stem]()
    text = (RECIPES / "results" / f"{stem}.json").read_text()
    (tmp_path / "copy.json").write_text(text)
    records = Records(tmp_path / "copy.json", points)
    assert capsys.readouterr().err == ""
    asked = [point for point in points if point.get("variant") not in ("scale", "rates")]  # of the advice
    assert len(list(records)) == len(asked)
    records.write()
    assert records.path.read_text() == text  # the file is as the store leaves it


_LONG = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("recipe", "options", "drawn"),
    [
        ("figures_gpt2", ["--only", "recall", "fig8", "bytes"], {"recall", "fig8", "bytes"}),
        pytest.param("figures_theory", ["--only", "fig5", "constant"], {"fig5"}, marks=_LONG),
        pytest.param(
            "figures_hessian",
            ["--only", "growth", "addition"],
            {"hessian_growth", "hessian_addition"},
            marks=_LONG,
        ),
        pytest.param("figures_rules", [], {"rules"}, marks=_LONG),
    ],
)
@pytest.mark.slow
def test_a_quick_study_runs_and_resumes(recipe, options, drawn, tmp_path):
    command = [sys.executable, RECIPES / f"{recipe}.py", "--preset", "quick", "--out", tmp_path, *options]
    subprocess.run(command, check=True, capture_output=True)
    before = {path: path.read_bytes() for path in (tmp_path / "results").iterdir()}
    assert {figure.stem for figure in (tmp_path / "figures" / "quick").glob("*.png")} == drawn
    again = subprocess.run(command, check=True, capture_output=True, text=True)
    assert {path: path.read_bytes() for path in before} == before
    assert again.stdout.count("drew") == len(drawn)
