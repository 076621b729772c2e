"""Does the query/key scale find better tickets? Figures 7 and 8 of arXiv 2511.04217, and more.

    python recipes/figures_gpt2.py --preset quick     # a smoke test
    python recipes/figures_gpt2.py --preset cpu       # the study in recipes/README.md, two cores
    python recipes/figures_gpt2.py --preset long      # the same with more of everything: a day
    python recipes/figures_gpt2.py --preset paper     # the commands of the full study; --execute runs them

Every point is one ordinary run of the training loop, on one thread, so that it can be repeated exactly:

    python recipes/figures_gpt2.py --preset cpu --point "recall qk_scale=2 seed=1"

recall.png      recall, a task that only attention solves: which query/key factors let a mask be found, and
                when, for several head widths, with and without LayerNorm
induction.png   the same of repeated sequences, where two layers have to work together
fig8.png        text: validation loss against the query/key factor, also after more steps
bytes.png       text: validation loss against the bytes of the file, beside quantised dense models
ablations.png   text: what each choice is worth
fig7.png        text: validation loss against non-zero parameters

Records go to results/gpt2_<preset>.json as they come; a study that was cut short goes on from there.
"""

import argparse
import contextlib
import copy
import io
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # sums in one order: a point then repeats to the last bit

import matplotlib
import numpy as np
import torch
from tqdm import tqdm
from train_gpt2_slt import train

from hf_slt.model.ticket import MASK_FILE, Header, read_header
from hf_slt.sharing.card import describe_environment
from hf_slt.sharing.files import replacing
from hf_slt.sharing.plots import COLOURS, MARKERS
from hf_slt.text.blocks import Corpus, DataArguments, TokenBlocks, load_blocks
from hf_slt.text.evaluation import evaluate_blocks
from hf_slt.training.arguments import Arguments
from hf_slt.training.batches import validation_batches
from hf_slt.training.run import Run

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
UNSOLVED = -100  # the label of a token that is not to be predicted

# -- tasks that only attention solves ---------------------------------------------------------------


class Exercise(TokenBlocks):
    """Sequences of which only the tokens in `asked` (length,) are to be predicted."""

    def __init__(self, array: np.ndarray, asked: np.ndarray) -> None:
        super().__init__(array.astype(np.uint16), array.size)  # bits per byte are then bits per token
        self.asked = asked

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        ids = super().__getitem__(index)["input_ids"]
        return {"input_ids": ids, "labels": np.where(self.asked, ids, UNSOLVED)}


def make_induction(count: int, seed: int, tokens: int, shortest: int, longest: int, length: int) -> Exercise:
    """Random sequences that repeat with a period in shortest..longest; asked is the second half.

    Who finds an earlier place of the present token and looks at what came after it can go on. That takes
    two layers: one tells each place the token before it, the other looks for the present token there.
    """
    rng = np.random.default_rng(seed)
    period = rng.integers(shortest, longest + 1, (count, 1))
    motif = rng.integers(0, tokens, (count, longest))
    return Exercise(
        np.take_along_axis(motif, np.arange(length) % period, axis=1), np.arange(length) >= length // 2
    )


def make_recall(count: int, seed: int, keys: int, values: int) -> Exercise:
    """Pairs of a key and a value, one token each, then every key with its value as the answer asked for.

        pair k*values + v, ... in any order | question k, answer v, question k', answer v', ...

    One layer of attention is enough: the question looks for the pairs of its key, and takes the value.
    Without attention all values are alike: ln(values) nats.
    """
    rng = np.random.default_rng(seed)
    value = rng.integers(0, values, (count, keys))
    order, questions = (rng.permuted(np.tile(np.arange(keys), (count, 1)), axis=1) for _ in range(2))
    pairs = order * values + np.take_along_axis(value, order, axis=1)
    answers = np.take_along_axis(value, questions, axis=1)
    asked = np.stack([keys * values + questions, keys * values + keys + answers], axis=2)
    place = np.arange(3 * keys)
    return Exercise(
        np.concatenate([pairs, asked.reshape(count, -1)], axis=1),
        (place >= keys) & ((place - keys) % 2 == 1),
    )


def numbers_tokenizer(size: int) -> Any:
    """Tokens that are called 0, 1, 2, ...: the loop stores a tokenizer beside every model."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    numbers = Tokenizer(models.WordLevel({str(token): token for token in range(size)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=numbers, unk_token="0", eos_token="0")


# -- points -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What all runs on some data have in common."""

    base: dict[str, Any]  # arguments of the training loop, by name
    solved: float | None = None  # the run ends when the validation loss is below this
    half: float = 0.0  # half of what is known without attention: below it, a mask has switched
    exercise: Callable[..., Exercise] | None = None
    shape: dict[str, int] = field(default_factory=dict)  # arguments of `exercise`
    vocabulary: int = 0


