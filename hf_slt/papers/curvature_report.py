"""Reports on the curvature of a model: how much do its blocks differ?

`measure_saved` does all the work of `slt curvature`, from a folder and text to rows; reports show them.
recipes/figures_hessian.py tries to choose scales and learning rates by curvature: this does not help.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..about import require_packages
from ..sharing.plots import _figure, _save
from ..text.blocks import pack_beginning
from ..text.corpus import read_files
from ..text.evaluation import check_vocabulary, load_model
from ..text.splits import embedded_validation
from .curvature import Batch, BlockCurvature, block_curvature

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def value_to_query(rows: Iterable[BlockCurvature]) -> dict[int, float]:
    """Compute, per layer, the norm of the value block divided by that of the query block. 1 means that they are equal.

    Args:
        rows (`Iterable[BlockCurvature]`):
            What `block_curvature` returned.

    Returns:
        `dict[int, float]`: the ratio by layer.
    """
    norms = {(row.layer, row.block): row.norm for row in rows}
    return {
        layer: norms[layer, "v"] / norms[layer, "q"] if norms[layer, "q"] else math.inf
        for layer, block in norms
        if block == "v" and (layer, "q") in norms
    }


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
    """Measure the curvature of a saved GPT-2 on text: of a ticket, a checkpoint with scores, or stock GPT-2.

    Args:
        name (`str`):
            Folder or Hub name of the model.
        files (`Sequence[str]`, *optional*):
            Files of text. Default: the validation part of the embedded corpus.
        text_column (`str`, defaults to `"text"`):
            Column of the text in files that have columns.
        tokenizer (`str`, *optional*):
            Folder or Hub name of the tokenizer. Default: that of the model.
        sequences (`int`, defaults to 4):
            Number of blocks, the first of the text.
        block_size (`int`, *optional*):
            Tokens in a block. Default: 64, or fewer if the model has fewer positions.
        layer_norm (`str`, defaults to `"both"`):
            `"keep"`, `"remove"` or `"both"`.
        device (`str`, defaults to `"cpu"`):
            Device to compute on.
        dtype (`torch.dtype`, defaults to `torch.float32`):
            Type to compute in.
        options:
            Those of `block_curvature`.

    Returns:
        `dict[str, list[BlockCurvature]]`: rows of `block_curvature` by label, as in `curvature_report`.

    Raises:
        `ValueError`: for an impossible option.
    """
    if layer_norm not in ("keep", "remove", "both"):
        raise ValueError(f'layer_norm={layer_norm!r}: give "keep", "remove" or "both"')
    if sequences < 1:
        raise ValueError(f"sequences={sequences}: give at least 1")
    if options.get("eigenvalues"):  # checked before text and model are read
        require_packages("eigenvalues", "scipy", extra="curvature")
    texts = read_files(files, text_column) if files else embedded_validation()
    model, words = load_model(name, tokenizer, dtype=dtype)
    positions = getattr(model.config, "max_position_embeddings", 64)
    length = min(64, positions) if block_size is None else block_size
    if not 2 <= length <= positions:
        raise ValueError(f"block_size {length} is not in 2..{positions}, the positions of the model")
    blocks = np.asarray(pack_beginning(texts, words, length, sequences).array)
    check_vocabulary(blocks.max(), model.config.vocab_size)
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
    """Run `block_curvature` with and without LayerNorm; only without for a model that has none.

    Args:
        model (`PreTrainedModel`):
            A GPT-2, see `block_curvature`.
        batches (`Batch` or `Iterable[Batch]`):
            One batch or several, see `block_curvature`.
        layer_norm (`Sequence[str]`, defaults to `("keep", "remove")`):
            Any of `"keep"` and `"remove"`.
        options:
            Other options of `block_curvature`.

    Returns:
        `dict[str, list[BlockCurvature]]`: rows by label, `"LayerNorm"` and `"no LayerNorm"`.
    """
    names = {"keep": "LayerNorm", "remove": "no LayerNorm"}
    if not getattr(model.config, "layer_norm", True):
        layer_norm = ["remove"]
    return {names[how]: block_curvature(model, batches, layer_norm=how, **options) for how in layer_norm}


def report_facts(report: Mapping[str, Sequence[BlockCurvature]]) -> dict[str, Any]:
    """Turn a report into an object for JSON: records of all blocks, and value to query by setting and layer.

    Args:
        report (`Mapping[str, Sequence[BlockCurvature]]`):
            What `curvature_report` returned.

    Returns:
        `dict[str, Any]`: `blocks` and `value_to_query`.
    """
    ratios = {
        label: {at: ratio if math.isfinite(ratio) else None for at, ratio in value_to_query(rows).items()}
        for label, rows in report.items()
    }
    return {"blocks": report_records(report), "value_to_query": ratios}


def report_records(report: Mapping[str, Sequence[BlockCurvature]]) -> list[dict[str, Any]]:
    """Turn a report into plain records, one per label, layer and block.

    Args:
        report (`Mapping[str, Sequence[BlockCurvature]]`):
            What `curvature_report` returned.

    Returns:
        `list[dict[str, Any]]`: the records.
    """
    return [{"setting": label, **asdict(row)} for label, rows in report.items() for row in rows]


def format_report(report: Mapping[str, Sequence[BlockCurvature]]) -> str:
    """Write a report as text, layers by blocks: Frobenius norms of H, and value to query.

    Args:
        report (`Mapping[str, Sequence[BlockCurvature]]`):
            What `curvature_report` returned.

    Returns:
        `str`: the text.

    Example:

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
    """Draw a report: layers by blocks, norms on one log colour scale, value to query at the side.

    Args:
        report (`Mapping[str, Sequence[BlockCurvature]]`):
            What `curvature_report` returned.
        path (`str` or `os.PathLike`):
            The picture to write.
        title (`str`, *optional*):
            Title of the figure.

    Raises:
        `ValueError`: if no block has any curvature.
    """
    from matplotlib.colors import LogNorm  # slow to import

    norms = [row.norm for rows in report.values() for row in rows if row.norm > 0]
    if not norms:
        raise ValueError("nothing to draw: no block has any curvature")
    deepest = max(len({row.layer for row in rows}) for rows in report.values())
    figure = _figure(1.5 + 5.2 * len(report), 1.6 + 0.45 * deepest)
    colours = LogNorm(min(norms), max(max(norms), 1.001 * min(norms)))
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
                colour = "w" if colours(value) < 0.6 else "k"
                axis.text(j, i, f"{value:.0e}", ha="center", va="center", fontsize=7, color=colour)
        names: dict[int | None, str] = {None: "table"}
        names |= {layer: f"{layer}   v/q {ratio:.2g}" for layer, ratio in value_to_query(rows).items()}
        axis.set_xticks(range(len(blocks)), blocks, fontsize=8)
        axis.set_yticks(range(len(layers)), [names.get(layer, str(layer)) for layer in layers])
        axis.set_title(label)
        axis.set_ylabel("layer")
    space = next(iter(report.values()))[0].space
    figure.colorbar(image, ax=list(axes), label=f"Frobenius norm of H over {space}s")
    figure.suptitle(title or "Curvature by layer and block")
    _save(figure, path)
