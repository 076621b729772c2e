"""Curvature of attention: how much the loss is curved along each block of a GPT-2.

The Hessian of a loss over a network is the sum of two parts: one has the second derivative of the loss, the other
that of the network (the Gauss-Newton split):

    H = H_o + H_f,    H_o = J^T (d2 loss / dF2) J,    H_f = sum_i (d loss / dF_i) (d2 F_i / dw2)

H_o ("outer") is positive semi-definite, H_f ("functional") has either sign. For self-attention both
are written with three moments of the input under the attention distribution, which is what Ormaniec,
Dangel and Singh (arXiv 2410.10986) found and what `attention_hessian.py` computes in closed form. In a
whole model the same blocks are measured by products with vectors: `block_curvature` never forms a matrix.

A supermask is trained through scores, not weights. With the straight-through estimator a change of a score by 1
changes the masked weight by w, so the score's Hessian is, exactly,

    H_score = diag(w) H_weight diag(w),    taken at the masked weights w * m.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..about import require_packages
from ..masks.modules import masked_parameters
from ..progress import progress_bar
from .curvature_operators import CurvatureOperator, estimate_norms, extreme_eigenvalues

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batch = Tensor | Mapping[str, Tensor]

BLOCKS = ("q", "k", "v", "o", "fc", "proj", "embedding")


@dataclass(frozen=True)
class BlockCurvature:
    """Curvature of the mean token loss along one block of weights, or of their scores.

    Args:
        layer (`int` or `None`):
            Number of the layer; None for the embedding.
        block (`str`):
            Name of the block.
        space (`str`):
            `"weight"` or `"score"`.
        size (`int`):
            Number of weights.
        norm (`float`):
            Frobenius norm of H.
        norm_outer (`float`):
            Frobenius norm of H_o; NaN if the parts were not measured.
        norm_functional (`float`):
            Frobenius norm of H_f; NaN if the parts were not measured.
        trace (`float`):
            Trace of H.
        trace_outer (`float`):
            Trace of H_o; NaN if the parts were not measured.
        smallest (`float`, *optional*):
            Smallest eigenvalue of H; None if eigenvalues were not computed.
        largest (`float`, *optional*):
            Largest eigenvalue of H; None if eigenvalues were not computed.
    """

    layer: int | None
    block: str
    space: str
    size: int
    norm: float
    norm_outer: float
    norm_functional: float
    trace: float
    trace_outer: float
    smallest: float | None = None
    largest: float | None = None

    @property
    def rms(self) -> float:
        """Root mean square of H's eigenvalues: the norm, divided by the root of the block's size."""
        return self.norm / math.sqrt(self.size)

    @property
    def mean_outer(self) -> float:
        """Mean diagonal entry of H_o: the curvature along a single weight, or a single score."""
        return self.trace_outer / self.size


def block_curvature(
    model: PreTrainedModel,
    batches: Batch | Iterable[Batch],
    blocks: Sequence[str] = BLOCKS,
    space: str = "weight",
    probes: int = 20,
    seed: int = 0,
    *,
    layers: Sequence[int] | None = None,
    layer_norm: str = "keep",
    qk_factor: float = 1.0,
    parts: bool = True,
    eigenvalues: bool = True,
    dtype: torch.dtype | None = None,
    progress: bool = False,
) -> list[BlockCurvature]:
    """Measure norms, traces and extreme eigenvalues of the diagonal Hessian blocks, one row per layer and block.

    The loss is the mean cross-entropy over all predicted tokens, in eval mode. H_o is the Gauss-Newton matrix and
    H_f = H - H_o. No matrix is formed: norms and traces are estimated by products of H and H_o with `probes` vectors
    per block. Most of the vectors are for the few directions that dominate (as in Hutch++), the others are Rademacher
    vectors orthogonal to these. A block with no more entries than `probes` is computed exactly. Eigenvalues are
    computed by Lanczos' method (SciPy's `eigsh`).

    Memory: a copy of the model, about twelve times the block's weights for a product (twenty while Lanczos runs), and
    several times the activations of one batch. If that is too much, give several small batches. A single batch is
    faster: one pass through the model is used for all products. The embedding is the largest block.

    Args:
        model (`PreTrainedModel`):
            A [`SupermaskGPT2LMHeadModel`] in either state, or a stock `GPT2LMHeadModel`. It is not changed.
        batches (`Batch` or `Iterable[Batch]`):
            One batch or several: token ids (batch, length), or a mapping with `input_ids` and, as usual,
            `attention_mask` and `labels` (-100 is not counted).
        blocks (`Sequence[str]`, defaults to `BLOCKS`):
            Which blocks: "q", "k", "v" (columns of the fused `c_attn`), "o" (attention output), "fc", "proj"
            (MLP), "embedding" (the token table, tied or not).
        space (`str`, defaults to `"weight"`):
            `"weight"`, or `"score"` for diag(w) H diag(w), where w is the frozen weight before its mask; blocks
            without scores are left out. Edge-popup ranks |score|. The sign of the score would only conjugate H by
            +-1: norms, traces and eigenvalues are the same.
        probes (`int`, defaults to 20):
            Vectors per block.
        seed (`int`, defaults to 0):
            Seed of the vectors.
        layers (`Sequence[int]`, *optional*):
            Numbers of the layers to measure. Default: all.
        layer_norm (`str`, defaults to `"keep"`):
            `"keep"`, or `"remove"` to measure the same weights without LayerNorm.
        qk_factor (`float`, defaults to 1.0):
            Query and key weights are multiplied by this before the measurement.
        parts (`bool`, defaults to `True`):
            Whether to measure H_o and H_f too. Without them all probes are used for H.
        eigenvalues (`bool`, defaults to `True`):
            Whether to compute the extreme eigenvalues, which takes most of the time.
        dtype (`torch.dtype`, *optional*):
            Type to compute in. Default: that of the model.
        progress (`bool`, defaults to `False`):
            Whether to show a bar.

    Returns:
        `list[BlockCurvature]`: one row per layer and block.

    Raises:
        `ValueError`: for an impossible option.
        [`SLTError`]: if eigenvalues are wanted and SciPy is not installed.
    """
    if space not in ("weight", "score"):
        raise ValueError(f'space={space!r}: give "weight" or "score"')
    if probes < 1:
        raise ValueError(f"probes={probes}: give at least 1")
    if eigenvalues:
        require_packages("eigenvalues", "scipy", extra="curvature")
    plain = _PlainModel(model, batches, layer_norm=layer_norm, qk_factor=qk_factor, dtype=dtype)
    if space == "score" and not plain.frozen_layers:
        raise ValueError(
            f'space="score" needs a model with frozen weights and masks; {type(model).__name__} has none: '
            'use space="weight", or the supermask model before merge_and_unload()'
        )
    rows = []
    for place in progress_bar(
        list(plain.places(blocks, layers, space)), "curvature", disable=not progress, unit="block"
    ):
        operator = plain.operator(place, space)
        held = plain.size // operator.size  # as many vectors as take about the memory of the model
        generator = torch.Generator().manual_seed(seed)
        found = estimate_norms(
            operator, probes, generator, outer=parts, most=held, chunk=plain.chunk(operator.size)
        )
        if eigenvalues:
            width = max(4, min(20, 2 * held))  # with fewer than 4 vectors, Lanczos does not converge
            ends = extreme_eigenvalues(operator, found["norm"], generator, width)
            found["smallest"], found["largest"] = ends
        rows.append(BlockCurvature(place.layer, place.block, space, operator.size, **found))
    return rows


@dataclass(frozen=True)
class _Place:
    """The place of a block in the model: some columns of one weight."""

    layer: int | None
    block: str
    path: str  # path of the module
    columns: slice


class _PlainModel:
    """A copy of a GPT-2 in which every weight is an ordinary tensor, and the batches to measure it on."""

    def __init__(
        self,
        model: PreTrainedModel,
        batches: Batch | Iterable[Batch],
        *,
        layer_norm: str = "keep",
        qk_factor: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        if layer_norm not in ("keep", "remove"):
            raise ValueError(f'layer_norm={layer_norm!r}: give "keep" or "remove"')
        if not hasattr(model, "transformer") or not hasattr(model.config, "n_head"):
            raise ValueError(
                f"{type(model).__name__} is not a GPT-2 with a language model head: give a "
                "SupermaskGPT2LMHeadModel or a GPT2LMHeadModel"
            )
        self.config = model.config
        # Tickets and stock models have ordinary weights already.
        given: Any = model
        self.model = (given.to_ticket() if hasattr(model, "to_ticket") else copy.deepcopy(given)).eval()
        # Fused attention cannot be differentiated twice.
        self.model.set_attn_implementation("eager")
        self.frozen_layers = {
            path: plan for path, _, name, plan in masked_parameters(model) if name == "weight"
        }
        self.qk_factor = qk_factor
        if layer_norm == "remove":
            for path, module in list(self.model.named_modules()):
                if isinstance(module, nn.LayerNorm):
                    self.model.set_submodule(path, nn.Identity())
        if dtype is not None:
            self.model.to(dtype)
        self.model.requires_grad_(False)
        self.size = sum(one.numel() for one in self.model.parameters())
        self.dtype = next(self.model.parameters()).dtype
        self.device = next(self.model.parameters()).device
        if qk_factor != 1:
            for block in self.model.transformer.h:
                block.attn.c_attn.weight[:, : self._widths()[0] * 2] *= qk_factor
        batches = [batches] if isinstance(batches, Tensor | Mapping) else list(batches)
        if not batches:
            raise ValueError("no batches: give token ids of shape (batch, length), or a list of such batches")
        self.data = [_prediction_batch(batch, self.device) for batch in batches]
        if not any(len(targets) for *_, targets in self.data):
            raise ValueError("the batches predict no token: give sequences of at least 2 tokens with labels")

    def _widths(self) -> list[int]:
        """Return the numbers of columns of queries, keys and values."""
        config = self.config
        usual = config.n_embd // config.n_head
        return [config.n_head * getattr(config, name, usual) for name in ("qk_width", "v_width")]

    def places(self, blocks: Sequence[str], layers: Sequence[int] | None, space: str) -> Iterator[_Place]:
        for block in blocks:
            if block not in BLOCKS:
                raise ValueError(f"block {block!r} is not one of {', '.join(BLOCKS)}")
        depth = self.config.n_layer
        for layer in layers or ():
            if not 0 <= layer < depth:
                raise ValueError(f"layer {layer} of a model with layers 0..{depth - 1}")
        qk, v = self._widths()
        inside = {
            "q": ("attn.c_attn", slice(0, qk)),
            "k": ("attn.c_attn", slice(qk, 2 * qk)),
            "v": ("attn.c_attn", slice(2 * qk, 2 * qk + v)),
            "o": ("attn.c_proj", slice(None)),
            "fc": ("mlp.c_fc", slice(None)),
            "proj": ("mlp.c_proj", slice(None)),
        }
        found = [
            _Place(layer, block, f"transformer.h.{layer}.{inside[block][0]}", inside[block][1])
            for layer in (range(depth) if layers is None else layers)
            for block in blocks
            if block in inside
        ]
        if "embedding" in blocks:
            found.append(_Place(None, "embedding", "transformer.wte", slice(None)))
        return (place for place in found if space == "weight" or place.path in self.frozen_layers)

    def operator(self, place: _Place, space: str) -> CurvatureOperator:
        """Return the operator for products with H and H_o of the mean token loss over one block."""
        step = None
        if space == "score":  # a change of a score by 1 adds the frozen weight before its mask
            plan = self.frozen_layers[place.path]
            whole = np.concatenate([tensor.draw() for tensor in plan.tensors], plan.axis)
            drawn = torch.from_numpy(whole[:, place.columns])
            factor = self.qk_factor if place.block in ("q", "k") else 1.0
            step = factor * drawn.to(self.device, self.dtype).reshape(-1)
        block = self.model.get_parameter(f"{place.path}.weight")[:, place.columns]
        batches = [
            (partial(self.logits, place, arguments, rows), targets) for arguments, rows, targets in self.data
        ]
        return CurvatureOperator(batches, block, step)

    def logits(self, place: _Place, arguments: dict[str, Any], rows: Tensor, block: Tensor) -> Tensor:
        """Compute the logits at the positions `rows`, as a function of one block of the model's weights."""
        name = f"{place.path}.weight"
        weight = self.model.get_parameter(name)
        start, stop, _ = place.columns.indices(weight.shape[1])
        if block.shape != weight.shape:
            block = torch.cat([weight[:, :start], block, weight[:, stop:]], 1)
        return functional_call(self.model, {name: block}, (), arguments).logits.flatten(0, 1)[rows]

    def chunk(self, size: int) -> int:
        """Return how many probes go through the model together: many for a tiny model, few for a large one."""
        tokens = max(arguments["input_ids"].numel() for arguments, *_ in self.data)
        of_logits = 2**22 // (tokens * self.config.vocab_size)
        of_block = max(2**19, self.size // 8) // size
        return max(1, min(8, of_logits, of_block))


def _prediction_batch(batch: Batch, device: torch.device) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Return the model's arguments, the flat positions that predict something, and what they predict."""
    batch = {"input_ids": batch} if isinstance(batch, Tensor) else batch
    names = [name for name in ("input_ids", "attention_mask", "labels") if batch.get(name) is not None]
    given = {name: batch[name].to(device) for name in names}
    arguments: dict[str, Any] = {"input_ids": given["input_ids"], "use_cache": False}
    labels = given.get("labels", given["input_ids"])
    if "attention_mask" in given and not given["attention_mask"].all():
        arguments["attention_mask"] = given["attention_mask"]
        if "labels" not in given:
            labels = labels.masked_fill(given["attention_mask"] == 0, -100)
    targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100).flatten()
    rows = (targets != -100).nonzero().flatten()
    return arguments, rows, targets[rows]