_COMMON = {
    "scale_with_width": True,
    "density": 0.5,
    "learning_rate": 1e-2,
    "weight_learning_rate": 3e-3,
    "warmup_steps": 30,
    "save_every": 0,
}
# Rates stay level in exercises: when a task is solved then does not depend on the steps allowed for it.
_EXERCISE = {**_COMMON, "law": "normal", "rate_floor": 1.0, "batch_size": 32, "evaluate_every": 25}
TASKS = {
    "recall": Task(
        {**_EXERCISE, "n_layer": 1, "n_embd": 64, "n_inner": 64, "n_head": 2, "n_qk": 64, "n_v": 32,
         "block_size": 24, "steps": 400},
        solved=0.5, half=math.log(8) / 2, exercise=make_recall, shape={"keys": 8, "values": 8}, vocabulary=80,
    ),
    "induction": Task(
        {**_EXERCISE, "n_layer": 2, "n_embd": 128, "n_inner": 128, "n_head": 2, "n_qk": 64, "n_v": 64,
         "embedding_range": 0.01, "learning_rate": 3e-3, "block_size": 32,
         "steps": 1000, "evaluate_every": 50},
        # Who knows the tokens of the period, but not their order, has the mean of ln(period): twice this.
        solved=0.75, half=sum(map(math.log, range(4, 13))) / 18, exercise=make_induction,
        shape={"tokens": 32, "shortest": 4, "longest": 12, "length": 32}, vocabulary=32,
    ),
    "text": Task(
        {**_COMMON, "law": "signed_constant", "n_layer": 2, "n_embd": 128, "n_head": 2, "vocab_size": 1024,
         "block_size": 64, "batch_size": 16, "steps": 300, "validation_blocks": 256, "evaluate_every": 100},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One run: a task, what differs from its base, a seed; and the experiments that draw it."""

    task: str
    changes: tuple[tuple[str, Any], ...]
    seed: int
    experiments: tuple[str, ...]

    @property
    def id(self) -> str:
        changes = (f"{name}={value}" for name, value in self.changes)
        return " ".join([self.task, *changes, f"seed={self.seed}"])

    @property
    def settings(self) -> dict[str, Any]:
        return {**TASKS[self.task].base, **dict(self.changes), "seed": self.seed}


def settings_of(task: str, **changes: Any) -> tuple[tuple[str, Any], ...]:
    """Changes in one order, without those that change nothing."""
    base = TASKS[task].base
    return tuple((name, value) for name, value in sorted(changes.items()) if base.get(name) != value)


FACTORS = (1, 1.41, 2, 2.83, 4, 5.66, 8)  # powers of sqrt 2: n^(1/4) of 16, 64 and 256 are among them
NO_NORM_FACTORS = (2, 4, 8, 16, 32)
PAPER_FACTORS = (1, 1.5, 2, "paper", 3.5, 4, 5)
HEAD_WIDTHS = (16, 64, 256)
DENSITIES = (0.05, 0.15, 0.3, 0.5, 0.7)
DENSE_WIDTHS = (32, 48, 64, 96)
KINDS: tuple[dict[str, Any], ...] = ({"control": "dense"}, {"qk_scale": 1}, {"qk_scale": "paper"})  # figure 7
ABLATIONS: dict[str, dict[str, Any]] = {
    "signed constant, density 0.5, rate 1e-2": {},
    "normal law": {"law": "normal"},
    "uniform law, U[-1, 1]": {"law": "uniform"},
    "xavier uniform law": {"law": "xavier_uniform"},
    "density 0.7": {"density": 0.7},
    "density 0.3": {"density": 0.3},
    "embeddings frozen": {"embedding": "frozen"},
    "embeddings trained": {"embedding": "trained"},
    "no width-aware scale": {"scale_with_width": False},
    "no LayerNorm": {"layer_norm": False},
    "score rate 3e-3": {"learning_rate": 3e-3},  # with AdamW also: first scores 3 times as large
    "score rate 3e-2": {"learning_rate": 3e-2},
    "score rate 5e-3, factor 2 (as nano)": {"learning_rate": 5e-3, "qk_scale": 2},
    "SGD, rate 1": {"optimizer": "sgd", "learning_rate": 1.0},
    "SGD, rate 10": {"optimizer": "sgd", "learning_rate": 10.0},
    "dense, rate 1e-3": {"control": "dense", "weight_learning_rate": 1e-3},
    "dense, rate 3e-3": {"control": "dense"},
}


@dataclass(frozen=True)
class Study:
    """How much of every experiment a preset runs: seeds, and what the base of a task is changed to."""

    seeds: dict[str, int]
    factors: tuple = FACTORS
    no_norm_factors: tuple = NO_NORM_FACTORS
    text_factors: tuple = PAPER_FACTORS
    head_widths: tuple[int, ...] = HEAD_WIDTHS
    densities: tuple[float, ...] = DENSITIES
    dense_widths: tuple[int, ...] = DENSE_WIDTHS
    dense_rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    longer: tuple[int, ...] = (900, 2700)
    longer_widths: tuple[int, ...] = (48, 64, 72)
    longer_rates: tuple[float, ...] = (3e-3,)  # the best of dense_rates for widths 48 and 64
    ablations: tuple[str, ...] = tuple(ABLATIONS)
    sizes: tuple[tuple[int, int], ...] = ((64, 2), (128, 2), (128, 4))  # figure 7: width, depth
    shorter: dict[str, Any] = field(default_factory=dict)

    def points(self) -> list[Point]:
        """Every run of the study, the most telling first."""
        return points_of(
            (experiment, seed, task, {**changes, **self.shorter})
            for experiment, plan in PLANS.items()
            for seed in range(self.seeds[experiment])  # a study cut short has all settings of a seed
            for task, changes in plan(self)
        )


def points_of(runs: Iterable[tuple[str, int, str, dict[str, Any]]]) -> list[Point]:
    """Runs as experiment, seed, task, changes; one that several experiments ask for becomes one point."""
    found: dict[tuple, list[str]] = {}
    for experiment, seed, task, changes in runs:
        found.setdefault((task, settings_of(task, **changes), seed), []).append(experiment)
    return [Point(*key, tuple(dict.fromkeys(names))) for key, names in found.items()]


Plan = Iterator[tuple[str, dict[str, Any]]]


def plan_recall(study: Study) -> Plan:
    for width in study.head_widths:
        for factor in study.factors:
            yield "recall", {"n_qk": width, "qk_scale": factor}
    yield "recall", {"control": "dense", "n_qk": None, "n_v": None}


def plan_no_norm(study: Study) -> Plan:
    # Without LayerNorm to amplify them, embeddings of GPT-2's size leave queries, keys and logits near zero.
    for width in study.head_widths:
        for factor in study.no_norm_factors:
            changes = {"layer_norm": False, "embedding_range": 0.05}
            yield "recall", {"n_qk": width, "qk_scale": factor, **changes}


def plan_induction(study: Study) -> Plan:
    for width in study.head_widths:
        for factor in study.factors[:-1]:
            yield "induction", {"n_qk": width, "qk_scale": factor}
    for rate in study.dense_rates[:2]:
        changes = {"n_qk": None, "n_v": None, "embedding_range": None, "weight_learning_rate": rate}
        yield "induction", {"control": "dense", **changes}


def plan_induction_no_norm(study: Study) -> Plan:
    for factor in study.no_norm_factors[:4]:
        yield "induction", {"qk_scale": factor, "layer_norm": False, "embedding_range": 0.05}


def plan_fig8(study: Study) -> Plan:
    for factor in study.text_factors:
        yield "text", {"qk_scale": factor}


def plan_longer(study: Study) -> Plan:
    for place, steps in enumerate(study.longer):
        factors = (1, 2, "paper") if place == 0 else (2, "paper")
        for factor in factors:
            yield "text", {"qk_scale": factor, "steps": steps}


def plan_bytes(study: Study) -> Plan:
    for density in study.densities:
        yield "text", {"density": density, "qk_scale": "paper"}
        yield "text", {"density": density, "qk_scale": "paper", "embedding": "trained"}
    for width in study.dense_widths:
        for rate in study.dense_rates:  # each width at the rate that suits it: a fair opponent
            yield "text", {"control": "dense", "n_embd": width, "weight_learning_rate": rate}
    for steps in study.longer:  # a small dense model is quicker by the step: let it have more of them
        yield "text", {"qk_scale": "paper", "steps": steps}
        changes = {"density": 0.3, "embedding": "trained", "embedding_bits": 4}
        yield "text", {"qk_scale": "paper", "steps": steps, **changes}
        for width in study.longer_widths:
            for rate in study.longer_rates:
                changes = {"steps": steps, "weight_learning_rate": rate}
                yield "text", {"control": "dense", "n_embd": width, **changes}


def plan_ablations(study: Study) -> Plan:
    for name in study.ablations:
        changes = ABLATIONS[name]
        yield "text", changes if "control" in changes else {"qk_scale": "paper", **changes}


def plan_fig7(study: Study) -> Plan:
    for width, depth in study.sizes:
        for kind in KINDS:
            yield "text", {"n_embd": width, "n_layer": depth, **kind}


PLANS: dict[str, Callable[[Study], Plan]] = {
    "recall": plan_recall,
    "no_norm": plan_no_norm,
    "induction": plan_induction,
    "induction_no_norm": plan_induction_no_norm,
    "fig8": plan_fig8,
    "longer": plan_longer,
    "bytes": plan_bytes,
    "ablations": plan_ablations,
    "fig7": plan_fig7,
}
STUDIES = {
    "cpu": Study(
        {"recall": 3, "no_norm": 2, "induction": 3, "induction_no_norm": 1}
        | {"fig8": 3, "longer": 1, "bytes": 1, "ablations": 2, "fig7": 2}
    ),
    "long": Study(
        dict.fromkeys(PLANS, 5),
        no_norm_factors=(2, 2.83, 4, 5.66, 8, 11.3, 16, 22.6),
        densities=(0.05, 0.1, 0.15, 0.3, 0.5, 0.7),
        sizes=((64, 1), (64, 2), (128, 1), (128, 2), (128, 4), (256, 4)),
        longer=(900, 2700, 8100),
        longer_rates=(1e-3, 3e-3),
    ),
    "quick": Study(
        dict.fromkeys(PLANS, 1),
        factors=(1, 2.83, 4),
        no_norm_factors=(8,),
        text_factors=(1, "paper"),
        head_widths=(16,),
        densities=(0.5,),
        dense_widths=(64,),
        dense_rates=(3e-3,),
        longer=(),
        ablations=("normal law",),
        sizes=((64, 1),),
        shorter={"steps": 3, "evaluate_every": 2, "n_embd": 32, "n_layer": 1, "batch_size": 4},
    ),
}


# -- one run ----------------------------------------------------------------------------------------


class UntilSolved(Run):
    """A run that ends when the validation loss is below `solved`."""

    solved = -math.inf

    def look(self) -> bool:
        improved = super().look()
        if self.best is not None and self.best[1] < self.solved:
            self.steps = self.done
        return improved


# Words of the records, where the training has others.
WORDS = {
    "steps": "max_steps", "batch_size": "per_device_train_batch_size", "optimizer": "optim",
    "evaluate_every": "eval_steps", "save_every": "save_steps", "rate_floor": "min_lr_rate",
}  # fmt: skip


def arguments_of(settings: dict[str, Any], folder: str) -> Arguments:
    """Settings as arguments of the training loop."""
    return Arguments.of(
        **{WORDS.get(name, name): value for name, value in settings.items()}, output_dir=folder
    )


@cache
def exercise_corpus(task: str, count: int) -> Corpus:
    """Fresh sequences for every step, the same for every seed but for their order."""
    made = TASKS[task]
    assert made.exercise is not None
    train, validation = made.exercise(count, 1, **made.shape), made.exercise(256, 2, **made.shape)
    return Corpus(train, validation, numbers_tokenizer(made.vocabulary), task, f"{task} {count} {made.shape}")


@cache
def text_corpus(vocab_size: int, block_size: int, validation_blocks: int | None) -> Corpus:
    """The embedded corpus."""
    return load_blocks(
        DataArguments(vocab_size=vocab_size, block_size=block_size, validation_blocks=validation_blocks)
    )


def corpus_of(point: Point, arguments: Arguments) -> Corpus:
    if TASKS[point.task].exercise:
        return exercise_corpus(
            point.task, arguments.run.max_steps * arguments.run.per_device_train_batch_size
        )
    data = arguments.data
    return text_corpus(data.vocab_size, data.block_size, data.validation_blocks)


def measure(point: Point) -> dict[str, Any] | None:
    """Run a point; its record, or None if a signal ended it."""
    torch.set_num_threads(1)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = arguments_of(point.settings, folder)
        with contextlib.redirect_stderr(io.StringIO()):  # the bar of the study is enough
            run = UntilSolved(arguments, corpus_of(point, arguments))
            run.solved = TASKS[point.task].solved or -math.inf
            if not train(run):
                return None
            report = run.finish()
        record = record_of(point, report, run.log.records)
        record["solved"] = None if run.solved == -math.inf else report["best_loss"] < run.solved
        if "bytes" in point.experiments:
            record["stored"] = stored_forms(run, record)
        return record | {"seconds": round(time.process_time() - started, 1)}


def record_of(point: Point, report: dict[str, Any], log: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What is kept of a run: its settings, losses and sizes."""
    return {
        "id": point.id,
        "experiments": list(point.experiments),
        "task": point.task,
        "settings": point.settings,
        "seed": point.seed,
        **{name: report[name] for name in ("steps", "loss", "best_loss", "text")},
        "curve": [(line["step"], line["loss"]) for line in log if line["kind"] == "evaluation"],
        **sizes_of(Path(report["saved"])),
    }


# -- sizes ------------------------------------------------------------------------------------------


def entropy_bytes(size: int, kept: int) -> float:
    """Bytes to name one of the masks that keep `kept` of `size` weights: log2 C(size, kept) / 8.

    >>> round(8 * entropy_bytes(4, 2), 12) == round(math.log2(6), 12)
    True
    """
    ln = math.lgamma(size + 1) - math.lgamma(kept + 1) - math.lgamma(size - kept + 1)
    return ln / math.log(2) / 8


def sizes_of(folder: Path) -> dict[str, Any]:
    """Non-zero parameters and bytes of a saved ticket or dense model."""
    file_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if (folder / MASK_FILE).exists():
        header: Header = read_header(folder / MASK_FILE)
        entries = list(header.tensors.values())
        nonzero = sum(entry.kept if entry.kept is not None else entry.size for entry in entries)
        masks = sum(entropy_bytes(entry.size, entry.kept) for entry in entries if entry.kept is not None)
        values = sum(entry.value_bytes for entry in entries if entry.kept is None)
        sizes = {"mask_bytes": math.ceil(masks), "value_bytes": values}
        return {"nonzero": nonzero, "file_bytes": file_bytes, **sizes}
    from safetensors.numpy import load_file

    arrays = [array for path in folder.glob("*.safetensors") for array in load_file(path).values()]
    return {"nonzero": sum(array.size for array in arrays), "file_bytes": file_bytes, "mask_bytes": 0}


GROUP = 64  # values that share a scale


def quantise(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, int]:
    """Values as integers of `bits` bits, times a float16 scale per group, give them back; and the bytes.

    integer = round(value / scale),  scale = largest |value| of the group / (2^(bits - 1) - 1)
    """
    largest = 2 ** (bits - 1) - 1
    flat = torch.nn.functional.pad(values.reshape(-1), (0, -values.numel() % GROUP)).view(-1, GROUP)
    scales = (flat.abs().amax(dim=1, keepdim=True) / largest).half().float().clamp(min=2.0**-24)
    whole = (flat / scales).round().clamp(-largest, largest)
    back = (whole * scales).view(-1)[: values.numel()].view_as(values)
    return back, math.ceil(values.numel() * bits / 8) + 2 * len(scales)


def store_trained(model: torch.nn.Module, bits: int) -> int:
    """Round the trained weights of a model as if stored in `bits` bits each; the bytes they take.

    Matrices are quantised below 16 bits; vectors (gains, biases) always stay float16.
    """
    total = 0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("scores"):
                continue
            if bits < 16 and weight.dim() == 2:
                back, size = quantise(weight, bits)
            else:
                back, size = weight.half().float(), 2 * weight.numel()
            weight.copy_(back)
            total += size
    return total


def stored_forms(run: Run, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Bytes and loss with the trained weights in 16, 8 and 4 bits, beside masks at their entropy."""
    masks = record["mask_bytes"]
    if bits := record["settings"].get("embedding_bits"):  # the ticket holds them so, and was trained so
        return [{"bits": bits, "bytes": masks + record["value_bytes"], "loss": record["loss"]}]
    whole = run.accelerator.unwrap_model(run.model)
    trained = [name for name, _ in whole.named_parameters() if not name.endswith("scores")]
    forms = []
    for bits in (16, 8, 4) if trained else (0,):
        model = copy.deepcopy(whole)
        size = masks + store_trained(model, bits)
        at_once = run.options.per_device_train_batch_size
        batches = validation_batches(run.corpus.validation, at_once, run.accelerator)
        forms.append({"bits": bits, "bytes": size, "loss": evaluate_blocks(model, batches)["loss"]})
    return forms


# -- the study --------------------------------------------------------------------------------------


class Records:
    """The records of a study, in a file that is whole after every point."""

    def __init__(self, path: Path, points: list[Point]) -> None:
        self.path = path
        self.points = {point.id: point for point in points}
        stored = json.loads(path.read_text())["records"] if path.exists() else []
        self.found = {record["id"]: record for record in stored if self._is_current(record)}
        for name, record in self.found.items():
            record["experiments"] = list(self.points[name].experiments)  # which may draw it since

    def _is_current(self, record: dict[str, Any]) -> bool:
        """Whether a record is what its point would give today; else the point is measured again."""
        point = self.points.get(record["id"])
        if point is None or point.settings != record["settings"]:
            return False
        return "bytes" not in point.experiments or "stored" in record

    def add(self, record: dict[str, Any]) -> None:
        self.found[record["id"]] = record
        order = [self.found[name] for name in self.points if name in self.found]
        lines = ",\n".join(json.dumps(record) for record in order)
        environment = json.dumps(describe_environment())
        with replacing(self.path) as temporary:
            temporary.write_text(f'{{"environment": {environment},\n"records": [\n{lines}\n]}}\n')

    def of(self, experiment: str, **wanted: Any) -> list[dict[str, Any]]:
        """Records of an experiment whose settings are as wanted; None stands for "not set"."""
        return [
            record
            for record in self.found.values()
            if experiment in record["experiments"]
            and all(record["settings"].get(name) == value for name, value in wanted.items())
        ]


def run_points(points: list[Point], records: Records, workers: int) -> None:
    """Measure what has no record yet, several at a time."""
    left = [point for point in points if point.id not in records.found]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or workers would outlive a kill
    bar = tqdm(total=len(points), initial=len(points) - len(left), desc="study", unit="run")
    # A fresh interpreter for every worker: torch does not survive a fork with threads.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        for future in as_completed([pool.submit(measure, point) for point in left]):
            record = future.result()
            if record is None:
                raise KeyboardInterrupt  # in a worker
            records.add(record)
            bar.update()
            bar.set_postfix_str(f"{record['id']}: {record['loss']:.3f}")
    except KeyboardInterrupt:
        for worker in active_children():  # a point cut short is measured again
            worker.kill()
        raise SystemExit("interrupted; the same command goes on from here") from None
    finally:
        bar.close()
        pool.shutdown(cancel_futures=True)


def repeat(point: Point, records: Records) -> int:
    """Run one point again and compare it with its record; 0 if every loss is the same to the last bit."""
    known, record = records.found.get(point.id), measure(point)
    if record is None:
        return 1
    print(f"{point.id}: loss {record['loss']!r} after {record['steps']} steps, {record['seconds']} s")
    if known is None:
        print("no record of it yet")
        return 0
    same = json.loads(json.dumps(record))["curve"] == known["curve"]
    print("the same as recorded" if same else f"recorded: {known['loss']!r} after {known['steps']} steps")
    return 0 if same else 1


# -- figures ----------------------------------------------------------------------------------------


def mean_and_spread(losses: list[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds; of one seed the latter is 0."""
    return statistics.mean(losses), statistics.stdev(losses) if len(losses) > 1 else 0.0


def finish(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
    plt.close(figure)
    print(f"drew {path}")


def factor_of(record: dict[str, Any]) -> float:
    """The query/key factor of a record as a number."""
    settings = record["settings"]
    width = settings.get("n_qk") or settings["n_embd"] // settings["n_head"]
    factor = settings["qk_scale"]
    return width**0.25 if factor == "paper" else float(factor)


def by(records: Iterable[dict[str, Any]], key: Callable[[dict[str, Any]], Any]) -> dict[Any, list]:
    """Records in groups, in the order of their key."""
    groups: dict[Any, list] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return dict(sorted(groups.items()))


def quickest_factor(records: Iterable[dict[str, Any]]) -> float | None:
    """The bottom of a parabola through log steps over log factor, where all seeds switched."""
    groups = {f: [taken(record) for record in group] for f, group in by(records, factor_of).items()}
    points = [
        (math.log(f), statistics.mean(map(math.log, g))) for f, g in groups.items() if max(g) < math.inf
    ]
    if len(points) < 4:
        return None
    a, b, _ = np.polyfit(*zip(*points, strict=True), 2)
    return math.exp(-b / (2 * a)) if a > 0 else None


def lowest_factor(records: Iterable[dict[str, Any]]) -> float | None:
    """The bottom of a parabola over log factor through the lowest mean loss and its two neighbours."""
    groups = by(records, factor_of)
    points = [(math.log(f), statistics.mean(r["best_loss"] for r in g)) for f, g in groups.items()]
    lowest = min(range(len(points)), key=lambda place: points[place][1])
    if not 0 < lowest < len(points) - 1:
        return None  # at the edge: not enclosed
    a, b, _ = np.polyfit(*zip(*points[lowest - 1 : lowest + 2], strict=True), 2)
    return math.exp(-b / (2 * a))


def draw_switching(column: Any, curves: dict[str, list[dict[str, Any]]]) -> None:
    """Above, the share of seeds that switch; below, the steps it takes them: median and seeds."""
    shares, steps = column
    found = [record for records in curves.values() for record in records]
    if not found:
        return
    longest = found[0]["settings"]["steps"]
    for place, (label, records) in enumerate(curves.items()):
        style = {"color": COLOURS[place], "marker": MARKERS[place], "alpha": 0.8}
        # A seed that never switches is drawn above all that do: a median stands that.
        groups = {f: [min(taken(r), longest * 1.1) for r in g] for f, g in by(records, factor_of).items()}
        best = quickest_factor(records)
        if best is not None:
            label += f": quickest at {best:.1f}"
        share = [statistics.mean(step <= longest for step in group) for group in groups.values()]
        shares.plot(list(groups), share, **style)
        steps.plot(
            list(groups), [statistics.median(group) for group in groups.values()], label=label, **style
        )
        for factor, group in groups.items():
            steps.plot([factor] * len(group), group, ".", color=COLOURS[place], alpha=0.35)
    half = TASKS[found[0]["task"]].half
    shares.set(ylabel=f"share of seeds below {half:.2f} nats", ylim=(-0.05, 1.05))
    steps.set(ylabel="steps to get there, median", xlabel="factor on query and key weights")
    steps.axhline(longest, color="grey", linestyle="--", linewidth=1)
    steps.legend(fontsize=8, title="above the dashes: never", title_fontsize=8, framealpha=0.5)
    for axes in column:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({factor_of(record) for record in found}))
        axes.xaxis.set_major_formatter("{x:.3g}")


def taken(record: dict[str, Any]) -> float:
    """Steps until a mask had switched, on a line between two evaluations; infinite if it never did."""
    half = TASKS[record["task"]].half
    before, high = 0, math.nan
    for step, loss in record["curve"]:
        if loss < half:
            return step if math.isnan(high) else step - (step - before) * (half - loss) / (high - loss)
        before, high = step, loss
    return math.inf


def draw_recall(study: Study, records: Records, folder: Path) -> None:
    figure, grid = plt.subplots(2, 2, figsize=(10, 6.5), sharey="row")
    titles = {"recall": "with LayerNorm", "no_norm": "without LayerNorm"}
    for column, (experiment, title) in zip(grid.T, titles.items(), strict=True):
        groups = by(records.of(experiment, control=None), lambda record: record["settings"]["n_qk"])
        curves = {f"head width {n}": group for n, group in groups.items()}
        draw_switching(column, curves)
        for place, n in enumerate(groups):
            for axes in column:
                axes.axvline(n**0.25, color=COLOURS[place], linestyle=":", linewidth=1)
        column[0].set_title(f"Recall {title} (dotted: n^(1/4))", loc="left", fontsize=10)
    finish(figure, folder / "recall.png")


def draw_induction(study: Study, records: Records, folder: Path) -> None:
    figure, grid = plt.subplots(2, 2, figsize=(11, 7))
    groups = by(records.of("induction", control=None), lambda record: record["settings"]["n_qk"])
    draw_switching(grid[:, 0], {f"head width {n}": group for n, group in groups.items()})
    grid[0, 0].set_title("Induction (dotted: n^(1/4))", loc="left", fontsize=10)
    losses, curves = grid[:, 1]
    lines = {f"head width {n}": group for n, group in groups.items()}
    if bare := records.of("induction_no_norm"):
        lines["head width 64, no LayerNorm"] = bare
    for place, (label, line) in enumerate(lines.items()):
        tickets, lowest = by(line, factor_of), lowest_factor(line)
        label += "" if lowest is None else f": lowest at {lowest:.1f}"
        means, spreads = zip(
            *(mean_and_spread([r["best_loss"] for r in group]) for group in tickets.values()), strict=True
        )
        style: dict[str, Any] = {"color": COLOURS[place], "marker": MARKERS[place]}
        losses.errorbar(list(tickets), means, spreads, capsize=3, label=label, **style)
    losses.set_xscale("log", base=2)
    losses.set_xticks(study.factors)
    losses.xaxis.set_major_formatter("{x:.3g}")
    losses.set(xlabel="factor on query and key weights", ylabel="lowest validation loss, mean and std")
    losses.set_title(f"Runs end below {TASKS['induction'].solved}", loc="left", fontsize=10)
    for place, n in enumerate(groups):
        for axes in grid.flat[:3]:
            axes.axvline(n**0.25, color=COLOURS[place], linestyle=":", linewidth=1)
    middle = sorted(groups)[len(groups) // 2]
    for place, (factor, group) in enumerate(by(groups[middle], factor_of).items()):
        curves.plot(*zip(*group[0]["curve"], strict=True), color=f"C{place}", label=f"factor {factor:g}")
    dense = (record for record in records.of("induction", control="dense") if record["seed"] == 0)
    for style, record in zip(("--", ":"), dense, strict=False):
        label = f"dense, rate {record['settings']['weight_learning_rate']:g}"
        curves.plot(*zip(*record["curve"], strict=True), style, color="black", label=label)
    curves.set(xlabel="optimizer step", ylabel="validation loss (nats per token)")
    curves.set_title(f"Head width {middle}, seed 0", loc="left", fontsize=10)
    for axes in (losses, curves):
        axes.axhline(TASKS["induction"].half, color="grey", linewidth=1, linestyle="--")
        axes.legend(fontsize=7)
    finish(figure, folder / "induction.png")


def draw_fig8(study: Study, records: Records, folder: Path) -> None:
    """A line for each model and length of training: mean and std over seeds."""
    figure, axes = plt.subplots(figsize=(7.5, 4.8))
    tickets = {record["id"]: record for name in ("fig8", "longer") for record in records.of(name)}.values()
    for place, ((_, steps), line) in enumerate(by(tickets, lambda r: (r["task"], r["steps"])).items()):
        groups = by(line, factor_of)
        means, spreads = zip(
            *(mean_and_spread([r["best_loss"] for r in g]) for g in groups.values()), strict=True
        )
        seeds, settings = max(map(len, groups.values())), line[0]["settings"]
        label = (
            f"{line[0]['task']}, width {settings['n_embd']}: {steps} steps, {seeds} seed{'s'[: seeds - 1]}"
        )
        style: dict[str, Any] = {"color": COLOURS[place], "marker": MARKERS[place]}
        axes.errorbar(list(groups), means, spreads, capsize=3, label=label, **style)
    paper = {(r["settings"]["n_embd"] // r["settings"]["n_head"]) ** 0.25 for r in tickets}
    for factor in paper:
        axes.axvline(factor, color="grey", linestyle=":", label="n^(1/4)")
    axes.set(xlabel="factor on query and key weights", ylabel="validation loss (nats per token)")
    axes.set_title("Figure 8: mean and std over seeds", loc="left", fontsize=10)
    axes.legend(fontsize=8)
    finish(figure, folder / "fig8.png")


def draw_bytes(study: Study, records: Records, folder: Path) -> None:
    """A panel for each length of training; of several rates the best."""
    found = records.of("bytes")
    lengths = sorted({record["settings"]["steps"] for record in found})
    figure, panels = plt.subplots(1, len(lengths), figsize=(4.4 * len(lengths) + 1, 4.6), squeeze=False)
    tickets = [record for record in found if record["settings"].get("control") is None]
    trained = [record for record in tickets if record["settings"].get("embedding") == "trained"]
    dense = [record for record in found if record["settings"].get("control") == "dense"]
    curves: list[tuple[str, list, int]] = [
        ("ticket, all masked", [r for r in tickets if r not in trained], 0),
        *((f"ticket, embeddings in {bits} bits", trained, bits) for bits in (8, 4)),
        *((f"dense, {bits} bits", dense, bits) for bits in (16, 8, 4)),
    ]
    for axes, steps in zip(panels[0], lengths, strict=True):
        for place, (label, runs, bits) in enumerate(curves):
            best: dict[float, float] = {}
            for record in runs:
                for form in record["stored"]:
                    if record["settings"]["steps"] == steps and form["bits"] == bits:
                        size = form["bytes"] / 1000
                        best[size] = min(form["loss"], best.get(size, math.inf))
            if best:
                dashes = "--" if label.startswith("dense") else "-"
                style: dict[str, Any] = {"color": COLOURS[place], "marker": MARKERS[place]}
                axes.plot(*zip(*sorted(best.items()), strict=True), dashes, label=label, **style)
        axes.set(xlabel="kilobytes (masks at log2 C(n, k) bits)", ylabel="validation loss (nats per token)")
        axes.set_xscale("log")
        axes.set_xticks([20, 50, 100, 200, 500], minor=False)
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(f"Equal bytes after {steps} steps", loc="left", fontsize=10)
        axes.legend(fontsize=7)
    finish(figure, folder / "bytes.png")


def draw_ablations(study: Study, records: Records, folder: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 0.4 * len(study.ablations) + 1.2))
    rows = []
    for name in study.ablations:
        changes = ABLATIONS[name]
        if "control" not in changes:
            changes = {"qk_scale": "paper", **changes}
        wanted = settings_of("text", **{**changes, **study.shorter})
        losses = [
            r["best_loss"]
            for r in records.of("ablations")
            if {**TASKS["text"].base, **dict(wanted), "seed": r["seed"]} == r["settings"]
        ]
        if losses:
            rows.append((name, losses))
    for place, (_, losses) in enumerate(reversed(rows)):
        axes.plot(losses, [place] * len(losses), "o", color=COLOURS[0], alpha=0.7)
        axes.annotate(
            f"{statistics.mean(losses):.3f}",
            (max(losses), place),
            (8, -3),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)])
    axes.set_xlabel("validation loss (nats per token), one dot a seed")
    axes.margins(x=0.15)
    finish(figure, folder / "ablations.png")


def draw_fig7(study: Study, records: Records, folder: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.5))
    labels = ("trained model", "ticket, factor 1", "ticket, factor n^(1/4)")
    for place, (label, kind) in enumerate(zip(labels, KINDS, strict=True)):
        models = by(
            records.of("fig7", **kind), lambda record: (record["task"], record["settings"].get("n_layer"))
        )
        for number, found in enumerate(models.values()):
            groups = by(found, lambda record: record["nonzero"])
            means, spreads = zip(
                *(mean_and_spread([r["best_loss"] for r in group]) for group in groups.values()), strict=True
            )
            style: dict[str, Any] = {"color": COLOURS[place], "marker": MARKERS[place], "capsize": 3}
            axes.errorbar(list(groups), means, spreads, label=label if number == 0 else None, **style)
            if place == 0:
                for size, loss, group in zip(groups, means, groups.values(), strict=True):
                    settings = group[0]["settings"]
                    name = f"{settings['n_layer']} x " if "n_layer" in settings else ""
                    axes.annotate(
                        f"{name}{settings['n_embd']}",
                        (size, loss),
                        (6, 6),
                        textcoords="offset points",
                        fontsize=8,
                    )
    axes.set(xlabel="non-zero parameters", ylabel="validation loss (nats per token)", xscale="log")
    axes.set_title(
        "Figure 7: mean and std over seeds (beside the trained: layers x width)", loc="left", fontsize=10
    )
    axes.legend()
    finish(figure, folder / "fig7.png")


DRAWINGS: dict[str, Callable[[Study, Records, Path], None]] = {
    "recall": draw_recall,
    "no_norm": draw_recall,
    "induction": draw_induction,
    "induction_no_norm": draw_induction,
    "fig8": draw_fig8,
    "longer": draw_fig8,
    "bytes": draw_bytes,
    "ablations": draw_ablations,
    "fig7": draw_fig7,
}


# -- the paper's own size ---------------------------------------------------------------------------

PAPER_WIDTHS = {"mini": 512, "small": 768, "medium": 1024}  # heads are 64 wide in all
TASKS |= {model: Task({"n_embd": width, "n_head": width // 64}) for model, width in PAPER_WIDTHS.items()}


def paper_points() -> list[Point]:
    """The runs of figures 7 and 8 on WikiText-103."""
    plans: list[tuple[str, str, dict[str, Any]]] = []
    for model, width in PAPER_WIDTHS.items():
        plans += [("fig8", model, {"qk_scale": factor}) for factor in PAPER_FACTORS]
        for wide in (width // 2, width, 2 * width):
            plans += [("fig7", model, {"n_embd": wide, "n_head": wide // 64, **kind}) for kind in KINDS]
    return points_of((name, seed, model, changes) for name, model, changes in plans for seed in range(3))


def paper_command(point: Point) -> tuple[Path, list[str]]:
    """The folder of a run of the paper's study, and its command."""
    folder = Path("runs/paper") / point.id.replace(" ", "-")
    launch = "accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train_gpt2_slt.py".split()
    options = {**dict(point.changes), "seed": point.seed, "output_dir": folder}
    options["resume_from_checkpoint"] = "true"
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return folder, [*launch, "--config", f"recipes/{point.task}.yaml", *words]


def run_paper(execute: bool, out: Path) -> int:
    """Print the commands of the paper's study, or run those that have no record yet, and draw."""
    points = paper_points()
    if not execute:
        print("\n".join(shlex.join(paper_command(point)[1]) for point in points))
        return 0
    records = Records(out / "results" / "gpt2_paper.json", points)
    for point in points:
        if point.id in records.found:
            continue
        folder, command = paper_command(point)
        if not (folder / "report.json").exists() and (code := subprocess.run(command).returncode):
            print(f"{point.id} ended with code {code}; the same command goes on from here", file=sys.stderr)
            return code
        log = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
        records.add(record_of(point, json.loads((folder / "report.json").read_text()), log))
    for draw in (draw_fig7, draw_fig8):
        draw(Study({}), records, out / "figures" / "paper")
    return 0


# -- command line -----------------------------------------------------------------------------------


def leave_launch() -> bool:
    """Under `accelerate launch` with several processes: whether this one is not the first.

    Points are independent and their workers many, so one process is enough; it forgets the others.
    """
    others = int(os.environ.get("RANK", 0)) > 0
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return others


def main() -> int:
    if leave_launch():
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=(*STUDIES, "paper"), default="quick")
    parser.add_argument("--only", choices=PLANS, nargs="+", default=list(PLANS), help="experiments to make")
    parser.add_argument("--point", metavar="ID", help="run one point again and compare it with its record")
    parser.add_argument("--list", action="store_true", help="print the id of every point and stop")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes, one per core")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results/ and figures/")
    parser.add_argument("--execute", action="store_true", help="with paper: run the commands, not only print")
    args = parser.parse_args()
    if args.preset == "paper":
        return run_paper(args.execute, args.out)
    study = STUDIES[args.preset]
    points = study.points()
    records = Records(args.out / "results" / f"gpt2_{args.preset}.json", points)
    if args.point:
        named = {point.id: point for point in points}
        if args.point not in named:
            parser.error(f"no point {args.point!r}; --list names them all")
        return repeat(named[args.point], records)
    chosen = [point for point in points if set(point.experiments) & set(args.only)]
    if args.list:
        print("\n".join(point.id for point in chosen))
        return 0
    run_points(chosen, records, args.workers)
    figures = args.out / "figures" / ("" if args.preset == "cpu" else args.preset)
    for draw in dict.fromkeys(DRAWINGS[experiment] for experiment in args.only if study.seeds[experiment]):
        draw(study, records, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
