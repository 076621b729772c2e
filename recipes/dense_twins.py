"""Search the initial weights and the rate of a preset's dense twin, as the settings of the ticket were searched.

    python recipes/dense_twins.py --preset nano           # 500 steps, the length of the preset
    python recipes/dense_twins.py --preset ternary         # 1,000 steps of its 10,000

Standard deviations and rates are tried with seed 0, one core per run. The best pair is in the preset as
`dense_std` and `dense_learning_rate`, which `--compare dense` and `--control dense` use.

results/dense_twins.json   every run: preset, standard deviation, rate, loss
"""

import studies
from studies import HERE, Point, Record, Records
from tables import markdown_table

# By preset: steps, and what was tried, as grids of (standard deviations, rates).
GRIDS: dict[str, tuple[int, list[tuple[tuple[float, ...], tuple[float, ...]]]]] = {
    "quick": (5, [((0.05,), (4e-3,))]),
    "nano": (500, [((0.05,), (4e-3, 2e-3, 6e-3)), ((0.03, 0.08), (4e-3,))]),
    "ternary": (1000, [((0.05,), (4e-3, 2e-3, 1e-3)), ((0.02, 0.03, 0.08), (2e-3,))]),
}


def points_of(preset: str) -> list[Point]:
    """Return every run of a preset: all combinations of standard deviation and rate of its grids."""
    steps, grids = GRIDS[preset]
    of = "nano" if preset == "quick" else preset
    return [
        {"preset": of, "dense_std": std, "dense_learning_rate": rate, "max_steps": steps, "seed": 0}
        for stds, rates in grids
        for std in stds
        for rate in rates
    ]


def measure(preset: str, max_steps: int, **settings: float) -> Record:
    """Train the dense twin of a preset and return its record."""
    fixed = {
        "config": HERE / f"{preset}.yaml",
        "control": "dense",
        "max_steps": max_steps,
        "eval_steps": max_steps,
    }
    with studies.trained_run({**fixed, **settings}) as run:
        summary = studies.summary_of(run)
    return {name: summary[name] for name in ("loss", "tokens", "text", "seconds")}


def main() -> None:
    """Search, and print the runs of the preset from the best to the worst."""
    options = studies.parser_of(__doc__, GRIDS, ["search"]).parse_args()
    points = points_of(options.preset)
    stem = "dense_twins_quick" if options.preset == "quick" else "dense_twins"
    path = options.out.resolve() / "results" / f"{stem}.json"
    records = Records(path, points, options.fresh, keep=True)
    records.measure(measure, points, options.workers)
    known = [{**record["of"], **record} for record in sorted(records, key=lambda one: one["loss"])]
    print(markdown_table({key: one[key] for key in one if key != "of"} for one in known))


if __name__ == "__main__":
    main()
