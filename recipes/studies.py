"""Shared code of the studies in this folder: a record store, one training run, presets and figures.

A point is a dictionary of settings. Measuring it gives a dictionary of numbers. Both are stored as one line of a file
in results/. The file is complete after every point, so a study that was stopped resumes from there:

    {
    "environment": {...},                                   # of the last measurement
    "fits": {...},                                          # conclusions, if the study has any
    "records": [
    {"of": {"n": 20, "sources": [0, 10]}, "error": [...]},  # sorted by their settings
    ...
    ]
    }

A point has all settings. Therefore a point that was changed has no record and is measured again. Its old record is
dropped, with a message.
"""

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm
from train_gpt2_slt import train

from hf_slt.sharing.card import describe_environment
from hf_slt.sharing.plots import COLOURS, MARKERS
from hf_slt.tickets.files import replacing
from hf_slt.training.arguments import Arguments, parse_arguments
from hf_slt.training.memory import keep_freed_memory
from hf_slt.training.run import Run

HERE = Path(__file__).parent
Point = Mapping[str, Any]
Record = dict[str, Any]
Measure = Callable[..., Record]  # takes the settings of a point by name; workers must be able to import it

# -- records ----------------------------------------------------------------------------------------


class Records:
    """The records of the points of a study, in the order of the points, and the file that holds them."""

    def __init__(self, path: Path, points: Iterable[Point], fresh: bool = False, keep: bool = False) -> None:
        """Read the file, unless `fresh`. With `keep`, records of other points (also by other processes) stay in it."""
        self.path, self.keep = path, keep
        self.points = {_key(point): point for point in points}
        self.facts: dict[str, Any] = self.read() if path.exists() and not fresh else {}
        stored = {_key(record["of"]): record for record in self.facts.pop("records", [])}
        known = stored if keep else self.points
        self.found: dict[str, Record] = {key: stored[key] for key in known if key in stored}
        if changed := len(stored) - len(self.found):
            first = next(key for key in stored if key not in self.found)
            message = f"{changed} records are of no point of the present study and are dropped"
            print(f"{path.name}: {message}; the first is of {first}", file=sys.stderr)

    def __iter__(self) -> Iterator[Record]:
        return (self.found[key] for key in self.points if key in self.found)

    def get(self, point: Point) -> Record | None:
        """Return the record of a point, or None."""
        return self.found.get(_key(point))

    def add(self, point: Point, found: Record) -> None:
        """Store the record of a point."""
        if self.keep and self.path.exists():  # another process may have added records since
            written = {_key(record["of"]): record for record in self.read()["records"]}
            self.found = {**written, **self.found}
        self.found[_key(point)] = {"of": dict(point), **found}
        self.facts["environment"] = describe_environment()
        self.write()

    def conclude(self, **facts: Any) -> None:
        """Store these conclusions in the file of the records."""
        facts = {**self.facts, **json.loads(json.dumps(facts))}
        if facts != self.facts:
            self.facts = facts
            self.write()

    def read(self) -> dict[str, Any]:
        """Return the contents of the file."""
        return json.loads(self.path.read_text())

    def text(self) -> str:
        """Return the text of the file: all conclusions and records."""
        head = "".join(f"{json.dumps(name)}: {json.dumps(fact)},\n" for name, fact in self.facts.items())
        lines = ",\n".join(json.dumps(self.found[key]) for key in sorted(self.found))
        return f'{{\n{head}"records": [\n{lines}\n]\n}}\n'

    def write(self) -> None:
        """Write all conclusions and records to the file."""
        with replacing(self.path) as temporary:
            temporary.write_text(self.text())

    def measure(self, measure: Measure, points: Iterable[Point], workers: int) -> None:
        """Measure the points that have no record, several at a time."""
        points = list(points)
        left = [point for point in points if self.get(point) is None]
        name, done = self.path.stem, len(points) - len(left)
        with tqdm(total=len(points), initial=done, desc=name, unit="point") as bar:
            try:
                for point, found in measure_all(measure, left, workers):
                    self.add(point, found)
                    bar.update()
            except KeyboardInterrupt:
                raise SystemExit("interrupted; the same command resumes from here") from None


def grid(**settings: Iterable[Any]) -> list[Point]:
    """Return a point for every combination of settings. The last setting changes fastest.

    >>> grid(n=(1, 2), seed=range(2))
    [{'n': 1, 'seed': 0}, {'n': 1, 'seed': 1}, {'n': 2, 'seed': 0}, {'n': 2, 'seed': 1}]
    """
    return [dict(zip(settings, values, strict=True)) for values in product(*settings.values())]


