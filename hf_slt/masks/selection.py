"""Which scores are the largest: the selections that mask rules use.

    keep_largest      the `count` largest, or largest in magnitude; of equal scores the lower index is kept
    keep_in_groups    the n largest in magnitude of every m
    keep_by_chance    with probability sigmoid(score), the same for the same scores

Selection is exact and stores nothing between calls: it is never out of date, however the scores were changed.

On a CPU a sample gives lower and upper bounds of the threshold, and the scores are compared with them in pieces that
stay in a core's cache. Memory is used for little more than one read of the scores and one write of the mask;
temporaries of full size would cost more than the arithmetic. On other devices two histograms find the threshold, by
kernels of Triton (`digit_kernels.py`) or by operators of torch, and the host waits for neither.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PIECE = 1 << 19  # values at a time on a CPU: two megabytes
_DIGITS = 1 << 16  # bins of a histogram: one for each value of 16 bits, half of a float32
_SAMPLE = 1 << 14  # below this size, ranking all values is faster than taking a sample first


def kept_count(density: float, size: int) -> int:
    """Return how many of `size` weights a density keeps: the nearest integer, at least one.

    Args:
        density (`float`):
            Fraction kept.
        size (`int`):
            Number of weights.

    Returns:
        `int`: number of weights kept.

    Example:

    >>> kept_count(1 - 0.9, 10)
    1
    """
    return max(1, min(size, round(density * size)))


def piece_size(tensor: Tensor) -> int:
    """Return how many values to work on at a time: enough for a core's cache, or to keep another device busy.

    Args:
        tensor (`Tensor`):
            Any tensor on the device.

    Returns:
        `int`: number of values.
    """
    return _PIECE if tensor.device.type == "cpu" else 1 << 24


def keep_largest(values: Tensor, count: int, magnitude: bool = False) -> Tensor:
    """Return the boolean mask of the `count` largest values. Ties go to the lower (row-major) index.

    Args:
        values (`Tensor`):
            Scores of one tensor.
        count (`int`):
            How many to keep.
        magnitude (`bool`, defaults to `False`):
            Whether values are compared by magnitude.

    Returns:
        `Tensor`: the mask, in the shape of the values.

    Raises:
        `ValueError`: if there are fewer than `count` values, or if a value is not finite.

    Example:

    >>> keep_largest(torch.tensor([3., 1., 2., 2.]), 2).tolist()
    [True, False, True, False]
    """
    return keep_largest_of_all([values], count, magnitude)[0]


def keep_largest_of_all(values: Sequence[Tensor], count: int, magnitude: bool = False) -> list[Tensor]:
    """Do the same as `keep_largest` for several tensors, ranked together as if they were one long tensor.

    Args:
        values (`Sequence[Tensor]`):
            Scores of each tensor.
        count (`int`):
            How many to keep of all together.
        magnitude (`bool`, defaults to `False`):
            Whether values are compared by magnitude.

    Returns:
        `list[Tensor]`: a mask for each tensor.

    Raises:
        `ValueError`: if there are fewer than `count` values.
    """
    if not 0 < count <= sum(one.numel() for one in values):
        raise ValueError(f"cannot keep {count} of {sum(one.numel() for one in values)} values")
    mask = _keep_largest_op([one.detach() for one in values], count, magnitude)
    parts = mask.split([one.numel() for one in values])
    return [part.view(one.shape) for part, one in zip(parts, values, strict=True)]


# A single operator, which torch.compile, torch.export and torch.func do not look into.
@torch.library.custom_op("hf_slt::keep_largest", mutates_args=())
def _keep_largest_op(values: list[Tensor], count: int, magnitude: bool) -> Tensor:
    # Contiguous on purpose: the order of ties is row-major whatever the strides.
    flats = [one.contiguous().view(-1) for one in values]
    if flats[0].device.type == "cpu":
        return keep_by_sample(flats, count, magnitude)
    if _has_triton(flats[0].device.type):
        from .digit_kernels import keep_by_kernels  # importing Triton takes time, and only here it is needed

        return keep_by_kernels(flats, count, magnitude)
    return keep_by_digits(flats, count, magnitude)


@cache
def _has_triton(device_type: str) -> bool:
    """Return whether Triton is installed and compiles for such a device."""
    return device_type in ("cuda", "xpu") and find_spec("triton") is not None


@_keep_largest_op.register_fake
def _(values: list[Tensor], count: int, magnitude: bool) -> Tensor:
    return values[0].new_empty(sum(one.numel() for one in values), dtype=torch.bool)


@torch.library.register_vmap("hf_slt::keep_largest")
def _(info, in_dims, values: list[Tensor], count: int, magnitude: bool):
    dims = in_dims[0]
    masks = [
        _keep_largest_op(
            [one if at is None else one.select(at, place) for one, at in zip(values, dims, strict=True)],
            count,
            magnitude,
        )
        for place in range(info.batch_size)
    ]
    return torch.stack(masks), 0


# -- on a CPU ------------------------------------------------------------------------------------------


def keep_by_sample(flats: Sequence[Tensor], count: int, magnitude: bool = False) -> Tensor:
    """Count the values above a bracket of the threshold, collect those inside it, and rank only these.

    Args:
        flats (`Sequence[Tensor]`):
            Scores of each tensor, as rows.
        count (`int`):
            How many to keep of all together.
        magnitude (`bool`, defaults to `False`):
            Whether values are compared by magnitude.

    Returns:
        `Tensor`: one mask for all, as a row.
    """
    # Not `numpy()`: after that, FSDP could not free the storage of a parameter any more.
    arrays = [np.from_dlpack(flat.detach()) for flat in flats]
    for low, high in _brackets(arrays, count, magnitude):
        mask = _keep_between(arrays, count, magnitude, low, high)
        if mask is not None:
            return torch.from_numpy(mask)
    raise AssertionError("the last bracket holds everything")


def _brackets(flats: Sequence[np.ndarray], count: int, magnitude: bool) -> Iterator[tuple[float, float]]:
    """Yield bounds of the threshold from a sample (Floyd and Rivest), then wider ones, for untypical samples."""
    size = sum(map(len, flats))
    if size > _SAMPLE:
        # With this step between sampled values, sample and bracket both grow as size ** (2/3).
        sample = np.concatenate([flat[:: round(size ** (1 / 3))] for flat in flats])
        sample = np.abs(sample, out=sample) if magnitude else sample
        place = count * len(sample) / size
        deviation = max(1.0, (place * (1 - place / len(sample))) ** 0.5)  # as of a random sample
        for width in (2.5, 10):
            above, below = int(place - width * deviation), int(place + width * deviation) + 1
            high = float(_largest(sample, above + 1)) if above >= 0 else math.inf
            low = float(_largest(sample, below + 1)) if below < len(sample) else -math.inf
            yield low, high
    yield -math.inf, math.inf


def _largest(values: np.ndarray, rank: int) -> Any:
    """Return the value of this rank, 1 for the largest. The order of the values changes."""
    values.partition(len(values) - rank)
    return values[len(values) - rank]


def _keep_between(
    flats: Sequence[np.ndarray], count: int, magnitude: bool, low: float, high: float
) -> np.ndarray | None:
    """Return the mask if the threshold lies in low .. high.

    Each piece is one task of a thread. An operator of torch would divide every piece among all threads and wait for
    the slowest of them, which takes long if another process uses a core.
    """
    mask = np.empty(sum(map(len, flats)), bool)
    pieces = [flat[at : at + _PIECE] for flat in flats for at in range(0, len(flat), _PIECE)]
    starts = np.cumsum([0, *map(len, pieces)]).tolist()
    numbers = iter(range(len(pieces)))  # shared by the threads: each takes the next piece when it is free

    def rank() -> list[tuple[int, np.ndarray, np.ndarray, int, bool]]:
        """Mark the values above the bracket, piece by piece. Return places and values of those inside."""
        longest = max(map(len, pieces))
        # The same memory for all pieces: new memory costs more than the arithmetic.
        magnitudes, closes = np.empty(longest if magnitude else 0, flats[0].dtype), np.empty(longest, bool)
        done = []
        for number in numbers:
            values, start = pieces[number], starts[number]
            if magnitude:
                values = np.abs(values, out=magnitudes[: len(values)])
            kept, close = mask[start : start + len(values)], closes[: len(values)]
            np.greater(values, high, out=kept)
            np.greater_equal(values, low, out=close)
            close ^= kept
            places = np.flatnonzero(close)
            # The largest of several numbers is NaN if one of them is.
            finite = math.isfinite(values.max()) and (magnitude or math.isfinite(values.min()))
            done.append((start, places + start, values[places], int(np.count_nonzero(kept)), finite))
        return done

    threads = min(torch.get_num_threads(), len(pieces))
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:  # NumPy releases the interpreter lock
            parts = [part for task in [pool.submit(rank) for _ in range(threads)] for part in task.result()]
    else:
        parts = rank()
    parts.sort(key=lambda part: part[0])  # of equal values the first are kept
    _, places, inside, above, finite = zip(*parts, strict=True)
    if not all(finite):  # one bad score is enough
        raise ValueError(
            "scores are not finite, so they cannot be ranked: the loss diverged or a checkpoint is "
            "damaged; lower the learning rate or clip gradients"
        )
    place, value, wanted = np.concatenate(places), np.concatenate(inside), count - sum(above)
    if not 0 < wanted <= len(value):
        return None
    threshold = _largest(value.copy(), wanted)
    mask[place] = larger = value > threshold
    missing = wanted - np.count_nonzero(larger)
    mask[place[value == threshold][:missing]] = True
    return mask


# -- on any device, without waiting for it -------------------------------------------------------------


def keep_by_digits(flats: Sequence[Tensor], count: int, magnitude: bool = False) -> Tensor:
    """Return the mask of `keep_by_sample` for float32 values, by operators that a device can queue.

    The host reads nothing back. Where Triton runs, `keep_by_kernels` does the same with half as many launches.

    The bits of floats, read as integers, have the order of the floats. There are three passes over the values: a
    histogram of the upper 16 bits finds the upper bits of the threshold, a histogram of the lower 16 bits of values
    with these upper bits finds the threshold itself, and the last pass writes the mask. Values that are not finite
    are not noticed here: the norm of their gradient is not finite either. The integers of a single tensor are kept;
    those of several tensors, which may be all scores of a model, are computed again in every pass.

    Args:
        flats (`Sequence[Tensor]`):
            Scores of each tensor, as rows.
        count (`int`):
            How many to keep of all together.
        magnitude (`bool`, defaults to `False`):
            Whether values are compared by magnitude.

    Returns:
        `Tensor`: one mask for all, as a row.
    """
    pieces = [piece for flat in flats for piece in flat.split(piece_size(flat)) if len(piece)]
    kept = [_ordered_bits(piece, magnitude) for piece in pieces] if len(flats) == 1 else None

    def keys() -> Iterable[Tensor]:
        return kept or (_ordered_bits(piece, magnitude) for piece in pieces)

    def lower_digits() -> Iterator[Tensor]:
        """Yield 1 + the lower bits of values with the upper bits found; 0 for smaller, _DIGITS + 1 for larger ones."""
        for some in keys():
            yield some.add_(start).clamp_(0, _DIGITS + 1)

    dropped = sum(map(len, flats)) - count
    one = torch.ones((), dtype=torch.int64, device=flats[0].device)
    histograms = torch.zeros(2, _DIGITS + 2, dtype=torch.int64, device=flats[0].device)
    for some in keys():
        histograms[0].index_add_(0, some >> 16, one.expand(len(some)))
    upper = torch.searchsorted(histograms[0].cumsum(0), dropped, right=True)
    start = torch.sub(one, upper, alpha=_DIGITS)  # plus this, keys with these upper bits are 1 to _DIGITS
    for digits in lower_digits():
        histograms[1].index_add_(0, digits, one.expand(len(digits)))
    at_most = histograms[1].cumsum(0)
    lower = torch.searchsorted(at_most, dropped, right=True)
    wanted: Any = at_most.take(lower) - dropped  # number of ties to keep
    mask = torch.empty(sum(map(len, flats)), dtype=torch.bool, device=flats[0].device)
    parts = mask.split([len(piece) for piece in pieces])
    for digits, part in zip(kept or lower_digits(), parts, strict=True):
        tie_ranks = (digits == lower).cumsum(0, dtype=torch.int32)
        torch.gt(
            digits.add_(tie_ranks <= wanted), lower, out=part
        )  # ties count as larger until enough of them are kept
        if len(pieces) > 1:
            wanted = wanted - tie_ranks[-1]
    return mask


def _ordered_bits(flat: Tensor, magnitude: bool) -> Tensor:
    """Return integers from 0 in the order of the values: in 32 bits, or in 64 for values with signs."""
    if magnitude:
        return flat.float().abs().view(torch.int32)
    bits = (flat.float() + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + 2**31  # reverses the order of negative numbers


# -- other selections ----------------------------------------------------------------------------------


def keep_in_groups(scores: Tensor, few: int, many: int, dim: int) -> Tensor:
    """Keep the `few` largest in magnitude of every `many` along a dimension. Ties go to the lower index.

    Args:
        scores (`Tensor`):
            Scores of a matrix.
        few (`int`):
            How many to keep of each group.
        many (`int`):
            Size of a group.
        dim (`int`):
            The dimension along which groups lie.

    Returns:
        `Tensor`: the mask.

    Example:

    >>> keep_in_groups(torch.tensor([[3., -4., 1., 2.]]), 2, 4, 1).tolist()
    [[True, True, False, False]]
    """
    groups = scores.detach().abs().unflatten(dim, (-1, many)).unbind(dim + 1)
    # For each member of a group: how many others rank before it.
    ahead = [torch.zeros_like(groups[0], dtype=torch.uint8) for _ in groups]
    for second in range(many):
        for first in range(second):
            wins = groups[first] >= groups[second]
            ahead[second] = ahead[second] + wins
            ahead[first] = ahead[first] + ~wins
    return torch.stack([place < few for place in ahead], dim + 1).flatten(dim, dim + 1)


def keep_by_chance(scores: Tensor, seed: int, name: str) -> Tensor:
    """Keep each weight with probability sigmoid(score), by a hash of its index, the seed, the name and all scores.

    A step changes the scores, and with them every random choice. To repeat the choice, only the scores are needed.

    Args:
        scores (`Tensor`):
            Scores of one tensor.
        seed (`int`):
            Seed of the model.
        name (`str`):
            Name of the tensor.

    Returns:
        `Tensor`: the mask.
    """
    name_key = seed
    for letter in name:  # computed here: torch.compile does not know Python's hash
        name_key = (31 * name_key + ord(letter)) % 2**31
    flat = scores.detach().reshape(-1)
    # A sum of integers does not depend on its order: it is the same on all devices, with any number of threads.
    key = (flat.view(torch.int32).sum(dtype=torch.int64) + name_key).to(torch.int32)
    kept, start = [], 0
    for part in flat.split(piece_size(flat)):
        place = torch.arange(start, start + len(part), dtype=torch.int32, device=part.device)
        chance = (_hash(_hash(place) ^ key) >> 8) & 0xFFFFFF  # 24 bits, as many as a float holds
        kept.append(chance < part.sigmoid() * 2**24)
        start += len(part)
    return torch.cat(kept).view(scores.shape)


def _hash(words: Tensor) -> Tensor:
    """Mix 32 bits: similar words give unrelated results (the finaliser of MurmurHash3)."""
    words = (words ^ ((words >> 16) & 0xFFFF)) * -2048144789
    words = (words ^ ((words >> 13) & 0x7FFFF)) * -1028477387
    return words ^ ((words >> 16) & 0xFFFF)
