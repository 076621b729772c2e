"""Which is better for its bytes: a ticket, or a dense model rounded to 4 bits? Both at their best.

    python recipes/equal_bytes.py --preset quick                        # a smoke test, a minute
    python recipes/equal_bytes.py --preset cpu                          # what the docs show, hours
    python recipes/equal_bytes.py --preset text --train_files a.txt     # its main rows on a text of yours
    python recipes/equal_bytes.py --preset full                         # three seeds everywhere: a day

Both sides have the same text, tokenizer, loop and tokens, and files of the same bytes (see rivals.py). Their
settings were found by the search: one change each from the best so far, on one size, seed 0, and few steps.

results/equal_bytes.json   every run, those of the search too: side, bytes, steps, seed, loss and all settings
figures/equal_bytes.png    validation loss against bytes of the file, and against steps
"""

import statistics
from dataclasses import dataclass
from typing import Any

import studies
from rivals import Rows, Share, measure, records_of, table, with_text
from studies import Point, Study, line, panels

LOOP = {
    "n_layer": 1, "n_head": 4, "vocab_size": 2048, "block_size": 128, "per_device_train_batch_size": 8,
    "warmup_steps": 30, "min_lr_rate": 0, "save_steps": 0, "validation_blocks": 128,
}  # fmt: skip
MASKED = {**LOOP, "law": "signed_constant", "scale_with_width": True, "qk_scale": 2}
SCALED = {**MASKED, "scales": "row", "scale_bits": 8}
STOCK = {**LOOP, "control": "dense", "initial_std": 0.08, "weight_learning_rate": 4e-3}
DEEPER = {**STOCK, "n_layer": 2, "weight_learning_rate": 6e-3}
# By contestant: its settings; by bytes of the file its width, or all that is special there.
CONTESTANTS: dict[str, tuple[dict[str, Any], dict[int, Any]]] = {
    "ticket": (
        {**SCALED, "rule": "signed", "density": 0.7, "layer_norm": "trained", "score_decay": 0.5},
        {30_000: 44, 60_000: 88, 115_000: 144, 230_000: 228},
    ),
    "paper's ticket": (
        {**MASKED, "rule": "edge_popup", "density": 0.5},
        {60_000: 124, 115_000: 200, 230_000: 308},
    ),
    "dense int4": (
        {**STOCK, "rounding": "int4"},
        {30_000: 20, 60_000: {"n_embd": 44, "weight_learning_rate": 6e-3}, 115_000: 72, 230_000: 120},
    ),
    "dense int4, two layers": ({**DEEPER, "rounding": "int4"}, {60_000: 36, 115_000: 60, 230_000: 92}),
    "dense ternary": (
        {**STOCK, "weight_learning_rate": 6e-3, "rounding": "ternary"},
        {60_000: 88, 115_000: 144, 230_000: 228},
    ),
}
# By steps: the rates of scores and of scales. The lower one of scales was found after the run of 10,000.
RATES = {20: (5e-3, 3e-3), 1000: (5e-3, 3e-3), 3000: (2e-3, 1.5e-3), 10_000: (2e-3, 3e-3)}
# The search: a contestant, steps, and what is changed of it; None is an option left out.
TWO = {"n_layer": 2, "n_embd": 60, "weight_learning_rate": 6e-3}
DEEP = {**TWO, "n_layer": 4, "n_embd": 48}
QUICK = {"weight_learning_rate": 6e-3}
SLOW = {**DEEP, "weight_learning_rate": 3e-3}
LOUD = {"weight_learning_rate": 3e-3}
WIDE = {**LOUD, "n_layer": 2, "n_embd": 112}
SMALL = {**LOUD, "n_embd": 88}
FAST = {**WIDE, "learning_rate": 5e-3}
THREE = {**FAST, "n_layer": 3, "n_embd": 96}
SPARSER = {**THREE, "density": 0.6}
PLAIN = {**SPARSER, "layer_norm": None, "score_decay": None}
TRIALS: list[tuple[str, int, dict[str, Any]]] = [
    ("dense int4", 1000, SLOW),
    ("dense int4", 1000, {**SLOW, "initial_std": 0.02}),
    ("dense int4", 1000, {**SLOW, "initial_std": 0.16}),
    ("dense int4", 1000, DEEP),
    ("dense int4", 1000, {**DEEP, "weight_learning_rate": 1e-2}),
    ("dense int4", 1000, {**DEEP, "n_head": 2}),
    ("dense int4", 1000, {**DEEP, "adam_beta2": 0.98}),
    ("dense int4", 1000, TWO),
    ("dense int4", 3000, SLOW),
    ("dense int4", 3000, DEEP),
    ("dense int4", 3000, {**TWO, "weight_learning_rate": 9e-3}),
    *(("dense int4", steps, QUICK) for steps in (1000, 10_000)),
    *(("dense int4", 3000, {**QUICK, "seed": seed}) for seed in range(3)),
    ("dense int4", 3000, {"weight_learning_rate": 9e-3}),
    ("dense int4", 3000, {"weight_learning_rate": 4e-3}),
    *(("dense int4", 3000, {"n_embd": 44, "seed": seed}) for seed in range(3)),
    ("dense int4", 3000, {**QUICK, "n_embd": 120}),
    ("ticket", 1000, PLAIN),
    *(("ticket", 1000, {**PLAIN, "score_decay": decay}) for decay in (0.1, 0.5, 2.0)),
    ("ticket", 1000, SPARSER),
    ("ticket", 1000, {**SPARSER, "n_layer": 5, "n_embd": 80}),
    ("ticket", 1000, {**SPARSER, "learning_rate": 7e-3}),
    ("ticket", 1000, {**SPARSER, "weight_learning_rate": 6e-3}),
    ("ticket", 1000, {**SPARSER, "adam_beta2": 0.98}),
    ("ticket", 1000, {**SPARSER, "n_head": 2}),
    ("ticket", 1000, THREE),
    ("ticket", 1000, {**THREE, "n_head": 2, "weight_learning_rate": 6e-3}),
    ("ticket", 1000, {**THREE, "n_head": 2, "weight_learning_rate": 6e-3, "density": 0.85, "n_embd": 100}),
    ("ticket", 3000, SPARSER),
    *(
        ("ticket", steps, {**WIDE, "learning_rate": rate})
        for steps in (1000, 10_000)
        for rate in (5e-3, 2e-3)
    ),
    *(
        ("ticket", 3000, {**WIDE, "learning_rate": rate, "seed": seed})
        for rate in (5e-3, 2e-3)
        for seed in range(3)
    ),
    *(("ticket", 3000, {**WIDE, "n_embd": 68, "seed": seed}) for seed in range(3)),
    ("ticket", 3000, {**WIDE, "n_embd": 168}),
    ("ticket", 3000, {**LOUD, "learning_rate": 3e-3}),
    *(("ticket", 3000, {"weight_learning_rate": rate}) for rate in (6e-3, 3e-3, 1.5e-3)),
    *(("ticket", 3000, {**SMALL, "seed": seed}) for seed in range(3)),
    *(("ticket", 3000, {**SMALL, "weight_learning_rate": rate}) for rate in (1.5e-3, 8e-4)),
    ("ticket", 3000, {**SMALL, "density": 0.8, "n_embd": 92}),
    ("ticket", 3000, {**SMALL, "n_head": 2}),
    ("ticket", 3000, {**SMALL, "score_decay": 1.0}),
    ("paper's ticket", 1000, {"n_layer": 2, "n_embd": 152}),
]


