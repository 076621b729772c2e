"""What a person training a supermask asks of its curvature: how uneven are the blocks, and what to do.

value-to-query ratio -> the query/key scale where it is one, and a learning rate for each group of scores.
`measure_saved` does the whole of `slt curvature`, from a folder and text to rows; reports show them.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..sharing.files import replacing
from ..text.blocks import BlockPacker, pack
from ..text.corpus import CorpusArguments, load_documents, read_files
from ..text.evaluation import load_model
from .curvature import BLOCKS, Batch, BlockCurvature, block_curvature, progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def value_to_query(rows: Iterable[BlockCurvature]) -> dict[int, float]:
    """Per layer, the norm of the value block over that of the query block: 1 is even, as with LayerNorm."""
    norms = {(row.layer, row.block): row.norm for row in rows}
    return {
        layer: norms[layer, "v"] / norms[layer, "q"] if norms[layer, "q"] else math.inf
        for layer, block in norms
        if block == "v" and (layer, "q") in norms
    }


@dataclass(frozen=True)
class Advice:
    """What the measured curvature suggests for training the scores of a model.

    `qk_scale`: at which the query and key scores bend the loss as much as the value scores do.
    `rates`: factors on the score learning rate per block, geometric mean 1.
    `value_to_query`: the ratio at the model's own scale, geometric mean over layers; `curve`: the ratio
    (root mean square curvature of v over that of q and k) at every scale that was tried.
    """

    qk_scale: float
    rates: dict[str, float]
    value_to_query: float
    curve: list[tuple[float, float]]

    def arguments(self) -> dict[str, float]:
        """The same as options of `train_gpt2_slt.py`; fc and proj share their geometric mean there."""
        names = {"q": "query", "k": "key", "v": "value", "o": "output", "embedding": "embedding"}
        rates = {f"{name}_rate": self.rates[block] for block, name in names.items() if block in self.rates}
        mlp = math.sqrt(self.rates["fc"] * self.rates["proj"])
        return {"qk_scale": self.qk_scale, **rates, "mlp_rate": mlp}


def advise(
    model: PreTrainedModel,
    batches: Batch | Iterable[Batch],
    *,
    factors: Sequence[float] = (0.35, 0.5, 0.71, 1.0, 1.41, 2.0, 2.83),
    adaptive: bool = True,
    limit: float = 8.0,
    probes: int = 8,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    progress: bool = False,
) -> Advice:
    """Suggest `qk_scale` and per-block score learning rates from the blocks measured in score space.

    Small logits make the query's and key's score curvature grow as the fourth power of the scale, until
    attention sharpens; so the balance is measured at `factors` times the model's own scale, and the
    scale where v equals q and k is interpolated. Where they never meet, the nearest is taken.

    With curvature h a plain gradient step should be 1/h. An adaptive optimizer divides by the gradient's
    root mean square already, which near a fit goes as sqrt(h) (the Gauss-Newton matrix is the gradient's
    covariance), and leaves 1/sqrt(h) to the rate. Rates stay within `limit` of each other's mean.

    Nothing is promised of the loss. In six of six short runs of nano's shape, with AdamW, the advice made
    it worse (recipes/README.md): read it as a diagnosis.
    """
    own = _own_qk_scale(model)

    def measure(factor: float, blocks: Sequence[str]) -> dict[str, float]:
        rows = block_curvature(
            model,
            batches,
            blocks,
            "score",
            probes,
            seed,
            qk_factor=factor,
            parts=False,
            eigenvalues=False,
            dtype=dtype,
        )
        return {
            block: math.exp(np.mean([math.log(max(row.rms, 1e-300)) for row in rows if row.block == block]))
            for block in dict.fromkeys(row.block for row in rows)
        }

    curve = []
    for factor in progress_bar(sorted({*factors, 1.0}), "query/key scale", progress):
        at = measure(factor, ("q", "k", "v"))
        curve.append((own * factor, at["v"] / math.sqrt(at["q"] * at["k"])))
    scale = _where_even(curve)
    at = measure(scale / own, BLOCKS)
    logs = {block: -(0.5 if adaptive else 1.0) * math.log(value) for block, value in at.items()}
    mean = sum(logs.values()) / len(logs)
    rates = {block: min(limit, max(1 / limit, math.exp(value - mean))) for block, value in logs.items()}
    present = dict(curve)[own]
    return Advice(qk_scale=scale, rates=rates, value_to_query=present, curve=curve)


def _own_qk_scale(model: PreTrainedModel) -> float:
    scale = getattr(model.config, "qk_scale", 1.0)
    return model.config.qk_width**0.25 if scale == "paper" else float(scale)


def _where_even(curve: Sequence[tuple[float, float]]) -> float:
    """The first scale, going up, at which the ratio falls through 1; without one, where it is closest to 1.

    >>> round(_where_even([(1.0, 16.0), (4.0, 1 / 16)]), 6)
    2.0
    """
    points = [(math.log(scale), math.log(ratio)) for scale, ratio in curve]
    for (a, fa), (b, fb) in itertools.pairwise(points):
        if fa >= 0 >= fb and fa > fb:
            return math.exp(a + (b - a) * fa / (fa - fb))
    return math.exp(min(points, key=lambda point: abs(point[1]))[0])


# ---------------------------------------------------------------------------------------------------
# A saved model -> rows -> text and figure


def measure_saved(
    name: str,
    files: Sequence[str] | None = None,
    *,
    text_column: str = "text",
    tokenizer: str | None = None,
    sequences: int = 4,
    block_size: int | None = None,
    layer_norm: str = "both",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> dict[str, list[BlockCurvature]]:
    """The report of a saved GPT-2 on text: a ticket, a checkpoint with scores, or stock GPT-2.

    The text is that of `files`, else the validation part of the embedded corpus: its first `sequences`
    blocks of `block_size` tokens (64, or fewer where the model has fewer positions). `layer_norm` is
    "keep", "remove" or "both"; `options` are those of `block_curvature`.
    """
    if layer_norm not in ("keep", "remove", "both"):
        raise ValueError(f'layer_norm={layer_norm!r}: give "keep", "remove" or "both"')
    if sequences < 1:
        raise ValueError(f"sequences={sequences}: give at least 1")
    documents = read_files(files, text_column) if files else load_documents(CorpusArguments())[1]
    loaded: Any = load_model(name, tokenizer, dtype=dtype)
    model, words = loaded
    positions = getattr(model.config, "max_position_embeddings", 64)
    length = min(64, positions) if block_size is None else block_size
    if not 2 <= length <= positions:
        raise ValueError(f"block_size {length} is not in 2..{positions}, the positions of the model")
    blocks = pack(BlockPacker(documents, words, length), "given", sequences).array
    if blocks.max() >= model.config.vocab_size:
        raise ValueError(
            f"token id {blocks.max()} is outside the model's vocabulary of {model.config.vocab_size}; "
            "use the model's tokenizer"
        )
    ways = ("keep", "remove") if layer_norm == "both" else (layer_norm,)
    batch = torch.from_numpy(blocks.astype(np.int64))
    return curvature_report(model.to(device), batch, layer_norm=ways, **options)


def curvature_report(
    model: PreTrainedModel,
    batches: Batch | Iterable[Batch],
    *,
    layer_norm: Sequence[str] = ("keep", "remove"),
    **options: Any,
) -> dict[str, list[BlockCurvature]]:
    """`block_curvature` with and without LayerNorm, by label; only the latter for a model that has none."""
    names = {"keep": "LayerNorm", "remove": "no LayerNorm"}
    if not getattr(model.config, "layer_norm", True):
        layer_norm = ["remove"]
    return {names[how]: block_curvature(model, batches, layer_norm=how, **options) for how in layer_norm}


def report_facts(report: Mapping[str, Sequence[BlockCurvature]]) -> dict[str, Any]:
    """A report for JSON: a record per setting, layer and block, and value to query per setting and layer."""
    ratios = {
        label: {
            layer: ratio if math.isfinite(ratio) else None for layer, ratio in value_to_query(rows).items()
        }
        for label, rows in report.items()
    }
    return {"blocks": report_records(report), "value_to_query": ratios}


def report_records(report: Mapping[str, Sequence[BlockCurvature]]) -> list[dict[str, Any]]:
    """A report as plain records, one per label, layer and block, for JSON."""
    return [{"setting": label, **asdict(row)} for label, rows in report.items() for row in rows]


def format_report(report: Mapping[str, Sequence[BlockCurvature]]) -> str:
    """Layers by blocks as text: Frobenius norms of H, and value to query.

    >>> row = BlockCurvature(0, "q", "weight", 4, 0.02, 0.01, 0.01, 0.0, 0.0)
    >>> print(format_report({"LayerNorm": [row]}))
    LayerNorm, norms of H over weights
    layer        q
        0  2.0e-02
    """
    lines = []
    for label, rows in report.items():
        blocks = list(dict.fromkeys(row.block for row in rows if row.layer is not None))
        norms = {(row.layer, row.block): row.norm for row in rows}
        ratios = value_to_query(rows)
        space = rows[0].space if rows else "weight"
        lines += ["", f"{label}, norms of H over {space}s"]
        lines.append("layer" + "".join(f"  {block:>7}" for block in blocks) + ("      v/q" if ratios else ""))
        for layer in dict.fromkeys(row.layer for row in rows if row.layer is not None):
            cells = [norms.get((layer, block), math.nan) for block in blocks]
            cells += [ratios[layer]] if layer in ratios else []
            lines.append(f"{layer:>5}" + "".join(f"  {cell:7.1e}" for cell in cells))
        if (None, "embedding") in norms:
            lines.append(f"embedding  {norms[None, 'embedding']:7.1e}")
    return "\n".join(lines[1:])


def plot_report(
    report: Mapping[str, Sequence[BlockCurvature]], path: str | os.PathLike, *, title: str | None = None
) -> None:
    """Draw a report: layers by blocks, norms on one log colour scale, value to query at the side."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    norms = [row.norm for rows in report.values() for row in rows if row.norm > 0]
    if not norms:
        raise ValueError("nothing to draw: no block has any curvature")
    colours = LogNorm(min(norms), max(max(norms), 1.001 * min(norms)))
    deepest = max(len({row.layer for row in rows}) for rows in report.values())
    figure = Figure(figsize=(1.5 + 5.2 * len(report), 1.6 + 0.45 * deepest), layout="constrained")
    axes = figure.subplots(1, len(report), squeeze=False)[0]
    for axis, (label, rows) in zip(axes, report.items(), strict=True):
        blocks = list(dict.fromkeys(row.block for row in rows))
        layers = list(dict.fromkeys(row.layer for row in rows))
        table = np.full((len(layers), len(blocks)), np.nan)
        for row in rows:
            value = row.norm if row.norm > 0 else np.nan
            table[layers.index(row.layer), blocks.index(row.block)] = value
        image = axis.imshow(table, norm=colours, cmap="viridis", aspect="auto")
        for (i, j), value in np.ndenumerate(table):
            if not np.isnan(value):
                dark = colours(value) < 0.6
                axis.text(
                    j, i, f"{value:.0e}", ha="center", va="center", fontsize=7, color="w" if dark else "k"
                )
        ratios = value_to_query(rows)
        axis.set_xticks(range(len(blocks)), blocks, fontsize=8)
        axis.set_yticks(
            range(len(layers)),
            [
                "table"
                if layer is None
                else f"{layer}   v/q {ratios[layer]:.2g}"
                if layer in ratios
                else str(layer)
                for layer in layers
            ],
        )
        axis.set_title(label)
        axis.set_ylabel("layer")
    space = next(iter(report.values()))[0].space
    figure.colorbar(image, ax=list(axes), label=f"Frobenius norm of H over {space}s")
    figure.suptitle(title or "Curvature by layer and block")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format=Path(path).suffix.lstrip(".") or "png")
