"""Which model is best for its bytes: a strict ticket, a ternary or binary network, a dense one in 2 to 4 bits?

    python recipes/equal_bytes.py --list                          # every run: known, or what it would cost
    python recipes/equal_bytes.py --only search --workers 1       # parts of the study, in the order named
    python recipes/equal_bytes.py --data FOLDER                   # all parts; FOLDER has the files of the texts
    python recipes/equal_bytes.py --only page                     # only write the page again
    python recipes/equal_bytes.py --preset quick                  # a smoke test of a minute

Every contestant has the same text, tokenizer, loop and tokens, and a file of the same bytes (rivals.py).

search      each option of each contestant in turn, the best value kept: 1,000 steps, 115 kB, seed 0. Every
            contestant has the same number of trials, and its width is what its bytes allow.
lengths     the rates again, whole, half and quarter, at 3,000 steps
last        four more trials of each contestant at 3,000 steps: beyond the edge of its search, or what it has not had
115 60 230  3,000 steps, kB of the file, three seeds
seconds     115 kB with as many steps as fit in the seconds of the reference
wiki_115    articles of Wikipedia, 115 kB, three seeds; wiki_1000 with 1 MB, one seed
longer      10,000 steps at 115 kB, seed 0

Settings are chosen by the loss on the validation part, tables show the loss on the test part: the held-out
documents in turn belong to the one and to the other. A run that has a record is not run again; one that was
killed is resumed from its last checkpoint in runs/.

results/equal_bytes.json   every run: kind, bytes, steps, seed, text, losses, seconds and all settings
docs/equal_bytes.md        the tables; figures/equal_bytes.png their figure
"""

import math
import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import studies
from rivals import FlatRecords, kind_of, measure
from studies import HERE, Point, Record, Study, line, panels
from tables import markdown_table

from hf_slt.tickets.files import replacing

LOOP = {
    "n_layer": 1, "n_head": 4, "block_size": 128, "per_device_train_batch_size": 8, "warmup_steps": 30,
    "min_lr_rate": 0, "validation_blocks": 256, "test_part": True,
}  # fmt: skip
TICKET = {
    **LOOP, "law": "signed_constant", "scale_with_width": True, "qk_scale": 2, "scales": "row", "scale_bits": 8,
    "layer_norm": "trained", "score_decay": 0.5, "learning_rate": 5e-3, "weight_learning_rate": 3e-3,
}  # fmt: skip
STOCK = {
    **LOOP, "control": "dense", "step": "largest", "vector_bits": 8, "dense_std": 0.08, "weight_decay": 0.1,
    "weight_learning_rate": 4e-3, "step_learning_rate": 1e-3,
}  # fmt: skip
RATES = ("learning_rate", "weight_learning_rate", "step_learning_rate")
RATE_DIVISORS = (1, 2, 4)  # tried at full length, as longer runs want lower rates
Options = tuple[tuple[str, tuple[Any, ...]], ...]


@dataclass(frozen=True)
class Contestant:
    """One row of the tables.

    Args:
        settings (`dict`):
            Options of the training loop and of `rivals.measure`, before the search. Any options of a rule can
            be among them.
        bits (`dict`):
            Bits per weight in the file, about, by kind of step (None for tickets). Used until a run has measured
            it.
        search (`tuple`):
            Options with the values to try beside the present one, in this order.
        last (`tuple`):
            Changes of the best settings to try last, at full length. The best one counts if it is an improvement.
    """

    settings: dict[str, Any]
    bits: dict[str | None, float]
    search: Options
    last: tuple[dict[str, Any], ...]


def ticket_search(option: str, value: Any) -> Options:
    """Return the trials of a ticket: 10, as for every contestant. One of them is of an option of its rule."""
    return (
        ("learning_rate", (2.5e-3, 1e-2)),
        ("weight_learning_rate", (1.5e-3, 6e-3)),
        ("score_decay", (0.2, 1.0)),
        (option, (value,)),
        ("n_layer", (2,)),
        ("relaxed_steps", (0.5, 0.8)),
    )


