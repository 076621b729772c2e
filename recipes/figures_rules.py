"""Which mask rule has the lowest loss at equal bytes? Compare all rules with dense models on text, at equal file size.

    python recipes/figures_rules.py --preset quick                      # a smoke test, a minute
    python recipes/figures_rules.py --preset cpu                        # what the docs show, hours
    python recipes/figures_rules.py --preset text --train_files a.txt   # the main rows, on your own text
    python recipes/figures_rules.py --preset full --train_files a.txt   # all rules, sizes and lengths: days

Every contestant gets the width at which its file has the wanted number of bytes: a rule with more bits per weight
gets a narrower model. rivals.py says how bytes are counted and how the dense models are rounded. Records of dense
models with the field `counted` are older: their integers took 4 bits each and no description was counted.

The rate of each contestant is searched first: RATES of its kind and length, at SEARCH_BYTES, on the embedded
corpus, seed 0. The comparison uses the best rate, at every size and on every text.

results/rules.json   every run, including those of the search: kind, bytes, steps, seed, loss and all settings
figures/rules.png    validation loss against bytes, one line per contestant, where several sizes were run
"""

import argparse
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import studies
from rivals import FlatRecords, measure
from studies import Point, Records, Study, line, panels
from tables import markdown_table

Rows = dict[tuple[int, int, str], list[Point]]  # by bytes, steps and contestant: a run for each seed


@dataclass(frozen=True)
class Share:
    """A part of a preset: each of these contestants is run with each of the seeds."""

    contestants: tuple[str, ...]
    bytes: int
    steps: int
    seeds: int


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
# By contestant: its settings, and about how many bits per weight its file has.
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
STOCK = {"control": "dense", "dense_std": 0.08}
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
# The rules that were best after 300 steps, with scales, and a dense model.
LONGER = (*(f"{name}, scales" for name in ("edge_popup", "signed", "multicoat", "multibit")), "dense int4")
# By kind and steps: the longer a run, the lower its best rate.
RATES = {
    "scores": {20: (1e-2,), 300: (5e-3, 1e-2), 1000: (3e-3, 6e-3), 3000: (2e-3, 4e-3)},
    "bernoulli": {300: (1e-2, 5e-2, 3e-1, 1.0), 1000: (5e-2, 3e-1), 3000: (5e-2, 3e-1)},
    "dense": {20: (6e-3,), 300: (6e-3, 1.2e-2), 1000: (4e-3, 8e-3), 3000: (4e-3, 6e-3)},
}
SEARCH_BYTES = 115_000
SIZES = (60_000, SEARCH_BYTES, 230_000)
PRESETS = {
    "quick": (Share(("edge_popup", "sign, scales", "dense int4"), 30_000, 20, 1),),
    "cpu": (
        Share(SHORT_LIST, 60_000, 300, 1),
        Share(SHORT_LIST, 230_000, 300, 1),
        Share(SHORT_LIST, 115_000, 300, 3),
        Share(LONGER, 115_000, 1000, 1),
    ),
    "text": (Share(SHORT_LIST, 115_000, 300, 1),),
    "full": tuple(Share(tuple(CONTESTANTS), size, steps, 3) for size in SIZES for steps in (300, 1000, 3000)),
}


def kind_of(name: str) -> str:
    """Return the key in RATES of the rates that a contestant tries."""
    return "dense" if name.startswith("dense") else "bernoulli" if name.startswith("bernoulli") else "scores"


def width_for(name: str, budget: int) -> int:
    """Return the width (a multiple of 4) whose file size is nearest to a budget of bytes."""
    options, bits = CONTESTANTS[name]

    def size(width: int) -> float:
        blocks, rows = 12 * BASE["n_layer"] * width**2, BASE["vocab_size"] + BASE["block_size"]
        outputs = rows + BASE["n_layer"] * 9 * width if options.get("scales") == "row" else 0
        described = 0 if name.startswith("dense") else 2_600
        return (blocks + rows * width) * bits / 8 + outputs + described

    return min(range(8, 513, 4), key=lambda width: abs(size(width) - budget))


