"""Layers that learn: a frozen random weight and a score for each of its entries.

    drawn  = draw(seed, name)                           buffer, never saved
    scores                                              parameter, float32
    weight = drawn * factors[rule.codes(scores)] * scale                       made in every forward
    dL/dscore := dL/dfactor * slope(score) = dL/dweight * drawn * scale * slope(score)

A step function has no gradient, so that of a soft function of the score is taken (straight through): for
edge-popup, which ranks by magnitude, its sign; see `rules.py`. Whoever asks such a layer for its `weight`
gets the masked one, with that gradient. Scales of the outputs are optional, and trained as usual.

Where only a share of a tensor is searched, there are scores for that share alone, in one row.

Importing this module teaches `hf_slt.model` to build models with scores.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..model.codes import pack_codes, search_pattern
from ..model.layers import (
    FORWARDS,
    LAYERS,
    LOSSES,
    DrawnLayer,
    Embedding,
    Head,
    Linear,
    SupermaskLayer,
    Vector,
)
from ..model.random_weights import TensorSpec
from ..sharing.saving import largest_code
from .loss import causal_lm_loss, loss_of_a_ticket
from .rules import RULES, Place
from .selection import piece_size

# What the forward that this thread is in has made so far, to be used again in it.
_made: ContextVar[dict[Any, Any] | None] = ContextVar("made", default=None)


def made_so_far() -> dict[Any, Any] | None:
    return None if torch.compiler.is_compiling() else _made.get()


class ScoresLayer(DrawnLayer):
    """A drawn weight under the mask of its scores."""

    body_name = "drawn"
    drawn: Any
    siblings: Sequence["ScoresLayer"] = ()  # all layers that a joint rule ranks together

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        super().__init__(tensors)
        self.rule = RULES[tensors[0].rule](**dict(tensors[0].options))  # a loop may ramp an option of it
        self.is_searched_whole = tensors[0].search == 1
        self.in_float32 = [self.attribute(tensor, "scores") for tensor in tensors]  # 16 bits would tie them
        for tensor, name in zip(self.tensors, self.in_float32, strict=True):
            shape = tensor.shape if self.is_searched_whole else (tensor.searched,)
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.float32)))
            if not self.is_searched_whole:  # where these are in the flattened matrix
                places = torch.empty(tensor.searched, dtype=torch.int64)
                self.register_buffer(self.attribute(tensor, "searched"), places, persistent=False)
        self._begin()

    def stored(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.in_float32]

    def join(self, layers: Sequence[SupermaskLayer]) -> None:
        if self.rule.joint:
            self.siblings = tuple(layer for layer in layers if isinstance(layer, ScoresLayer))

    @torch.no_grad()
    def reset(self) -> None:
        if self.drawn.is_meta:
            return
        for tensor, scores in zip(self.tensors, self.stored(), strict=True):
            if not getattr(scores, "_is_hf_initialized", False):  # not what a checkpoint gave
                first = self.rule.first_scores(self._place(tensor), tuple(scores.shape))
                scores.copy_(torch.from_numpy(first))
        self._make_current()

    @torch.no_grad()
    def materialise(self) -> None:
        for tensor, columns in self.places():
            drawn = tensor.draw()
            if not self.is_searched_whole:
                searched, factors = search_pattern(tensor)
                factors[searched] = 1
                drawn *= factors.reshape(tensor.shape)
                rows, within = np.divmod(searched, tensor.shape[1])
                places = torch.from_numpy(rows * self.shape[1] + columns.start + within)
                getattr(self, self.attribute(tensor, "searched")).copy_(places)
            self.drawn[:, columns].copy_(torch.from_numpy(drawn))
        self._made_from = self._sources()

    def _place(self, tensor: TensorSpec, training: bool = False) -> Place:
        return Place(tensor, 0 if self.inputs_first else 1, training)

    def _asked(self, training: bool) -> tuple[list[Tensor], list[Place]]:
        """What the rule is asked: the scores of every tensor, and where they are."""
        places = [self._place(tensor, training) for tensor in self.tensors]
        return [scores.detach() for scores in self.stored()], places

    @torch.no_grad()
    def codes(self, training: bool = False) -> list[Tensor]:
        """The code of every score, by tensor, as the scores stand: to keep, or those to train on."""
        if not self.rule.joint:
            return self.rule.codes_of_all(*self._asked(training))
        siblings, made = self.siblings or (self,), made_so_far()
        if made is None or siblings not in made:
            asked = [layer._asked(training) for layer in siblings]
            every, places = ([one for some in side for one in some] for side in zip(*asked, strict=True))
            codes = iter(self.rule.codes_of_all(every, places))
            found = {layer: [next(codes) for _ in layer.stored()] for layer in siblings}
            if made is None:
                return found[self]
            made[siblings] = found
        return made[siblings][self]

    def masked_weight(self) -> Tensor:
        """The weight that this layer computes with, differentiable in its scores and scales."""
        self._make_current()
        codes, scores, scale = self.codes(self.training), self.stored(), self.output_scale()
        if self._is_traced():
            factors = [self._traced_factor(*pair) for pair in zip(scores, codes, strict=True)]
            weight = self.spread(self.drawn, factors)
            return weight if scale is None else weight * scale.to(weight.dtype)
        return MaskedWeight.apply(self, codes, self.drawn, scale, *scores)

    def _is_traced(self) -> bool:
        """Whether torch.compile or torch.func is at work, which want operators they know.

        The latter passes plain tensors for parameters.
        """
        plain = not all(isinstance(scores, nn.Parameter) for scores in self.stored())
        return plain or torch.compiler.is_compiling()

    def _traced_factor(self, scores: Tensor, codes: Tensor) -> Tensor:
        """The factor as a number with the derivative of the soft score: x - x is 0, but has a gradient."""
        soft = self.rule.soft(scores)
        return factors_of(codes, self.rule.factors, scores.dtype) + (soft - soft.detach())

    def part(self, matrix: Tensor, tensor: TensorSpec) -> Tensor:
        """A tensor's part of the matrix, as its scores lie: all of it, or a row of what is searched."""
        if not self.is_searched_whole:
            return matrix.reshape(-1)[getattr(self, self.attribute(tensor, "searched"))]
        return matrix[:, next(columns for one, columns in self.places() if one is tensor)]

    def spread(self, drawn: Tensor, factors: Sequence[Tensor]) -> Tensor:
        """drawn times the factors of what is searched."""
        if self.is_searched_whole:
            return drawn * torch.cat(list(factors), -1).to(drawn.dtype)
        flat = drawn.reshape(-1)
        for tensor, some in zip(self.tensors, factors, strict=True):
            places = getattr(self, self.attribute(tensor, "searched"))
            flat = flat.index_copy(0, places, flat[places] * some.to(drawn.dtype))
        return flat.view(drawn.shape)

    @property
    def weight(self) -> Tensor:
        return self.masked_weight()

    def data(self) -> list[np.ndarray | None]:
        return [pack_codes(codes.cpu().numpy(), len(self.rule.factors)) for codes in self.codes()]

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
        return f"{super().extra_repr()}, {self.rule}"


