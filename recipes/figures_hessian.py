"""The Hessian of attention, measured: growth, the authors' own setting, scores (arXiv 2410.10986).

    python recipes/figures_hessian.py --preset quick                # one seed, a few core-minutes
    python recipes/figures_hessian.py --preset full                 # three seeds, two laws, ten core-minutes
    python recipes/figures_hessian.py --preset full --only advice   # 12 short trainings, 35 core-minutes

hessian_growth.png     one attention layer in closed form: Frobenius norm of each block against the scale
                       of the input, softmax and linear, without and with LayerNorm; slopes by window
hessian_addition.png   a one-block GPT-2 on 5-digit addition against the norms the authors published
hessian_scores.png     supermask GPT-2 over scores: are query, key and value even, and at which qk_scale?
hessian_advice.png     does `advise` help? nano's shape with and without it, with and without LayerNorm

Measured points go to a JSON file per figure as they come; a run that was cut short goes on from there.
"""

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from pydoc_data import topics

os.environ.setdefault("OMP_NUM_THREADS", "1")  # products with one probe are too small to share

import matplotlib
import numpy as np
import torch
from hf_slt.training.loop import build_model, train
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

from hf_slt import SupermaskGPT2Config, SupermaskGPT2LMHeadModel
from hf_slt.papers.attention_hessian import attention_hessian
from hf_slt.papers.curvature import block_curvature
from hf_slt.papers.curvature_report import advise
from hf_slt.sharing.files import replacing
from hf_slt.text.blocks import load_blocks
from hf_slt.training.arguments import Arguments, parse_arguments
from hf_slt.training.monitoring import attention_moments, read_log

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
FIGURES = ("growth", "addition", "scores", "advice")
ADVICE = {"plain": (), "scale": ("qk_scale",), "rates": ("rate",), "both": ("qk_scale", "rate")}
PAIRS = ("qq", "kk", "qk", "qv", "kv", "vv")
WINDOWS = ((0.01, 0.1), (1.0, 10.0))  # slopes are fitted in each; one line over both would mean nothing

# Frobenius norms that the authors measured, {(LayerNorm, sigma): (Q of H, Q of H_o, V of H)}.
PUBLISHED = {
    (False, 0.01): (7.28e-10, 2.86e-12, 3.82e-4),
    (False, 0.0886): (3.55e-5, 1.28e-6, 0.0282),
    (False, 1.13): (17.7, 9.53, 7.26),
    (False, 10.0): (1.26e5, 5.38e4, 357.0),
    (True, 0.01): (3.81, None, 17.5),
    (True, 0.0886): (4.14, None, 13.1),
    (True, 1.13): (0.657, None, 0.410),
    (True, 10.0): (0.0661, None, 0.00591),
}


@dataclass(frozen=True)
class Preset:
    seeds: int
    sigmas: tuple[float, ...]  # growth
    probes: int
    scales: tuple[float, ...]  # qk_scale, on the layers of head width 64
    laws: tuple[str, ...]
    widths: tuple[int, ...]  # of a query or key, beside 64
    steps: int  # of a training


PRESETS = {
    "quick": Preset(
        seeds=1,
        sigmas=tuple(np.geomspace(0.01, 10, 13).tolist()),
        probes=10,
        scales=(1.0, 1.5, 2.0, 2.83, 4.0, 5.0, 6.0),
        laws=("normal",),
        widths=(16, 256),
        steps=100,
    ),
    "full": Preset(
        seeds=3,
        sigmas=tuple(np.geomspace(0.01, 10, 25).tolist()),
        probes=10,
        scales=(1.0, 2.0, 2.83, 4.0, 6.0),
        laws=("normal", "signed_constant"),
        widths=(16, 256),
        steps=300,
    ),
}


# ---------------------------------------------------------------------------------------------------
# (a) growth with the scale of the input


