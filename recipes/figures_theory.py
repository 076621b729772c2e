"""Attention by pruning, measured: figures 4, 5 and 6 of arXiv 2511.04217, and one on the query/key scale.

    python recipes/figures_theory.py --preset quick     # under 3 minutes on two cores
    python recipes/figures_theory.py --preset paper     # under an hour

Every point prunes a random source down to a target and runs the library's own layers:

    error = max over tokens |source(x)_i - target(x)_i|,  mean over inputs x     # one number per source

fig4.png    error against the width n = n_K = n_V, T = 4, with exponential fits
fig5.png    error against the length T
fig6.png    error against the width, for transformers of 1 to 4 blocks
scale.png   figure 4 again with query and key weights U[-1, 1], without the factor n^(1/4)
constant    no figure: the C of Theorem 3, printed and stored

Measured points go to a JSON file per figure as they come; a run that was cut short goes on from there.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one process per core is the parallelism here

import matplotlib
import numpy as np
import torch
from scipy.optimize import curve_fit
from tqdm import tqdm

from hf_slt.papers import theory

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
PAPER_FIT = (0.8, 0.06)  # figure 4 of the paper: 0.8 exp(-0.06 n)


@dataclass(frozen=True)
class Preset:
    sources: int
    widths: tuple[int, ...]  # figure 4
    lengths: tuple[int, ...]  # figure 5
    block_widths: tuple[int, ...]  # figure 6
    block_sources: int
    scale_widths: tuple[int, ...]
    core: int  # values per subset-sum problem that are placed exactly, figures 4 and 5


PRESETS = {
    "quick": Preset(
        sources=20,
        widths=tuple(range(4, 61, 8)),
        lengths=tuple(2**k for k in range(3, 12)),
        block_widths=(100, 140, 180, 220),
        block_sources=10,
        scale_widths=(8, 16, 32, 64, 128, 256),
        core=24,
    ),
    "paper": Preset(
        sources=100,
        widths=tuple(range(4, 101, 4)),
        lengths=tuple(2**k for k in range(3, 14)),
        block_widths=tuple(range(100, 226, 25)),
        block_sources=100,
        scale_widths=(*range(4, 61, 4), 80, 100, 140, 200, 280, 400),
        core=32,
    ),
}


# ---------------------------------------------------------------------------------------------------
# Inputs and targets


def rotations(rng: np.random.Generator, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Points on a circle at angular velocity w after a token of zeros: x (count, length + 1, 2), and w."""
    w, start = rng.uniform(-np.pi, np.pi, count), rng.uniform(0, np.pi, count)
    angle = w[:, None] * np.arange(1, length + 1) + start[:, None]
    x = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    return np.concatenate([np.zeros((count, 1, 2)), x], axis=1), w