@dataclass(frozen=True)
class Preset:
    """How much is run."""

    shares: tuple[Share, ...]
    searched: bool = True  # whether the runs of the search belong to it


PAIR, DEEPEST = ("ticket", "dense int4"), "dense int4, two layers"
BEST = (*PAIR, DEEPEST)
SIZES = (60_000, 115_000, 230_000)
PRESETS = {
    "quick": Preset((Share(PAIR, 30_000, 20, 1),), searched=False),
    "cpu": Preset(
        (
            Share(tuple(CONTESTANTS), 115_000, 1000, 1),
            Share(BEST, 60_000, 3000, 3),
            Share(("paper's ticket", "dense ternary"), 115_000, 3000, 1),
            Share(BEST, 115_000, 3000, 3),
            Share(BEST, 230_000, 3000, 1),
            Share(("ticket", DEEPEST), 115_000, 10_000, 1),
        ),
    ),
    "text": Preset((Share(PAIR, 115_000, 3000, 3), Share((DEEPEST,), 115_000, 3000, 1)), searched=False),
    "full": Preset(
        (
            *(Share(tuple(CONTESTANTS), size, steps, 3) for size in SIZES for steps in (1000, 3000)),
            *(Share(BEST, size, 10_000, 3) for size in SIZES),
        ),
    ),
}
SEARCH_BYTES = 115_000


