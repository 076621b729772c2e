"""Measure the Hessian of attention (arXiv 2410.10986): its growth, the authors' own setting, and scores.

    python recipes/figures_hessian.py --preset quick                # one seed, a few core-minutes
    python recipes/figures_hessian.py --preset full                 # three seeds, two laws, ten core-minutes
    python recipes/figures_hessian.py --preset full --only advice   # 12 short trainings, 35 core-minutes

hessian_growth.png     one attention layer in closed form: Frobenius norm of each block against the scale
                       of the input, softmax and linear, without and with LayerNorm; slopes by window
hessian_addition.png   a one-block GPT-2 on 5-digit addition, compared with the norms that the authors published
hessian_scores.png     a supermask GPT-2: at which qk_scale do query, key and value scores have equal curvature?
hessian_advice.png     does it help to set scale and rates by curvature (`advise`)? A model of nano's shape with and
                       without the advice, with and without LayerNorm

Each record is written to results/hessian_<preset>_<figure>.json as soon as it is measured; a study that is stopped
resumes from there.
"""

import math
import statistics
from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise, product
from pydoc_data import topics
from typing import Any

import numpy as np
import studies
import torch
from studies import (
    Part,
    Point,
    Preset,
    Record,
    Study,
    TimedRun,
    geometric_mean,
    grid,
    group,
    line,
    panels,
    select,
)
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from hf_slt import SupermaskGPT2Config, SupermaskGPT2LMHeadModel
from hf_slt.papers.attention_hessian import attention_hessian
from hf_slt.papers.curvature import BLOCKS, block_curvature
from hf_slt.text.blocks import load_blocks
from hf_slt.training.arguments import RunArguments
from hf_slt.training.monitoring import attention_moments
from hf_slt.training.run import build_model

NORMS = {True: "LayerNorm", False: "no LayerNorm"}
# `sigmas` is the number of input scales from 0.01 to 10. `scales` are query/key scales, for heads of width 64.
PRESETS = studies.presets(
    {},
    quick={
        "seeds": 1,
        "sigmas": 13,
        "scales": (1.0, 1.5, 2.0, 2.83, 4.0, 5.0, 6.0),
        "laws": ("normal",),
        "steps": 100,
    },
    full={
        "seeds": 3,
        "sigmas": 25,
        "scales": (1.0, 2.0, 2.83, 4.0, 6.0),
        "laws": ("normal", "signed_constant"),
        "steps": 300,
    },
)
PROBES = 10


# ---------------------------------------------------------------------------------------------------
# Growth with the scale of the input

PAIRS = ("qq", "kk", "qk", "qv", "kv", "vv")
HALVES = {"outer": "-", "functional": "--"}  # the two parts of the Hessian, and their line styles
WINDOWS = ((0.01, 0.1), (1.0, 10.0))  # a slope is fitted in each; one line over both would be meaningless


def points_growth(preset: Preset) -> list[Point]:
    """Return the points of the growth figure."""
    sigmas = np.geomspace(0.01, 10, preset.sigmas).tolist()
    return grid(softmax=(True, False), layer_norm=(False, True), sigma=sigmas)


def measure_growth(softmax: bool, layer_norm: bool, sigma: float, size: int = 8, seeds: int = 8) -> Record:
    """Return the norms of every block, mean over seeds: X ~ N(0, sigma^2), weights N(0, 1/d), Y ~ N(0, 1)."""
    norms = {half: dict.fromkeys(PAIRS, 0.0) for half in HALVES}
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        X, Y, *weights = (torch.randn(size, size, generator=generator, dtype=torch.float64) for _ in range(5))
        X = sigma * X
        if layer_norm:  # without epsilon: the result would depend on sigma where sigma^2 is near epsilon
            X = torch.nn.functional.layer_norm(X, (size,), eps=0.0)
        H = attention_hessian(X, *[w / math.sqrt(size) for w in weights], Y, softmax=softmax)
        for half, pair in product(HALVES, PAIRS):
            norms[half][pair] += getattr(H, half)[tuple(pair)].norm().item() / seeds
    return norms


def slopes(records: list[Record], half: str, pair: str) -> list[float] | None:
    """Return the log-log slope of a block against sigma in each window, or None if the block is zero."""
    sigma, norm = np.array([(r["of"]["sigma"], r[half][pair]) for r in records]).T
    if norm.min() == 0:
        return None
    inside = [(sigma > low * 0.999) & (sigma < high * 1.001) for low, high in WINDOWS]
    return [round(float(np.polyfit(np.log(sigma[i]), np.log(norm[i]), 1)[0]), 4) for i in inside]