def _key(point: Point) -> str:
    # The last digits of a float (for example from np.geomspace) depend on the machine.
    rounded = json.loads(json.dumps(point), parse_float=lambda digits: float(f"{float(digits):.12g}"))
    return json.dumps(rounded, sort_keys=True)


def digest_of(point: Point) -> str:
    """Return a short name for a point: a hash of all its settings."""
    return hashlib.sha256(_key(point).encode()).hexdigest()[:16]


def select(records: Iterable[Record], **wanted: Any) -> list[Record]:
    """Return the records with these settings. None means "not set"."""
    return [
        record for record in records if all(record["of"].get(name) == value for name, value in wanted.items())
    ]


def group(records: Iterable[Record], by: str | Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """Group records by a setting or a function, sorted by its values.

    >>> list(group([{"of": {"n": 3}}, {"of": {"n": 2}}, {"of": {"n": 3}}], "n").items())
    [(2, [{'of': {'n': 2}}]), (3, [{'of': {'n': 3}}, {'of': {'n': 3}}])]
    """
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(record["of"][by] if isinstance(by, str) else by(record), []).append(record)
    return dict(sorted(groups.items()))


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean. Values below 1e-300, such as zeros, count as 1e-300.

    >>> round(geometric_mean([1.0, 100.0]), 9)
    10.0
    """
    return math.exp(np.mean([math.log(max(value, 1e-300)) for value in values]))


# -- measuring --------------------------------------------------------------------------------------


def measure_all(measure: Measure, points: Iterable[Point], workers: int) -> Iterator[tuple[Point, Record]]:
    """Yield each point with its record as soon as it is measured, in worker processes of one thread each.

    With one thread and AVX2 (also where torch could use wider vectors) sums always have the same order, so a
    point repeats to the last bit. Freed memory is kept (docs/speed.md). Every worker is a fresh interpreter, because
    these settings are read at the start, and because torch does not survive a fork with threads.
    """
    settings = {"OMP_NUM_THREADS": "1"}
    if platform.machine() in ("x86_64", "AMD64") and "ATEN_CPU_CAPABILITY" not in os.environ:
        settings["ATEN_CPU_CAPABILITY"] = "avx2"
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin_worker)
    try:
        running = {pool.submit(_quietly, measure, point): point for point in points}
        for future in as_completed(running):
            yield running[future], future.result()
    except BaseException:
        for worker in active_children():  # points that are being measured will be measured again
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        for name, value in before.items():  # later child processes must not inherit these settings
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _begin_worker() -> None:
    """Keep freed memory. End this worker when the study ends, even if it was killed; only the study handles Ctrl-C."""
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _quietly(measure: Measure, point: Point) -> Record:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return measure(**point)


# -- one training run -------------------------------------------------------------------------------


def loop_arguments(**settings: Any) -> Arguments:
    """Return arguments of the training loop by their names on its command line. None means "not given"."""
    words: list[str] = []
    for name, value in settings.items():
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            return parse_arguments(words)
    except SystemExit as stop:  # a worker that exits would end the whole study without a word
        raise ValueError(message.getvalue().strip()) from stop


class TimedRun(Run):
    """A run that counts its processor time, also after it was killed and resumed."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        file = self.folder / "seconds.json"
        self.before = json.loads(file.read_text())["seconds"] if self.done and file.exists() else 0.0
        self.started = time.process_time()

    @property
    def seconds(self) -> float:
        """Processor seconds since the first step. Reading the text is not counted."""
        return self.before + time.process_time() - self.started

    def save(self) -> None:
        """Write a checkpoint, and the seconds to a file next to it."""
        super().save()
        with replacing(self.folder / "seconds.json") as temporary:
            temporary.write_text(json.dumps({"seconds": self.seconds}))


@contextlib.contextmanager
def trained_run(
    settings: Point, make_run: Callable[..., TimedRun] = TimedRun, folder: Path | None = None
) -> Iterator[TimedRun]:
    """Train a model with the loop of train_gpt2_slt.py and yield its run. Its files are removed afterwards.

    Args:
        settings (`Mapping[str, Any]`):
            Options of the training loop by name.
        make_run (`Callable`, *optional*):
            Makes a run from the parsed arguments.
        folder (`Path`, *optional*):
            Folder for checkpoints: a run that was killed resumes from the last one. Without a folder nothing is kept.
    """
    with tempfile.TemporaryDirectory() as temporary:
        saving = (
            {"save_steps": 0} if folder is None else {"save_steps": 0.1, "resume_from_checkpoint": "true"}
        )
        run = make_run(loop_arguments(**{**settings, **saving, "output_dir": folder or temporary}))
        if not train(run):
            raise KeyboardInterrupt
        yield run
        run.close()
        if folder is not None:
            shutil.rmtree(folder)


def summary_of(run: TimedRun) -> Record:
    """Return the validation losses of a run, its tokens, the digest of its text and its seconds."""
    seen = [one for one in run.log.records if one["kind"] == "evaluation"]
    return {
        "loss": seen[-1]["loss"],
        "best_loss": min(one["loss"] for one in seen),
        "curve": [(one["step"], one["loss"]) for one in seen],
        "tokens": run.steps * run.tokens_per_step,
        "text": run.corpus.digest,
        "seconds": round(run.seconds, 1),
    }


# -- presets ----------------------------------------------------------------------------------------


class Preset(SimpleNamespace):
    """The size of a study: numbers by name."""


def presets(usual: Mapping[str, Any], **changes: Mapping[str, Any]) -> dict[str, Preset]:
    """Return presets by name: the usual numbers, with the changes of each.

    >>> presets({"seeds": 3, "steps": 900}, quick={"seeds": 1})["quick"]
    Preset(seeds=1, steps=900)
    """
    return {name: Preset(**{**usual, **some}) for name, some in changes.items()}


# -- figures ----------------------------------------------------------------------------------------

matplotlib.rcParams.update({
    "axes.prop_cycle": matplotlib.cycler(color=(*COLOURS, "#555555")),
    "axes.grid": True, "grid.alpha": 0.25, "axes.spines.right": False, "axes.spines.top": False,
    "axes.titlelocation": "left", "axes.titlesize": 10, "figure.titlesize": 11,
    "legend.fontsize": 7, "legend.title_fontsize": 7, "lines.markersize": 5, "savefig.dpi": 130,
})  # fmt: skip


def line(place: int) -> dict[str, Any]:
    """Return the colour and the marker of a line, by its place among the lines."""
    again, colour = divmod(place, len(COLOURS))  # a colour that is used again gets another marker
    return {"color": COLOURS[colour], "marker": MARKERS[(place + again) % len(MARKERS)]}


def panels(rows: int, columns: int, width: float, height: float, **sharing: Any) -> tuple[Figure, Any]:
    """Return a figure, and its axes in an array (rows, columns)."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **sharing)


# -- one call of a recipe ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A figure with its own records: the points of a preset, how to measure a point, and how to draw the records."""

    points: Callable[[Any], list[Point]]
    measure: Measure
    draw: Callable[[list[Record], Any, "Study"], dict[str, list | dict]]  # saves figures, returns conclusions


@dataclass(frozen=True)
class Study:
    """The options of the command line, and the files of the study."""

    name: str
    kept: str  # the preset whose figures the README shows
    options: argparse.Namespace

    def records(self, points: Iterable[Point], part: str = "") -> Records:
        """Return the records of the study, or of one of its parts."""
        stem = "_".join(filter(None, (self.name, self.options.preset, part)))
        return Records(self.options.out / "results" / f"{stem}.json", points, self.options.fresh)

    def save(self, figure: Figure, name: str) -> None:
        """Write a figure to its file, atomically."""
        preset = self.options.preset
        path = self.options.out / "figures" / ("" if preset == self.kept else preset) / f"{name}.png"
        with replacing(path) as temporary:
            figure.savefig(temporary, format="png", pil_kwargs={"optimize": True})
        print(f"drew {path}")

    def make(self, part: Part, name: str, preset: Any, wanted: Callable[[Point], bool] | None = None) -> None:
        """Measure the points of a part (with `wanted`, only some), draw it, and store and print its conclusions."""
        points = part.points(preset)
        records = self.records(points, name)
        records.measure(part.measure, filter(wanted, points) if wanted else points, self.options.workers)
        facts = part.draw(list(records), preset, self)
        records.conclude(**facts)
        for title, fact in facts.items():
            for row in [fact] if isinstance(fact, dict) else fact:
                print(f"{title}: " + ", ".join(f"{name} {value}" for name, value in row.items()))


def parser_of(doc: str | None, presets: Iterable[str], parts: Iterable[str]) -> argparse.ArgumentParser:
    """Return a parser with the options that all studies have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(presets), default="quick")
    parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts), help="parts to make")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: all cores)")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results/ and figures/")
    parser.add_argument("--fresh", action="store_true", help="measure points with a record again too")
    return parser
