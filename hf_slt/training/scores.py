"""Layers that learn: a frozen random weight and a score for each of its entries.

    drawn  = draw(seed, name)                         buffer, never saved
    scores                                            parameter, float32
    weight = drawn * mask,  mask = largest(scores)    made in every forward
    dL/dscore := dL/dmask * slope(score) = dL/dweight * drawn * slope(score)

The step function has no gradient, so its derivative is taken as 1 (straight through); the rank of a score
keeps its own slope: for edge-popup, which ranks by magnitude, the sign. Whoever asks such a layer for its
`weight` gets the masked one, with that gradient.

Importing this module teaches `hf_slt.model` to build models with scores.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..model.layers import (
    LAYERS,
    LOSSES,
    DrawnLayer,
    Embedding,
    Head,
    Linear,
    SupermaskLayer,
)
from ..model.quantisation import largest_code
from ..model.random_weights import TensorSpec, draw
from ..model.ticket import pack_mask
from .loss import causal_lm_loss
from .selection import RULES, keep_largest, kept_count, piece_size, traced_mask


class ScoresLayer(DrawnLayer):
    """A drawn weight under the mask of its scores; each tensor is ranked by itself."""

    body_name = "drawn"
    drawn: Any

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        super().__init__(tensors)
        self.density = tensors[0].density  # a loop may ramp it from step to step
        self.rule = RULES[tensors[0].rule]
        self.in_float32 = [self.attribute(tensor, "scores") for tensor in tensors]  # 16 bits would tie them
        for tensor, name in zip(self.tensors, self.in_float32, strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(tensor.shape, dtype=torch.float32)))
        self._begin()

    def stored(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.in_float32]

    @torch.no_grad()
    def reset(self) -> None:
        if self.drawn.is_meta:
            return
        for tensor, scores in zip(self.tensors, self.stored(), strict=True):
            if not getattr(scores, "_is_hf_initialized", False):  # not what a checkpoint gave
                scores.copy_(torch.from_numpy(self.first_scores(tensor)))
        self._make_current()

    def first_scores(self, tensor: TensorSpec) -> np.ndarray:
        """Edge-popup's first scores, kaiming_uniform(a=sqrt 5): U[-1, 1] / sqrt(fan in)."""
        fan_in = self.shape[0 if self.inputs_first else 1]
        return draw(tensor.seed, tensor.name + ".scores", tensor.shape, "uniform", 1 / math.sqrt(fan_in))

    @torch.no_grad()
    def materialise(self) -> None:
        for tensor, columns in self.places():
            self.drawn[:, columns].copy_(torch.from_numpy(tensor.draw()))
        self._made_from = self._sources()

    def masks(self) -> list[Tensor]:
        """The boolean mask of every tensor, as its scores stand."""
        rank = self.rule.rank
        return [keep_largest(one, kept_count(self.density, one.numel()), rank) for one in self.stored()]

    def masked_weight(self) -> Tensor:
        """The weight that this layer computes with, differentiable in its scores."""
        scores = self.stored()
        if not self._is_traced():
            return MaskedWeight.apply(self._product(), self.drawn, self.rule.slope, *scores)
        self._make_current()
        factors = torch.cat([self._traced_factor(one) for one in scores], -1)
        return self.drawn * factors.to(self.drawn.dtype)

    def _is_traced(self) -> bool:
        """Whether torch.compile or torch.func is at work, which want operators they know.

        The latter passes plain tensors for parameters.
        """
        plain = not all(isinstance(scores, nn.Parameter) for scores in self.stored())
        return plain or torch.compiler.is_compiling()

    @torch.no_grad()
    def _product(self) -> Tensor:
        self._make_current()
        return apply_mask(self.drawn, self.masks())

    def _traced_factor(self, scores: Tensor) -> Tensor:
        """The mask as a number whose derivative is that of the rank: x - x is 0, but has a gradient."""
        ranked = self.rule.rank(scores)
        mask = traced_mask(ranked, kept_count(self.density, scores.numel()))
        return mask + (ranked - ranked.detach())

    @property
    def weight(self) -> Tensor:
        return self.masked_weight()

    def data(self) -> list[np.ndarray | None]:
        return [pack_mask(mask.cpu().numpy()) for mask in self.masks()]

    def _apply(self, fn, recurse=True):
        """Move with the model, but keep the scores in float32."""
        before = [scores.detach() for scores in self.stored()]  # the values: a cast replaces .data
        super()._apply(fn, recurse)
        for new, old in zip(self.stored(), before, strict=True):
            if new.dtype != torch.float32 and not new.is_meta:
                gradient, new.grad = new.grad, None
                new.data = old.to(new.device, torch.float32)
                new.grad = None if gradient is None else gradient.to(torch.float32)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, density={self.density}"


class MaskedWeight(torch.autograd.Function):
    """Passes the masked weight through, and its gradient to the scores of each tensor, side by side."""

    generate_vmap_rule = True

    @staticmethod
    def forward(masked: Tensor, drawn: Tensor, slope: Callable[[Tensor], Tensor], *scores: Tensor) -> Tensor:
        return masked.view_as(masked)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, drawn, ctx.slope, *scores = inputs
        ctx.save_for_backward(drawn, *scores)

    @staticmethod
    def backward(ctx, grad: Tensor):
        drawn, *scores = ctx.saved_tensors
        widths = [one.shape[-1] for one in scores]
        parts = zip(grad.split(widths, -1), drawn.split(widths, -1), scores, strict=True)
        multiply = _times if torch.is_grad_enabled() else _times_in_pieces  # it may be differentiated again
        return None, None, None, *(multiply(g, w, s, ctx.slope) for g, w, s in parts)


