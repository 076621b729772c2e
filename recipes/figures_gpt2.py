"""Does the query/key scale find better tickets? Figures 7 and 8 of arXiv 2511.04217, and more.

    python recipes/figures_gpt2.py --preset quick     # a smoke test
    python recipes/figures_gpt2.py --preset cpu       # the study in recipes/README.md, two cores
    python recipes/figures_gpt2.py --preset long      # the same with more seeds and settings: a day

Figures 7 and 8 at the paper's own sizes, on GPUs, are made by reproduce.sh beside this file.

Every point is one ordinary run of the training loop, on one thread, and can be repeated bit for bit:

    python recipes/figures_gpt2.py --preset cpu --point "recall qk_scale=2 seed=1"

recall.png      recall, a task that needs attention: with which query/key factors a mask is found, and after how
                many steps, for several head widths, with and without LayerNorm
induction.png   the same for repeated sequences, where two layers have to work together
fig8.png        text: validation loss against the query/key factor, also after more steps
bytes.png       text: validation loss against the bytes of the file, compared with quantised dense models
ablations.png   text: how much each setting changes the loss
fig7.png        text: validation loss against non-zero parameters

Each record is written to results/gpt2_<preset>.json as soon as it is measured; a study that is stopped resumes there.
"""

import copy
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import studies
import torch
from rivals import round_groups
from safetensors.numpy import load_file
from studies import Preset, Record, Records, Study, TimedRun, group, line, panels, select
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_slt.sharing.card import entropy_bits, kept_of, value_bytes
from hf_slt.text.blocks import Corpus, DataArguments, TokenBlocks, load_blocks
from hf_slt.text.evaluation import evaluate_blocks
from hf_slt.tickets.format import MASK_FILE, read_header
from hf_slt.training.arguments import Arguments
from hf_slt.training.batches import validation_batches
from hf_slt.training.run import Run

UNSOLVED = -100  # the label of a token that is not predicted

# -- tasks that need attention ----------------------------------------------------------------------


class Exercise(TokenBlocks):
    """Sequences in which only the tokens in `asked` (length,) are predicted."""

    def __init__(self, array: np.ndarray, asked: np.ndarray) -> None:
        super().__init__(array.astype(np.uint16), array.size)  # bits per byte are then bits per token
        self.asked = asked

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        ids = super().__getitem__(index)["input_ids"]
        return {"input_ids": ids, "labels": np.where(self.asked, ids, UNSOLVED)}


def make_induction(count: int, seed: int, tokens: int, shortest: int, longest: int, length: int) -> Exercise:
    """Make random sequences that repeat with a period in shortest..longest; the second half is predicted.

    A model can predict the next token if it finds an earlier copy of the current token and reads what came after it.
    That takes two layers: one gives each position the token before it, the other looks for the current token.
    """
    rng = np.random.default_rng(seed)
    period = rng.integers(shortest, longest + 1, (count, 1))
    motif = rng.integers(0, tokens, (count, longest))
    return Exercise(
        np.take_along_axis(motif, np.arange(length) % period, axis=1), np.arange(length) >= length // 2
    )