def dense_search(step: str) -> Options:
    """Return the trials of a rounded model: 10, as for every contestant."""
    return (
        ("weight_learning_rate", (2e-3, 8e-3)),
        ("dense_std", (0.04, 0.16)),
        ("weight_decay", (0.0, 0.5)),
        ("step", (step,)),
        ("n_layer", (2,)),
        ("relaxed_steps", (0.5, 0.8)),
    )


def last_of_dense(step: str) -> tuple[dict[str, Any], ...]:
    """Return the last trials of a rounded model, one with the other kind of step."""
    return (
        {"weight_decay": 1.0},
        {"relaxed_steps": 0.9},
        {"weight_restart": 0.01},
        {"weight_restart": 0.003, "step": step},
    )


SIX_CODES = {"branches": 6, "unit": "row", "weight_restart": 0.01}
CONTESTANTS = {
    # The mask keeps or drops. Scales of rows and gains of LayerNorm are learned beside it.
    "strict, edge_popup": Contestant(
        {**TICKET, "rule": "edge_popup", "density": 0.5},
        {None: 1.0},
        ticket_search("density", 0.4),
        (
            {"density": 0.3},
            {"mask_steps": 4},
            {"weight_restart": 0.01},
            {"density": 0.5, "weight_restart": 0.01},
        ),
    ),
    # Every weight is one of the numbers that were drawn for its tensor, chosen by a path: a random code.
    "strict, trellis": Contestant(
        {**TICKET, "law": "normal", "rule": "trellis", "branches": 4, "states": 256},
        {None: 2.0},
        ticket_search("states", 64),
        (
            {"states": 4096, "mask_steps": 4},
            {"states": 4096, "mask_steps": 8},
            {**SIX_CODES, "states": 1296, "mask_steps": 4},
            {**SIX_CODES, "states": 7776, "mask_steps": 8},
        ),
    ),
    # The mask sets signs: a ternary network, in which the seed carries nothing.
    "ternary, rule signed": Contestant(
        {**TICKET, "rule": "signed", "density": 0.7},
        {None: 1.58},
        ticket_search("density", 0.6),
        (
            {"density": 0.8},
            {"mask_steps": 4},
            {"density": 0.8, "weight_restart": 0.01},
            {"density": 0.8, "weight_restart": 0.003},
        ),
    ),
    "dense int4": Contestant(
        {**STOCK, "rounding": "int4"},
        {"learned": 3.3, "largest": 3.5},
        dense_search("learned"),
        last_of_dense("learned"),
    ),
    "dense int3": Contestant(
        {**STOCK, "rounding": "int3"},
        {"learned": 2.5, "largest": 2.4},
        dense_search("learned"),
        last_of_dense("learned"),
    ),
    "dense int2": Contestant(
        {**STOCK, "rounding": "int2"},
        {"learned": 1.75, "largest": 1.5},
        dense_search("learned"),
        last_of_dense("learned"),
    ),
    "ternary, rounded": Contestant(
        {**STOCK, "rounding": "ternary", "step": "mean"},
        {"learned": 1.45, "mean": 1.57},
        dense_search("learned"),
        last_of_dense("learned"),
    ),
    "binary, rounded": Contestant(
        {**STOCK, "rounding": "binary", "step": "mean"},
        {"learned": 1.0, "mean": 1.0},
        dense_search("learned"),
        last_of_dense("learned"),
    ),
}
REFERENCE = "strict, edge_popup"  # whose seconds the others get in the column of equal seconds
TRIALS = 1 + sum(len(values) for _, values in CONTESTANTS[REFERENCE].search) + len(RATE_DIVISORS)
TRIALS += len(CONTESTANTS[REFERENCE].last)
WIKI = {"train_files": ["enwiki2014-train.parquet"], "validation_files": ["enwiki2014-valid.parquet"]}
# By text and bytes: the vocabulary, whose table is about half of a small model, and what else is special.
TEXTS: dict[str, dict[str, Any]] = {
    "embedded": {"vocab_size": 2048},
    "enwiki2014, 115 kB": {**WIKI, "vocab_size": 2048, "train_blocks": 78_125},  # 10 million tokens
    "enwiki2014, 1 MB": {**WIKI, "vocab_size": 8192, "train_blocks": 78_125, "n_head": 8, "n_layer": 2},
}
LENGTHS = {"quick": (2, 4), "cpu": (1000, 3000)}  # steps of the search, and of the tables
QUICK = {
    "n_head": 1,
    "block_size": 16,
    "per_device_train_batch_size": 2,
    "validation_blocks": 4,
    "vocab_size": 300,
}
SEARCH_BYTES = 115_000