class MaskedRows(torch.autograd.Function):
    """Rows of a masked table by their numbers: `F.embedding` of MaskedWeight, with the same gradient.

    But only the rows that were looked up have one, so only these are multiplied in the backward.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(ids: Tensor, masked: Tensor, drawn: Tensor, slope: Callable, scores: Tensor) -> Tensor:
        return F.embedding(ids, masked)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ids, _, drawn, ctx.slope, scores = inputs
        ctx.save_for_backward(ids, drawn, scores)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ids, drawn, scores = ctx.saved_tensors
        table = torch.ops.aten.embedding_dense_backward(grad, ids, len(drawn), -1, False)
        if torch.is_grad_enabled():  # it may be differentiated again
            return None, None, None, None, _times(table, drawn, scores, ctx.slope)
        result = table.to(scores.dtype)
        # A row that was looked up twice is written twice, the same.
        result[ids] = _times(table[ids], drawn[ids], scores[ids], ctx.slope)
        return None, None, None, None, result


def _times(gradient: Tensor, drawn: Tensor, scores: Tensor, slope: Callable) -> Tensor:
    return (gradient * drawn).to(scores.dtype) * slope(scores)


def _times_in_pieces(gradient: Tensor, drawn: Tensor, scores: Tensor, slope: Callable) -> Tensor:
    """The same without temporaries of full size, which cost 4 % of a step and 5 % of its memory."""
    result = torch.empty_like(scores)
    rows = max(1, piece_size(scores) // scores.shape[-1])
    for out, g, w, s in zip(*(one.split(rows) for one in (result, gradient, drawn, scores)), strict=True):
        torch.mul(g, w, out=out).mul_(slope(s))
    return result


def apply_mask(weight: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """weight * mask; the masks lie side by side in its columns."""
    masked = torch.empty_like(weight)
    widths, rows = [mask.shape[-1] for mask in masks], max(1, piece_size(weight) // weight.shape[-1])
    for whole, factor, mask in zip(masked.split(widths, -1), weight.split(widths, -1), masks, strict=True):
        for some, those, kept in zip(whole.split(rows), factor.split(rows), mask.split(rows), strict=True):
            torch.mul(those, kept.view(torch.int8).to(those.dtype), out=some)
    return masked


class ValuesLayer(SupermaskLayer):
    """Values that are trained as usual; computed with as the ticket will hold them, in 32, 8 or 4 bits."""

    kind = "trained"
    body_name = "values"

    def __init__(self, tensors: Sequence[TensorSpec], bits: int = 32) -> None:
        super().__init__(tensors)
        self.bits = bits
        self.values = nn.Parameter(torch.empty(self.shape))
        self._begin()

    @torch.no_grad()
    def reset(self) -> None:
        if not self.values.is_meta and not getattr(self.values, "_is_hf_initialized", False):
            self.values.copy_(torch.from_numpy(self.drawn_weight()))

    def masked_weight(self) -> Tensor:
        return self.values if self.bits == 32 else RoundedWeight.apply(self.values, self.bits)

    @property
    def weight(self) -> Tensor:
        return self.masked_weight()

    def data(self) -> list[np.ndarray | None]:
        return [self.weight.detach().float().cpu().numpy()]


class RoundedWeight(torch.autograd.Function):
    """Rows rounded to what 8 or 4 bits can hold, as by `quantisation.py`; the gradient passes through."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, bits: int) -> Tensor:
        largest = weight.abs().amax(-1, keepdim=True).float()
        steps = (largest / largest_code(bits)).view(torch.int32)
        scales = ((steps + 0x1FFF) & ~0x1FFF).view(torch.float32).clamp_min(2**-14)
        return ((weight / scales).round() * scales + 0.0).to(weight.dtype)  # + 0.0: no code is a minus zero

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ScoresLinear(ScoresLayer, Linear):
    """A linear layer whose mask is learned."""


class ScoresEmbedding(ScoresLayer, Embedding):
    """A table whose mask is learned."""

    _shared: list[Tensor] | None = None  # within `made_once`: the product, as soon as there is one

    def forward(self, input: Tensor, unembed: bool = False) -> Tensor:
        if unembed or self._is_traced():
            return super().forward(input, unembed)
        return MaskedRows.apply(input, self._product(), self.drawn, self.rule.slope, self.scores)

    def made_once(self) -> AbstractContextManager:
        return nullcontext() if torch.compiler.is_compiling() else self._sharing()

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        self._shared = []
        try:
            yield
        finally:
            self._shared = None

    def _product(self) -> Tensor:
        shared = self._shared  # another thread may end its own forward meanwhile
        if shared is None:
            return super()._product()
        if not shared:
            shared.append(super()._product())
        return shared[0]


class ScoresHead(ScoresLayer, Head):
    """A head whose mask is learned."""


class ValuesEmbedding(ValuesLayer, Embedding):
    """A table whose values are trained."""


class ValuesHead(ValuesLayer, Head):
    """A head whose values are trained."""


LAYERS["scores"] = {
    **LAYERS["ticket"],  # frozen ones learn nothing
    ("masked", "linear"): ScoresLinear,
    ("masked", "embedding"): ScoresEmbedding,
    ("masked", "head"): ScoresHead,
    ("trained", "embedding"): ValuesEmbedding,
    ("trained", "head"): ValuesHead,
}
LOSSES["scores"] = causal_lm_loss