class MaskedWeight(torch.autograd.Function):
    """The weight of a layer, from the codes of its scores; its gradient goes to scores and scales."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        layer: ScoresLayer, codes: list[Tensor], drawn: Tensor, scale: Any, *scores: Tensor
    ) -> Tensor:
        return masked_product(layer, codes, drawn, scale)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.layer, ctx.codes, drawn, scale, *scores = inputs
        ctx.save_for_backward(drawn, scale, *scores)

    @staticmethod
    def backward(ctx, grad: Tensor):
        drawn, scale, *scores = ctx.saved_tensors
        grad = grad.to_dense() if grad.is_sparse else grad  # of a table that was only looked up
        # It may be differentiated again; and where few are searched there is little to save.
        simple = torch.is_grad_enabled() or not ctx.layer.is_searched_whole
        slopes = _slopes if simple else _slopes_in_pieces
        of_scale, *of_scores = slopes(ctx.layer, ctx.codes, grad, drawn, scale, scores)
        return None, None, None, of_scale, *of_scores


def masked_product(
    layer: ScoresLayer, codes: Sequence[Tensor], drawn: Tensor, scale: Tensor | None
) -> Tensor:
    """drawn * factors * scale."""
    factors = layer.rule.factors
    if not layer.is_searched_whole:
        weight = layer.spread(drawn, [factors_of(some, factors, drawn.dtype) for some in codes])
        return weight if scale is None else weight * scale.to(weight.dtype)
    result = torch.empty_like(drawn)
    for some, block in _blocks(layer, codes):
        out = torch.mul(drawn[block], factors_of(some[block[0]], factors, drawn.dtype), out=result[block])
        if scale is not None:
            out.mul_(_within(scale, block))
    return result


def factors_of(codes: Tensor, factors: Sequence[float], dtype: torch.dtype) -> Tensor:
    """The factor of every code; evenly spaced ones are computed, which is quicker than a table."""
    first, step = factors[0], factors[1] - factors[0]
    if any(first + step * code != factor for code, factor in enumerate(factors)):
        return torch.tensor(factors, dtype=dtype, device=codes.device)[codes.int()]
    values = codes.view(torch.uint8).to(dtype)
    return values if (first, step) == (0, 1) else values.mul_(step).add_(first)


def _slopes(layer: ScoresLayer, codes, grad: Tensor, drawn: Tensor, scale: Tensor | None, scores) -> tuple:
    """The gradients of the scale and of every tensor's scores, by formulas that can be differentiated."""
    of_scale, product = None, grad * drawn
    if scale is not None:
        of_scale = (grad * masked_product(layer, codes, drawn, None)).sum_to_size(scale.shape)
        product = product * scale
    found = []
    for tensor, one in zip(layer.tensors, scores, strict=True):
        part, slope = layer.part(product, tensor).to(one.dtype), layer.rule.slope(one)
        found.append(part if slope is None else part * slope)
    return of_scale, *found