def point(name: str, size: int, steps: int, seed: int, **changes: Any) -> Point:
    """All settings of a run."""
    settings, widths = CONTESTANTS[name]
    special = widths[size] if isinstance(widths[size], dict) else {"n_embd": widths[size]}
    told = {**special, "max_steps": steps, "eval_steps": max(1, steps // 4)}
    scores, scales = RATES[steps]
    rates = {"learning_rate": scores} if "rule" in settings else {}
    rates |= {"weight_learning_rate": scales} if "scales" in settings else {}
    settings = {**settings, **rates, **told, "seed": seed, **changes}
    return {name: value for name, value in settings.items() if value is not None}


class Comparison:
    """The points of a preset, on the embedded corpus or on other files."""

    def __init__(self, preset: Preset, text: Point) -> None:
        self.preset, self.text = preset, text

    def search(self) -> list[Point]:
        """One change each from the contestant as it is."""
        if self.text or not self.preset.searched:  # settings are searched once, and hold for every text
            return []
        return [point(name, SEARCH_BYTES, steps, **{"seed": 0, **changes}) for name, steps, changes in TRIALS]

    def rows(self) -> Rows:
        """By bytes, steps and contestant: one run for each seed."""
        return {
            (share.bytes, share.steps, name): [
                point(name, share.bytes, share.steps, seed, **self.text) for seed in range(share.seeds)
            ]
            for share in self.preset.shares
            for name in share.contestants
        }


def draw(lines: list[dict[str, Any]], study: Study) -> None:
    """Loss against bytes, and against steps, where most was run; a bar from lowest to highest seed."""
    steps, size = (statistics.mode(one[name] for one in lines) for name in ("steps", "size"))
    figure, axes = panels(1, 2, 11, 4.2)
    for axis, across, fixed, value in (
        (axes[0][0], "bytes", "steps", steps),
        (axes[0][1], "steps", "size", size),
    ):
        for place, name in enumerate(CONTESTANTS):
            of = [one for one in lines if (one["contestant"], one[fixed]) == (name, value)]
            if of:
                of.sort(key=lambda one: one[across])
                below = [one["loss"] - one["lowest"] for one in of]
                above = [one["highest"] - one["loss"] for one in of]
                where = [one[across] / (1000 if across == "bytes" else 1) for one in of]
                losses = [one["loss"] for one in of]
                axis.errorbar(where, losses, [below, above], label=name, capsize=3, **line(place))
        axis.set_ylabel("validation loss (nats per token)")
        axis.legend(frameon=False)
    axes[0][0].set_title(f"{steps:,} steps")
    axes[0][0].set_xlabel("size of the file (kB)")
    axes[0][1].set_title(f"files of about {size / 1000:.0f} kB")
    axes[0][1].set_xscale("log")
    axes[0][1].set_xlabel("training steps of 1024 tokens")
    study.save(figure, "equal_bytes")


def main() -> None:
    """Search, compare, draw."""
    parser = studies.parser_of(__doc__, PRESETS, ["search", "compare"])
    options, text = with_text(parser)
    comparison = Comparison(PRESETS[options.preset], text)
    search, rows = comparison.search(), comparison.rows()
    wanted = [one for points in rows.values() for one in points]
    records = records_of("equal_bytes", options, [*search, *wanted])
    if "search" in options.only:
        records.measure(measure, search, options.workers)
    if "compare" in options.only:
        records.measure(measure, sorted(wanted, key=lambda one: one["max_steps"]), options.workers)
    lines = table(rows, records)
    for one in lines:
        print(", ".join(f"{name} {value}" for name, value in one.items()))
    draw(lines, Study("equal_bytes", "cpu", options))


if __name__ == "__main__":
    main()
