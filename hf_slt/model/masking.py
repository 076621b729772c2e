"""From scores to masks: which weights are kept, and what the scores learn from it.

A rule ranks the scores of one tensor and keeps the `count` highest. Edge-popup (Ramanujan et al.,
2020) ranks by magnitude:

    mask = 1 where |score| is among the count largest, else 0      # ties: the lower index stays
    y    = (weight * mask) x
    dL/dscore := dL/dmask * sign(score) = dL/d(weight * mask) * weight * sign(score)

The step function has no gradient, so its derivative is taken as 1 (straight through); abs() keeps
its own, the sign.

Selection is exact whatever happened to the scores. A `Selector` remembers its last mask and threshold,
but only as a guess: the mask is given again when one pass over the scores proves it right, and the
threshold says where to look for the next. Nothing can therefore be stale, however the scores were changed.

All is done in pieces that stay in a core's cache: one read of the scores and one write of the mask is all
the traffic to memory. Temporaries of full size would cost more than the arithmetic.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Rule:
    """How scores become a mask: keep the largest `rank(scores)`; `slope` is rank's derivative."""

    rank: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


RULES = {"edge_popup": Rule(rank=torch.abs, slope=torch.sign)}

_SAMPLE = 1 << 14  # below this size, sorting all is quicker than bracketing the threshold by a sample
_CHUNK = 1 << 19  # values at a time on a CPU: two megabytes
_MOST = 1 << 24  # values at a time elsewhere; float32 counts no further


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


def as_they_are(values: Tensor) -> Tensor:
    return values


class Selector:
    """Exact selection that starts from the last: one pass if the mask stands, one more if it moved a little.

    A mask is all values above its threshold and, of those equal to it, the ones before `cut`.
    """

    def __init__(self) -> None:
        self.mask = torch.empty(0, dtype=torch.bool)
        self.count = 0  # how many it keeps
        self.threshold = torch.tensor(torch.nan)
        self.cut = 0
        self.reach = torch.tensor(torch.nan)  # how far from it the next threshold is looked for

    def select(self, values: Tensor, count: int, rank: Callable[[Tensor], Tensor] = as_they_are) -> Tensor:
        """Boolean mask, shaped as `values`, of exactly the `count` largest by `rank`, which is elementwise.

        The same tensor as the last time if it still holds; not to be written to.
        """
        if not 0 < count <= values.numel():
            raise ValueError(f"cannot keep {count} of {values.numel()} values")
        # Contiguous on purpose: the order of ties is row-major whatever the strides.
        flat = values.detach().contiguous().view(-1)
        known = self.mask.shape == values.shape and self.mask.device == flat.device
        if not (known and self.count == count and self._stands(flat, rank)):
            self._search(flat, count, rank, known)
            self.mask, self.count = self.mask.view(values.shape), count
        return self.mask

    def _stands(self, flat: Tensor, rank: Callable) -> bool:
        """Whether the last mask is the one of these values too."""
        start = 0
        for chunk, was in zip(_chunks(flat), _chunks(self.mask.view(-1)), strict=True):
            ranked = rank(chunk)
            keeps = torch.empty_like(ranked, dtype=torch.float32)
            ties = min(max(0, self.cut - start), len(chunk))  # up to there equals are kept
            torch.ge(ranked[:ties], self.threshold, out=keeps[:ties])
            torch.gt(ranked[ties:], self.threshold, out=keeps[ties:])
            if not torch.equal(_eights(keeps.bool()), _eights(was)):
                return False
            start += len(chunk)
        return True

    def _search(self, flat: Tensor, count: int, rank: Callable, known: bool) -> None:
        """Find the mask anew: around the last threshold, where a sample says, or among all values."""
        if known and bool(torch.isfinite(self.reach)):
            last = self.threshold
            if self._search_between(flat, count, rank, last - self.reach, last + self.reach):
                self.reach = torch.maximum(4 * (self.threshold - last).abs(), self.reach / 2)
                return
        for low, high in _brackets(flat, count, rank):
            if self._search_between(flat, count, rank, low, high):
                self.reach = (high - low) / 4
                return

    def _search_between(self, flat: Tensor, count: int, rank: Callable, low: Tensor, high: Tensor) -> bool:
        """Count what lies above the bracket, collect what lies inside, and choose among that only."""
        mask = torch.empty(flat.shape, dtype=torch.bool, device=flat.device)
        # Tests give floats, 1 or 0, in memory that is used again: torch is several times slower at booleans.
        room = torch.empty(2, min(len(flat), piece_size(flat)), device=flat.device)
        start, above, total = 0, 0, 0.0
        places, inside = [], []
        for chunk, kept in zip(_chunks(flat), _chunks(mask), strict=True):
            ranked = rank(chunk)
            over, under = room[:, : len(chunk)]
            kept.copy_(torch.gt(ranked, high, out=over))
            near = _places(_eights(torch.ge(ranked, low, out=under).bool()) ^ _eights(kept))
            places.append(near + start)
            inside.append(ranked[near])
            above += int(over.sum())
            total += float(ranked.sum())
            start += len(chunk)
        if not math.isfinite(total):  # one bad score is enough
            raise ValueError(
                "scores are not finite, so they cannot be ranked: the loss diverged or a checkpoint is "
                "damaged; lower the learning rate or clip gradients"
            )
        place, near, wanted = torch.cat(places), torch.cat(inside), count - above
        if not 0 < wanted <= len(near):
            return False
        threshold = near.topk(wanted, sorted=False).values.amin()
        mask[place[near > threshold]] = True
        ties = place[near == threshold]
        missing = wanted - int((near > threshold).sum())
        mask[ties[:missing]] = True
        self.mask, self.threshold = mask, threshold
        self.cut = int(ties[missing - 1]) + 1
        return True


