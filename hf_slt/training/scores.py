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
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..model.layers import LAYERS, LOSSES, DrawnLayer, Embedding, Head, Linear, SupermaskLayer
from ..model.quantisation import largest_code
from ..model.random_weights import TensorSpec, draw
from ..model.ticket import pack_mask
from .loss import causal_lm_loss
from .selection import RULES, keep_largest, kept_count, piece_size, traced_mask

# The masked tables of the forward that this thread is in, if it shares them.
_tables: ContextVar[dict[nn.Module, Tensor] | None] = ContextVar("tables", default=None)


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
        self._make_current()
        scores = self.stored()
        if not self._is_traced():
            with torch.no_grad():
                masked = apply_mask(self.drawn, self.masks())
            return MaskedWeight.apply(masked, self.drawn, self.rule.slope, *scores)
        factors = torch.cat([self._traced_factor(one) for one in scores], -1)
        return self.drawn * factors.to(self.drawn.dtype)

    def _is_traced(self) -> bool:
        """Whether torch.compile or torch.func is at work, which want operators they know.

        The latter passes plain tensors for parameters.
        """
        plain = not all(isinstance(scores, nn.Parameter) for scores in self.stored())
        return plain or torch.compiler.is_compiling()

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
        grad = grad.to_dense() if grad.is_sparse else grad  # of a table that was only looked up
        widths = [one.shape[-1] for one in scores]
        parts = zip(grad.split(widths, -1), drawn.split(widths, -1), scores, strict=True)
        multiply = _times if torch.is_grad_enabled() else _times_in_pieces  # it may be differentiated again
        return None, None, None, *(multiply(g, w, s, ctx.slope) for g, w, s in parts)


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

    def forward(self, input: Tensor, unembed: bool = False) -> Tensor:
        # The logits give a shared table a gradient of full size: the few rows of a lookup are added to it,
        # rather than spread over a table of zeros first.
        if unembed or _tables.get() is None or self._is_traced():
            return super().forward(input, unembed)
        return F.embedding(input, self.masked_weight(), sparse=True)

    def masked_weight(self) -> Tensor:
        tables = None if torch.compiler.is_compiling() else _tables.get()
        if tables is None:
            return super().masked_weight()
        if self not in tables:
            tables[self] = super().masked_weight()
        return tables[self]

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        before = _tables.set({})
        try:
            yield
        finally:
            _tables.reset(before)

    def made_once(self) -> AbstractContextManager:
        return nullcontext() if torch.compiler.is_compiling() else self._sharing()


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
