"""The arithmetic of masked weights, and the gradients that pass through it.

    weight    = drawn * factors[codes] * scale        for a trellis: the scale of the law * table[states] * scale
    dL/dscore = dL/dweight * drawn * scale * surrogate_grad(score)
    dL/dscale = sum over the inputs of dL/dweight * drawn * factors[codes]

A parameter may consist of several tensors that lie side by side along one axis (query, key and value of
GPT-2). All work is done in pieces that stay in a core's cache: temporaries of full size cost more than the
arithmetic.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..weights.quantisation import largest_code
from .rules import Rule
from .selection import piece_size


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a parameter are.

    Args:
        axis (`int`):
            The axis along which the tensors lie side by side.
        extents (`tuple[int, ...]`):
            Size of each tensor along that axis.
        positions (`tuple[Tensor, ...]`, *optional*):
            If only a part of each tensor is searched: the flat indices of the searched weights.
    """

    axis: int
    extents: tuple[int, ...]
    positions: tuple[Tensor, ...] | None = None

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Return the part of each tensor, in the shape of its scores.

        Args:
            whole (`Tensor`):
                Anything in the shape of the parameter.

        Returns:
            `list[Tensor]`: a part for each tensor. If only a part of it is searched: a row of the searched weights.
        """
        if self.positions is not None:
            flat = whole.reshape(-1)
            return [flat[some] for some in self.positions]
        return list(whole.split(self.extents, self.axis))

    def assemble(self, drawn: Tensor, factors: Sequence[Tensor]) -> Tensor:
        """Return drawn times the factors of the searched weights. All operators are known to autograd.

        Args:
            drawn (`Tensor`):
                The frozen numbers, in the shape of the parameter.
            factors (`Sequence[Tensor]`):
                Factors of the searched weights of each tensor.

        Returns:
            `Tensor`: the product, in the shape of the parameter.
        """
        if self.positions is None:
            return drawn * torch.cat(list(factors), self.axis).to(drawn.dtype)
        flat = drawn.reshape(-1)
        for positions, some in zip(self.positions, factors, strict=True):
            flat = flat.index_copy(0, positions, flat[positions] * some.to(drawn.dtype))
        return flat.view(drawn.shape)

    def pieces(self, whole: Tensor) -> Iterator[tuple[int, slice, tuple[slice, ...]]]:
        """Yield (number of the tensor, its rows, the same place in the whole) for pieces that fit the cache.

        Args:
            whole (`Tensor`):
                Anything in the shape of the parameter.

        Yields:
            Number of the tensor, the rows within it, and the same place in the whole.
        """
        rows = max(1, piece_size(whole) // (whole.numel() // whole.shape[0]))
        start = 0
        for number, extent in enumerate(self.extents):
            height = extent if self.axis == 0 else whole.shape[0]
            for row in range(0, height, rows):
                inside = slice(row, min(row + rows, height))
                if self.axis == 0:
                    yield number, inside, (slice(start + inside.start, start + inside.stop),)
                else:
                    between = (slice(None),) * (self.axis - 1)
                    yield number, inside, (inside, *between, slice(start, start + extent))
            start += extent


def factors_of_codes(codes: Tensor, factors: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return the factor of every code. Evenly spaced factors are computed, which is faster than a table.

    Codes that are floats are returned as they are: they are the numbers of a trellis.

    Args:
        codes (`Tensor`):
            Codes of one tensor.
        factors (`Sequence[float]`):
            The factor of each code.
        dtype (`torch.dtype`):
            Type of the result.

    Returns:
        `Tensor`: factors, in the shape of the codes.
    """
    if codes.is_floating_point():
        return codes.to(dtype)
    first, step = factors[0], factors[1] - factors[0]
    if any(first + step * code != factor for code, factor in enumerate(factors)):
        return torch.tensor(factors, dtype=dtype, device=codes.device)[codes.int()]
    values = codes.view(torch.uint8).to(dtype)
    return values if (first, step) == (0, 1) else values.mul_(step).add_(first)