def draw_growth(records: list[Record], preset: Preset, study: Study) -> dict[str, Any]:
    """Draw the norms of Hessian blocks against the scale of the input."""
    figure, table = panels(2, 2, 11, 8.5, sharex=True)
    found: dict[str, Any] = {}
    for axes, (softmax, layer_norm) in zip(table.flat, product((True, False), (False, True)), strict=True):
        points = select(records, softmax=softmax, layer_norm=layer_norm)
        kind = f"{'softmax' if softmax else 'linear'} attention, {NORMS[layer_norm]}"
        for (half, style), (place, pair) in product(HALVES.items(), enumerate(PAIRS)):
            short = f"{pair} {'H_o' if half == 'outer' else 'H_f'}"
            found[f"{kind}, {short}"] = fits = slopes(points, half, pair)
            if fits:
                shown = " / ".join(f"{round(slope, 2) + 0.0:.2f}" for slope in fits)  # avoids "-0.00"
                curve = zip(*((r["of"]["sigma"], r[half][pair]) for r in points), strict=True)
                axes.loglog(*curve, style, color=f"C{place}", label=f"{short}  {shown}")
        axes.set(title=kind, ylabel="Frobenius norm")
        axes.legend(fontsize=6.5, title="slopes, sigma .01-.1 / 1-10")
        if layer_norm:  # the lines are flat: leave room for the legend
            low, high = axes.get_ylim()
            axes.set_ylim(low / 300, high * 10)
    for axes in table[-1]:
        axes.set_xlabel("sigma, scale of the input")
    figure.suptitle("Hessian blocks of one attention layer against the scale of its input (L = d = 8)")
    study.save(figure, "hessian_growth")
    return {"slopes": found}


# ---------------------------------------------------------------------------------------------------
# The authors' setting

# Frobenius norms that the authors published, {(LayerNorm, sigma): (Q of H, Q of H_o, V of H)}.
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
COLUMNS = (("q", "norm"), ("q", "norm_outer"), ("v", "norm"))  # of the table above
SHORT = {"norm": "H", "norm_outer": "H_o"}