def growth_point(softmax: bool, layer_norm: bool, sigma: float, size: int = 8, seeds: int = 8) -> dict:
    """Norms of every block, mean over seeds: X ~ N(0, sigma^2), weights N(0, 1/d), Y ~ N(0, 1)."""
    norms = {"outer": dict.fromkeys(PAIRS, 0.0), "functional": dict.fromkeys(PAIRS, 0.0)}
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        X, Y, *weights = (torch.randn(size, size, generator=generator, dtype=torch.float64) for _ in range(5))
        X = sigma * X
        if layer_norm:  # without epsilon, which would bring the scale back where sigma^2 is near it
            X = torch.nn.functional.layer_norm(X, (size,), eps=0.0)
        H = attention_hessian(X, *[w / math.sqrt(size) for w in weights], Y, softmax=softmax)
        for part, blocks in norms.items():
            for pair in PAIRS:
                blocks[pair] += getattr(H, part)[tuple(pair)].norm().item() / seeds
    return norms


def slopes(records: list[dict]) -> list[dict]:
    """Log-log slope of every block in every window, for each kind of attention."""
    found = []
    for softmax in (True, False):
        for layer_norm in (False, True):
            points = [r for r in records if r["softmax"] == softmax and r["layer_norm"] == layer_norm]
            for low, high in WINDOWS:
                inside = [p for p in points if low * 0.999 <= p["sigma"] <= high * 1.001]
                x = np.log([p["sigma"] for p in inside])
                for part in ("outer", "functional"):
                    for pair in PAIRS:
                        y = np.array([p[part][pair] for p in inside])
                        slope = round(float(np.polyfit(x, np.log(y), 1)[0]), 4) if y.min() > 0 else None
                        found.append(
                            {
                                "softmax": softmax,
                                "layer_norm": layer_norm,
                                "window": [low, high],
                                "part": part,
                                "block": pair,
                                "slope": slope,
                            }
                        )
    return found


def show(slope: float) -> str:
    """Two digits, and no minus before a zero."""
    return f"{round(slope, 2) + 0.0:.2f}"


