"""From scores to masks: which weights are kept, and what the scores learn from it.

A rule ranks the scores of one tensor and keeps the `count` highest. Edge-popup (Ramanujan et al.,
2020) ranks by magnitude:

    mask = 1 where |score| is among the count largest, else 0      # ties: the lower index stays
    y    = (weight * mask) x
    dL/dscore := dL/dmask * sign(score) = dL/d(weight * mask) * weight * sign(score)

The step function has no gradient, so its derivative is taken as 1 (straight through); abs() keeps
its own, the sign.

Selection is exact whatever happened to the scores. A `Selector` remembers the last threshold, but
only as a guess: it is used when exactly `count` values pass it, which proves it right. Nothing can
therefore be stale, however the scores were changed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """How scores become a mask: keep the largest `rank(scores)`; `slope` is rank's derivative."""

    rank: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


RULES = {"edge_popup": Rule(rank=torch.abs, slope=torch.sign)}

_SAMPLE = 1 << 14  # values looked at to bracket the threshold; below this size, sorting is quicker


def kept_count(density: float, size: int) -> int:
    """How many of `size` weights a density keeps: the nearest integer, at least one.

    >>> kept_count(1 - 0.9, 10)
    1
    """
    return max(1, min(size, round(density * size)))


def keep_largest(values: Tensor, count: int) -> Tensor:
    """Boolean mask of the `count` largest values; ties go to the lower (row-major) index.

    >>> keep_largest(torch.tensor([3., 1., 2., 2.]), 2).tolist()
    [True, False, True, False]
    """
    return Selector().select(values, count)


class Selector:
    """Exact selection that starts from the last threshold: one pass when nothing moved.

    The mask is {v > threshold} plus, where values equal the threshold, the first of them.
    """

    def __init__(self) -> None:
        self.threshold: Tensor | None = None
        self.last_tie = -1  # flat index of the last value kept among those equal to the threshold

    def select(self, values: Tensor, count: int) -> Tensor:
        """Boolean mask, shaped as `values`, of exactly the `count` largest."""
        if not 0 < count <= values.numel():
            raise ValueError(f"cannot keep {count} of {values.numel()} values")
        # Contiguous on purpose: the order of ties is row-major whatever the strides.
        flat = values.detach().contiguous().view(-1)
        mask = self._above(flat)
        if mask is None or int(mask.sum()) != count:
            if not bool(torch.isfinite(flat.sum())):  # one bad score is enough
                raise ValueError(
                    "scores are not finite, so they cannot be ranked: the loss diverged or a checkpoint is "
                    "damaged; lower the learning rate or clip gradients"
                )
            self.threshold = _kth_largest(flat, count)
            self.last_tie = -1
            mask = flat > self.threshold
            missing = count - int(mask.sum())
            ties = (flat == self.threshold).nonzero().view(-1)
            if missing < len(ties):
                self.last_tie = int(ties[missing - 1])
                ties = ties[:missing]
            mask[ties] = True
        return mask.view(values.shape)

    def _above(self, flat: Tensor) -> Tensor | None:
        """The mask of the remembered threshold, or None without one that fits."""
        if self.threshold is None or self.threshold.device != flat.device:
            return None
        if self.last_tie < 0:
            return flat >= self.threshold
        mask = flat > self.threshold
        ties = (flat == self.threshold).nonzero().view(-1)
        mask[ties[ties <= self.last_tie]] = True
        return mask


def _kth_largest(flat: Tensor, count: int) -> Tensor:
    """The count-th largest value, by Floyd and Rivest's idea: bracket it from a sample.

    One pass counts what lies above the bracket, one collects what lies inside; only that is sorted.
    Works alike on CPU and CUDA, where `kthvalue` is slow and a full sort hungry.
    """
    size = flat.numel()
    if size <= _SAMPLE:
        return _sorted_kth(flat, count)
    sample = flat[:: size // _SAMPLE].sort(descending=True).values
    place = count * len(sample) / size
    slack = 4 * max(
        1.0, (place * (1 - place / len(sample))) ** 0.5
    )  # 4 standard deviations, if it were random
    above, below = int(place - slack), int(place + slack) + 1
    high = sample[above] if above >= 0 else None
    low = sample[below] if below < len(sample) else None
    inside = torch.ones_like(flat, dtype=torch.bool) if low is None else flat >= low
    beyond = 0
    if high is not None:
        over = flat > high
        beyond = int(over.sum())
        inside &= ~over
    candidates = flat[inside]
    if not beyond < count <= beyond + len(candidates):
        return _sorted_kth(flat, count)  # the sample was not typical
    return _sorted_kth(candidates, count - beyond)


def _sorted_kth(flat: Tensor, count: int) -> Tensor:
    return flat.sort(descending=True).values[count - 1]


@torch.library.custom_op("hf_slt::keep_largest", mutates_args=())
def _keep_largest_op(values: Tensor, count: int) -> Tensor:
    return keep_largest(values, count)


@_keep_largest_op.register_fake
def _(values: Tensor, count: int) -> Tensor:
    return torch.empty_like(values, dtype=torch.bool, memory_format=torch.contiguous_format)


@torch.library.register_vmap("hf_slt::keep_largest")
def _(info, in_dims, values: Tensor, count: int):
    return torch.stack([keep_largest(one, count) for one in values.unbind(in_dims[0])]), 0


def traced_mask(values: Tensor, count: int) -> Tensor:
    """`keep_largest` as one opaque operator, for torch.compile, torch.export and torch.func."""
    return _keep_largest_op(values.detach(), count)


class TracedMaskedWeight(torch.autograd.Function):
    """Passes the masked weight through, and its gradient to the scores.

    `masked` is weight * mask, computed by the caller; the scores of several parts that lie side by
    side in the columns of one weight (query, key, value) come in order.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(masked: Tensor, weight: Tensor, rule: str, *scores: Tensor) -> Tensor:
        return masked.view_as(masked)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, weight, rule, *scores = inputs
        ctx.slope = RULES[rule].slope
        ctx.save_for_backward(weight, *scores)
        ctx.save_for_forward(weight, *scores)

    @staticmethod
    def backward(ctx, grad: Tensor):
        weight, *scores = ctx.saved_tensors
        widths = [part.shape[-1] for part in scores]
        parts = zip(grad.split(widths, -1), weight.split(widths, -1), scores, strict=True)
        return None, None, None, *((g * w).to(s.dtype) * ctx.slope(s) for g, w, s in parts)


class MaskedWeight(TracedMaskedWeight):
    """The same with a forward derivative, which torch.compile refuses to trace."""

    @staticmethod
    def jvp(ctx, _masked, _weight, _rule, *tangents):
        weight, *scores = ctx.saved_tensors
        moved = [ctx.slope(s) * (0 if t is None else t) for t, s in zip(tangents, scores, strict=True)]
        return weight * torch.cat(moved, -1).to(weight.dtype)
