"""Which mask rule is best for its bytes? All rules on text, at equal bytes of the file, beside dense rivals.

    python recipes/figures_rules.py --preset quick                       # a smoke test, minutes
    python recipes/figures_rules.py --preset cpu                         # one size and seed, 300 steps
    python recipes/figures_rules.py --preset full --train_files a.txt    # the whole comparison: days

Every contestant gets the width at which its file has the bytes asked for: a rule with more bits a weight is a
narrower model. What counts as bytes, and what dense rivals are, is in rivals.py.

The rate of each contestant is searched first, among RATES, on the smallest budget of bytes and the fewest
steps, seed 0; the comparison runs with the best of them. Every run is one record in results/.

rules.png    validation loss against bytes, a line a contestant; one panel for each number of steps
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import studies
from rivals import measure
from studies import Point, Study, line, panels

BASE = {
    "scale_with_width": True,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 2048,
    "block_size": 128,
    "per_device_train_batch_size": 8,
    "warmup_steps": 30,
    "min_lr_rate": 0,
    "save_steps": 0,
    "qk_scale": 2,
    "weight_learning_rate": 3e-3,
    "validation_blocks": 128,
}
CONSTANT = {"law": "signed_constant"}
# By contestant: what it is, and about how many bits a weight of it takes in the file.
RULES: dict[str, tuple[dict[str, Any], float]] = {
    "edge_popup": ({**CONSTANT, "rule": "edge_popup", "density": 0.5}, 1.0),
    "global": ({**CONSTANT, "rule": "global", "density": 0.5}, 1.0),
    "n_m": ({**CONSTANT, "rule": "n_m"}, 1.0),
    "threshold": ({**CONSTANT, "rule": "threshold"}, 0.9),
    "bernoulli": ({**CONSTANT, "rule": "bernoulli"}, 1.0),
    "sign": ({**CONSTANT, "rule": "sign"}, 1.0),
    "signed": ({**CONSTANT, "rule": "signed", "density": 0.6}, 1.57),
    "multicoat": ({**CONSTANT, "rule": "multicoat"}, 1.21),
    "multibit": ({**CONSTANT, "rule": "multibit"}, 1.95),
}
STOCK = {"control": "dense", "initial_std": 0.08}
CONTESTANTS = {
    **{
        f"{name}, scales": ({**of, "scales": "row", "scale_bits": 8}, bits)
        for name, (of, bits) in RULES.items()
    },
    **RULES,
    "dense int4": ({**STOCK, "rounding": "int4"}, 4.25),
    "dense ternary": ({**STOCK, "rounding": "ternary"}, 1.6),
}
# The rules with learned scales, three of them also without, and the dense rivals.
SHORT_LIST = tuple(
    name for name in CONTESTANTS if name not in RULES or name in ("edge_popup", "sign", "signed")
)
RATES = {"scores": (3e-3, 1e-2), "bernoulli": (2e-2, 5e-1), "dense": (3e-3, 8e-3)}


@dataclass(frozen=True)
class Preset:
    """How much is run."""

    budgets: tuple[int, ...]  # bytes of a file
    steps: tuple[int, ...]
    seeds: int
    contestants: tuple[str, ...] = tuple(CONTESTANTS)
    searched: int = 300  # steps of a run that searches the rate


PRESETS = {
    "quick": Preset((30_000,), (20,), 1, ("edge_popup", "sign, scales", "dense int4"), searched=10),
    "cpu": Preset((115_000,), (300,), 1, SHORT_LIST),
    "full": Preset((60_000, 115_000, 230_000), (300, 1000, 3000), 3),
}


def kind_of(name: str) -> str:
    """Which rates a contestant searches."""
    return "dense" if name.startswith("dense") else "bernoulli" if name.startswith("bernoulli") else "scores"


def width_for(name: str, budget: int) -> int:
    """The width, a multiple of the heads, whose file comes nearest to a budget of bytes."""
    options, bits = CONTESTANTS[name]

    def size(width: int) -> float:
        blocks, rows = 12 * BASE["n_layer"] * width**2, BASE["vocab_size"] + BASE["block_size"]
        outputs = rows + BASE["n_layer"] * 9 * width if options.get("scales") == "row" else 0
        described = 0 if name.startswith("dense") else 2_600
        return (blocks + rows * width) * bits / 8 + outputs + described

    return min(range(8, 513, 4), key=lambda width: abs(size(width) - budget))


def point(name: str, budget: int, steps: int, rate: float, seed: int, files: list[str] | None) -> Point:
    """All settings of a run."""
    options = {**BASE, **CONTESTANTS[name][0], "n_embd": width_for(name, budget), "seed": seed}
    options["weight_learning_rate" if kind_of(name) == "dense" else "learning_rate"] = rate
    options |= {"max_steps": steps, "eval_steps": max(1, steps // 3)}
    return {**options, **({"train_files": files} if files else {})}


# -- the study ---------------------------------------------------------------------------------------------


class Comparison:
    """The points of a preset; those of the comparison follow from the records of the search."""

    def __init__(self, preset: Preset, files: list[str] | None) -> None:
        self.preset, self.files = preset, files

    def search_points(self) -> dict[str, list[Point]]:
        """By contestant: one run for each rate."""
        budget, steps = self.preset.budgets[0], self.preset.searched
        return {
            name: [point(name, budget, steps, rate, 0, self.files) for rate in RATES[kind_of(name)]]
            for name in self.preset.contestants
        }

    def best_rate(self, name: str, records: Any) -> float | None:
        """The rate of the lowest loss, if all were measured."""
        found = [records.get(one) for one in self.search_points()[name]]
        if None in found:
            return None
        best = min(found, key=lambda record: record["loss"])
        return best["of"]["weight_learning_rate" if kind_of(name) == "dense" else "learning_rate"]

    def points(self, records: Any) -> dict[tuple[str, int, int], list[Point]]:
        """By contestant, budget and steps: one run for each seed."""
        found = {}
        for steps in self.preset.steps:
            for budget in self.preset.budgets:
                for name in self.preset.contestants:
                    if rate := self.best_rate(name, records):
                        found[name, budget, steps] = [
                            point(name, budget, steps, rate, seed, self.files)
                            for seed in range(self.preset.seeds)
                        ]
        return found


def rows_of(comparison: Comparison, records: Any) -> list[dict[str, Any]]:
    """A row for each contestant, budget and number of steps that was run with all its seeds."""
    rows = []
    for (name, budget, steps), points in comparison.points(records).items():
        found = [records.get(one) for one in points]
        if None not in found:
            losses = [record["loss"] for record in found]
            rows.append({
                "contestant": name, "budget": budget, "steps": steps,
                "bytes": round(statistics.mean(record["bytes"] for record in found)),
                "width": points[0]["n_embd"], "rate": comparison.best_rate(name, records),
                "loss": round(statistics.mean(losses), 4),
                "lowest": round(min(losses), 4), "highest": round(max(losses), 4), "seeds": len(losses),
            })  # fmt: skip
    return rows


def draw(rows: Iterable[dict[str, Any]], study: Study) -> None:
    """Loss against bytes; one panel for each number of steps."""
    rows = list(rows)
    steps = sorted({row["steps"] for row in rows})
    if not steps:
        return
    figure, axes = panels(1, len(steps), 5 * len(steps) + 2.5, 5, sharey=True)
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    for axis, count in zip(axes[0], steps, strict=True):
        for place, name in enumerate(names):
            of = sorted(
                (row["bytes"], row["loss"])
                for row in rows
                if (row["contestant"], row["steps"]) == (name, count)
            )
            if of:
                look = line(place) | ({"markerfacecolor": "none"} if "scales" not in name else {})
                axis.plot(*zip(*of, strict=True), label=name, **look)
        axis.set_title(f"{count} steps")
        axis.set_xlabel("bytes of the file")
    axes[0][0].set_ylabel("validation loss (nats per token)")
    axes[0][-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    study.save(figure, "rules")


def main() -> None:
    """Search the rates, compare, draw."""
    parser = studies.parser_of(__doc__, PRESETS, ["search", "compare"])
    parser.add_argument("--train_files", nargs="+", help="text to train on; the embedded corpus by default")
    options = parser.parse_args()
    study = Study("rules", "cpu", options)
    comparison = Comparison(PRESETS[options.preset], options.train_files)
    search = [one for points in comparison.search_points().values() for one in points]
    # What is to be compared follows from the search, so the records of both are in one file.
    records = study.records(search)
    known = study.records(
        [*search, *(one for points in comparison.points(records).values() for one in points)]
    )
    if "search" in options.only:
        known.measure(measure, search, options.workers)
    wanted = [one for points in comparison.points(known).values() for one in points]
    records = study.records([*search, *wanted])
    if "compare" in options.only:
        records.measure(measure, wanted, options.workers)
    rows = rows_of(comparison, records)
    records.conclude(rows=rows)
    for row in sorted(rows, key=lambda row: (row["steps"], row["budget"], row["loss"])):
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    draw(rows, study)


if __name__ == "__main__":
    main()