def draw_growth(records: list[dict], fits: list[dict], path: Path) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(11, 8.5), sharex=True, layout="constrained")
    for row, softmax in zip(axes, (True, False), strict=True):
        for axis, layer_norm in zip(row, (False, True), strict=True):
            points = [r for r in records if r["softmax"] == softmax and r["layer_norm"] == layer_norm]
            chosen = [f for f in fits if f["softmax"] == softmax and f["layer_norm"] == layer_norm]
            slope = {(f["part"], f["block"], f["window"][0]): f["slope"] for f in chosen}
            for part, style in (("outer", "-"), ("functional", "--")):
                for colour, pair in enumerate(PAIRS):
                    norms = [p[part][pair] for p in points]
                    if min(norms) <= 0:
                        continue
                    ends = " / ".join(show(slope[part, pair, low]) for low, _ in WINDOWS)
                    label = f"{pair} {'H_o' if part == 'outer' else 'H_f'}  {ends}"
                    sigmas = [p["sigma"] for p in points]
                    axis.loglog(sigmas, norms, style, color=f"C{colour}", label=label, lw=1.4)
            kind = "softmax" if softmax else "linear"
            axis.set_title(f"{kind} attention, {'LayerNorm' if layer_norm else 'no LayerNorm'}")
            axis.legend(fontsize=6.5, title="slopes, sigma .01-.1 / 1-10", title_fontsize=6.5)
            axis.grid(alpha=0.3)
            axis.set_ylabel("Frobenius norm")
            if layer_norm:  # flat lines: room for them and the legend
                low, high = axis.get_ylim()
                axis.set_ylim(low / 300, high * 10)
    for axis in axes[-1]:
        axis.set_xlabel("sigma, scale of the input")
    figure.suptitle("Hessian blocks of one attention layer against the scale of its input (L = d = 8)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


# ---------------------------------------------------------------------------------------------------
# (b) the authors' setting


def additions(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows "12345+67890=080235" over 12 tokens; only the six digits of the answer are predicted."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(0, 10**5, (count, 2), generator=generator).tolist()
    ids = torch.tensor([["0123456789+=".index(c) for c in f"{a:05d}+{b:05d}={a + b:06d}"] for a, b in pairs])
    labels = ids.clone()
    labels[:, :12] = -100
    return {"input_ids": ids, "labels": labels}


def addition_model(sigma: float, seed: int = 0, width: int = 128) -> GPT2LMHeadModel:
    """One untrained block: weights N(0, (0.8 / sqrt(width))^2), token and position tables N(0, sigma^2)."""
    config = GPT2Config(
        n_layer=1,
        n_embd=width,
        n_head=1,
        n_inner=512,
        vocab_size=12,
        n_positions=18,
        activation_function="relu",
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                std = sigma if name.endswith(("wte.weight", "wpe.weight")) else 0.8 / math.sqrt(width)
                weight.normal_(0.0, std, generator=generator)
    return model


def addition_point(layer_norm: bool, sigma: float, seed: int, probes: int) -> dict:
    """Norms of the query, key and value blocks; the published ones beside them."""
    rows = block_curvature(
        addition_model(sigma, seed),
        additions(64, seed),
        ("q", "k", "v"),
        probes=probes,
        seed=seed,
        layer_norm="keep" if layer_norm else "remove",
        eigenvalues=False,
        dtype=torch.float64,
    )
    return {row.block: {"norm": row.norm, "norm_outer": row.norm_outer} for row in rows}


def addition_ratios(records: list[dict]) -> list[dict]:
    """Geometric mean over seeds, divided by the published norm."""
    found = []
    for (layer_norm, sigma), published in PUBLISHED.items():
        points = [r for r in records if r["layer_norm"] == layer_norm and r["sigma"] == sigma]
        for (block, kind), theirs in zip(
            (("q", "norm"), ("q", "norm_outer"), ("v", "norm")), published, strict=True
        ):
            if theirs is not None and points:
                ours = math.exp(np.mean([math.log(p[block][kind]) for p in points]))
                found.append(
                    {
                        "layer_norm": layer_norm,
                        "sigma": sigma,
                        "block": block,
                        "what": kind,
                        "ours": ours,
                        "published": theirs,
                        "ratio": round(ours / theirs, 3),
                    }
                )
    return found


def draw_addition(records: list[dict], ratios: list[dict], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for axis, layer_norm in zip(axes, (False, True), strict=True):
        points = [r for r in records if r["layer_norm"] == layer_norm]
        sigmas = sorted({p["sigma"] for p in points})
        for block, colour in (("q", "C0"), ("k", "C2"), ("v", "C3")):
            for kind, style in (("norm", "-"), ("norm_outer", "--")):
                means = [
                    math.exp(np.mean([math.log(p[block][kind]) for p in points if p["sigma"] == sigma]))
                    for sigma in sigmas
                ]
                label = f"{block}, {'H' if kind == 'norm' else 'H_o'}"
                axis.loglog(sigmas, means, style, color=colour, label=label)
        for r in ratios:
            if r["layer_norm"] == layer_norm:
                marker = "o" if r["what"] == "norm" else "s"
                colour = "C0" if r["block"] == "q" else "C3"
                axis.plot(r["sigma"], r["published"], marker, mfc="none", color=colour, ms=9)
        axis.plot([], [], "ko", mfc="none", ms=9, label="published, H")
        axis.plot([], [], "ks", mfc="none", ms=9, label="published, H_o")
        axis.set(title="Pre-LN" if layer_norm else "no LayerNorm", xlabel="sigma, scale of the embeddings")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("Frobenius norm")
    figure.suptitle("5-digit addition, one block of width 128: ours (lines) and the authors' (markers)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


# ---------------------------------------------------------------------------------------------------
# (c) scores of a supermask GPT-2


def text_batch(count: int = 4, length: int = 64, seed: int = 0) -> torch.Tensor:
    """Bytes of Python's own language reference, which every installation has."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - length, (count,), generator=generator).tolist()
    return torch.stack([torch.tensor(list(text[start : start + length])) for start in starts])


def score_point(
    law: str, layer_norm: bool, qk_scale: float, n_qk: int, seed: int, probes: int, every_block: bool
) -> dict:
    """Curvature over scores by block, geometric means over the layers of a 2-layer supermask GPT-2."""
    config = SupermaskGPT2Config(
        n_layer=2,
        n_embd=128,
        n_head=2,
        n_qk=n_qk,
        n_v=64,
        vocab_size=256,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=None,
        density=0.5,
        law=law,
        layer_norm=layer_norm,
        qk_scale=qk_scale,
        scale_with_width=True,
        seed=seed,
    )
    model, batch = SupermaskGPT2LMHeadModel(config), text_batch(seed=seed)
    blocks = ("q", "k", "v", "o", "fc", "proj", "embedding") if every_block else ("q", "k", "v")
    rows = block_curvature(model, batch, blocks, "score", probes, seed, eigenvalues=False)

    def mean(values: Iterable[float]) -> float:
        return math.exp(np.mean([math.log(max(value, 1e-300)) for value in values]))

    return {
        "rms": {b: mean(row.rms for row in rows if row.block == b) for b in blocks},
        "mean_outer": {b: mean(row.mean_outer for row in rows if row.block == b) for b in blocks},
        "spread": attention_moments(model, batch, relative=True).mean().item(),
    }


def value_to_query_at(point: dict, what: str) -> float:
    """Value over the geometric mean of query and key, by `rms` of H or by the mean diagonal of H_o."""
    values = point[what]
    return values["v"] / math.sqrt(values["q"] * values["k"])


def even_scales(records: list[dict]) -> list[dict]:
    """The scale where value and query meet, interpolated, per law, LayerNorm, width and measure."""
    found = []
    for key in dict.fromkeys((r["law"], r["layer_norm"], r["n_qk"]) for r in records):
        points = [r for r in records if (r["law"], r["layer_norm"], r["n_qk"]) == key]
        scales = sorted({p["qk_scale"] for p in points})
        for what in ("rms", "mean_outer"):
            logs = [
                np.mean([math.log(value_to_query_at(p, what)) for p in points if p["qk_scale"] == scale])
                for scale in scales
            ]
            # The ratio falls with the scale; np.interp wants it rising. No extrapolation.
            even = (
                math.exp(np.interp(0.0, logs[::-1], np.log(scales[::-1])))
                if min(logs) <= 0 <= max(logs)
                else None
            )
            law, layer_norm, n_qk = key
            found.append(
                {
                    "law": law,
                    "layer_norm": layer_norm,
                    "n_qk": n_qk,
                    "measure": what,
                    "even_at": None if even is None else round(even, 3),
                    "paper_scale": round(n_qk**0.25, 3),
                    "ratio_at": {
                        f"{scale:g}": float(f"{math.exp(log):.3g}")
                        for scale, log in zip(scales, logs, strict=True)
                    },
                }
            )
    return found


def draw_scores(records: list[dict], even: list[dict], path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    colours = {"normal": "C0", "signed_constant": "C1"}
    for law in dict.fromkeys(r["law"] for r in records):
        for layer_norm, style in ((True, "-"), (False, "--")):
            for e in even:
                if (e["law"], e["layer_norm"], e["n_qk"], e["measure"]) == (law, layer_norm, 64, "rms"):
                    scales, ratios = zip(*((float(s), v) for s, v in e["ratio_at"].items()), strict=True)
                    name = f"{law}, {'' if layer_norm else 'no '}LayerNorm"
                    axes[0].loglog(scales, ratios, style, marker="o", ms=3, color=colours[law], label=name)
    axes[0].axhline(1, color="k", lw=0.8)
    axes[0].axvline(64**0.25, color="k", lw=0.8, ls=":", label="n^(1/4), n = 64")
    axes[0].set(xlabel="qk_scale", ylabel="value to query/key, root mean square of H", title="is it even?")
    axes[0].legend(fontsize=8)

    law = records[0]["law"]
    for colour, block in enumerate(("q", "k", "v", "o", "fc", "proj", "embedding")):
        for layer_norm, style in ((True, "-"), (False, "--")):
            points = [
                r
                for r in records
                if (r["law"], r["layer_norm"], r["n_qk"]) == (law, layer_norm, 64) and block in r["rms"]
            ]
            scales = sorted({p["qk_scale"] for p in points})
            means = [
                math.exp(np.mean([math.log(p["rms"][block]) for p in points if p["qk_scale"] == scale]))
                for scale in scales
            ]
            label = block if layer_norm else None
            axes[1].loglog(scales, means, style, color=f"C{colour}", label=label)
    axes[1].set(
        xlabel="qk_scale", ylabel="root mean square of H over scores", title=f"every block, {law} law"
    )
    axes[1].legend(
        fontsize=7,
        title="solid: LN\ndashed: none",
        title_fontsize=7,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )

    for what, marker in (("rms", "o"), ("mean_outer", "s")):
        points = [e for e in even if (e["law"], e["layer_norm"], e["measure"]) == (law, True, what)]
        points = [e for e in points if e["even_at"]]
        points.sort(key=lambda e: e["n_qk"])
        label = "root mean square of H" if what == "rms" else "mean diagonal of H_o"
        axes[2].loglog([e["n_qk"] for e in points], [e["even_at"] for e in points], marker + "-", label=label)
    widths = sorted({e["n_qk"] for e in even})
    axes[2].loglog(widths, [n**0.25 for n in widths], "k:", label="n^(1/4)")
    axes[2].set(
        xlabel="n, width of a query and key", ylabel="qk_scale at which v = q, k", title="with LayerNorm"
    )
    axes[2].legend(fontsize=8)
    for axis, ticks in zip(axes, ((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6), widths), strict=True):
        axis.minorticks_off()
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.grid(alpha=0.3)
    axes[2].set_yticks((1.5, 2, 3, 4, 5, 6), ("1.5", "2", "3", "4", "5", "6"))
    figure.suptitle("Curvature over scores: untrained 2-layer supermask GPT-2, width 128, density 0.5")
    figure.savefig(path, dpi=130)
    plt.close(figure)


# ---------------------------------------------------------------------------------------------------
# (d) does the advice help?


def advice_point(layer_norm: bool, variant: str, seed: int, steps: int) -> dict:
    """Validation loss of nano's shape after `steps`, with the part of the advice that `variant` names.

    The training is that of `train_gpt2_slt.py`, and it gets the advice as a person would give it: as options.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = {"layer_norm": layer_norm, "seed": seed, "steps": steps, "output_dir": folder}
        often = {"evaluate_every": 100, "save_every": 0}
        taken = {
            name: round(value, 4)
            for name, value in (advice_for(layer_norm, seed).items() if ADVICE[variant] else ())
            if name.endswith(ADVICE[variant])
        }
        report = train(nano_arguments(**own, **often, **taken))
        if report is None:
            raise SystemExit("interrupted; the same command goes on after the last finished training")
        evaluations = [r for r in read_log(Path(folder) / "log.jsonl") if r["kind"] == "evaluation"]
        curve = [[r["step"], round(r["loss"], 4)] for r in evaluations]
        return {"loss": report["loss"], "curve": curve, "taken": taken}


@cache
def advice_for(layer_norm: bool, seed: int) -> dict[str, float]:
    """What `advise` says of the untrained nano model, from two blocks of its training text."""
    arguments = nano_arguments(layer_norm=layer_norm, seed=seed)
    corpus = load_blocks(arguments.data)
    ids = torch.as_tensor(np.asarray(corpus.train[np.arange(2)]["input_ids"]), dtype=torch.long)
    return advise(build_model(arguments, corpus), ids, seed=seed).arguments()


def nano_arguments(**options) -> Arguments:
    """The nano preset at the paper's scale and rate 1e-2 with these options, read as from a command line."""
    options = {"config": HERE / "nano.yaml", "qk_scale": "paper", "learning_rate": 1e-2, **options}
    return parse_arguments([word for name, value in options.items() for word in (f"--{name}", str(value))])


def advice_gains(records: list[dict]) -> list[dict]:
    """Mean loss over seeds, and what it gains on the plain run of the same seed: mean, least and most."""
    found = []
    for layer_norm, variant in dict.fromkeys((r["layer_norm"], r["variant"]) for r in records):
        points = [r for r in records if r["layer_norm"] == layer_norm]
        plain = {r["seed"]: r["loss"] for r in points if r["variant"] == "plain"}
        mine = {r["seed"]: r["loss"] for r in points if r["variant"] == variant}
        gains = [plain[seed] - loss for seed, loss in mine.items() if seed in plain]
        found.append(
            {
                "layer_norm": layer_norm,
                "variant": variant,
                "seeds": len(gains),
                "loss": round(float(np.mean(list(mine.values()))), 4),
                "gain": round(float(np.mean(gains)), 4),
                "gain_range": [round(min(gains), 4), round(max(gains), 4)],
            }
        )
    return found


def draw_advice(records: list[dict], gains: list[dict], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    names = {
        "plain": "as the preset is",
        "scale": "advised scale",
        "rates": "advised rates",
        "both": "advised",
    }
    for axis, layer_norm in zip(axes, (True, False), strict=True):
        for colour, variant in enumerate(ADVICE):
            chosen = [r for r in records if (r["layer_norm"], r["variant"]) == (layer_norm, variant)]
            for place, r in enumerate(chosen):
                mean = np.mean([one["loss"] for one in chosen])
                label = f"{names[variant]}: {mean:.3f}" if place == 0 else None
                axis.plot(*zip(*r["curve"], strict=True), "o-", ms=4, lw=1, color=f"C{colour}", label=label)
        axis.set(title="LayerNorm" if layer_norm else "no LayerNorm", xlabel="step")
        axis.set_ylabel("validation loss, nats a token")
        axis.legend(title="mean at the end", fontsize=8, title_fontsize=8)
        axis.grid(alpha=0.3)
    steps = records[0]["steps"]
    figure.suptitle(f"Does it help to take the advice? nano's shape, {steps} steps, a line per seed")
    figure.savefig(path, dpi=130)
    plt.close(figure)


# ---------------------------------------------------------------------------------------------------
# Points, kept as they come


class Points:
    """Measured points in a JSON file: each is computed once, whatever interrupts the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        old = json.loads(path.read_text()) if path.exists() else {}
        self.known = {json.dumps(r["of"], sort_keys=True): r["is"] for r in old.get("points", [])}
        self.used: list[dict] = []

    def get(self, measure: Callable[..., dict], **of) -> None:
        key = json.dumps(of, sort_keys=True)
        if key not in self.known:
            self.known[key] = measure(**of)
            self.write({})
        self.used.append({**of, **self.known[key]})

    def write(self, summary: dict) -> None:
        points = [{"of": json.loads(key), "is": value} for key, value in self.known.items()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps({**summary, "points": points}, indent=1) + "\n")


def run(
    name: str, called: str, out: Path, fresh: bool = False, variants: Sequence[str] = ("plain", "both")
) -> None:
    """Measure, write and draw one figure of the preset that is called so."""
    preset = PRESETS[called]
    path = out / "results" / f"hessian_{called}_{name}.json"
    if fresh:
        path.unlink(missing_ok=True)
    points = Points(path)
    seeds = range(preset.seeds)
    if name == "growth":
        jobs = [
            (growth_point, {"softmax": softmax, "layer_norm": layer_norm, "sigma": sigma})
            for softmax in (True, False)
            for layer_norm in (False, True)
            for sigma in preset.sigmas
        ]
    elif name == "addition":
        jobs = [
            (addition_point, {"layer_norm": ln, "sigma": sigma, "seed": seed, "probes": preset.probes})
            for seed in seeds
            for ln, sigma in PUBLISHED
        ]
    elif name == "advice":
        jobs = [
            (advice_point, {"layer_norm": ln, "variant": variant, "seed": seed, "steps": preset.steps})
            for seed in seeds
            for ln in (True, False)
            for variant in variants
        ]
    else:
        wide = [(law, ln, 64, True, 1.0) for law in preset.laws for ln in (True, False)]
        # Where blocks are even moves with the width; the range of scales goes along.
        others = [(preset.laws[0], True, n, False, (n / 64) ** 0.25) for n in preset.widths]
        jobs = [
            (
                score_point,
                {
                    "law": law,
                    "layer_norm": ln,
                    "qk_scale": round(scale * move, 3),
                    "n_qk": n_qk,
                    "seed": seed,
                    "probes": preset.probes,
                    "every_block": every_block,
                },
            )
            for law, ln, n_qk, every_block, move in wide[:2] + others + wide[2:]
            for seed in seeds
            for scale in preset.scales
        ]
    for measure, of in tqdm(jobs, desc=name):
        points.get(measure, **of)

    summarise, draw, keep = {
        "growth": (slopes, draw_growth, "slopes"),
        "addition": (addition_ratios, draw_addition, "against_published"),
        "scores": (even_scales, draw_scores, "even"),
        "advice": (advice_gains, draw_advice, "gains"),
    }[name]
    summary = summarise(points.used)
    points.write({"preset": asdict(preset), keep: summary})
    figures = out / "figures" / ("quick" if called == "quick" else "")
    figures.mkdir(parents=True, exist_ok=True)
    draw(points.used, summary, figures / f"hessian_{name}.png")
    say(name, summary)


def say(name: str, summary: list[dict]) -> None:
    """The findings as a few lines."""
    if name == "growth":
        for softmax, layer_norm in ((True, False), (False, False), (True, True), (False, True)):
            chosen = [s for s in summary if s["softmax"] == softmax and s["layer_norm"] == layer_norm]
            print(f"{'softmax' if softmax else 'linear'}, {'' if layer_norm else 'no '}LayerNorm")
            for part, short in (("outer", "H_o"), ("functional", "H_f")):
                cells = []
                for pair in PAIRS:
                    both = [s["slope"] for s in chosen if s["part"] == part and s["block"] == pair]
                    cells.append(f"{pair} " + ("zero" if None in both else "/".join(map(show, both))))
                print(f"  {short}  " + "   ".join(cells))
    elif name == "addition":
        for r in summary:
            ln, kind = "Pre-LN" if r["layer_norm"] else "no LN", "H" if r["what"] == "norm" else "H_o"
            where = f"{ln:6}  sigma {r['sigma']:<7g} {r['block']} {kind:3}"
            print(f"{where}  {r['ours']:9.3g}  published {r['published']:9.3g}  ratio {r['ratio']:.2f}")
    elif name == "advice":
        for g in summary:
            where = f"{'' if g['layer_norm'] else 'no '}LayerNorm, {g['variant']}"
            low, high = g["gain_range"]
            print(f"{where}: loss {g['loss']:.3f}, gain {g['gain']:+.3f} ({low:+.3f} to {high:+.3f})")
    else:
        for e in summary:
            where = f"{e['law']}, {'' if e['layer_norm'] else 'no '}LayerNorm, n {e['n_qk']}, {e['measure']}"
            even = "nowhere in the range" if e["even_at"] is None else f"at qk_scale {e['even_at']:.2f}"
            print(f"{where}: even {even}; n^(1/4) is {e['paper_scale']:.2f}")


def main() -> None:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--preset", choices=PRESETS, default="quick")
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=FIGURES[:-1], help="figures to make")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results/ and figures/")
    parser.add_argument("--fresh", action="store_true", help="measure again what is already known")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=ADVICE,
        default=("plain", "both"),
        help="what is taken of the advice: nothing (the others are held against that), scale, rates, both",
    )
    options = parser.parse_args()
    start = time.monotonic()
    for name in options.only:
        run(name, options.preset, options.out, options.fresh, options.variants)
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