class MaskedWeight(torch.autograd.Function):
    """Computes the weight of a parameter from the codes of its scores. The gradient goes to scores and scales."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        rule: Rule, layout: Layout, codes: list[Tensor], drawn: Tensor, scale: Any, *scores: Tensor
    ) -> Tensor:
        return masked_product(rule, layout, codes, drawn, scale)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.rule, ctx.layout, codes, drawn, scale, *scores = inputs
        # Only the gradient of a scale needs the mask. Without scales its memory is free after the forward.
        ctx.codes = None if scale is None else codes
        ctx.save_for_backward(drawn, scale, *scores)

    @staticmethod
    def backward(ctx, grad: Tensor):
        drawn, scale, *scores = ctx.saved_tensors
        grad = grad.to_dense() if grad.is_sparse else grad  # sparse for a table that was only looked up
        # Simple formulas if the gradient is differentiated again, or if only a part of the weights is searched.
        simple = torch.is_grad_enabled() or ctx.layout.positions is not None
        gradients = _gradients if simple else _gradients_in_pieces
        of_scale, *of_scores = gradients(ctx.rule, ctx.layout, ctx.codes, grad, drawn, scale, scores)
        return None, None, None, None, of_scale, *of_scores


def masked_product(
    rule: Rule, layout: Layout, codes: Sequence[Tensor], drawn: Tensor, scale: Tensor | None
) -> Tensor:
    """Return drawn * factors * scale.

    Args:
        rule ([`Rule`]):
            The rule, which has the factors.
        layout ([`Layout`]):
            Where each tensor is in the parameter.
        codes (`Sequence[Tensor]`):
            Codes of each tensor.
        drawn (`Tensor`):
            The frozen numbers.
        scale (`Tensor` or `None`):
            Learned factors of the outputs, in a shape that multiplies the parameter.

    Returns:
        `Tensor`: the masked weight.
    """
    if layout.positions is not None:
        factors = [factors_of_codes(some, rule.factors, drawn.dtype) for some in codes]
        weight = layout.assemble(drawn, factors)
        return weight if scale is None else weight * scale.to(weight.dtype)
    result = torch.empty_like(drawn)
    for number, rows, place in layout.pieces(drawn):
        some = factors_of_codes(codes[number][rows], rule.factors, drawn.dtype)
        out = torch.mul(drawn[place], some, out=result[place])
        if scale is not None:
            out.mul_(_within(scale, place))
    return result


def traced_product(
    rule: Rule,
    layout: Layout,
    codes: Sequence[Tensor],
    drawn: Tensor,
    scale: Tensor | None,
    scores: Sequence[Tensor],
) -> Tensor:
    """Return the same as `masked_product`, computed by operators that torch.compile and torch.func know.

    The factor gets the derivative of the surrogate by adding x - x.detach(), which is 0 but has a gradient.

    Args:
        rule ([`Rule`]):
            The rule, which has factors and surrogate.
        layout ([`Layout`]):
            Where each tensor is in the parameter.
        codes (`Sequence[Tensor]`):
            Codes of each tensor.
        drawn (`Tensor`):
            The frozen numbers.
        scale (`Tensor` or `None`):
            Learned factors of the outputs, in a shape that multiplies the parameter.
        scores (`Sequence[Tensor]`):
            Scores of each tensor.

    Returns:
        `Tensor`: the masked weight, differentiable in scores and scale.
    """
    factors = []
    for some, one in zip(codes, scores, strict=True):
        surrogate = rule.surrogate(one)
        factors.append(factors_of_codes(some, rule.factors, one.dtype) + (surrogate - surrogate.detach()))
    weight = layout.assemble(drawn, factors)
    return weight if scale is None else weight * scale.to(weight.dtype)


def _gradients(rule: Rule, layout: Layout, codes, grad: Tensor, drawn: Tensor, scale, scores) -> tuple:
    """Return the gradients of the scale and of every tensor's scores, by formulas that can be differentiated."""
    of_scale, product = None, grad * drawn
    if scale is not None:
        # Differentiable in the scores too: there are mixed second derivatives of scores and scale.
        unscaled = traced_product(rule, layout, codes, drawn, None, scores)
        of_scale = (grad * unscaled).sum_to_size(scale.shape)
        product = product * scale
    found = []
    for part, one in zip(layout.parts(product), scores, strict=True):
        slope = rule.surrogate_grad(one)
        found.append(part.to(one.dtype) if slope is None else part.to(one.dtype) * slope)
    return of_scale, *found


def _gradients_in_pieces(rule: Rule, layout: Layout, codes, grad: Tensor, drawn, scale, scores) -> tuple:
    """Return the same as `_gradients`, without temporaries of full size."""
    of_scale = None if scale is None else torch.zeros_like(scale)
    of_scores = [torch.empty_like(one) for one in scores]
    for number, rows, place in layout.pieces(drawn):
        out = torch.mul(grad[place], drawn[place], out=of_scores[number][rows])
        if of_scale is not None:
            total = out * factors_of_codes(codes[number][rows], rule.factors, out.dtype)
            here = _within(of_scale, place)
            here += total.sum_to_size(here.shape)
            out.mul_(_within(scale, place))
        if (slope := rule.surrogate_grad(scores[number][rows])) is not None:
            out.mul_(slope)
    return of_scale, *of_scores


def _within(scale: Tensor, place: tuple[slice, ...]) -> Tensor:
    """Return the part of the scale that belongs to a piece. Axes of size 1 are the same for every piece."""
    return scale[
        tuple(at if extent > 1 else slice(None) for at, extent in zip(place, scale.shape, strict=False))
    ]


class RoundedWeight(torch.autograd.Function):
    """Rounds rows to what 16, 8 or 4 bits can hold (see `quantisation.py`). The gradient passes unchanged."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, bits: int) -> Tensor:
        if bits == 16:
            return weight.to(torch.float16).to(weight.dtype)
        largest = weight.abs().amax(-1, keepdim=True).float()
        steps = (largest / largest_code(bits)).view(torch.int32)
        scales = ((steps + 0x1FFF) & ~0x1FFF).view(torch.float32).clamp_min(2**-14)
        return ((weight / scales).round() * scales + 0.0).to(weight.dtype)  # + 0.0 turns -0.0 into 0.0

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def rounded(values: Tensor, bits: int) -> Tensor:
    """Return trained values as the ticket will hold them, in 4, 8, 16 or 32 bits.

    Args:
        values (`Tensor`):
            Trained values in float32.
        bits (`int`):
            Bits per value in the ticket.

    Returns:
        `Tensor`: the rounded values. The gradient passes unchanged.
    """
    return values if bits == 32 else RoundedWeight.apply(values, bits)
