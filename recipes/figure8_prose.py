"""Figure 8 of arXiv 2511.04217 on prose: loss against the query/key factor, in the paper's own setting.

    python recipes/figure8_prose.py --preset quick                       # a smoke test of a minute
    python recipes/figure8_prose.py --preset hour --data FOLDER          # 2 layers of 128, 40 minutes on one core
    python recipes/figure8_prose.py --preset unscaled --data FOLDER      # the same with std 0.02 at width 128
    python recipes/figure8_prose.py --preset night --data FOLDER         # 4 layers of 256, about a night on two cores

The setting is the paper's: rule edge_popup, density 0.3, GPT-2's own normal law (std 0.02, residual projections
smaller by the square root of twice the depth), heads of 64, and only the masks are learned. The std is that of
width 768 and is adapted to narrower models (`scale_with_width`); preset `unscaled` leaves it as it is. The paper does
not say how it treats the token table; here it is masked too. The text is FOLDER/enwiki2014-train.parquet; the
smoke test uses the embedded corpus. According to the paper's theory the best factor is 64 ** (1/4) = 2.83.

The rate of the scores is chosen first, at factor 1 and seed 0, by the validation loss. All factors then use it.
A run that was stopped resumes from its last checkpoint in runs/.

results/figure8_prose_<preset>.json   every run
figures/<preset>/figure8_prose.png    the figure; that of preset hour in figures/
"""

import os
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import studies
from rivals import measure
from studies import Point, Preset, Record, Records, Study, line, panels, select

from hf_slt.errors import SLTError

SETTING = {
    "rule": "edge_popup", "density": 0.3, "law": "normal", "scales": "none", "layer_norm": "true", "score_decay": 0,
    "min_lr_rate": 0.1, "validation_blocks": 256, "test_part": True,
}  # fmt: skip
TEXT = {"train_files": ["enwiki2014-train.parquet"], "validation_files": ["enwiki2014-valid.parquet"]}
BEST_IN_THEORY = 64**0.25
HOUR_SHAPE = {"n_layer": 2, "n_embd": 128, "n_head": 2, "vocab_size": 2048, "block_size": 128}
HOUR_LOOP = {
    "per_device_train_batch_size": 8, "max_steps": 2000, "warmup_steps": 100, "eval_steps": 500,
    "train_blocks": 16_000,
}  # fmt: skip
PRESETS = studies.presets(
    {"factors": (1, 1.5, 2, 2.83, 3.5, 4, 5), "seeds": 2, "rates": (1e-3, 3e-3, 1e-2), "text": TEXT},
    quick={
        "factors": (1, 2.83), "seeds": 1, "rates": (1e-3, 3e-3), "text": {},
        "shape": {"n_layer": 1, "n_embd": 64, "n_head": 1, "vocab_size": 300, "block_size": 16},
        "loop": {"per_device_train_batch_size": 2, "max_steps": 4, "warmup_steps": 1, "eval_steps": 2},
    },
    hour={"shape": {**HOUR_SHAPE, "scale_with_width": True}, "loop": HOUR_LOOP, "rates": (3e-3, 1e-2, 3e-2)},
    unscaled={"shape": HOUR_SHAPE, "loop": HOUR_LOOP},
    night={
        "shape": {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 4096, "block_size": 256,
                  "scale_with_width": True},
        "loop": {"per_device_train_batch_size": 4, "max_steps": 6000, "warmup_steps": 200, "eval_steps": 1500,
                 "train_blocks": 24_000},
    },
)  # fmt: skip


def point(preset: Preset, rate: float, factor: float, seed: int) -> Point:
    """Return all settings of a run."""
    changes = {"learning_rate": rate, "qk_scale": factor, "seed": seed}
    return {**SETTING, **preset.text, **preset.shape, **preset.loop, **changes}


def rate_points(preset: Preset) -> list[Point]:
    """Return the runs that choose the rate."""
    return [point(preset, rate, 1, 0) for rate in preset.rates]


def chosen_rate(preset: Preset, records: Records) -> float:
    """Return the rate with the lowest validation loss at factor 1."""
    found = [record for one in rate_points(preset) if (record := records.get(one)) is not None]
    return min(found, key=lambda record: record["validation_loss"])["of"]["learning_rate"]


def factor_points(preset: Preset, rate: float) -> list[Point]:
    """Return the runs of the figure, seed after seed."""
    return [point(preset, rate, factor, seed) for seed in range(preset.seeds) for factor in preset.factors]


def means_of(records: list[Record], preset: Preset) -> dict[float, list[float]]:
    """Return the test losses of every factor."""
    return {factor: [one["loss"] for one in select(records, qk_scale=factor)] for factor in preset.factors}


def draw(records: list[Record], preset: Preset, study: Study) -> None:
    """Draw the test loss of every seed against the factor, and the mean; print the mean of each factor."""
    figure, ((axis,),) = panels(1, 1, 6.5, 4.2)
    losses = {factor: some for factor, some in means_of(records, preset).items() if some}
    means = [statistics.mean(some) for some in losses.values()]
    axis.plot(list(losses), means, label="mean over seeds", **line(0))
    for seed in range(preset.seeds):
        mine = {record["of"]["qk_scale"]: record["loss"] for record in select(records, seed=seed)}
        axis.plot(
            list(mine), list(mine.values()), ".", color="#777777", label="one seed" if seed == 0 else None
        )
    axis.axvline(BEST_IN_THEORY, color="#777777", linestyle=":", label="n^(1/4) of heads of 64")
    shape = "{n_layer} layers of {n_embd}".format(**preset.shape)
    axis.set(
        xlabel="factor on query and key weights",
        ylabel="test loss (nats per token)",
        title=f"Figure 8 on prose: {shape}, {preset.loop['max_steps']:,} steps, density 0.3, masks only",
    )
    axis.legend(frameon=False)
    study.save(figure, "figure8_prose")
    for (factor, some), mean in zip(losses.items(), means, strict=True):
        print(f"factor {factor}: {mean:.3f} ({', '.join(f'{one:.3f}' for one in some)})")


def check_text(preset: Preset) -> None:
    """Raise `SLTError` if a text of the preset is not in the current folder."""
    for file in (name for files in preset.text.values() for name in files):
        if not Path(file).is_file():
            raise SLTError(f"no {file} in {Path.cwd()}: give the folder of the text as --data")


def main() -> None:
    """Choose the rate, run every factor, draw the figure."""
    parser = studies.parser_of(__doc__, PRESETS, ("runs", "figure"))
    parser.add_argument("--data", type=Path, default=Path(), help="folder of the text")
    options = parser.parse_args()
    options.out = options.out.resolve()
    preset: Any = PRESETS[options.preset]
    runs = Path("runs/figure8_prose").resolve()
    file = options.out / "results" / f"figure8_prose_{options.preset}.json"
    records = Records(file, [], options.fresh, keep=True)
    if "runs" in options.only:
        os.chdir(options.data)  # records hold the file name of a text, not its folder
        try:
            check_text(preset)
        except SLTError as error:
            parser.error(str(error))
        records.measure(partial(measure, runs), rate_points(preset), options.workers)
        rate = chosen_rate(preset, records)
        records.measure(partial(measure, runs), factor_points(preset, rate), options.workers)
        records.conclude(rate=rate)
    points = factor_points(preset, records.facts["rate"])
    found = [record for one in points if (record := records.get(one)) is not None]
    draw(found, preset, Study("figure8_prose", "hour", options))


if __name__ == "__main__":
    main()
