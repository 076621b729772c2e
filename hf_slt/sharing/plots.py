"""Figures from records (the lines of log.jsonl) or from masks. Needs neither a model nor torch.

    {"kind": "train", "step": 10, "loss": 6.1, "rate": 0.01, ...}
    {"kind": "evaluation", "step": 200, "loss": 5.2, ...}
    {"kind": "masks", "step": 200, "flipped": 0.03, ...}

Values that a record lacks are not drawn; a panel without a point is left out. Every function writes one file,
atomically, and returns its path; the suffix (.png, .svg, .pdf) chooses the format.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..tickets.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = Mapping[str, Any]

# Okabe and Ito's colours, which people with any colour vision can tell apart; markers and dashes differ too.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9".split()
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
MARKERS = "osD^vP"
CELLS = 64  # largest number of cells on a side of a density map
CELL_SIDE = 4  # smallest number of weights on a side of a cell: in smaller cells the share is mostly chance
MOST_TENSORS = 8  # in one picture of masks


def plot_run(records: Iterable[Record], path: str | os.PathLike, title: str) -> Path:
    """Draw the curves of one run: loss, learning rate, and the share of mask bits that flip between two evaluations.

    Args:
        records (`Iterable[Record]`):
            The lines of log.jsonl.
        path (`str` or `os.PathLike`):
            The picture to write. Its suffix is the format.
        title (`str`):
            Title of the figure.

    Returns:
        `Path`: the picture.

    Raises:
        `ValueError`: if no record holds a number.
    """
    records = list(records)
    train, rate = (_series(records, "train", name) for name in ("loss", "rate"))
    validation = _series(records, "evaluation", "loss")
    flipped = _series(records, "masks", "flipped")
    flipped = tuple(values[flipped[1] > 0] for values in flipped)  # there is no evaluation before the first

    def draw_loss(axes: "Axes") -> None:
        if len(train[0]):
            axes.plot(*train, color=BLUE, alpha=0.3, linewidth=0.8)
            axes.plot(train[0], smooth(train[1]), color=BLUE, linewidth=1.6, label="train, running mean")
        if len(validation[0]):
            label = f"validation, {validation[1][-1]:.3f} at the end"
            axes.plot(*validation, color=VERMILLION, marker="o", markersize=5, linewidth=1.2, label=label)
        axes.set_ylabel("loss (nats per token)")
        axes.legend(frameon=False)

    def draw_rate(axes: "Axes") -> None:
        axes.plot(*rate, color=GREEN)
        axes.set_ylabel("learning rate")
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", scilimits=(-2, 3))

    def draw_flipped(axes: "Axes") -> None:
        from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter

        axes.plot(*flipped, color=PURPLE, marker="s", markersize=4)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        axes.set_ylabel("mask bits flipped\nsince last evaluation")

    found = (
        (draw_loss, 2.2, len(train[0]) + len(validation[0])),
        (draw_rate, 1.0, len(rate[0])),
        (draw_flipped, 1.2, len(flipped[0])),
    )
    panels = [(draw, height) for draw, height, count in found if count]
    if not panels:
        raise ValueError("no record of kind train, evaluation or masks holds a number; nothing to plot")
    heights = [height for _, height in panels]
    figure = _figure(8, 1.2 + 1.5 * sum(heights))
    rows = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (draw, _) in zip(rows, panels, strict=True):
        _style(axes)
        draw(axes)
    rows[-1].set_xlabel("optimizer step")
    rows[0].set_title(title, loc="left")
    figure.align_ylabels()
    return _save(figure, path)


def plot_comparison(runs: Mapping[str, Iterable[Record]], path: str | os.PathLike, title: str) -> Path:
    """Draw the validation losses of several runs. A run that was never trained (step 0 only) is a horizontal line.

    Args:
        runs (`Mapping[str, Iterable[Record]]`):
            The lines of each run's log.jsonl, by its label.
        path (`str` or `os.PathLike`):
            The picture to write.
        title (`str`):
            Title of the figure.

    Returns:
        `Path`: the picture.

    Raises:
        `ValueError`: if no run has an evaluation.
    """
    found = {label: _series(records, "evaluation", "loss") for label, records in runs.items()}
    drawn = {label: series for label, series in found.items() if len(series[0])}
    if not drawn:
        raise ValueError(f"no evaluation in the records of {', '.join(runs) or 'no run'}; nothing to plot")
    figure = _figure(8, 4.5)
    axes = figure.subplots()
    _style(axes)
    for place, (label, (steps, losses)) in enumerate(drawn.items()):
        colour = COLOURS[place % len(COLOURS)]
        text = f"{label}: {losses[-1]:.3f}"
        if steps[-1] == 0:
            axes.axhline(losses[-1], color=colour, linestyle="--", label=text)
        else:
            marker = MARKERS[place % len(MARKERS)]
            axes.plot(steps, losses, color=colour, marker=marker, markersize=5, label=text)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("validation loss (nats per token)")
    axes.set_xlim(left=0)
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, title="last validation loss", alignment="left")
    return _save(figure, path)


def plot_masks(masks: Mapping[str, np.ndarray], path: str | os.PathLike, title: str | None = None) -> Path:
    """Draw masks: where weights are kept, and how evenly rows and columns share them.

    One tensor of each kind is drawn, from a middle block. The upper picture has the share kept in each cell of
    the tensor, the lower one the share kept in each row and column. Dotted lines are for a random mask of the same
    density. For masks that keep every weight, with factors of both signs, positive weights are shown instead.

    Args:
        masks (`Mapping[str, np.ndarray]`):
            Factors of every weight, by tensor name.
        path (`str` or `os.PathLike`):
            The picture to write.
        title (`str`, *optional*):
            Title of the figure.

    Returns:
        `Path`: the picture.

    Raises:
        `ValueError`: if no mask is given.
    """
    names = choose_tensors(list(masks), MOST_TENSORS)
    if not names:
        raise ValueError("no mask is given; nothing to plot")
    signs = all(one.all() and (one < 0).any() for one in masks.values())
    share = "share positive" if signs else "share kept"
    masks = {name: masks[name] > 0 if signs else masks[name] != 0 for name in names}
    maps = {name: density_map(np.atleast_2d(masks[name])) for name in names}
    # One colour scale for all, without the few extreme cells that would make all others look equal.
    lowest, highest = np.percentile(np.concatenate([cells.ravel() for cells in maps.values()]), (1, 99))
    across = min(4, len(names))
    down = -(-len(names) // across)
    figure = _figure(2.4 * across + 1, 4.2 * down + 0.4)
    grid = figure.subplots(2 * down, across, squeeze=False, height_ratios=[1.6, 1] * down)
    shared = grid[1, 0]
    for place, name in enumerate(names):
        row, column = divmod(place, across)
        upper, lower = grid[2 * row, column], grid[2 * row + 1, column]
        mask = np.atleast_2d(masks[name])
        height, width = mask.shape
        picture = upper.imshow(
            maps[name],
            vmin=lowest,
            vmax=max(highest, lowest + 1e-3),
            cmap="cividis",
            aspect="auto",
            interpolation="nearest",
            extent=(0, width, height, 0),
        )
        upper.set_title(f"{name}\n{height} x {width}, {mask.mean():.1%} {share.split()[1]}", fontsize=9)
        _draw_shares(lower, mask, share)
        if lower is not shared:
            lower.sharex(shared)
        if column == 0:
            upper.set_ylabel("row")
            lower.set_ylabel("frequency")
        upper.set_xlabel("column")
        lower.set_xlabel(share)
    for axes in grid.reshape(down, 2, across).swapaxes(1, 2).reshape(-1, 2)[len(names) :].ravel():
        axes.remove()
    bar = figure.colorbar(picture, ax=figure.axes, label=f"{share} in a cell", aspect=40)
    bar.outline.set_visible(False)
    figure.legend(*shared.get_legend_handles_labels(), loc="outside lower left", ncols=across, frameon=False)
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    return _save(figure, path)


def _draw_shares(axes: "Axes", mask: np.ndarray, share: str) -> None:
    """Draw histograms of the share kept in every row and column; dotted, the binomial law of a random mask."""
    _style(axes)
    density = mask.mean()
    for axis, label, colour in ((1, "rows", BLUE), (0, "columns", VERMILLION)):
        kept, size = mask.sum(axis=axis), mask.shape[axis]
        step = -(-(np.ptp(kept) + 1) // 20)  # whole weights: bins of equal chance
        edges = np.arange(kept.min(), kept.max() + step + 1, step) - 0.5
        axes.hist(
            kept / size,
            edges / size,
            density=True,
            histtype="stepfilled",
            facecolor=f"{colour}40",
            edgecolor=colour,
            label=f"{share} of {label}",
        )
        deviation = (density * (1 - density) / size) ** 0.5
        if deviation > 0:
            points = np.linspace(max(0, density - 4 * deviation), min(1, density + 4 * deviation), 100)
            bell = np.exp(-(((points - density) / deviation) ** 2) / 2) / (deviation * (2 * np.pi) ** 0.5)
            note = "the same for a random mask" if axis == 0 else None
            axes.plot(points, bell, color=colour, linestyle=":", linewidth=1.2, label=note)
    axes.set_yticks([])


def choose_tensors(names: Sequence[str], most: int) -> list[str]:
    """Choose one tensor of each kind, from the middle of its blocks, in the order of the names.

    Args:
        names (`Sequence[str]`):
            Names of tensors.
        most (`int`):
            How many to choose at most.

    Returns:
        `list[str]`: names.

    Example:

    >>> choose_tensors(["wte", "h.0.attn.c_proj", "h.1.attn.c_proj", "h.2.attn.c_proj"], 8)
    ['wte', 'h.1.attn.c_proj']
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    return [same[len(same) // 2] for same in kinds.values()][:most]


def density_map(mask: np.ndarray) -> np.ndarray:
    """Compute the share kept in each cell of a grid. Cells are as equal as whole numbers of weights allow.

    Args:
        mask (`np.ndarray`):
            A boolean matrix.

    Returns:
        `np.ndarray`: shares, at most `CELLS` along each side.

    Example:

    >>> density_map(np.eye(8, dtype=bool)).tolist()
    [[0.25, 0.0], [0.0, 0.25]]
    """
    total, sides = mask.astype(np.int32), []
    for axis, length in enumerate(mask.shape):
        edges = np.linspace(0, length, max(1, min(CELLS, length // CELL_SIDE)) + 1).astype(int)
        total = np.add.reduceat(total, edges[:-1], axis=axis)
        sides.append(np.diff(edges))
    return total / np.outer(*sides)


def smooth(values: np.ndarray, window: int | None = None) -> np.ndarray:
    """Compute the running mean, over a narrower window at both ends.

    Args:
        values (`np.ndarray`):
            A series.
        window (`int`, *optional*):
            Number of values in the window. Default: a twenty-fifth of them.

    Returns:
        `np.ndarray`: the means, as many as there are values.

    Example:

    >>> smooth(np.array([1., 2., 6., 3.]), 3).tolist()
    [1.0, 3.0, 3.6666666666666665, 3.0]
    """
    reach = (window or len(values) // 25) // 2
    sums = np.concatenate(([0.0], np.cumsum(values)))
    place = np.arange(len(values))
    # The window is as wide to the left as to the right: otherwise the mean would bend a falling curve.
    reaches = np.minimum(np.minimum(place, place[::-1]), reach)
    return (sums[place + reaches + 1] - sums[place - reaches]) / (2 * reaches + 1)


def _series(records: Iterable[Record], kind: str, name: str) -> tuple[np.ndarray, ...]:
    """Return steps and values of the records of a kind whose value is a finite number."""
    pairs = [(one["step"], one[name]) for one in records if one["kind"] == kind and name in one]
    steps, values = np.array(pairs, dtype=float).reshape(-1, 2).T
    finite = np.isfinite(values)
    return steps[finite], values[finite]


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure  # slow to import; no pyplot, so there is nothing to close

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def _style(axes: "Axes") -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: "Figure", path: str | os.PathLike) -> Path:
    with replacing(path) as temporary:
        figure.savefig(temporary, format=Path(path).suffix.lstrip(".") or "png")
    return Path(path)