def _slopes_in_pieces(layer: ScoresLayer, codes, grad: Tensor, drawn: Tensor, scale: Any, scores) -> tuple:
    """The same without temporaries of full size."""
    of_scale = None if scale is None else torch.zeros_like(scale)
    of_scores = [torch.empty_like(one) for one in scores]
    pieces = zip(_blocks(layer, codes), _blocks(layer, scores), _blocks(layer, of_scores), strict=True)
    for (some, block), (scored, _), (result, _) in pieces:
        out = torch.mul(grad[block], drawn[block], out=result[block[0]])
        if of_scale is not None:
            total = out * factors_of(some[block[0]], layer.rule.factors, out.dtype)
            here = _within(of_scale, block)
            here += total.sum_to_size(here.shape)
            out.mul_(_within(scale, block))
        if (slope := layer.rule.slope(scored[block[0]])) is not None:
            out.mul_(slope)
    return of_scale, *of_scores


def _blocks(layer: ScoresLayer, parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, tuple[slice, slice]]]:
    """Rows and columns of the matrix that stay in a core's cache, each with the tensor's part they are in."""
    rows = max(1, piece_size(parts[0]) // layer.shape[1])
    for (_, columns), part in zip(layer.places(), parts, strict=True):
        for start in range(0, layer.shape[0], rows):
            yield part, (slice(start, start + rows), columns)


def _within(scale: Tensor, block: tuple[slice, slice]) -> Tensor:
    """The scale of a block: it has one row, or one column, or both."""
    rows, columns = (at if extent > 1 else slice(None) for at, extent in zip(block, scale.shape, strict=True))
    return scale[rows, columns]


class ValuesLayer(SupermaskLayer):
    """Values that are trained as usual; computed with as the ticket will hold them, in 4 to 32 bits."""

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
    """Rows rounded to what 16, 8 or 4 bits can hold, as by `quantisation.py`; the gradient passes through."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, bits: int) -> Tensor:
        if bits == 16:
            return weight.to(torch.float16).to(weight.dtype)
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
        if unembed or self._is_traced():
            return super().forward(input, unembed)
        # The logits give a tied table a gradient of full size: the few rows of a lookup are added to it,
        # rather than spread over a table of zeros first.
        return F.embedding(input, self.masked_weight(), sparse=True)

    def masked_weight(self) -> Tensor:
        made = made_so_far()
        if made is None:
            return super().masked_weight()
        if self not in made:
            made[self] = super().masked_weight()
        return made[self]


class ScoresHead(ScoresLayer, Head):
    """A head whose mask is learned."""


class ValuesEmbedding(ValuesLayer, Embedding):
    """A table whose values are trained."""


class ValuesHead(ValuesLayer, Head):
    """A head whose values are trained."""


class ValuesVector(ValuesLayer, Vector):
    """A vector whose values are trained."""


def one_forward() -> AbstractContextManager:
    """The context in which a table is masked once, and a joint rule selects once, for all uses."""
    inside = torch.compiler.is_compiling() or _made.get() is not None  # a model within another
    return nullcontext() if inside else _remembering()


@contextmanager
def _remembering() -> Iterator[None]:
    before = _made.set({})
    try:
        yield
    finally:
        _made.reset(before)


LAYERS["scores"] = {
    **LAYERS["ticket"],  # frozen ones learn nothing
    ("masked", "linear"): ScoresLinear,
    ("masked", "embedding"): ScoresEmbedding,
    ("masked", "head"): ScoresHead,
    ("trained", "embedding"): ValuesEmbedding,
    ("trained", "head"): ValuesHead,
    ("trained", "vector"): ValuesVector,
}
FORWARDS["scores"] = one_forward
LOSSES |= {"scores": causal_lm_loss, "ticket": loss_of_a_ticket}