def _brackets(flat: Tensor, count: int, rank: Callable) -> Iterator[tuple[Tensor, Tensor]]:
    """Where a sample says the threshold is (Floyd and Rivest); then everywhere, if it was not typical."""
    size, endless = flat.numel(), torch.tensor(torch.inf, device=flat.device)
    if size > _SAMPLE:
        sample = rank(flat[:: sample_stride(size)])
        place = count * len(sample) / size
        deviation = max(1.0, (place * (1 - place / len(sample))) ** 0.5)  # if it were random
        for width in (2.5, 10):
            above, below = int(place - width * deviation), int(place + width * deviation) + 1
            # The largest but so many: by quickselect, which is quicker than to sort even a sample.
            high = sample.kthvalue(len(sample) - above).values if above >= 0 else endless
            low = sample.kthvalue(len(sample) - below).values if below < len(sample) else -endless
            yield low, high
    yield -endless, endless


def sample_stride(size: int) -> int:
    """One value in so many is looked at: then sample and bracket grow alike, as size ** (2/3)."""
    return round(size ** (1 / 3))


def piece_size(tensor: Tensor) -> int:
    """How many values to work on at a time."""
    return _CHUNK if tensor.device.type == "cpu" else _MOST


def _chunks(flat: Tensor) -> tuple[Tensor, ...]:
    return flat.split(piece_size(flat))


def _eights(flags: Tensor) -> Tensor:
    """Booleans eight at a time, where that goes: torch takes as long for each as for a number."""
    return flags.view(torch.int64 if len(flags) % 8 == 0 else torch.int8)