@dataclass(frozen=True)
class Row:
    """Where contestants meet: a part of the study with a table of its own."""

    text: str
    bytes: int
    seeds: int
    longer: int = 1  # times the steps of the other rows


ROWS = {
    "115": Row("embedded", 115_000, 3),
    "60": Row("embedded", 60_000, 3),
    "230": Row("embedded", 230_000, 3),
    "wiki_115": Row("enwiki2014, 115 kB", 115_000, 3),
    "wiki_1000": Row("enwiki2014, 1 MB", 1_000_000, 1),
    "longer": Row("embedded", 115_000, 1, longer=10),
}
PARTS = (
    "search",
    "lengths",
    "last",
    "115",
    "60",
    "230",
    "wiki_115",
    "seconds",
    "wiki_1000",
    "longer",
    "page",
)

# -- sizes ------------------------------------------------------------------------------------------


def weights_and_extras(settings: Point, width: int) -> tuple[int, int]:
    """Return the number of masked or rounded weights, and the bytes of all else in the file, about."""
    rows = settings["vocab_size"] + settings["block_size"]
    weights = settings["n_layer"] * 12 * width**2 + rows * width
    outputs = rows + settings["n_layer"] * 9 * width  # one scale or step each
    vectors = (2 * settings["n_layer"] + 1) * width  # gains
    if "rounding" not in settings:
        return weights, outputs + vectors + 2_200
    steps = {"learned": outputs, "largest": weights // 32, "mean": 2 * outputs}[settings["step"]]
    return weights, steps + 2 * vectors + settings["n_layer"] * 9 * width + 900


def width_for(settings: Point, bits: float, budget: int) -> int:
    """Return the largest width, a multiple of the heads, whose file has at most 1 % more than the budget."""
    heads, width = settings["n_head"], settings["n_head"]
    while True:
        weights, extras = weights_and_extras(settings, width + heads)
        if weights * bits / 8 + extras > 1.01 * budget:
            return width
        width += heads


def measured_bits(record: Record) -> float:
    """Return the bits per weight of a run's file, by the same count as `width_for`."""
    weights, extras = weights_and_extras(record["of"], record["of"]["n_embd"])
    return 8 * (record["bytes"] - extras) / weights


# -- points -----------------------------------------------------------------------------------------


class Comparison:
    """The points of the study as far as the records so far decide them.

    Args:
        records (`FlatRecords`):
            What was measured.
        names (`Iterable[str]`):
            The contestants that take part.
        quick (`bool`, *optional*, defaults to `False`):
            Whether to run a few steps only.
    """

    def __init__(self, records: FlatRecords, names: Iterable[str], quick: bool = False) -> None:
        self.records, self.names = records, list(names)
        self.trial_steps, self.steps = LENGTHS["quick" if quick else "cpu"]
        self.shrink, self.changes = (20, QUICK) if quick else (1, {})

    def point(
        self, settings: Point, bits: float, size: int, steps: int, seed: int, text: str = "embedded"
    ) -> Point:
        """Return all settings of a run, with the width that its bytes allow."""
        settings = {**settings, **TEXTS[text], **self.changes}
        width = width_for(settings, bits, size // self.shrink)
        return {
            **settings,
            "n_embd": width,
            "max_steps": steps,
            "eval_steps": max(1, steps // 4),
            "seed": seed,
        }

    def known(self, points: Iterable[Point]) -> list[Record]:
        """Return the records of those points that have one."""
        return [record for record in map(self.records.get, points) if record is not None]

    def search(self, name: str) -> tuple[list[Point], dict[str, Any], float]:
        """Return the trials so far and the next ones, the best settings, and the bits per weight with them."""
        contestant = CONTESTANTS[name]
        best = contestant.settings
        points, record = self.trial(best, contestant.bits[best.get("step")])
        if record is None:
            return points, best, contestant.bits[best.get("step")]
        for option, values in contestant.search:
            found = []
            for value in values:
                settings = {**best, option: value}
                bits = contestant.bits[value] if option == "step" else measured_bits(record)
                more, one = self.trial(settings, bits)
                points += more
                found += [(one, settings)] if one else []
            if len(found) < len(values):
                break
            record, best = min([(record, best), *found], key=lambda one: self.rank(one[0]))
        return points, best, measured_bits(record)

    def trial(
        self, settings: Point, bits: float, steps: int | None = None
    ) -> tuple[list[Point], Record | None]:
        """Return the runs of one trial and the record that counts, if there is one yet.

        How well codes compress depends on the settings. Where a file misses its size, a second run has the width
        that the first file allows, and counts instead of it.
        """
        points = [self.point(settings, bits, SEARCH_BYTES, steps or self.trial_steps, 0)]
        record = self.records.get(points[0])
        if record is not None and not 0.97 <= record["bytes"] / (SEARCH_BYTES / self.shrink) <= 1.03:
            again = self.point(settings, measured_bits(record), SEARCH_BYTES, steps or self.trial_steps, 0)
            if again["n_embd"] != points[0]["n_embd"]:
                points.append(again)
                record = self.records.get(again)
        return points, record

    def rank(self, record: Record) -> tuple[bool, float]:
        """Return what trials are ordered by: a file that is too large loses, then the validation loss decides."""
        return record["bytes"] > 1.03 * SEARCH_BYTES / self.shrink, record["validation_loss"]

    def lengths(self, name: str) -> tuple[list[Point], dict[str, Any], float]:
        """Return the trials of rates at full length, the best settings, and the bits per weight with them."""
        _, best, bits = self.search(name)
        divided = [
            {**best, **{rate: best[rate] / divisor for rate in RATES if rate in best}}
            for divisor in RATE_DIVISORS
        ]
        trials = [(self.trial(one, bits, self.steps), one) for one in divided]
        points = [point for (some, _), _ in trials for point in some]
        found = [(record, settings) for (_, record), settings in trials if record is not None]
        if len(found) < len(trials):
            return points, best, bits
        record, settings = min(found, key=lambda one: self.rank(one[0]))
        return points, settings, measured_bits(record)

    def last(self, name: str) -> tuple[list[Point], dict[str, Any], float]:
        """Return the last trials, the best settings, and the bits per weight with them."""
        decided, best, bits = self.lengths(name)
        if len(self.known(decided)) < len(decided):
            return [], best, bits
        changed = [(best, bits)]
        for change in CONTESTANTS[name].last:
            more = {**best, **change}
            if "weight_restart" in more and not more.get("relaxed_steps"):
                more["relaxed_steps"] = 0.5  # without them there is nothing to start again after
            changed.append((more, self.bits_after(name, best, more, bits)))
        trials = [(self.trial(one, its_bits, self.steps), one) for one, its_bits in changed]
        points = [point for (some, _), _ in trials[1:] for point in some]
        found = [(record, settings) for (_, record), settings in trials if record is not None]
        if len(found) < len(trials):
            return points, best, bits
        record, settings = min(found, key=lambda one: self.rank(one[0]))
        return points, settings, measured_bits(record)

    def bits_after(self, name: str, settings: Point, changed: Point, bits: float) -> float:
        """Return the bits per weight to expect after a change: as measured, unless the kind of codes changes."""
        if changed.get("step") != settings.get("step"):
            return CONTESTANTS[name].bits[changed.get("step")]
        if changed.get("branches") != settings.get("branches"):
            return bits + math.log2(changed["branches"] / settings["branches"])
        return bits

    def row(self, name: str, row: Row) -> list[Point]:
        """Return a run for each seed."""
        _, best, bits = self.last(name)
        steps = self.steps * row.longer // (3 if row.longer > 1 else 1)
        return [self.point(best, bits, row.bytes, steps, seed, row.text) for seed in range(row.seeds)]

    def seconds(self, name: str, row: Row) -> list[Point]:
        """Return the run that takes as long as the reference: none before the seconds of both are known."""
        mine, other = (self.known(self.row(one, row)[:1]) for one in (name, REFERENCE))
        if name == REFERENCE or not mine or not other:
            return []
        (point,) = self.row(name, row)[:1]
        steps = point["max_steps"] * other[0]["seconds"] / max(mine[0]["seconds"], 0.1)
        settings = {key: value for key, value in point.items() if key not in ("max_steps", "eval_steps")}
        for record in self.records.found.values():  # of an earlier call, though seconds differ a little
            of = record["of"]
            same = all(of.get(key) == value for key, value in settings.items())
            if same and of["max_steps"] != point["max_steps"] and abs(of["max_steps"] / steps - 1) < 0.05:
                return [of]
        steps = max(1, round(steps, -2 if steps > 1000 else 0))
        return [{**point, "max_steps": int(steps), "eval_steps": max(1, int(steps) // 4)}]

    def points(self, part: str) -> list[Point]:
        """Return the runs of a part, as far as they are decided; seed after seed."""
        if part in ("search", "lengths", "last"):
            return [one for name in self.names for one in getattr(self, part)(name)[0]]
        if part == "seconds":
            return [one for name in self.names for one in self.seconds(name, ROWS["115"])]
        rows = [self.row(name, ROWS[part]) for name in self.names]
        return [one for seed in range(ROWS[part].seeds) for one in (points[seed] for points in rows)]

    def trials(self, name: str) -> int:
        """Return how many runs the choice of a contestant's settings rests on."""
        return len(self.known([*self.search(name)[0], *self.lengths(name)[0], *self.last(name)[0]]))

    def has_all_trials(self, name: str) -> bool:
        """Return whether a contestant's trials have all been run. The last ones follow from those before."""
        last = self.last(name)[0]
        points = [*self.search(name)[0], *self.lengths(name)[0], *last]
        return bool(last) and len(self.known(points)) == len(points)


def cost_of(point: Point, records: FlatRecords) -> float:
    """Return the seconds that a run will take, about: by a run of the same way, or by its weights."""
    weights = weights_and_extras(point, point["n_embd"])[0]
    way = ("rule", "rounding", "step", "n_layer", "branches", "states", "relaxed_steps", "mask_steps")
    alike = [
        record["seconds"]
        / record["of"]["max_steps"]
        / weights_and_extras(record["of"], record["of"]["n_embd"])[0]
        for record in records.found.values()
        if all(record["of"].get(name) == point.get(name) for name in way)
    ]
    return (statistics.median(alike) if alike else 1.6e-7) * weights * point["max_steps"]


# -- the page ---------------------------------------------------------------------------------------

PAGE = """\
# Equal bytes: strict tickets, ternary and binary networks, dense models

*Written by `python recipes/equal_bytes.py --only page` from
[equal_bytes.json](../recipes/results/equal_bytes.json); edit the recipe, not this page.*

If file size is your budget, which model is best for its bytes? All contestants have the same text, tokenizer,
training loop and tokens per step (1,024). Every file is entropy-coded by the same coder and counted whole:
description, scales or steps, gains, biases and codes. The tokenizer is in none of them.

- **strict**: the mask keeps, drops or chooses numbers that the seed drew. Scales of rows and gains of LayerNorm
  are learned beside it. Another seed is another set of models that can be reached.
- **ternary**: weights -1, 0, 1 times a scale per row. *Rule signed* learns them through scores over the law
  `signed_constant`: every ternary matrix can be reached from every seed, so the seed carries nothing. *Rounded*
  trains stock GPT-2 with rounding in the forward.
- **dense**: stock GPT-2 with 15 (int4), 7 (int3) or 4 (int2) uniform levels, rounded in the forward, with a step
  per output unit that is learned as in LSQ (or, if the search prefers it, one for every 64 weights). **binary**
  has 2 levels.

Settings are chosen on the validation part of the held-out text and losses are those of the test part, which no
choice has seen (held-out documents alternate between the two). The search tries the options of each contestant
in turn at 115 kB, 1,000 steps and seed 0, then whole, half and quarter rates at 3,000 steps. The last option of
the search is `relaxed_steps`: to use no mask, or no rounding, in the first half or the first four fifths of all steps
([relaxed steps](rules.md#relaxed-steps)). Then everyone has four more trials of 3,000 steps, each a change of its best
settings; the best one counts if it is an improvement:

- edge_popup: density 0.3; a mask that is used for 4 steps; a rate of scales and gains that starts again at 0.01 when
  the relaxed steps end (`weight_restart`), also with density 0.5.
- rule signed: density 0.8; a mask that is used for 4 steps; density 0.8 with a restart at 0.01, and at 0.003.
- trellis: 4 codes and 4,096 states, a path that is used for 4 and for 8 steps; 6 codes (2.58 bits per weight), scores
  measured by row and a restart at 0.01, with 1,296 and with 7,776 states.
- dense, ternary and binary rounded: weight decay 1; rounding in the last tenth of the steps only; a restart at 0.01; a
  restart at 0.003 with learned steps. Where the search ended without relaxed steps, a restart comes after half of
  all steps.

*Trials* is how many runs that were: {trials} for everyone when the search is complete, and
one more for each trial whose file missed its size by more than 3 % and was run again with the width that its codes
allow. Losses are nats per token, the mean over seeds with the lowest and highest. Seconds are processor time of one
core; many runs were made beside other work, which makes them longer. *Equal seconds*: trained for as long as the
reference ({reference}) needs for its steps, one seed.

**Not counted.** Relaxed steps and the restart were found with trellis, the strict contestant: in two whole runs, in
some fifty runs of the last 600 to 1,500 steps and in about fifteen more whole runs, all at seed 0 of the embedded
corpus. The other contestants got the same options as trials, but nobody looked for options of their own in this way:
in that, trellis had more care than they.

What each search starts from was found in earlier runs, of which tickets had more than dense models
([notes](../recipes/results/equal_bytes_notes.md)). The file of records also holds runs of a first search of the dense
models, from a learned step and without the correction of sizes, and four of trellis with three codes per weight
(1.58 bits, 1 x 140, 243 states): 3.957 after 3,000 steps, where four codes have 3.879. They are not counted as trials.
It also holds rows with the settings that were best before the last four trials.

Texts: the embedded corpus of Python 3.11 (1.05 million tokens, vocabulary 2048), and articles of Wikipedia, of which
10 million tokens are used (vocabulary 2048 for 115 kB; 8192 and two layers for 1 MB, with the other settings as found
at 115 kB on the embedded corpus).
"""
EARLIER = """\
## Earlier runs

Until these runs the study had no test part: settings were chosen and reported on the same blocks, the ternary
ticket had some thirty trials, and dense int4 was counted without a coder. Those runs are not in the tables above.
They are kept with their notes: [equal_bytes_notes.md](../recipes/results/equal_bytes_notes.md) and
[equal_bytes_notes.json](../recipes/results/equal_bytes_notes.json).
"""


def table_rows(comparison: Comparison, row: Row) -> list[dict[str, Any]]:
    """Return a line for each contestant that has a record in a row, the lowest test loss first."""
    lines = []
    for name in comparison.names:
        found = comparison.known(comparison.row(name, row))
        if found:
            losses = [record["loss"] for record in found]
            lines.append({
                "contestant": name, "kind": kind_of(found[0]["of"]), "loss": statistics.mean(losses),
                "lowest": min(losses), "highest": max(losses), "seeds": len(losses),
                "bytes": statistics.mean(record["bytes"] for record in found),
                "seconds": statistics.mean(record["seconds"] for record in found),
                "shape": "{n_layer} x {n_embd}".format(**found[0]["of"]),
                "validation": statistics.mean(record["validation_loss"] for record in found),
                "equal": (comparison.known(comparison.seconds(name, row)) or [None])[0],
                "steps": found[0]["of"]["max_steps"],
            })  # fmt: skip
    return sorted(lines, key=lambda one: one["loss"])


def table_of(lines: list[dict[str, Any]], comparison: Comparison) -> str:
    """Return the Markdown table of `table_rows`, and how far the best strict ticket is from the others."""
    cells = []
    for one in lines:
        spread = f" ({one['lowest']:.3f} to {one['highest']:.3f})" if one["seeds"] > 1 else ""
        equal = one["equal"] and f"{one['equal']['loss']:.3f} ({one['equal']['of']['max_steps']:,} steps)"
        if one["contestant"] == REFERENCE:
            equal = f"{one['loss']:.3f}"
        cells.append({
            "": one["contestant"], "kind": one["kind"], "shape": one["shape"], "file": f"{one['bytes'] / 1000:.1f} kB",
            "test loss": f"{one['loss']:.3f}{spread}", "seeds": one["seeds"], "validation": f"{one['validation']:.3f}",
            "trials": comparison.trials(one["contestant"]), "seconds": round(one["seconds"]),
            "equal seconds": equal,
        })  # fmt: skip
    numbers = ("file", "test loss", "seeds", "validation", "trials", "seconds", "equal seconds")
    text = markdown_table(cells, numbers)
    strict = [one for one in lines if one["kind"] == "strict"]
    others = [one for one in lines if one["kind"] != "strict"]
    if strict and others:
        gap = strict[0]["loss"] - others[0]["loss"]
        side, other = "behind" if gap > 0 else "ahead of", others[0]["contestant"]
        seeds = min(strict[0]["seeds"], others[0]["seeds"])
        text += (
            f"\n\nThe best strict ticket is {abs(gap):.3f} {side} the best other contestant so far ({other})"
        )
        text += ", by one seed." if seeds == 1 else f", by {seeds} seeds."
    return text


def page_of(comparison: Comparison) -> str:
    """Return the page: tables of what was run, and what is missing."""
    text = [PAGE.format(trials=TRIALS, reference=REFERENCE)]
    missing = []
    for part, row in ROWS.items():
        lines = table_rows(comparison, row)
        if lines:
            title = f"## {row.text.split(',')[0]}, {row.bytes // 1000} kB, {lines[0]['steps']:,} steps"
            text += [title, table_of(lines, comparison)]
        full = {one["contestant"] for one in lines if one["seeds"] == row.seeds}
        if lost := [name for name in comparison.names if name not in full]:
            missing.append(f"- `{part}`: " + "; ".join(lost))
    unsearched = [name for name in comparison.names if not comparison.has_all_trials(name)]
    missing += [f"- trials (`search`, `lengths`, `last`): {'; '.join(unsearched)}"] if unsearched else []
    if drawn_texts(comparison):
        text.append("![Test loss against the size of the file](../recipes/figures/equal_bytes.png)")
    if missing:
        text += ["## Not run yet, or not with all seeds", "\n".join(missing)]
    text.append(EARLIER)
    return "\n\n".join(one.strip("\n") for one in text) + "\n"


def drawn_texts(comparison: Comparison) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of every text that was measured at more than one size."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for row in ROWS.values():
        if row.longer == 1 and (lines := table_rows(comparison, row)):
            found.setdefault(row.text.split(",")[0], {})[row.bytes] = lines
    several = {text: sizes.values() for text, sizes in found.items() if len(sizes) > 1}
    return {text: [one for lines in rows for one in lines] for text, rows in several.items()}


def draw(comparison: Comparison, study: Study) -> None:
    """Draw test loss against bytes for each text of several sizes; a bar from the lowest to the highest seed."""
    lines = drawn_texts(comparison)
    if not lines:
        return
    figure, axes = panels(1, len(lines), 5.5 * len(lines), 4.2)
    for axis, (text, some) in zip(axes[0], lines.items(), strict=True):
        for place, name in enumerate(comparison.names):
            if mine := sorted(
                (one for one in some if one["contestant"] == name), key=lambda one: one["bytes"]
            ):
                losses = [one["loss"] for one in mine]
                below = [one["loss"] - one["lowest"] for one in mine]
                above = [one["highest"] - one["loss"] for one in mine]
                sizes = [one["bytes"] / 1000 for one in mine]
                axis.errorbar(sizes, losses, [below, above], label=name, capsize=3, **line(place))
        axis.set(
            title=text, xlabel="size of the file (kB)", ylabel="test loss (nats per token)", xscale="log"
        )
        ticks = sorted({row.bytes // 1000 for row in ROWS.values() if row.text.split(",")[0] == text})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.legend(frameon=False)
    study.save(figure, "equal_bytes")


# -- command line -----------------------------------------------------------------------------------


def run_part(part: str, comparison: Comparison, measure_point: Callable[..., Record], workers: int) -> None:
    """Measure what a part lacks. A search decides its next trials by its last ones."""
    while left := [one for one in comparison.points(part) if comparison.records.get(one) is None]:
        unfound = [
            one for one in left if not all(Path(file).is_file() for file in one.get("train_files", ()))
        ]
        if unfound:
            print(f"{part}: no {', '.join(unfound[0]['train_files'])} in this folder; give it as --data")
            return
        comparison.records.measure(measure_point, left, workers)


def main() -> None:
    """Run the parts that were asked for, write figure and page."""
    parser = studies.parser_of(__doc__, ("cpu", "quick"), PARTS)
    parser.set_defaults(preset="cpu")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), metavar="NAME",
                        help=f"of {'; '.join(CONTESTANTS)}")  # fmt: skip
    parser.add_argument("--data", type=Path, default=Path(), help="folder of the texts that are files")
    parser.add_argument("--list", action="store_true", help="print every run as far as decided, and stop")
    parser.add_argument(
        "--cost", action="store_true", help="print the seconds that each part lacks, and stop"
    )
    options = parser.parse_args()
    out, quick = options.out.resolve(), options.preset == "quick"
    runs = Path("runs/equal_bytes").resolve() if out == HERE.resolve() else out / "runs"
    os.chdir(options.data)  # records name a text, not where it lies: workers find it in their folder
    name = "equal_bytes_quick" if quick else "equal_bytes"
    records = FlatRecords(out / "results" / f"{name}.json", [], options.fresh, keep=True)
    comparison = Comparison(records, options.contestants, quick)
    parts = [part for part in options.only if part != "page"]
    for part in parts:
        if not (options.list or options.cost):
            run_part(part, comparison, partial(measure, runs), options.workers)
            continue
        points = comparison.points(part)
        left = {studies.digest_of(one): cost_of(one, records) for one in points if records.get(one) is None}
        print(
            f"{part}: {len(points)} runs, {len(left)} to do, about {sum(left.values()) / 60:.0f} minutes of a core"
        )
        for one in points if options.list else ():
            state = f"to do, {left[key]:.0f} s" if (key := studies.digest_of(one)) in left else "known"
            way = one.get("rule") or one["rounding"]
            shape = f"{one['n_layer']} x {one['n_embd']}"
            print(f"  {key} {way}, {shape}, {one['max_steps']} steps, seed {one['seed']}: {state}")
    if options.list or options.cost:
        return
    draw(comparison, Study("equal_bytes", "cpu", options))
    page = (
        HERE.parent / "docs" / "equal_bytes.md"
        if out == HERE.resolve() and not quick
        else out / "equal_bytes.md"
    )
    with replacing(page) as temporary:
        temporary.write_text(page_of(Comparison(records, CONTESTANTS, quick)))
    print(f"wrote {page}")


if __name__ == "__main__":
    main()