def additions(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Make rows "12345+67890=080235" over 12 tokens; only the six digits of the answer are predicted."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(0, 10**5, (count, 2), generator=generator).tolist()
    ids = torch.tensor([["0123456789+=".index(c) for c in f"{a:05d}+{b:05d}={a + b:06d}"] for a, b in pairs])
    labels = ids.clone()
    labels[:, :12] = -100
    return {"input_ids": ids, "labels": labels}


def addition_model(sigma: float, seed: int = 0, width: int = 128) -> GPT2LMHeadModel:
    """Make one untrained block: weights N(0, (0.8 / sqrt(width))^2), token and position tables N(0, sigma^2)."""
    shape = {"n_layer": 1, "n_embd": width, "n_head": 1, "n_inner": 512, "vocab_size": 12, "n_positions": 18}
    plain = {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(**shape, **plain, activation_function="relu"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                std = sigma if name.endswith(("wte.weight", "wpe.weight")) else 0.8 / math.sqrt(width)
                weight.normal_(0.0, std, generator=generator)
    return model


def points_addition(preset: Preset) -> list[Point]:
    """Return the points of the authors' setting."""
    sigmas = dict.fromkeys(sigma for _, sigma in PUBLISHED)
    return grid(seed=range(preset.seeds), layer_norm=(False, True), sigma=sigmas, probes=[PROBES])


def measure_addition(layer_norm: bool, sigma: float, seed: int, probes: int) -> Record:
    """Return the norms of the query, key and value blocks."""
    model, batch, how = addition_model(sigma, seed), additions(64, seed), "keep" if layer_norm else "remove"
    exact: dict[str, Any] = {"layer_norm": how, "eigenvalues": False, "dtype": torch.float64}
    rows = block_curvature(model, batch, ("q", "k", "v"), probes=probes, seed=seed, **exact)
    return {row.block: {"norm": row.norm, "norm_outer": row.norm_outer} for row in rows}


def addition_ratios(records: list[Record]) -> list[dict[str, Any]]:
    """Return our norms (geometric means over seeds) divided by the published norms."""
    found = []
    for (layer_norm, sigma), published in PUBLISHED.items():
        points = select(records, layer_norm=layer_norm, sigma=sigma)
        for (block, what), theirs in zip(COLUMNS, published, strict=True):
            if theirs is not None and points:
                ours = geometric_mean(r[block][what] for r in points)
                where = {"layer_norm": layer_norm, "sigma": sigma, "block": block, "what": what}
                norms = {"ours": ours, "published": theirs, "ratio": round(ours / theirs, 3)}
                found.append({**where, **norms})
    return found


def draw_addition(records: list[Record], preset: Preset, study: Study) -> dict[str, Any]:
    """Draw our block norms and those of the authors."""
    figure, ((*row,),) = panels(1, 2, 11, 4.6)
    ratios = addition_ratios(records)
    colours = {"q": "C0", "k": "C2", "v": "C1"}
    for axes, layer_norm in zip(row, (False, True), strict=True):
        groups = group(select(records, layer_norm=layer_norm), "sigma")
        for (block, colour), (what, short) in product(colours.items(), SHORT.items()):
            means = [geometric_mean(r[block][what] for r in points) for points in groups.values()]
            style = {"color": colour, "linestyle": "-" if what == "norm" else "--"}
            axes.loglog(list(groups), means, label=f"{block}, {short}", **style)
        markers = {"norm": "o", "norm_outer": "s"}
        hollow: dict[str, Any] = {"markerfacecolor": "none", "markersize": 9, "linestyle": ""}
        for r in ratios:
            if r["layer_norm"] == layer_norm:
                style = {"color": colours[r["block"]], "marker": markers[r["what"]]}
                axes.plot(r["sigma"], r["published"], **style, **hollow)
        for what, short in SHORT.items():
            axes.plot([], [], color="black", marker=markers[what], label=f"published, {short}", **hollow)
        axes.set(title=NORMS[layer_norm], xlabel="sigma, scale of the embeddings")
        axes.legend()
    row[0].set_ylabel("Frobenius norm")
    figure.suptitle("5-digit addition, one block of width 128: ours (lines) and the authors' (markers)")
    study.save(figure, "hessian_addition")
    return {"against_published": ratios}


# ---------------------------------------------------------------------------------------------------
# Scores of a supermask GPT-2


def text_batch(count: int = 4, length: int = 64, seed: int = 0) -> torch.Tensor:
    """Return bytes of Python's own language reference, which every installation has."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - length, (count,), generator=generator).tolist()
    return torch.stack([torch.tensor(list(text[start : start + length])) for start in starts])


def points_scores(preset: Preset) -> list[Point]:
    """Return the points of curvature over scores."""

    def points(n: int, law: str, layer_norm: bool) -> list[Point]:
        # The scale of equal curvature grows with the head width, so the range of scales does too.
        scales = [round(scale * (n / 64) ** 0.25, 3) for scale in preset.scales]
        same = {"law": [law], "layer_norm": [layer_norm], "n_qk": [n], "every_block": [n == 64]}
        return grid(**same, seed=range(preset.seeds), qk_scale=scales, probes=[PROBES])

    kinds = [(64, law, layer_norm) for law in preset.laws for layer_norm in (True, False)]
    kinds += [(n, preset.laws[0], True) for n in (16, 256)]
    return [point for kind in kinds for point in points(*kind)]


def measure_scores(
    law: str, layer_norm: bool, qk_scale: float, n_qk: int, seed: int, probes: int, every_block: bool
) -> Record:
    """Return the curvature over scores by block: geometric means over the layers of a 2-layer supermask GPT-2."""
    shape = {"n_layer": 2, "n_embd": 128, "n_head": 2, "n_v": 64, "vocab_size": 256, "n_positions": 64}
    plain = {"bos_token_id": None, "eos_token_id": None, "density": 0.5, "scale_with_width": True}
    own = {"n_qk": n_qk, "law": law, "layer_norm": layer_norm, "qk_scale": qk_scale, "seed": seed}
    model = SupermaskGPT2LMHeadModel(SupermaskGPT2Config(**shape, **plain, **own))
    batch = text_batch(seed=seed)
    blocks = BLOCKS if every_block else ("q", "k", "v")
    rows = block_curvature(model, batch, blocks, "score", probes, seed, eigenvalues=False)
    means = {
        what: {b: geometric_mean(getattr(row, what) for row in rows if row.block == b) for b in blocks}
        for what in ("rms", "mean_outer")
    }
    return {**means, "spread": attention_moments(model, batch, relative=True).mean().item()}


def value_to_query(values: dict[str, float]) -> float:
    """Return the value entry divided by the geometric mean of query and key."""
    return values["v"] / math.sqrt(values["q"] * values["k"])


def even_scales(records: list[Record]) -> list[dict[str, Any]]:
    """Return the scale where value and query are equal, interpolated, by law, LayerNorm, width and measure."""
    found = []
    names = ("law", "layer_norm", "n_qk")
    for key in dict.fromkeys(tuple(r["of"][name] for name in names) for r in records):
        where = dict(zip(names, key, strict=True))
        groups = group(select(records, **where), "qk_scale")
        for what in ("rms", "mean_outer"):
            ratios = [geometric_mean(value_to_query(r[what]) for r in rs) for rs in groups.values()]
            # The ratio falls with the scale, but np.interp needs rising values. No extrapolation.
            logs, at = np.log(ratios[::-1]), np.log(list(groups)[::-1])
            even = math.exp(np.interp(0.0, logs, at)) if min(logs) <= 0 <= max(logs) else None
            ratio_at = {f"{s:g}": float(f"{r:.3g}") for s, r in zip(groups, ratios, strict=True)}
            scales = {"even_at": even and round(even, 3), "paper_scale": round(where["n_qk"] ** 0.25, 3)}
            found.append({**where, "measure": what, **scales, "ratio_at": ratio_at})
    return found


def draw_scores(records: list[Record], preset: Preset, study: Study) -> dict[str, Any]:
    """Draw curvature over scores against the query/key scale."""
    figure, ((is_even, every_block, with_width),) = panels(1, 3, 15, 4.6)
    even, law = even_scales(records), preset.laws[0]
    dashes = {True: "-", False: "--"}
    for e in even:
        if (e["n_qk"], e["measure"]) == (64, "rms"):
            scales, ratios = zip(*((float(s), ratio) for s, ratio in e["ratio_at"].items()), strict=True)
            style = {**line(preset.laws.index(e["law"])), "linestyle": dashes[e["layer_norm"]]}
            is_even.loglog(scales, ratios, label=f"{e['law']}, {NORMS[e['layer_norm']]}", **style)
    is_even.axhline(1, color="black", linewidth=0.8)
    is_even.axvline(64**0.25, color="black", linewidth=0.8, linestyle=":", label="n^(1/4), n = 64")
    is_even.set(xlabel="qk_scale", ylabel="value to query/key, root mean square of H", title="is it even?")
    is_even.legend()

    for (place, block), layer_norm in product(enumerate(BLOCKS), (True, False)):
        groups = group(select(records, law=law, layer_norm=layer_norm, n_qk=64), "qk_scale")
        means = [geometric_mean(r["rms"][block] for r in points) for points in groups.values()]
        style = {"color": f"C{place}", "linestyle": dashes[layer_norm]}
        every_block.loglog(list(groups), means, label=block if layer_norm else None, **style)
    every_block.set(xlabel="qk_scale", ylabel="root mean square of H over scores")
    every_block.set_title(f"every block, {law} law")
    every_block.legend(title="solid: LN\ndashed: none", loc="center left", bbox_to_anchor=(1, 0.5))

    labels = {"rms": "root mean square of H", "mean_outer": "mean diagonal of H_o"}
    for place, (what, label) in enumerate(labels.items()):
        wanted = {"law": law, "layer_norm": True, "measure": what}
        met = [e for e in even if all(e[name] == value for name, value in wanted.items()) and e["even_at"]]
        points = sorted((e["n_qk"], e["even_at"]) for e in met)
        with_width.loglog(*zip(*points, strict=True), label=label, **line(place))
    widths = sorted({e["n_qk"] for e in even})
    with_width.loglog(widths, [n**0.25 for n in widths], "k:", label="n^(1/4)")
    with_width.set(xlabel="n, width of a query and key", ylabel="qk_scale at which v = q, k")
    with_width.set_title("with LayerNorm")
    with_width.legend()
    for axes, ticks in ((is_even, range(1, 7)), (every_block, range(1, 7)), (with_width, widths)):
        axes.minorticks_off()
        axes.set_xticks(ticks, map(str, ticks))
    with_width.set_yticks((1.5, 2, 3, 4, 5, 6), ("1.5", "2", "3", "4", "5", "6"))
    figure.suptitle("Curvature over scores: untrained 2-layer supermask GPT-2, width 128, density 0.5")
    study.save(figure, "hessian_scores")
    return {"even": even}


# ---------------------------------------------------------------------------------------------------
# Advice from curvature: a query/key scale, and a rate for each group of scores

FACTORS = (0.35, 0.5, 0.71, 1.0, 1.41, 2.0, 2.83)
LIMIT = 8.0
# Groups of scores: their blocks, and parts of the names of their parameters.
GROUPS = {
    "query": (("q",), ("query_scores",)),
    "key": (("k",), ("key_scores",)),
    "value": (("v",), ("value_scores",)),
    "output": (("o",), ("attn.c_proj",)),
    "mlp": (("fc", "proj"), ("mlp",)),
    "embedding": (("embedding",), ("wte", "wpe")),
}


def advise(
    model: PreTrainedModel, batch: torch.Tensor, seed: int = 0, factors: Sequence[float] = FACTORS
) -> dict[str, float]:
    """Return `qk_scale` and a factor on the rate of each group of scores, as the curvature over scores suggests.

    While logits are small, the curvature of query and key scores grows as the fourth power of the scale, until
    attention becomes sharp. Therefore the curvature is measured at `factors` times the scale of the model, and the
    scale where v equals q and k is interpolated. If they are never equal, the nearest scale is used.

    With curvature h a plain gradient step should be 1/h. An adaptive optimizer already divides by the root mean
    square of the gradient. Near a minimum this is proportional to sqrt(h) (the Gauss-Newton matrix is the
    covariance of the gradient), so the rate should be proportional to 1/sqrt(h). Rates stay within a factor `LIMIT`
    of their mean.

    The advice need not improve the loss: in six of six short runs of nano's shape, with AdamW, it made the loss
    worse. Use it as a diagnosis.
    """
    scale = model.config.qk_scale
    own = model.config.qk_width**0.25 if scale == "paper" else float(scale)

    def measure(factor: float, blocks: Sequence[str]) -> dict[str, float]:
        options: dict[str, Any] = {"qk_factor": factor, "parts": False, "eigenvalues": False}
        rows = block_curvature(model, batch, blocks, "score", 8, seed, **options)
        return {block: geometric_mean(row.rms for row in rows if row.block == block) for block in blocks}

    at_factors = {factor: measure(factor, ("q", "k", "v")) for factor in sorted({*factors, 1.0})}
    even = where_even([(own * factor, value_to_query(at)) for factor, at in at_factors.items()])
    bends = measure(even / own, BLOCKS)
    mean = geometric_mean(bends.values())
    rates = {block: min(LIMIT, max(1 / LIMIT, math.sqrt(mean / bend))) for block, bend in bends.items()}
    grouped = {f"{name}_rate": geometric_mean(map(rates.get, blocks)) for name, (blocks, _) in GROUPS.items()}
    return {"qk_scale": even, **grouped}


def where_even(curve: Sequence[tuple[float, float]]) -> float:
    """Return the smallest scale at which the ratio falls through 1, or the scale where it is closest to 1.

    >>> round(where_even([(1.0, 16.0), (4.0, 1 / 16)]), 6)
    2.0
    """
    points = [(math.log(scale), math.log(ratio)) for scale, ratio in curve]
    for (a, fa), (b, fb) in pairwise(points):
        if fa >= 0 >= fb and fa > fb:
            return math.exp(a + (b - a) * fa / (fa - fb))
    return math.exp(min(points, key=lambda point: abs(point[1]))[0])


def rated_optimizer(
    rates: dict[str, float], model: torch.nn.Module, options: RunArguments
) -> torch.optim.Optimizer:
    """Return the AdamW of the run, with a factor on the rate of each group of scores."""
    groups = []
    for name, parameter in model.named_parameters():
        kind = next(kind for kind, (_, words) in GROUPS.items() if any(word in name for word in words))
        rate = options.learning_rate * rates.get(f"{kind}_rate", 1.0)
        groups.append({"params": [parameter], "lr": rate, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, betas=(options.adam_beta1, options.adam_beta2))


# ---------------------------------------------------------------------------------------------------
# Does the advice help?

VARIANTS = {"plain": (), "scale": ("qk_scale",), "rates": ("rate",), "both": ("qk_scale", "rate")}


def points_advice(preset: Preset) -> list[Point]:
    """Return the trainings with and without the advice."""
    seeds = range(preset.seeds)
    return grid(seed=seeds, layer_norm=(True, False), variant=VARIANTS, steps=[preset.steps])


def measure_advice(layer_norm: bool, variant: str, seed: int, steps: int) -> Record:
    """Return the validation loss of nano's shape after `steps`, with the part of the advice that `variant` names."""
    said = advice_for(layer_norm, seed) if VARIANTS[variant] else {}
    taken = {name: round(value, 4) for name, value in said.items() if name.endswith(VARIANTS[variant])}
    scale = {name: value for name, value in taken.items() if name == "qk_scale"}
    settings = nano_settings(layer_norm=layer_norm, seed=seed, max_steps=steps, eval_steps=100, **scale)
    with studies.trained_run(
        settings, partial(TimedRun, make_optimizer=partial(rated_optimizer, taken))
    ) as run:
        curve = studies.summary_of(run)["curve"]
    return {"loss": curve[-1][1], "curve": [[step, round(loss, 4)] for step, loss in curve], "taken": taken}


@cache
def advice_for(layer_norm: bool, seed: int) -> dict[str, float]:
    """Return the advice of `advise` for the untrained nano model, from two blocks of its training text."""
    arguments = studies.loop_arguments(**nano_settings(layer_norm=layer_norm, seed=seed))
    corpus = load_blocks(arguments.data)
    ids = torch.as_tensor(np.asarray(corpus.train[np.arange(2)]["input_ids"]), dtype=torch.long)
    return advise(build_model(arguments, corpus.tokenizer), ids, seed)


def nano_settings(**options: Any) -> dict[str, Any]:
    """Return the nano preset with only masks learned, the paper's scale, rate 1e-2 and these options."""
    usual = {"config": studies.HERE / "nano.yaml", "qk_scale": "paper", "learning_rate": 1e-2}
    masks = {"rule": "edge_popup", "density": 0.5, "scales": "none", "score_decay": 0, "min_lr_rate": 0.1}
    return {**usual, **masks, "layer_norm": True, **options}


def advice_gains(records: list[Record]) -> list[dict[str, Any]]:
    """Return the mean loss over seeds, and its gain over the plain run of the same seed: mean, least and most."""
    found = []
    for layer_norm, variant in product((True, False), VARIANTS):
        plain, mine = (
            {r["of"]["seed"]: r["loss"] for r in select(records, layer_norm=layer_norm, variant=name)}
            for name in ("plain", variant)
        )
        gains = [plain[seed] - loss for seed, loss in mine.items() if seed in plain]
        if gains:
            numbers = (statistics.mean(mine.values()), statistics.mean(gains), min(gains), max(gains))
            loss, gain, least, most = (round(number, 4) for number in numbers)
            what = {"layer_norm": layer_norm, "variant": variant, "seeds": len(gains)}
            found.append({**what, "loss": loss, "gain": gain, "gain_range": [least, most]})
    return found


def draw_advice(records: list[Record], preset: Preset, study: Study) -> dict[str, Any]:
    """Draw the trainings with and without the advice."""
    figure, ((*row,),) = panels(1, 2, 10, 4)
    names = ("as the preset is", "advised scale", "advised rates", "advised")
    for axes, layer_norm in zip(row, (True, False), strict=True):
        for place, (variant, name) in enumerate(zip(VARIANTS, names, strict=True)):
            chosen = select(records, layer_norm=layer_norm, variant=variant)
            for r in chosen:
                axes.plot(*zip(*r["curve"], strict=True), linewidth=1, **line(place))
            if chosen:
                mean = statistics.mean(r["loss"] for r in chosen)
                axes.lines[-1].set_label(f"{name}: {mean:.3f}")
        axes.set(title=NORMS[layer_norm], xlabel="step", ylabel="validation loss, nats a token")
        axes.legend(title="mean at the end")
    figure.suptitle(f"Does it help to take the advice? nano's shape, {preset.steps} steps, a line per seed")
    study.save(figure, "hessian_advice")
    return {"gains": advice_gains(records)}


PARTS = {
    "growth": Part(points_growth, measure_growth, draw_growth),
    "addition": Part(points_addition, measure_addition, draw_addition),
    "scores": Part(points_scores, measure_scores, draw_scores),
    "advice": Part(points_advice, measure_advice, draw_advice),
}


def main() -> None:
    """Make the figures that the command line asks for."""
    parser = studies.parser_of(__doc__, PRESETS, PARTS)
    help = "parts of the advice to use: plain (none, the reference), scale, rates or both"
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=("plain", "both"), help=help)
    parser.set_defaults(only=["growth", "addition", "scores"])
    options = parser.parse_args()
    study, chosen = Study("hessian", "full", options), (None, *options.variants)
    for name in options.only:
        study.make(PARTS[name], name, PRESETS[options.preset], lambda point: point.get("variant") in chosen)


if __name__ == "__main__":
    main()