def make_recall(count: int, seed: int, keys: int, values: int) -> Exercise:
    """Make sequences of pairs (key and value in one token), then every key as a question with its value as the answer.

        pair k*values + v, ... in any order | question k, answer v, question k', answer v', ...

    One layer of attention is enough: the question looks for the pairs of its key, and takes the value.
    Without attention all values are equally likely, and the loss is ln(values) nats.
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


def numbers_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer with the tokens 0, 1, 2, ...: the training loop stores a tokenizer with every model."""
    numbers = Tokenizer(models.WordLevel({str(token): token for token in range(size)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=numbers, unk_token="0", eos_token="0")


# -- points -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """The settings that all runs on the same data share."""

    base: dict[str, Any]  # arguments of the training loop, by name
    solved: float | None = None  # the run ends when the validation loss is below this
    half: float = 0.0  # half of the best loss without attention: below it, a mask has switched
    exercise: Callable[..., Exercise] | None = None
    shape: dict[str, int] = field(default_factory=dict)  # arguments of `exercise`
    vocabulary: int = 0


_COMMON = {
    "scale_with_width": True,
    "density": 0.5,
    "learning_rate": 1e-2,
    "weight_learning_rate": 3e-3,
    "warmup_steps": 30,
    "save_steps": 0,
}
# Rates are constant in exercises, so the step at which a task is solved does not depend on max_steps.
_EXERCISE = {
    **_COMMON,
    "law": "normal",
    "min_lr_rate": 1.0,
    "per_device_train_batch_size": 32,
    "eval_steps": 25,
}
TASKS = {
    "recall": Task(
        {**_EXERCISE, "n_layer": 1, "n_embd": 64, "n_inner": 64, "n_head": 2, "n_qk": 64, "n_v": 32,
         "block_size": 24, "max_steps": 400},
        solved=0.5, half=math.log(8) / 2, exercise=make_recall, shape={"keys": 8, "values": 8}, vocabulary=80,
    ),
    "induction": Task(
        {**_EXERCISE, "n_layer": 2, "n_embd": 128, "n_inner": 128, "n_head": 2, "n_qk": 64, "n_v": 64,
         "embedding_range": 0.01, "learning_rate": 3e-3, "block_size": 32,
         "max_steps": 1000, "eval_steps": 50},
        # A model that knows the tokens of the period, but not their order, has the mean of ln(period): twice `half`.
        solved=0.75, half=sum(map(math.log, range(4, 13))) / 18, exercise=make_induction,
        shape={"tokens": 32, "shortest": 4, "longest": 12, "length": 32}, vocabulary=32,
    ),
    "text": Task(
        {**_COMMON, "law": "signed_constant", "n_layer": 2, "n_embd": 128, "n_head": 2, "vocab_size": 1024,
         "block_size": 64, "per_device_train_batch_size": 16, "max_steps": 300, "validation_blocks": 256,
         "eval_steps": 100},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One run: a task, the changes to its base, a seed, and the experiments that draw it."""

    task: str
    changes: tuple[tuple[str, Any], ...]
    seed: int
    experiments: tuple[str, ...]

    @property
    def id(self) -> str:
        """Name of the run, for `--point` and for its folder."""
        changes = (f"{name}={value}" for name, value in self.changes)
        return " ".join([self.task, *changes, f"seed={self.seed}"])

    @property
    def settings(self) -> dict[str, Any]:
        """All arguments of `measure`."""
        of = {"task": self.task, **TASKS[self.task].base, **dict(self.changes), "seed": self.seed}
        return {**of, "quantised": True} if "bytes" in self.experiments else of


def settings_of(task: str, **changes: Any) -> tuple[tuple[str, Any], ...]:
    """Return the changes sorted by name, without those that equal the base of the task."""
    base = TASKS[task].base
    return tuple((name, value) for name, value in sorted(changes.items()) if base.get(name) != value)


def points_of(runs: Iterable[tuple[str, int, str, dict[str, Any]]]) -> list[Point]:
    """Return the points of runs (experiment, seed, task, changes). A run of several experiments becomes one point."""
    found: dict[tuple, list[str]] = {}
    for experiment, seed, task, changes in runs:
        found.setdefault((task, settings_of(task, **changes), seed), []).append(experiment)
    return [Point(*key, tuple(dict.fromkeys(names))) for key, names in found.items()]


FACTORS = (1, 1.41, 2, 2.83, 4, 5.66, 8)  # powers of sqrt 2: n^(1/4) of 16, 64 and 256 are among them
PAPER_FACTORS = (1, 1.5, 2, "paper", 3.5, 4, 5)
KINDS: tuple[dict[str, Any], ...] = ({"control": "dense"}, {"qk_scale": 1}, {"qk_scale": "paper"})  # figure 7
PLAIN = {"qk_scale": "paper"}  # each ablation changes one setting of it
ABLATIONS: dict[str, dict[str, Any]] = {
    "signed constant, density 0.5, rate 1e-2": PLAIN,
    "normal law": {**PLAIN, "law": "normal"},
    "uniform law, U[-1, 1]": {**PLAIN, "law": "uniform"},
    "xavier uniform law": {**PLAIN, "law": "xavier_uniform"},
    "density 0.7": {**PLAIN, "density": 0.7},
    "density 0.3": {**PLAIN, "density": 0.3},
    "embeddings frozen": {**PLAIN, "embedding": "frozen"},
    "embeddings trained": {**PLAIN, "embedding": "trained"},
    "no width-aware scale": {**PLAIN, "scale_with_width": False},
    "no LayerNorm": {**PLAIN, "layer_norm": False},
    "score rate 3e-3": {**PLAIN, "learning_rate": 3e-3},  # or initial scores 3 times as large
    "score rate 3e-2": {**PLAIN, "learning_rate": 3e-2},
    "score rate 5e-3, factor 2 (as nano)": {"learning_rate": 5e-3, "qk_scale": 2},
    "SGD, rate 1": {**PLAIN, "optim": "sgd", "learning_rate": 1.0},
    "SGD, rate 10": {**PLAIN, "optim": "sgd", "learning_rate": 10.0},
    "dense, rate 1e-3": {"control": "dense", "weight_learning_rate": 1e-3},
    "dense, rate 3e-3": {"control": "dense"},
}


def points(preset: Preset) -> list[Point]:
    """Return every run of a preset, the most informative first."""
    plan = list(planned_runs(preset))
    return points_of(
        (experiment, seed, EXPERIMENTS[experiment][0], {**changes, **preset.shorter})
        for experiment in EXPERIMENTS
        for seed in range(preset.seeds[experiment])  # so a study that is stopped has all settings of a seed
        for name, changes in plan
        if name == experiment
    )


def planned_runs(preset: Preset) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield an experiment and the settings that one of its runs changes."""
    # Without LayerNorm, embeddings of GPT-2's size would give queries, keys and logits near zero.
    bare = {"layer_norm": False, "embedding_range": 0.05}
    dense = {"control": "dense"}
    stock = {**dense, "n_qk": None, "n_v": None}

    for width, factor in product(preset.head_widths, preset.factors):
        yield "recall", {"n_qk": width, "qk_scale": factor}
    yield "recall", stock
    for width, factor in product(preset.head_widths, preset.no_norm_factors):
        yield "no_norm", {"n_qk": width, "qk_scale": factor, **bare}
    for width, factor in product(preset.head_widths, preset.factors[:-1]):
        yield "induction", {"n_qk": width, "qk_scale": factor}
    for rate in preset.dense_rates[:2]:
        yield "induction", {**stock, "embedding_range": None, "weight_learning_rate": rate}
    for factor in preset.no_norm_factors[:4]:
        yield "induction_no_norm", {"qk_scale": factor, **bare}

    for factor in preset.text_factors:
        yield "fig8", {"qk_scale": factor}
    for steps, factor in product(preset.longer, (1, 2, "paper")):
        if factor != 1 or steps == preset.longer[0]:
            yield "longer", {"qk_scale": factor, "max_steps": steps}
    for density in preset.densities:
        yield "bytes", {**PLAIN, "density": density}
        yield "bytes", {**PLAIN, "density": density, "embedding": "trained"}
    # Every width gets several rates, for a fair comparison.
    for width, rate in product(preset.dense_widths, preset.dense_rates):
        yield "bytes", {**dense, "n_embd": width, "weight_learning_rate": rate}
    for steps in preset.longer:  # a step of a small dense model is faster, so it gets more steps
        yield "bytes", {**PLAIN, "max_steps": steps}
        small = {"density": 0.3, "embedding": "trained", "embedding_bits": 4}
        yield "bytes", {**PLAIN, "max_steps": steps, **small}
        for width, rate in product(preset.longer_widths, preset.longer_rates):
            yield "bytes", {**dense, "n_embd": width, "max_steps": steps, "weight_learning_rate": rate}
    for name in preset.ablations:
        yield "ablations", ABLATIONS[name]
    for (width, depth), kind in product(preset.sizes, KINDS):
        yield "fig7", {"n_embd": width, "n_layer": depth, **kind}


# -- one run ----------------------------------------------------------------------------------------


class UntilSolved(TimedRun):
    """A run that ends when the validation loss is below `solved`."""

    solved: float | None = None

    def evaluate(self) -> bool:
        """Evaluate, and end the run if the task is solved."""
        improved = super().evaluate()
        if self.solved is not None and self.best is not None and self.best[1] < self.solved:
            self.steps = self.done
        return improved


@cache
def corpus_of(task: str, count: int, **data: Any) -> Corpus:
    """Return the embedded corpus, or `count` new sequences. Every seed has the same ones, in another order."""
    made = TASKS[task]
    if made.exercise is None:
        return load_blocks(DataArguments(**data))
    train, validation = made.exercise(count, 1, **made.shape), made.exercise(256, 2, **made.shape)
    return Corpus(train, validation, numbers_tokenizer(made.vocabulary), task, f"{task} {count} {made.shape}")


def measure(task: str, quantised: bool = False, **settings: Any) -> Record:
    """Run a point and return its record."""
    solved = TASKS[task].solved
    data = {
        name: settings[name] for name in ("vocab_size", "block_size", "validation_blocks") if name in settings
    }

    def make_run(arguments: Arguments) -> UntilSolved:
        count = arguments.run.max_steps * arguments.run.per_device_train_batch_size
        run = UntilSolved(arguments, corpus_of(task, count, **data))
        run.solved = solved
        return run

    with studies.trained_run(settings, make_run) as run:
        report = run.finish()
        found = outcome(report, run.log.records)
        found["solved"] = None if solved is None else report["best_loss"] < solved
        if quantised:
            found["stored"] = stored_forms(run, found)
        return found | {"seconds": round(run.seconds, 1)}


def outcome(report: dict[str, Any], log: Iterable[dict[str, Any]]) -> Record:
    """Return the losses and sizes of a run."""
    return {
        **{name: report[name] for name in ("steps", "loss", "best_loss", "text")},
        "curve": [(seen["step"], seen["loss"]) for seen in log if seen["kind"] == "evaluation"],
        **sizes_of(Path(report["saved"])),
    }


# -- sizes ------------------------------------------------------------------------------------------


def sizes_of(folder: Path) -> dict[str, Any]:
    """Return the non-zero parameters and the bytes of a saved ticket or dense model."""
    files = list(folder.glob("*.safetensors"))
    file_bytes = sum(path.stat().st_size for path in files)
    if not (folder / MASK_FILE).exists():
        nonzero = sum(array.size for path in files for array in load_file(path).values())
        return {"nonzero": nonzero, "file_bytes": file_bytes, "mask_bytes": 0}
    header = read_header(folder / MASK_FILE)
    entries = header.tensors.values()
    return {
        "nonzero": sum(kept_of(header, entry) for entry in entries),
        "file_bytes": file_bytes,
        "mask_bytes": math.ceil(sum(map(entropy_bits, entries)) / 8),
        "value_bytes": sum(map(value_bytes, entries)),
    }


def trained_weights(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of a model that are not scores."""
    return [weight for name, weight in model.named_parameters() if not name.endswith("scores")]


def store_trained(model: torch.nn.Module, bits: int) -> int:
    """Round the trained weights of a model as if stored in `bits` bits each. Return the bytes that they take.

    Below 16 bits, matrices are quantised; vectors (gains, biases) always stay float16.
    """
    total = 0
    with torch.no_grad():
        for weight in trained_weights(model):
            if bits < 16 and weight.dim() == 2:
                back, _, steps = round_groups(weight, 2**bits - 1)
                size = math.ceil(weight.numel() * bits / 8) + 2 * len(steps)
            else:
                back, size = weight.half().float(), 2 * weight.numel()
            weight.copy_(back)
            total += size
    return total


def stored_forms(run: Run, found: Record) -> list[dict[str, Any]]:
    """Return bytes and loss with the trained weights in 16, 8 and 4 bits. Masks count with their entropy."""
    masks = found["mask_bytes"]
    if (bits := run.arguments.model.embedding_bits) != 32:  # trained and stored with these bits
        return [{"bits": bits, "bytes": masks + found["value_bytes"], "loss": found["loss"]}]
    whole = run.accelerator.unwrap_model(run.model)
    forms = []
    for bits in (16, 8, 4) if trained_weights(whole) else (0,):
        model = copy.deepcopy(whole)
        size = masks + store_trained(model, bits)
        at_once = run.options.per_device_train_batch_size
        batches = validation_batches(run.corpus.validation, at_once, run.accelerator)
        forms.append({"bits": bits, "bytes": size, "loss": evaluate_blocks(model, batches)["loss"]})
    return forms


def repeat(point: Point, records: Records) -> int:
    """Run one point again and compare it with its record. Return 0 if every loss is bit-identical."""
    ((_, found),) = studies.measure_all(measure, [point.settings], workers=1)
    print(f"{point.id}: loss {found['loss']!r} after {found['steps']} steps, {found['seconds']} s")
    known = records.get(point.settings)
    if known is None:
        print("no record of it yet")
        return 0
    same = json.loads(json.dumps(found["curve"])) == known["curve"]
    print("the same as recorded" if same else f"recorded: {known['loss']!r} after {known['steps']} steps")
    return 0 if same else 1


# -- numbers from records ---------------------------------------------------------------------------


def factor_of(record: Record) -> float:
    """Return the query/key factor of a record as a number."""
    of = record["of"]
    width = of.get("n_qk") or of["n_embd"] // of["n_head"]
    return width**0.25 if of["qk_scale"] == "paper" else float(of["qk_scale"])


def taken(record: Record) -> float:
    """Return the steps until a mask switched, interpolated between two evaluations; infinite if it never did."""
    half = TASKS[record["of"]["task"]].half
    before, high = 0, math.nan
    for step, loss in record["curve"]:
        if loss < half:
            return step if math.isnan(high) else step - (step - before) * (half - loss) / (high - loss)
        before, high = step, loss
    return math.inf


def bottom(points: Iterable[tuple[float, float]]) -> float | None:
    """Return where a parabola through the points (over log x) is lowest, or None if it has no minimum."""
    x, y = zip(*points, strict=True)
    a, b, _ = np.polyfit(np.log(x), y, 2)
    return math.exp(-b / (2 * a)) if a > 0 else None


def quickest_factor(records: Iterable[Record]) -> float | None:
    """Return the minimum of a parabola through log steps over log factor, for factors where all seeds switched."""
    steps = {factor: [taken(r) for r in records] for factor, records in group(records, factor_of).items()}
    points = [(f, statistics.mean(map(math.log, s))) for f, s in steps.items() if max(s) < math.inf]
    return bottom(points) if len(points) >= 4 else None


def lowest_factor(records: Iterable[Record]) -> float | None:
    """Return the minimum of a parabola over log factor through the lowest mean loss and its two neighbours."""
    groups = group(records, factor_of)
    points = [(factor, statistics.mean(best_losses(records))) for factor, records in groups.items()]
    lowest = min(range(len(points)), key=lambda place: points[place][1])
    enclosed = 0 < lowest < len(points) - 1
    return bottom(points[lowest - 1 : lowest + 2]) if enclosed else None


def best_losses(records: Iterable[Record]) -> list[float]:
    """Return the lowest validation loss of each record."""
    return [record["best_loss"] for record in records]


# -- figures ----------------------------------------------------------------------------------------

Found = dict[str, list[Record]]  # by experiment


def draw_losses(axes: Any, groups: dict[float, list[Record]], place: int, label: str | None) -> list[float]:
    """Draw a line through the mean of each group's lowest losses, with standard deviations. Return the means."""
    means = [statistics.mean(best_losses(records)) for records in groups.values()]
    spreads = [np.std(best_losses(records), ddof=min(1, len(records) - 1)) for records in groups.values()]
    axes.errorbar(list(groups), means, spreads, capsize=3, label=label, **line(place))
    return means


def draw_widths(every: Iterable[Any], widths: Iterable[int]) -> None:
    """Draw a dotted line at n^(1/4) for every head width."""
    for axes, (place, n) in product(every, enumerate(widths)):
        axes.axvline(n**0.25, color=f"C{place}", linestyle=":", linewidth=1)


def show_factors(axes: Any, factors: Iterable[float]) -> None:
    """Label the axis of query/key factors."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(factors)))
    axes.xaxis.set_major_formatter("{x:.3g}")


def draw_switching(column: Any, curves: dict[str, list[Record]]) -> None:
    """Draw the share of seeds that switch (above), and the steps they need (below): the median and each seed."""
    shares, steps = column
    found = [record for records in curves.values() for record in records]
    if not found:
        return
    longest = found[0]["of"]["max_steps"]
    for place, (label, records) in enumerate(curves.items()):
        groups = group(records, factor_of)
        # A seed that never switches is drawn above all others. This does not spoil a median.
        needed = [[min(taken(record), longest * 1.1) for record in group] for group in groups.values()]
        if (best := quickest_factor(records)) is not None:
            label += f": quickest at {best:.1f}"
        shares.plot(list(groups), [np.mean(np.array(n) <= longest) for n in needed], alpha=0.8, **line(place))
        steps.plot(list(groups), list(map(statistics.median, needed)), label=label, alpha=0.8, **line(place))
        for factor, seeds in zip(groups, needed, strict=True):
            steps.plot([factor] * len(seeds), seeds, ".", color=f"C{place}", alpha=0.35)
    half = TASKS[found[0]["of"]["task"]].half
    shares.set(ylabel=f"share of seeds below {half:.2f} nats", ylim=(-0.05, 1.05))
    steps.set(ylabel="steps to get there, median", xlabel="factor on query and key weights")
    steps.axhline(longest, color="grey", linestyle="--", linewidth=1)
    steps.legend(title="above the dashes: never", framealpha=0.5)
    for axes in column:
        show_factors(axes, map(factor_of, found))


def of_widths(records: Iterable[Record]) -> tuple[list[int], dict[str, list[Record]]]:
    """Return the head widths, and the records of tickets of each width by a label."""
    groups = group(select(records, control=None), "n_qk")
    return list(groups), {f"head width {n}": records for n, records in groups.items()}


def draw_recall(preset: Preset, found: Found, study: Study) -> None:
    """Draw after how many steps recall is solved, with and without LayerNorm."""
    figure, grid = panels(2, 2, 10, 6.5, sharey="row")
    titles = {"recall": "with LayerNorm", "no_norm": "without LayerNorm"}
    for column, (experiment, title) in zip(grid.T, titles.items(), strict=True):
        widths, curves = of_widths(found[experiment])
        draw_switching(column, curves)
        draw_widths(column, widths)
        column[0].set_title(f"Recall {title} (dotted: n^(1/4))")
    study.save(figure, "recall")


def draw_induction(preset: Preset, found: Found, study: Study) -> None:
    """Draw after how many steps induction is solved, and the lowest losses."""
    figure, grid = panels(2, 2, 11, 7)
    (shares, losses), (steps, curves) = grid
    task = TASKS["induction"]
    widths, lines = of_widths(found["induction"])
    if not widths:
        return
    draw_switching((shares, steps), lines)
    shares.set_title("Induction (dotted: n^(1/4))")
    draw_widths((shares, losses, steps), widths)

    bare = {"head width 64, no LayerNorm": found["induction_no_norm"]} if found["induction_no_norm"] else {}
    for place, (label, records) in enumerate({**lines, **bare}.items()):
        lowest = lowest_factor(records)
        label += "" if lowest is None else f": lowest at {lowest:.1f}"
        draw_losses(losses, group(records, factor_of), place, label)
    show_factors(losses, preset.factors)
    losses.set(xlabel="factor on query and key weights", ylabel="lowest validation loss, mean and std")
    losses.set_title(f"Runs end below {task.solved}")

    middle = widths[len(widths) // 2]
    for factor, records in group(lines[f"head width {middle}"], factor_of).items():
        curves.plot(*zip(*records[0]["curve"], strict=True), label=f"factor {factor:g}")
    dense = select(found["induction"], control="dense", seed=0)
    for style, record in zip(("--", ":"), dense, strict=False):
        label = f"dense, rate {record['of']['weight_learning_rate']:g}"
        curves.plot(*zip(*record["curve"], strict=True), style, color="black", label=label)
    curves.set(xlabel="optimizer step", ylabel="validation loss (nats per token)")
    curves.set_title(f"Head width {middle}, seed 0")
    for axes in (losses, curves):
        axes.axhline(task.half, color="grey", linewidth=1, linestyle="--")
        axes.legend()
    study.save(figure, "induction")


def draw_fig8(preset: Preset, found: Found, study: Study) -> None:
    """Draw a line for each model and length of training: mean and std over seeds."""
    figure, ((axes,),) = panels(1, 1, 7.5, 4.8)
    tickets = [*found["fig8"], *found["longer"]]
    models = group(tickets, lambda record: (record["of"]["task"], record["steps"]))
    for place, ((task, steps), records) in enumerate(models.items()):
        groups = group(records, factor_of)
        seeds = max(map(len, groups.values()))
        model = f"{task}, width {records[0]['of']['n_embd']}"
        draw_losses(axes, groups, place, f"{model}: {steps} steps, {seeds} seed{'s'[: seeds - 1]}")
    for width in {record["of"]["n_embd"] // record["of"]["n_head"] for record in tickets}:
        axes.axvline(width**0.25, color="grey", linestyle=":", label="n^(1/4)")
    axes.set(xlabel="factor on query and key weights", ylabel="validation loss (nats per token)")
    axes.set_title("Figure 8: mean and std over seeds")
    axes.legend()
    study.save(figure, "fig8")


def draw_bytes(preset: Preset, found: Found, study: Study) -> None:
    """Draw loss against bytes, with a panel for each length of training; of several rates, only the best is shown."""
    lengths = group(found["bytes"], "max_steps")
    figure, ((*row,),) = panels(1, len(lengths), 4.4 * len(lengths) + 1, 4.6)
    ticket: dict[str, Any] = {"control": None, "embedding": "trained"}
    curves: list[tuple[str, dict[str, Any], int]] = [
        ("ticket, all masked", {**ticket, "embedding": None}, 0),
        *((f"ticket, embeddings in {bits} bits", ticket, bits) for bits in (8, 4)),
        *((f"dense, {bits} bits", {"control": "dense"}, bits) for bits in (16, 8, 4)),
    ]
    for axes, (steps, records) in zip(row, lengths.items(), strict=True):
        for place, (label, kind, bits) in enumerate(curves):
            forms = [form for record in select(records, **kind) for form in record["stored"]]
            sizes = [(form["bytes"] / 1000, form["loss"]) for form in forms if form["bits"] == bits]
            if best := dict(sorted(sizes, key=lambda form: (form[0], -form[1]))):  # keeps the lowest loss
                dashes = "--" if label.startswith("dense") else "-"
                axes.plot(list(best), list(best.values()), dashes, label=label, **line(place))
        axes.set(xlabel="kilobytes (masks at log2 C(n, k) bits)", ylabel="validation loss (nats per token)")
        axes.set_xscale("log")
        axes.set_xticks([20, 50, 100, 200, 500], minor=False)
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(f"Equal bytes after {steps} steps")
        axes.legend()
    study.save(figure, "bytes")


def draw_ablations(preset: Preset, found: Found, study: Study) -> None:
    """Draw the loss of each ablation."""
    figure, ((axes,),) = panels(1, 1, 8, 0.4 * len(preset.ablations) + 1.2)
    unset = dict.fromkeys(name for changes in ABLATIONS.values() for name in changes)
    base = {**unset, **TASKS["text"].base}
    rows = {
        name: best_losses(select(found["ablations"], **{**base, **ABLATIONS[name], **preset.shorter}))
        for name in reversed(preset.ablations)
    }
    rows = {name: losses for name, losses in rows.items() if losses}
    for place, losses in enumerate(rows.values()):
        axes.plot(losses, [place] * len(losses), "o", color="C0", alpha=0.7)
        beside: dict[str, Any] = {"xytext": (8, -3), "textcoords": "offset points", "fontsize": 8}
        axes.annotate(f"{statistics.mean(losses):.3f}", (max(losses), place), **beside)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xlabel("validation loss (nats per token), one dot a seed")
    axes.margins(x=0.15)
    study.save(figure, "ablations")


def draw_fig7(preset: Preset, found: Found, study: Study) -> None:
    """Draw loss against non-zero parameters."""
    figure, ((axes,),) = panels(1, 1, 7, 4.5)
    labels = ("trained model", "ticket, factor 1", "ticket, factor n^(1/4)")
    for place, (label, kind) in enumerate(zip(labels, KINDS, strict=True)):
        records = select(found["fig7"], **kind)
        models = group(records, lambda record: (record["of"]["task"], record["of"].get("n_layer")))
        for number, same in enumerate(models.values()):
            groups = group(same, lambda record: record["nonzero"])
            means = draw_losses(axes, groups, place, label if number == 0 else None)
            for (size, (first, *_)), loss in zip(groups.items(), means, strict=True):
                of = first["of"]
                name = f"{of['n_layer']} x {of['n_embd']}" if "n_layer" in of else str(of["n_embd"])
                beside: dict[str, Any] = {"xytext": (6, 6), "textcoords": "offset points", "fontsize": 8}
                axes.annotate(name if place == 0 else "", (size, loss), **beside)
    axes.set(xlabel="non-zero parameters", ylabel="validation loss (nats per token)", xscale="log")
    axes.set_title("Figure 7: mean and std over seeds (beside the trained: layers x width)")
    axes.legend()
    study.save(figure, "fig7")


EXPERIMENTS = {  # their tasks, and the figures that show them
    "recall": ("recall", draw_recall),
    "no_norm": ("recall", draw_recall),
    "induction": ("induction", draw_induction),
    "induction_no_norm": ("induction", draw_induction),
    "fig8": ("text", draw_fig8),
    "longer": ("text", draw_fig8),
    "bytes": ("text", draw_bytes),
    "ablations": ("text", draw_ablations),
    "fig7": ("text", draw_fig7),
}
PRESETS = studies.presets(
    {
        "factors": FACTORS,
        "no_norm_factors": (2, 4, 8, 16, 32),
        "text_factors": PAPER_FACTORS,
        "head_widths": (16, 64, 256),
        "densities": (0.05, 0.15, 0.3, 0.5, 0.7),
        "dense_widths": (32, 48, 64, 96),
        "dense_rates": (1e-3, 3e-3, 1e-2),
        "longer": (900, 2700),
        "longer_widths": (48, 64, 72),
        "longer_rates": (3e-3,),  # the best of dense_rates for widths 48 and 64
        "ablations": tuple(ABLATIONS),
        "sizes": ((64, 2), (128, 2), (128, 4)),  # figure 7: width, depth
        "shorter": {},  # changes to every run
    },
    cpu={
        "seeds": {"recall": 3, "no_norm": 2, "induction": 3, "induction_no_norm": 1}
        | {"fig8": 3, "longer": 1, "bytes": 1, "ablations": 2, "fig7": 2}
    },
    long={
        "seeds": dict.fromkeys(EXPERIMENTS, 5),
        "no_norm_factors": (2, 2.83, 4, 5.66, 8, 11.3, 16, 22.6),
        "densities": (0.05, 0.1, 0.15, 0.3, 0.5, 0.7),
        "sizes": ((64, 1), (64, 2), (128, 1), (128, 2), (128, 4), (256, 4)),
        "longer": (900, 2700, 8100),
        "longer_rates": (1e-3, 3e-3),
    },
    quick={
        "seeds": dict.fromkeys(EXPERIMENTS, 1),
        "factors": (1, 2.83, 4),
        "no_norm_factors": (8,),
        "text_factors": (1, "paper"),
        "head_widths": (16,),
        "densities": (0.5,),
        "dense_widths": (64,),
        "dense_rates": (3e-3,),
        "longer": (),
        "ablations": ("normal law",),
        "sizes": ((64, 1),),
        "shorter": {
            "max_steps": 3,
            "eval_steps": 2,
            "n_embd": 32,
            "n_layer": 1,
            "per_device_train_batch_size": 4,
        },
    },
)


def found_of(points: Iterable[Point], records: Records) -> Found:
    """Return the records of every experiment, in the order of the points."""
    found: Found = {experiment: [] for experiment in EXPERIMENTS}
    for point in points:
        for experiment in point.experiments if records.get(point.settings) else ():
            found[experiment].append(records.get(point.settings))
    return found


# -- command line -----------------------------------------------------------------------------------


def leave_launch() -> bool:
    """Return whether this is an extra process of `accelerate launch`, and leave the process group.

    Points are independent, and the study starts its own workers, so one process is enough.
    """
    others = int(os.environ.get("RANK", 0)) > 0
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return others


def main() -> int:
    """Run the points that the command line asks for and draw their figures."""
    if leave_launch():
        return 0
    parser = studies.parser_of(__doc__, PRESETS, EXPERIMENTS)
    parser.add_argument("--point", metavar="ID", help="run one point again and compare it with its record")
    parser.add_argument("--list", action="store_true", help="print the id of every point and stop")
    options = parser.parse_args()
    study = Study("gpt2", "cpu", options)
    preset = PRESETS[options.preset]
    all_points = points(preset)
    chosen = [point for point in all_points if set(point.experiments) & set(options.only)]
    if options.list:
        print("\n".join(point.id for point in chosen))
        return 0
    records = study.records(point.settings for point in all_points)
    if options.point:
        named = {point.id: point for point in all_points}
        if options.point not in named:
            parser.error(f"no point {options.point!r}; --list names them all")
        return repeat(named[options.point], records)
    records.measure(measure, (point.settings for point in chosen), options.workers)
    found = found_of(all_points, records)
    for draw in dict.fromkeys(EXPERIMENTS[name][1] for name in options.only if preset.seeds[name]):
        draw(preset, found, study)
    return 0


if __name__ == "__main__":
    sys.exit(main())