def within_norm(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random matrices of spectral norm 1, the most that the theorem allows a target."""
    W = rng.normal(size=shape)
    return W / np.linalg.norm(W, 2, axis=(-2, -1), keepdims=True)


@cache
def untrained_attention() -> theory.TargetAttention:
    rng = np.random.default_rng(0)
    shapes = (1, 2, 2), (1, 2, 2), (1, 2, 2), (1, 2, 1)
    return theory.TargetAttention(*(within_norm(rng, *shape) for shape in shapes))


@cache
def trained_attention() -> theory.TargetAttention:
    """Angular velocity from the first token's output: AdamW, 250 batches (25 epochs) of 1024 samples.

    That token is zero, so its query is zero and it attends to all alike: no gradient ever reaches
    W_Q and W_K, they only decay.
    """
    rng, generator = np.random.default_rng(1), torch.Generator().manual_seed(1)
    shapes = {"query": (2, 2), "key": (2, 2), "value": (2, 2), "output": (2, 1)}
    weights = {
        name: torch.nn.Parameter((2 * torch.rand(shape, generator=generator) - 1) / shape[0] ** 0.5)
        for name, shape in shapes.items()
    }
    optimizer = torch.optim.AdamW(weights.values(), lr=0.1, weight_decay=0.01)
    for _ in range(25):
        for _ in range(10):  # one length per batch spares the padding
            x, w = (torch.from_numpy(a).float() for a in rotations(rng, 1024, int(rng.integers(4, 257))))
            query = x[:, :1] @ weights["query"]
            share = torch.softmax(query @ (x @ weights["key"]).mT / 2**0.5, dim=-1)
            guess = (share @ x @ weights["value"] @ weights["output"])[:, 0, 0]
            optimizer.zero_grad()
            (guess - w).square().mean().backward()
            optimizer.step()
    return theory.TargetAttention(**{name: p.detach().double().numpy()[None] for name, p in weights.items()})


TARGETS = {"untrained": untrained_attention, "trained": trained_attention}


@cache
def untrained_transformer(blocks: int) -> theory.TargetTransformer:
    """Width 2, key and value width 8, MLP of GPT-2's proportion (4 times the width)."""
    rng = np.random.default_rng(2)  # the first blocks of a deeper target are those of a shallower one
    made = []
    for _ in range(blocks):
        attention = theory.TargetAttention(
            *(within_norm(rng, *shape) for shape in ((1, 2, 8), (1, 2, 8), (1, 2, 8), (1, 8, 2)))
        )
        made.append(theory.TargetBlock(attention, within_norm(rng, 2, 8), within_norm(rng, 8, 2)))
    return theory.TargetTransformer(np.zeros((1, 2)), np.zeros((64, 2)), tuple(made))


# ---------------------------------------------------------------------------------------------------
# One source: arguments that JSON can hold in, numbers out


def inputs_of(length: int) -> np.ndarray:
    return rotations(np.random.default_rng(3), max(2, min(64, 2**13 // length)), length)[0]


@cache
def wanted(target: str, length: int) -> np.ndarray:
    return TARGETS[target]()(inputs_of(length))


def distance(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    return np.linalg.norm(got - want, axis=-1)  # (inputs, tokens)


def measure_attention(
    source: int, target: str, construction: str, qk_scale: float | str, n: int, lengths: list[int], core: int
) -> dict:
    found = theory.approximate_attention(
        TARGETS[target](), n, n, source, construction=construction, qk_scale=qk_scale, core=core
    )
    layer = found.layer()
    error, first_token = [], []
    for length in lengths:
        if length > 512:  # float64 buys nothing at the errors of figure 5
            layer = layer.float()
        off = distance(theory.run_attention(layer, inputs_of(length), 1), wanted(target, length))
        error.append(off.max(axis=1).mean())
        first_token.append(off[:, 0].mean())
    entries = {"qk": np.abs(found.qk_error).max(), "vo": np.abs(found.vo_error).max()}
    return {"error": error, "first_token": first_token, **entries, "bound": found.bound(alpha=1.0)}


def measure_shape(
    source: int, heads: int, d1: int, d2: int, d_k: int, construction: str, n: int, core: int
) -> dict:
    """A target of its own for every source, at the edge of the norm bound, inputs at the edge of theirs."""
    rng = np.random.default_rng(source)
    shapes = (heads, d1, d_k), (heads, d1, d_k), (heads, d1, d_k), (heads, d_k, d2)
    target = theory.TargetAttention(*(within_norm(rng, *shape) for shape in shapes))
    x = rng.normal(size=(8, 8, d1))
    x *= np.sqrt(max(d1, d2)) / np.linalg.norm(x, axis=-1, keepdims=True)
    found = theory.approximate_attention(target, n, n, source, construction=construction, core=core)
    return {"error": distance(found(x), target(x)).max()}


def measure_transformer(source: int, blocks: int, construction: str, n: int, core: int) -> dict:
    target = untrained_transformer(blocks)
    found = theory.approximate_transformer(target, n, n, n, source, construction=construction, core=core)
    model = found.model().transformer.double()
    x = inputs_of(16)
    padded = np.zeros((*x.shape[:2], found.config.n_embd))
    padded[..., :2] = x
    with torch.no_grad():
        y = model(inputs_embeds=torch.from_numpy(padded)).last_hidden_state.numpy()[..., :2]
    return {"error": distance(y, target.hidden(x)).max(axis=1).mean(), "entry": found.error}


# ---------------------------------------------------------------------------------------------------
# Many sources, resumable


def measure_chunk(function: Callable[..., dict], of: dict) -> dict[str, list]:
    """Every number as a list over the chunk's sources, to 5 digits."""
    torch.set_num_threads(1)
    arguments = {key: value for key, value in of.items() if key != "sources"}
    found = [function(source, **arguments) for source in range(*of["sources"])]
    return {key: [_rounded(one[key]) for one in found] for key in found[0]}


def _rounded(value) -> float | list[float]:
    return [_rounded(one) for one in value] if isinstance(value, list) else float(f"{value:.4e}")


class Records:
    """Measured chunks of one figure in a JSON file, keyed by their arguments."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = json.loads(path.read_text())["records"] if path.exists() else []

    def measure(self, function: Callable[..., dict], points: list[dict], sources: int, workers: int) -> None:
        """Fill in what is not yet there; a chunk is ten sources of one point."""
        chunks = [
            {**of, "sources": [start, min(start + 10, sources)]}
            for of in points
            for start in range(0, sources, 10)
        ]
        self.rows = [row for row in self.rows if row["of"] in chunks]  # not those of an older preset
        done = [row["of"] for row in self.rows]
        todo = [of for of in chunks if of not in done]
        saved = time.monotonic()
        with (
            ProcessPoolExecutor(workers) as pool,
            tqdm(total=len(chunks), initial=len(chunks) - len(todo), desc=self.path.stem) as bar,
        ):
            running = {pool.submit(measure_chunk, function, of): of for of in todo}
            for future in as_completed(running):
                self.rows.append({"of": running[future], **future.result()})
                bar.update()
                if time.monotonic() - saved > 5:
                    self.save()
                    saved = time.monotonic()
        self.save()

    def save(self, **more) -> None:
        self.rows.sort(key=lambda row: json.dumps(row["of"], sort_keys=True))
        head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in more.items())
        body = ",\n".join(json.dumps(row) for row in self.rows)
        partial = self.path.with_suffix(".partial")
        partial.write_text(f'{{\n{head}"records": [\n{body}\n]\n}}\n')
        partial.replace(self.path)

    def get(self, key: str, **of) -> np.ndarray:
        """One number for all sources of a point, (sources, ...)."""
        rows = [row for row in self.rows if all(row["of"][name] == value for name, value in of.items())]
        return np.array(
            [one for row in sorted(rows, key=lambda row: row["of"]["sources"]) for one in row[key]]
        )


# ---------------------------------------------------------------------------------------------------
# Fits


def fit_mean(widths: np.ndarray, means: np.ndarray) -> tuple[float, float]:
    """Fit a exp(-b n) by least squares on the errors themselves, as the paper fits: the large ones decide."""
    (a, b), _ = curve_fit(lambda n, a, b: a * np.exp(-b * n), widths, means, p0=(1.0, 0.1), maxfev=10_000)
    return float(a), float(b)


def fit_log(widths: np.ndarray, medians: np.ndarray, floor: float) -> tuple[float, float]:
    """Fit a exp(-b n) by least squares on the logarithms above a floor: every decade counts alike."""
    above = medians > floor
    slope, start = np.polyfit(widths[above], np.log(medians[above]), 1)
    return float(np.exp(start)), float(-slope)


def fit_shared_rate(curves: list[dict[str, np.ndarray]], kind: str) -> dict:
    """Fit factor_b exp(-rate n), one rate for all curves, by least squares on the logarithms."""
    widths, errors = (np.concatenate([s[key] for s in curves]) for key in ("n", kind))
    which = np.repeat(np.eye(len(curves)), [len(s["n"]) for s in curves], axis=0)
    rate, *starts = np.linalg.lstsq(np.column_stack([-widths, which]), np.log(errors), rcond=None)[0]
    return {"rate": float(rate), "factors": [float(np.exp(a)) for a in starts]}


def summary(records: Records, key: str, widths: tuple[int, ...], **of) -> dict[str, np.ndarray]:
    errors = np.array([records.get(key, n=n, **of).reshape(-1) for n in widths])  # (widths, sources)
    return {"n": np.array(widths, dtype=float), "errors": errors, **moments(errors, axis=1)}


def moments(errors: np.ndarray, axis: int) -> dict[str, np.ndarray]:
    return {"mean": errors.mean(axis), "median": np.median(errors, axis), "std": errors.std(axis)}


def draw_curve(ax, x: np.ndarray, s: dict[str, np.ndarray], label: str, colour: str) -> None:
    """Mean, one standard deviation up (below the mean it would leave the logarithmic axis), median."""
    ax.plot(x, s["mean"], "o-", color=colour, ms=4, label=f"{label}: mean, + std")
    ax.fill_between(x, s["mean"], s["mean"] + s["std"], color=colour, alpha=0.15, lw=0)
    ax.plot(x, s["median"], "--", color=colour, lw=1, label=f"{label}: median")


def report(title: str, fits: dict) -> None:
    for label, fit in fits.items():
        print(f"{title}, {label}: {fit}")


def finish(fig, path: Path, top: float = 1.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.tight_layout(rect=(0, 0, 1, top))
    fig.savefig(path, dpi=150)
    plt.close(fig)
    print("wrote", path)


# ---------------------------------------------------------------------------------------------------
# Figures


@dataclass(frozen=True)
class Run:
    preset: Preset
    name: str
    data: Path
    figures: Path
    workers: int

    def records(
        self, figure: str, function: Callable[..., dict], points: list[dict], sources: int | None = None
    ) -> Records:
        records = Records(self.data / f"theory_{self.name}_{figure}.json")
        records.measure(function, points, sources or self.preset.sources, self.workers)
        return records


def attention_points(
    widths, lengths, core, targets=TARGETS, constructions=("proof",), scales=("paper",)
) -> list[dict]:
    return [
        {"target": t, "construction": c, "qk_scale": q, "n": n, "lengths": list(lengths), "core": core}
        for t in targets
        for c in constructions
        for q in scales
        for n in widths
    ]


def figure4(run: Run) -> None:
    widths, core, both = run.preset.widths, run.preset.core, ("proof", "balanced")
    points = attention_points(widths, [4], core, constructions=both)
    records = run.records("fig4", measure_attention, points)
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    fits = {}
    for ax, target in zip(axes, TARGETS, strict=True):
        for construction, colour in zip(both, ("C0", "C1"), strict=True):
            s = summary(records, "error", widths, target=target, construction=construction)
            draw_curve(ax, s["n"], s, construction, colour)
            # beyond `core` values a problem is not solved to the optimum, and errors stay near 2^-core
            mean, median = fit_mean(s["n"], s["mean"]), fit_log(s["n"], s["median"], floor=30 * 2.0**-core)
            fits[f"{target}, {construction}"] = {"mean": mean, "median": median}
            if construction == "proof":
                for (a, b), what, style in ((mean, "mean", "k:"), (median, "median", "k-.")):
                    label = f"fit of the {what}, proof: {a:.2g} exp(-{b:.2g} n)"
                    ax.plot(s["n"], a * np.exp(-b * s["n"]), style, lw=1, label=label)
        a, b = PAPER_FIT
        ax.plot(s["n"], a * np.exp(-b * s["n"]), color="C3", label=f"paper: {a} exp(-{b} n)")
        ax.axvline(2 * core, color="0.7", lw=1, label="proof: subset sums exact up to here")
        ax.set(title=f"{target} target", xlabel="width n = n_K = n_V", yscale="log")
        ax.set_ylim(2.0**-core / 300, 3)
        ax.legend(fontsize=6.5, loc="lower left")
    axes[0].set_ylabel("output error, T = 4")
    records.save(fits=fits)
    report("figure 4", fits)
    finish(fig, run.figures / "fig4.png")


def figure5(run: Run) -> None:
    lengths = run.preset.lengths
    records = run.records("fig5", measure_attention, attention_points((20, 40), lengths, run.preset.core))
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for ax, target in zip(axes, TARGETS, strict=True):
        for n, colour in ((20, "C0"), (40, "C1")):
            draw_curve(
                ax, lengths, moments(records.get("error", target=target, n=n), axis=0), f"n = {n}", colour
            )
            bound = records.get("bound", target=target, n=n).mean()
            ax.axhline(bound, color=colour, ls=":", lw=1, label=f"n = {n}: bound for every T, mean")
        ax.set(title=f"{target} target", xlabel="length T", yscale="log")
        ax.set_xscale("log", base=2)
    axes[0].set_ylabel("output error")
    fig.legend(*axes[0].get_legend_handles_labels(), fontsize=7, ncols=6, loc="upper center")
    finish(fig, run.figures / "fig5.png", top=0.94)


def figure6(run: Run) -> None:
    widths, constructions = run.preset.block_widths, ("proof", "balanced")
    points = [
        {"blocks": b, "construction": c, "n": n, "core": 24}
        for c in constructions
        for b in (1, 2, 3, 4)
        for n in widths
    ]
    records = run.records("fig6", measure_transformer, points, run.preset.block_sources)
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    fits = {}
    for ax, construction in zip(axes, constructions, strict=True):
        curves = [
            summary(records, "error", widths, blocks=b, construction=construction) for b in (1, 2, 3, 4)
        ]
        for kind in ("mean", "median"):
            fits[f"{construction}, {kind}"] = fit_shared_rate(curves, kind)
        rate, factors = (fits[f"{construction}, mean"][key] for key in ("rate", "factors"))
        for b, (s, factor) in enumerate(zip(curves, factors, strict=True)):
            draw_curve(ax, s["n"], s, f"{b + 1} block{'s' * (b > 0)}", f"C{b}")
            ax.plot(s["n"], factor * np.exp(-rate * s["n"]), ":", color=f"C{b}", lw=1)
        shown = ", ".join(f"{factor:.2g}" for factor in factors)
        ax.set_title(f"{construction}: factor exp(-{rate:.3f} n), factors {shown}", fontsize=10)
        ax.set(xlabel="width n = n_MHA = n_FC", yscale="log")
    axes[0].set_ylabel("output error")
    axes[0].legend(fontsize=7, ncols=2)
    records.save(fits=fits)
    report("figure 6", fits)
    finish(fig, run.figures / "fig6.png")


def figure_scale(run: Run) -> None:
    # trained W_Q and W_K are so small that either scale reaches them: the untrained target tells more
    widths, scales = (
        run.preset.scale_widths,
        (("paper", "U[-n^(1/4), n^(1/4)]", "C0"), (1.0, "U[-1, 1]", "C3")),
    )
    points = attention_points(widths, [4], 24, targets=("untrained",), scales=[scale for scale, *_ in scales])
    records = run.records("scale", measure_attention, points)
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for ax, key, title in zip(
        axes, ("error", "qk"), ("output error, T = 4", "largest error in W_QK"), strict=True
    ):
        for scale, label, colour in scales:
            s = summary(records, key, widths, qk_scale=scale)
            draw_curve(ax, s["n"], s, label, colour)
        ax.set(title=title, xlabel="width n = n_K = n_V", yscale="log")
        ax.set_xscale("log", base=2)
        ax.legend(fontsize=7, title="query and key weights", title_fontsize=7)
    finish(fig, run.figures / "scale.png")


def table_constant(run: Run) -> None:
    """C of Theorem 3: the least that agrees with every width measured, per shape."""
    shapes = [
        (1, 1, 1, 1),
        (1, 2, 1, 2),
        (1, 2, 2, 1),
        (2, 2, 2, 2),
        (1, 4, 4, 2),
        (2, 4, 4, 4),
        (1, 8, 8, 4),
    ]
    points = [
        {"heads": h, "d1": d1, "d2": d2, "d_k": d_k, "construction": c, "n": d1 * k, "core": 24}
        for c in ("proof", "balanced")
        for h, d1, d2, d_k in shapes
        for k in (8, 12, 16, 20, 24)
    ]
    records = run.records("constant", measure_shape, points)
    constants: dict[str, dict[str, float]] = {"proof": {}, "balanced": {}}
    for construction, found in constants.items():
        for h, d1, d2, d_k in shapes:
            widths = tuple(d1 * k for k in (8, 12, 16, 20, 24))
            s = summary(records, "error", widths, construction=construction, heads=h, d1=d1, d2=d2, d_k=d_k)
            C = theory.estimate_constant(list(widths), s["errors"], d1, d2, h)
            found[f"heads {h}, d1 {d1}, d2 {d2}"] = round(C, 2)
    records.save(constants=constants)
    report("constant C", constants)


FIGURES = {"4": figure4, "5": figure5, "6": figure6, "scale": figure_scale, "constant": table_constant}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="quick")
    parser.add_argument("--only", choices=FIGURES, nargs="+", default=list(FIGURES), help="what to make")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes, one per core")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results/ and figures/")
    args = parser.parse_args()
    data = args.out / "results"
    figures = args.out / "figures" / ("quick" if args.preset == "quick" else "")
    data.mkdir(parents=True, exist_ok=True)
    for key in args.only:
        FIGURES[key](Run(PRESETS[args.preset], args.preset, data, figures, args.workers))


if __name__ == "__main__":
    main()
