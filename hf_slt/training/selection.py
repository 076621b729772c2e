"""From scores to a mask: which weights are kept.

A rule ranks the scores of one tensor and keeps the `count` highest. Edge-popup (Ramanujan et al.,
2020) ranks by magnitude:

    mask = 1 where |score| is among the count largest, else 0      # ties: the lower index stays

Selection is exact, and remembers nothing: it cannot be out of date, however the scores were changed.

On a CPU the threshold is bracketed by a sample, in pieces that stay in a core's cache: one read of the scores
and one write of the mask is nearly all the traffic to memory, where temporaries of full size would cost more
than the arithmetic. On other devices it is found bit by bit, and no operator waits for the device.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """How scores become a mask: keep the largest `rank(scores)`; `slope` is rank's derivative."""

    rank: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


RULES = {"edge_popup": Rule(rank=torch.abs, slope=torch.sign)}

_PIECE = 1 << 19  # values at a time on a CPU: two megabytes
_SAMPLE = 1 << 14  # below this size, choosing among all is quicker than bracketing the threshold by a sample


def kept_count(density: float, size: int) -> int:
    """How many of `size` weights a density keeps: the nearest integer, at least one.

    >>> kept_count(1 - 0.9, 10)
    1
    """
    return max(1, min(size, round(density * size)))


def piece_size(tensor: Tensor) -> int:
    """Values to work on at a time: as many as stay in a core's cache, or keep another device busy."""
    return _PIECE if tensor.device.type == "cpu" else 1 << 24


def as_they_are(values: Tensor) -> Tensor:
    return values


def keep_largest(values: Tensor, count: int, rank: Callable[[Tensor], Tensor] = as_they_are) -> Tensor:
    """Boolean mask of the `count` largest values by `rank`; ties go to the lower (row-major) index.

    >>> keep_largest(torch.tensor([3., 1., 2., 2.]), 2).tolist()
    [True, False, True, False]
    """
    if not 0 < count <= values.numel():
        raise ValueError(f"cannot keep {count} of {values.numel()} values")
    # Contiguous on purpose: the order of ties is row-major whatever the strides.
    flat = values.detach().contiguous().view(-1)
    search = keep_by_sample if flat.device.type == "cpu" else keep_by_bits
    return search(flat, count, rank).view(values.shape)


# -- on a CPU ------------------------------------------------------------------------------------------


def keep_by_sample(flat: Tensor, count: int, rank: Callable[[Tensor], Tensor] = as_they_are) -> Tensor:
    """Count what lies above a bracket of the threshold, collect what lies inside, choose among that only."""
    for low, high in _brackets(flat, count, rank):
        mask = _keep_between(flat, count, rank, low, high)
        if mask is not None:
            return mask
    raise AssertionError("the last bracket holds everything")


def _brackets(flat: Tensor, count: int, rank: Callable) -> Iterator[tuple[float, float]]:
    """Where a sample says the threshold is (Floyd and Rivest); then everywhere, if it was not typical."""
    size = flat.numel()
    if size > _SAMPLE:
        # One value in so many: sample and bracket then grow alike, as size ** (2/3).
        sample = rank(flat[:: round(size ** (1 / 3))])
        place = count * len(sample) / size
        deviation = max(1.0, (place * (1 - place / len(sample))) ** 0.5)  # if it were random
        for width in (2.5, 10):
            above, below = int(place - width * deviation), int(place + width * deviation) + 1
            # The largest but so many: by quickselect, which is quicker than to sort even a sample.
            high = sample.kthvalue(len(sample) - above).values.item() if above >= 0 else math.inf
            low = sample.kthvalue(len(sample) - below).values.item() if below < len(sample) else -math.inf
            yield low, high
    yield -math.inf, math.inf


def _keep_between(flat: Tensor, count: int, rank: Callable, low: float, high: float) -> Tensor | None:
    """The mask, if the threshold lies in low .. high. By NumPy, which is quicker with booleans than torch."""
    mask, near = np.empty(len(flat), bool), np.empty(min(len(flat), _PIECE), bool)
    start, above, total = 0, 0, 0.0
    places, inside = [], []
    for chunk in flat.split(_PIECE):
        ranked = rank(chunk)
        total += float(ranked.sum())
        values, kept, close = ranked.numpy(), mask[start : start + len(chunk)], near[: len(chunk)]
        np.greater(values, high, out=kept)
        np.greater_equal(values, low, out=close)
        close ^= kept
        found = np.flatnonzero(close)
        places.append(found + start)
        inside.append(values[found])
        above += np.count_nonzero(kept)
        start += len(chunk)
    if not math.isfinite(total):  # one bad score is enough
        raise ValueError(
            "scores are not finite, so they cannot be ranked: the loss diverged or a checkpoint is "
            "damaged; lower the learning rate or clip gradients"
        )
    place, value, wanted = np.concatenate(places), np.concatenate(inside), count - above
    if not 0 < wanted <= len(value):
        return None
    threshold = np.partition(value, -wanted)[-wanted]
    mask[place[value > threshold]] = True
    missing = wanted - np.count_nonzero(value > threshold)
    mask[place[value == threshold][:missing]] = True
    return torch.from_numpy(mask)


# -- on any device, without waiting for it -------------------------------------------------------------


def keep_by_bits(flat: Tensor, count: int, rank: Callable[[Tensor], Tensor] = as_they_are) -> Tensor:
    """The same mask of float32 values, by operators that a device can queue: the host reads nothing back.

    Floats are ordered as integers by their bits. The threshold, the largest integer that `count` values
    reach, is built from the highest bit down. Scores that are not finite are not noticed here: the norm of
    their gradient is not finite either.
    """
    bits = (rank(flat).float() + 0.0).view(torch.int32)  # + 0.0: no minus zero, which is a zero
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative numbers the other way round
    threshold = torch.full((), -(2**31), dtype=torch.int64, device=flat.device)
    for bit in range(31, -1, -1):
        higher = threshold + 2**bit
        threshold = torch.where((keys >= higher).sum() >= count, higher, threshold)
    above, ties = keys > threshold, keys == threshold
    return above | (ties & (ties.cumsum(0) <= count - above.sum()))


# -- as one operator, where Python is traced -----------------------------------------------------------


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