def point(name: str, size: int, steps: int, seed: int, rate: float, **text: Any) -> Point:
    """Return all settings of a run."""
    settings = {**BASE, **CONTESTANTS[name][0], "n_embd": width_for(name, size), "seed": seed}
    settings["weight_learning_rate" if kind_of(name) == "dense" else "learning_rate"] = rate
    return {**settings, "max_steps": steps, "eval_steps": max(1, steps // 3), **text}


# -- the study ---------------------------------------------------------------------------------------------


def search_of(name: str, steps: int) -> dict[float, Point]:
    """Return the runs of the rate search, by rate."""
    return {rate: point(name, SEARCH_BYTES, steps, 0, rate) for rate in RATES[kind_of(name)][steps]}


def best_rate(name: str, steps: int, records: Records) -> float | None:
    """Return the rate with the lowest loss, or None if some rates have not been tried yet."""
    found = {rate: records.get(one) for rate, one in search_of(name, steps).items()}
    losses = {rate: record["loss"] for rate, record in found.items() if record}
    return min(losses, key=losses.__getitem__) if len(losses) == len(found) else None


def rows_of(shares: Iterable[Share], text: Point, records: Records) -> Rows:
    """Return one run per seed, by bytes, steps and contestant. Contestants without a known rate are left out."""
    return {
        (share.bytes, share.steps, name): [
            point(name, share.bytes, share.steps, seed, rate, **text) for seed in range(share.seeds)
        ]
        for share in shares
        for name in share.contestants
        if (rate := best_rate(name, share.steps, records))
    }


def table_rows(rows: Rows, records: Records) -> list[dict[str, Any]]:
    """Return a line for each contestant, size and number of steps that was run."""
    lines = []
    for (size, steps, name), points in rows.items():
        found = [one for one in map(records.get, points) if one is not None]
        if found:
            losses = [record["loss"] for record in found]
            lines.append({
                "contestant": name, "size": size, "steps": steps, "seeds": len(losses),
                "shape": f"{points[0]['n_layer']} x {points[0]['n_embd']}",
                "bytes": round(statistics.mean(record["bytes"] for record in found)),
                "loss": round(statistics.mean(losses), 3),
                "lowest": round(min(losses), 3), "highest": round(max(losses), 3),
                "seconds": round(statistics.mean(record["seconds"] for record in found)),
            })  # fmt: skip
    return sorted(lines, key=lambda one: (one["steps"], one["size"], one["loss"]))


def draw(rows: list[dict[str, Any]], study: Study) -> None:
    """Draw loss against bytes, with one panel for each number of steps that was run at the most sizes."""
    sizes: dict[int, set[int]] = {}
    for row in rows:
        sizes.setdefault(row["steps"], set()).add(row["size"])
    steps = [count for count in sorted(sizes) if len(sizes[count]) == max(map(len, sizes.values()))]
    figure, axes = panels(1, len(steps), 5 * len(steps) + 2.5, 5)
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    for axis, count in zip(axes[0], steps, strict=True):
        for place, name in enumerate(names):
            of = sorted(
                (row["bytes"] / 1000, row["loss"])
                for row in rows
                if (row["contestant"], row["steps"]) == (name, count)
            )
            if of:
                look = line(place) | ({"markerfacecolor": "none"} if "scales" not in name else {})
                axis.plot(*zip(*of, strict=True), label=name, **look)
        axis.set_title(f"{count} steps")
        axis.set_xlabel("size of the file (kB)")
    axes[0][0].set_ylabel("validation loss (nats per token)")
    handles = axes[0][0].get_legend_handles_labels()
    axes[0][-1].legend(*handles, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    study.save(figure, "rules")


def parse_options() -> tuple[argparse.Namespace, Point]:
    """Return the options, and the setting that names another text.

    Records hold the file name of a text, not its folder: workers find it in the current folder.
    """
    parser = studies.parser_of(__doc__, PRESETS, ["search", "compare"])
    parser.add_argument("--train_files", nargs="+", help="text to train on, all in one folder")
    options = parser.parse_args()
    options.out = options.out.resolve()
    files = [Path(one).resolve() for one in options.train_files or ()]
    if not files:
        return options, {}
    if lost := [str(one) for one in files if not one.is_file() or one.parent != files[0].parent]:
        parser.error(f"--train_files: {', '.join(lost)}: not a file, or not in the folder of the first")
    os.chdir(files[0].parent)
    return options, {"train_files": [one.name for one in files]}


def main() -> None:
    """Search the rates, compare, draw."""
    options, text = parse_options()
    shares = PRESETS[options.preset]
    searched = {(name, share.steps) for share in shares for name in share.contestants}
    search = [one for name, steps in sorted(searched) for one in search_of(name, steps).values()]
    stem = "rules_quick" if options.preset == "quick" else "rules"  # one file for all other presets
    records = FlatRecords(options.out / "results" / f"{stem}.json", search, options.fresh, keep=True)
    if "search" in options.only:
        records.measure(measure, sorted(search, key=lambda one: one["max_steps"]), options.workers)
    rows = rows_of(shares, text, records)
    if "compare" in options.only:
        wanted = [one for points in rows.values() for one in points]
        records.measure(measure, sorted(wanted, key=lambda one: one["max_steps"]), options.workers)
    if lines := table_rows(rows, records):
        print(
            markdown_table(lines, ("size", "steps", "seeds", "bytes", "loss", "lowest", "highest", "seconds"))
        )
        draw(lines, Study("rules", "cpu", options))


if __name__ == "__main__":
    main()
