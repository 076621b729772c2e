"""Curvature of attention: which blocks of a GPT-2 the loss bends along, and how much.

The Hessian of a loss over a network splits into a part that only knows the loss and a part
that only knows the network (the Gauss-Newton split):

    H = H_o + H_f,    H_o = J^T (d2 loss / dF2) J,    H_f = sum_i (d loss / dF_i) (d2 F_i / dw2)

H_o ("outer") is positive semi-definite, H_f ("functional") has either sign. For self-attention both
are written with three moments of the input under the attention distribution, which is what Ormaniec,
Dangel and Singh (arXiv 2410.10986) found and what `attention_hessian.py` computes in closed form. In a
whole model the same blocks are reached by products with vectors: `block_curvature` never forms a matrix.

A supermask is trained through scores, not weights. With the straight-through estimator the masked
weight moves by w for a unit of score, so the score's Hessian is, exactly,

    H_score = diag(w) H_weight diag(w),    taken at the masked weights w * m.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..model.layers import SupermaskLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batch = Tensor | Mapping[str, Tensor]

BLOCKS = ("q", "k", "v", "o", "fc", "proj", "embedding")

# ---------------------------------------------------------------------------------------------------
# Blocks of a whole model, by products with vectors


@dataclass(frozen=True)
class BlockCurvature:
    """Curvature of the mean token loss along one block of weights (or of their scores).

    `norm`, `norm_outer`, `norm_functional` are Frobenius norms of H, H_o and H_f; `trace` and
    `trace_outer` of H and H_o, NaN where the parts were not asked for; `smallest` and `largest` the
    extreme eigenvalues of H, None where they were not. `layer` is None for the embedding.
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
        """Root mean square of H's eigenvalues: the norm, freed of the block's size."""
        return self.norm / math.sqrt(self.size)

    @property
    def mean_outer(self) -> float:
        """Mean diagonal entry of H_o: the curvature that one weight, or one score, meets on its own."""
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
    """Norms, traces and extreme eigenvalues of the diagonal Hessian blocks, one row per layer and block.

    `model` is a `SupermaskGPT2LMHeadModel` in either state or a stock `GPT2LMHeadModel`; it is not
    changed. `batches` is one batch or several: token ids (batch, length), or a mapping with
    `input_ids` and, as usual, `attention_mask` and `labels` (-100 is not counted). The loss is the mean
    cross-entropy over all predicted tokens, in eval mode.

    Memory: a copy of the model, about twelve times the block's weights for a product (twenty while
    Lanczos runs), and the activations of one batch; give small batches. The embedding is the largest block.

    Blocks: "q", "k", "v" (columns of the fused `c_attn`), "o" (attention output), "fc", "proj" (MLP),
    "embedding" (the token table, tied or not). `space="score"` measures diag(w) H diag(w), w the frozen
    weight before its mask; blocks that have no scores are left out. Edge-popup ranks |score|, and its
    sign would only conjugate H by +-1: norms, traces and eigenvalues are the same.

    H_o is the Gauss-Newton matrix and H_f = H - H_o. No matrix is formed: `probes` products with H and
    with H_o per block estimate norms and traces, most of them spent on the few directions that dominate
    (as in Hutch++), the rest on Rademacher vectors orthogonal to these. A block with no more entries
    than `probes` is computed exactly. Eigenvalues are Lanczos' (SciPy's `eigsh`).

    `layer_norm="remove"` measures the same weights without LayerNorm; `qk_factor` multiplies query and
    key weights first; `dtype=torch.float64` computes in double; `layers` selects some. Without `parts`
    only H is measured, and without `eigenvalues` no Lanczos is run: each about halves the time.
    """
    if space not in ("weight", "score"):
        raise ValueError(f'space={space!r}: give "weight" or "score"')
    if probes < 1:
        raise ValueError(f"probes={probes}: give at least 1")
    plain = _PlainModel(model, batches, layer_norm=layer_norm, qk_factor=qk_factor, dtype=dtype)
    if space == "score" and not plain.frozen_layers:
        raise ValueError(
            f'space="score" needs a model with frozen weights and masks; {type(model).__name__} has none: '
            'use space="weight", or the supermask model before merge_and_unload()'
        )
    places = list(plain.places(blocks, layers, space))
    rows = []
    for place in progress_bar(places, "curvature", progress):
        hessian, outer = plain.operators(place, space)
        size = hessian.shape[0]
        generator = torch.Generator().manual_seed(seed)
        estimate: dict[str, Any] = _estimate(
            hessian, outer if parts else None, probes, generator, plain.sketch_width(size), plain.chunk(size)
        )
        if eigenvalues:
            estimate["smallest"], estimate["largest"] = _extreme_eigenvalues(
                hessian, estimate["norm"], generator, plain.lanczos_width(size)
            )
        rows.append(BlockCurvature(place.layer, place.block, space, size, **estimate))
    return rows