def _places(eights: Tensor) -> Tensor:
    """Where the few booleans are that are true."""
    rows, width = eights.nonzero().view(-1), eights.element_size()
    places = eights[rows].view(torch.bool).nonzero().view(-1)
    return rows[places // width] * width + places % width


def apply_mask(weight: Tensor, masks: list[Tensor], out: Tensor | None = None) -> Tensor:
    """weight * mask, in a new tensor or in `out`; the masks lie side by side in its columns."""
    masked = torch.empty_like(weight) if out is None else out
    widths, rows = [mask.shape[-1] for mask in masks], max(1, _CHUNK // weight.shape[-1])
    for whole, factor, mask in zip(masked.split(widths, -1), weight.split(widths, -1), masks, strict=True):
        for some, those, kept in zip(whole.split(rows), factor.split(rows), mask.split(rows), strict=True):
            torch.mul(those, kept.view(torch.int8).to(those.dtype), out=some)
    return masked


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
    """The same in eager mode: a backward that saves memory, and a forward derivative.

    torch.compile refuses to trace either.
    """

    @staticmethod
    def backward(ctx, grad: Tensor):
        if torch.is_grad_enabled():  # it will be differentiated again, or torch.func is at work
            return TracedMaskedWeight.backward(ctx, grad)
        weight, *scores = ctx.saved_tensors
        widths = [part.shape[-1] for part in scores]
        parts = zip(grad.split(widths, -1), weight.split(widths, -1), scores, strict=True)
        return None, None, None, *(_times_slope((g * w).to(s.dtype), s, ctx.slope) for g, w, s in parts)

    @staticmethod
    def jvp(ctx, _masked, _weight, _rule, *tangents):
        weight, *scores = ctx.saved_tensors
        moved = [ctx.slope(s) * (0 if t is None else t) for t, s in zip(tangents, scores, strict=True)]
        return weight * torch.cat(moved, -1).to(weight.dtype)


def _times_slope(gradient: Tensor, scores: Tensor, slope: Callable) -> Tensor:
    """gradient * slope(scores), in place and in pieces: no slope of full size."""
    rows = max(1, _CHUNK // scores.shape[-1])
    for some, those in zip(gradient.split(rows, -2), scores.split(rows), strict=True):
        some.mul_(slope(those))
    return gradient


class MaskedLogits(torch.autograd.Function):
    """Hidden states times a masked table, transposed: `F.linear` by MaskedWeight, with the same gradient.

    But the gradient of the table, as large as a vocabulary, is turned into that of its scores in place.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(hidden: Tensor, masked: Tensor, weight: Tensor, rule: str, scores: Tensor) -> Tensor:
        return F.linear(hidden, masked)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        hidden, masked, weight, rule, scores = inputs
        ctx.rule, ctx.slope = rule, RULES[rule].slope
        ctx.save_for_backward(hidden, masked, weight, scores)
        ctx.save_for_forward(hidden, masked, weight, scores)

    @staticmethod
    def backward(ctx, grad: Tensor):
        hidden, masked, weight, scores = ctx.saved_tensors
        again = torch.is_grad_enabled()  # as above
        before = result = None
        if ctx.needs_input_grad[0]:
            before = grad @ (MaskedWeight.apply(masked, weight, ctx.rule, scores) if again else masked)
        if ctx.needs_input_grad[4]:
            table = grad.reshape(-1, len(weight)).T @ hidden.reshape(-1, weight.shape[1])
            if again:
                result = (table * weight).to(scores.dtype) * ctx.slope(scores)
            else:
                result = _times_slope(table.mul_(weight).to(scores.dtype), scores, ctx.slope)
        return before, None, None, None, result

    @staticmethod
    def jvp(ctx, hidden_moves, _masked, _weight, _rule, scores_move):
        hidden, masked, weight, scores = ctx.saved_tensors
        moved = F.linear(hidden, weight * (ctx.slope(scores) * (0 if scores_move is None else scores_move)))
        return moved if hidden_moves is None else moved + F.linear(hidden_moves, masked)


class MaskedRows(torch.autograd.Function):
    """Rows of a masked table by their numbers: `F.embedding` of MaskedWeight, with the same gradient.

    But only the rows that were looked up have one, so only these are multiplied in the backward.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(ids: Tensor, masked: Tensor, weight: Tensor, rule: str, scores: Tensor) -> Tensor:
        return F.embedding(ids, masked)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ids, _, weight, rule, scores = inputs
        ctx.slope = RULES[rule].slope
        ctx.save_for_backward(ids, weight, scores)
        ctx.save_for_forward(ids, weight, scores)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ids, weight, scores = ctx.saved_tensors
        table = torch.ops.aten.embedding_dense_backward(grad, ids, len(weight), -1, False)
        if torch.is_grad_enabled():  # as above
            return None, None, None, None, (table * weight).to(scores.dtype) * ctx.slope(scores)
        result = table.to(scores.dtype)
        # A row that was looked up twice is written twice, the same.
        result[ids] = (table[ids] * weight[ids]).to(scores.dtype) * ctx.slope(scores[ids])
        return None, None, None, None, result

    @staticmethod
    def jvp(ctx, _ids, _masked, _weight, _rule, tangent):
        ids, weight, scores = ctx.saved_tensors
        return weight[ids] * (ctx.slope(scores[ids]) * tangent[ids]).to(weight.dtype)