@dataclass(frozen=True)
class _Place:
    """Where a block lives: some columns of one weight."""

    layer: int | None
    block: str
    path: str  # of the module
    columns: slice


class _PlainModel:
    """A copy of a GPT-2 whose every weight is an ordinary tensor, and the batches to measure it on."""

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
        masked = {path: m for path, m in model.named_modules() if isinstance(m, SupermaskLayer)}
        # Copied with plain layers in the places of masked ones: scores and caches are large, too.
        self.model = copy.deepcopy(model, {id(layer): _PlainLayer(layer) for layer in masked.values()}).eval()
        # Forward-mode differentiation does not go through scaled_dot_product_attention.
        self.model.set_attn_implementation("eager")
        # Of the model given: they can draw their weights.
        self.frozen_layers: dict[str, Any] = {
            path: layer for path, layer in masked.items() if layer.kind == "masked"
        }
        self.qk_factor = qk_factor
        if layer_norm == "remove":
            for module in list(self.model.modules()):
                for name, child in module.named_children():
                    if isinstance(child, nn.LayerNorm):
                        setattr(module, name, nn.Identity())
        if dtype is not None:
            self.model.to(dtype)
        self.model.requires_grad_(False)
        self.dtype = next(self.model.parameters()).dtype
        self.device = next(self.model.parameters()).device
        if qk_factor != 1:
            for block in self.model.transformer.h:
                block.attn.c_attn.weight[:, : self._widths()[0] * 2] *= qk_factor
        self.data = [_prediction_batch(batch, self.device) for batch in _as_list(batches)]
        self.tokens = sum(len(labels) for _, labels in self.data)
        if not self.tokens:
            raise ValueError("the batches predict no token: give sequences of at least 2 tokens with labels")

    def _widths(self) -> tuple[int, int]:
        """Columns of all queries (and of all keys), and of all values."""
        config = self.config
        qk = getattr(config, "qk_width", config.n_embd // config.n_head)
        v = getattr(config, "v_width", config.n_embd // config.n_head)
        return config.n_head * qk, config.n_head * v

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
            if block != "embedding"
        ]
        if "embedding" in blocks:
            found.append(_Place(None, "embedding", "transformer.wte", slice(None)))
        return (place for place in found if space == "weight" or place.path in self.frozen_layers)

    def frozen(self, place: _Place) -> Tensor:
        """The frozen weight of a block before its mask: what a unit of score adds to the weight."""
        layer = self.frozen_layers[place.path]
        weight = layer.drawn_weight()[:, place.columns]
        factor = self.qk_factor if place.block in ("q", "k") else 1.0
        return factor * torch.from_numpy(weight).to(self.device, self.dtype)

    def operators(self, place: _Place, space: str) -> tuple[_MeanOperator, _MeanOperator]:
        """H and H_o of the mean token loss over one block, row-major."""
        try:
            from curvlinops import GGNLinearOperator, HessianLinearOperator
        except ImportError as error:
            raise ImportError(
                "block_curvature needs curvlinops 3.0.1: pip install 'hf_slt[curvature]'"
            ) from error
        step = self.frozen(place).reshape(-1) if space == "score" else None
        view = _BlockView(self.model, place)
        loss = nn.CrossEntropyLoss(reduction="sum")
        hessian, outer = (
            _MeanOperator(
                operator(
                    view,
                    loss,
                    [view.block],
                    self.data,
                    check_deterministic=False,
                    num_data=self.tokens,
                    batch_size_fn=lambda inputs: len(inputs["input_ids"]),
                ),
                self.tokens,
                step,
            )
            for operator in (HessianLinearOperator, GGNLinearOperator)
        )
        return hessian, outer

    def chunk(self, size: int) -> int:
        """Probes that go through the model together: a tiny model is all overhead, a large one all memory."""
        tokens = max(inputs["input_ids"].numel() for inputs, _ in self.data)
        of_logits = 2**22 // (tokens * self.config.vocab_size)
        of_block = max(2**19, self.model.num_parameters() // 8) // size
        return max(1, min(8, of_logits, of_block))

    def sketch_width(self, size: int) -> int:
        """How many vectors of a block may be held at once: about a model's worth."""
        return max(1, self.model.num_parameters() // size)

    def lanczos_width(self, size: int) -> int:
        # Below 4 vectors restarts stop converging.
        return max(4, min(20, 2 * self.model.num_parameters() // size))


class _PlainLayer(nn.Module):
    """A masked layer as it computes now, its masked weight an ordinary parameter."""

    def __init__(self, layer: SupermaskLayer) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.masked_weight().detach().clone(), requires_grad=False)
        self.is_table, self.is_head = isinstance(layer, nn.Embedding), isinstance(layer, nn.Linear)

    def forward(self, input: Tensor, unembed: bool = False) -> Tensor:
        if self.is_head or unembed:
            return nn.functional.linear(input, self.weight)
        return nn.functional.embedding(input, self.weight) if self.is_table else input @ self.weight


class _BlockView(nn.Module):
    """The model as a function of one block of its weights."""

    def __init__(self, model: nn.Module, place: _Place) -> None:
        super().__init__()
        weight = model.get_parameter(f"{place.path}.weight")
        self.held = (model, weight)  # in a tuple: only `block` shall be this module's parameter
        self.name, self.columns = f"{place.path}.weight", place.columns
        self.block = nn.Parameter(weight[:, place.columns])  # no copy of it

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        model, weight = self.held
        start, stop, _ = self.columns.indices(weight.shape[1])
        around = [weight[:, :start], self.block, weight[:, stop:]]
        whole = torch.cat(around, 1) if stop - start < weight.shape[1] else self.block
        arguments = {"input_ids": inputs["input_ids"], "use_cache": False}
        if "attention_mask" in inputs:
            arguments["attention_mask"] = inputs["attention_mask"]
        logits = functional_call(model, {self.name: whole}, (), arguments).logits
        return logits.flatten(0, 1)[inputs["rows"]]


class _MeanOperator:
    """An operator of summed losses as one of their mean, over weights or, given w, over scores.

    diag(w) H diag(w), w the frozen weight, is the Hessian over straight-through scores. Both factors are
    applied here, outside of differentiation, which would keep more copies of the block.
    """

    def __init__(self, operator: Any, count: int, step: Tensor | None) -> None:
        self.operator, self.count, self.step = operator, count, step
        self.shape, self.device, self.dtype = operator.shape, operator.device, operator.dtype

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Of one vector, or of the columns of a matrix."""
        if self.step is None:
            return (self.operator @ vectors).div_(self.count)
        step = self.step if vectors.dim() == 1 else self.step[:, None]
        return (self.operator @ (step * vectors)).mul_(step).div_(self.count)


def _as_list(batches: Batch | Iterable[Batch]) -> list[Batch]:
    if isinstance(batches, Tensor | Mapping):
        return [batches]
    batches = list(batches)
    if not batches:
        raise ValueError("no batches: give token ids of shape (batch, length), or a list of such batches")
    return batches


def _prediction_batch(batch: Batch, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs with the flat positions that predict something, and what they predict."""
    mapping = {"input_ids": batch} if isinstance(batch, Tensor) else batch
    ids = mapping["input_ids"].to(device)
    labels = mapping.get("labels")
    labels = ids.clone() if labels is None else labels.to(device).clone()
    inputs = {"input_ids": ids}
    attention_mask = mapping.get("attention_mask")
    if attention_mask is not None and not bool(attention_mask.all()):
        inputs["attention_mask"] = attention_mask.to(device)
        if mapping.get("labels") is None:
            labels[attention_mask.to(device) == 0] = -100
    targets = torch.full_like(labels, -100)
    targets[:, :-1] = labels[:, 1:]
    inputs["rows"] = (targets.flatten() != -100).nonzero().flatten()
    return inputs, targets.flatten()[inputs["rows"]]


def _estimate(
    hessian: Any, outer: Any, probes: int, generator: torch.Generator, most: int, chunk: int
) -> dict[str, float]:
    """Frobenius norms and traces of H, H_o and H - H_o from `probes` products with each of the two.

    |A|^2 = |A Q|^2 + |A (I - QQ^T)|^2 for orthonormal Q. Q spans what H and H_o make of a few random
    vectors, which catches the dominant eigenvectors; the second term is Hutchinson's estimate. The
    same vectors go through H and H_o, so that H_f is measured and not a difference of two estimates.
    Without an operator of H_o its part of the answer is NaN.
    """
    size = hessian.shape[0]
    device, dtype = hessian.device, hessian.dtype

    def random_signs(count: int) -> Iterator[Tensor]:
        """Rademacher vectors, a few columns at a time."""
        for start in range(0, count, chunk):
            shape = (size, min(chunk, count - start))
            signs = torch.empty(shape, dtype=torch.int8).random_(0, 2, generator=generator)
            yield signs.to(device, dtype).mul_(2).sub_(1)

    def sums(vectors: Tensor) -> np.ndarray:
        """Of |Hv|^2, |H_o v|^2, |H_f v|^2, v.Hv, v.H_o v over the columns v, in double."""
        h = hessian @ vectors
        o = torch.full_like(h[:1], math.nan).expand_as(h) if outer is None else outer @ vectors
        found = np.zeros(5)
        for some in zip(vectors.split(2**16), h.split(2**16), o.split(2**16), strict=True):
            v, hv, ov = (part.double() for part in some)  # in slices, else this takes more than H itself
            found += [
                (a * b).sum().item() for a, b in ((hv, hv), (ov, ov), (hv - ov, hv - ov), (v, hv), (v, ov))
            ]
        return found

    total = np.zeros(5)
    if size <= probes:
        for some in torch.eye(size, dtype=dtype, device=device).split(chunk, dim=1):
            total += sums(some)
    else:
        sketched = min(probes // 5, most // 2)  # and as many basis vectors for each operator
        basis = torch.empty(size, 0, dtype=dtype, device=device)
        if sketched:
            used = (hessian,) if outer is None else (hessian, outer)
            images = [operator @ some for some in random_signs(sketched) for operator in used]
            basis = torch.linalg.qr(torch.cat(images, dim=1))[0]
            for some in basis.split(chunk, dim=1):
                total += sums(some)
        rest = probes - sketched - basis.shape[1]
        for some in random_signs(rest):
            if sketched:
                some -= basis @ (basis.T @ some)
            total += sums(some) / rest
    norm, norm_outer, norm_functional = np.sqrt(total[:3]).tolist()
    return {
        "norm": norm,
        "norm_outer": norm_outer,
        "norm_functional": norm_functional,
        "trace": float(total[3]),
        "trace_outer": float(total[4]),
    }


def _extreme_eigenvalues(
    hessian: Any, norm: float, generator: torch.Generator, width: int, tol: float = 1e-5
) -> tuple[float, float]:
    """Smallest and largest eigenvalue, each to `tol` of the spectrum's width; `norm` is H's, about."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    size, device, dtype = hessian.shape[0], hessian.device, hessian.dtype
    if norm == 0:
        return 0.0, 0.0
    if size <= width:
        columns = [hessian @ one for one in torch.eye(size, dtype=dtype, device=device)]
        values = torch.linalg.eigvalsh(torch.stack(columns, dim=1).double())
        return values[0].item(), values[-1].item()

    start = torch.randn(size, generator=generator, dtype=dtype).numpy()
    # Single precision cannot resolve more than its own rounding.
    tol = max(tol, 0.0 if dtype == torch.float64 else 1e-4)

    def farthest_from(shift: float) -> float:
        """The eigenvalue of H / norm that is farthest from `shift`."""

        def apply(vector: np.ndarray) -> np.ndarray:
            v = torch.from_numpy(np.ascontiguousarray(vector).reshape(-1)).to(device)
            product = (hessian @ v).div_(norm)
            return product.sub_(v, alpha=shift).cpu().numpy()

        shifted = LinearOperator(
            (size, size), matvec=apply, dtype=start.dtype
        )  # ARPACK's memory goes with it
        try:
            found = eigsh(shifted, k=1, v0=start, ncv=width, tol=tol, return_eigenvectors=False)
        except ArpackNoConvergence as stopped:
            raise RuntimeError(
                f"Lanczos found no eigenvalue of a block of {size} weights: measure in "
                "dtype=torch.float64, or leave eigenvalues out (eigenvalues=False)"
            ) from stopped
        return float(found[0]) + shift

    # Of H / norm, because ARPACK takes anything below 1e-11 for zero. The end of larger magnitude
    # first; seen from there, the other end is the farthest point. So both converge relative to the
    # width of the spectrum, though one of them may be zero.
    one = farthest_from(0.0)
    other = farthest_from(one)
    return norm * min(one, other), norm * max(one, other)


def progress_bar(items: Sequence, what: str, show: bool) -> Iterable:
    if not show:
        return items
    from tqdm.auto import tqdm

    return tqdm(items, desc=what)
