"""The selection of `keep_by_digits` as kernels of Triton, for devices that Triton compiles for.

    upper bits    histogram of the upper 16 bits of all keys; the bin in which the threshold lies
    lower bits    histogram of the lower 16 bits of keys with these upper bits; the threshold
    ties          how many keys of each block equal the threshold; sums of them over the blocks
    mask          larger keys, and ties until enough of them are kept

A key is an integer in the order of the values, computed from the bits of a float32. Counts are integers of 64 bits, so
the order in which they are added does not matter. The host reads nothing back: bins and counts are read by the next
kernel. Ten launches for one tensor, of which four read the values.

No GPU has run these kernels yet. The tests run them in Triton's interpreter, and compile them for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    from triton import language as tl
except ImportError:  # documentation and tests can import this file, but nothing runs
    triton = tl = None


def _jit(function: Callable) -> Any:
    """Return a kernel, or the function itself where Triton is not installed."""
    return triton.jit(function) if triton else function


_BINS = 1 << 16
_BLOCK = 4096  # values of one program


def keep_by_kernels(flats: Sequence[Tensor], count: int, magnitude: bool = False) -> Tensor:
    """Return the mask of `keep_by_digits`, by kernels of Triton.

    Args:
        flats (`Sequence[Tensor]`):
            Scores of each tensor, as contiguous rows on one device.
        count (`int`):
            How many to keep of all together.
        magnitude (`bool`, defaults to `False`):
            Whether values are compared by magnitude.

    Returns:
        `Tensor`: one mask for all, as a row.
    """
    device, sizes = flats[0].device, [len(flat) for flat in flats]
    blocks = [-(-size // _BLOCK) for size in sizes]
    dropped = sum(sizes) - count
    # The second histogram begins with the number of all smaller keys, so that its sums count them too.
    upper, lower = torch.zeros(2 * _BINS + 1, dtype=torch.int64, device=device).split([_BINS, _BINS + 1])
    ties = torch.empty(sum(blocks), dtype=torch.int64, device=device)
    mask = torch.empty(sum(sizes), dtype=torch.bool, device=device)
    # Triton launches on the current device, which need not be that of the scores.
    with nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device):
        for flat, grid in zip(flats, blocks, strict=True):
            launch(_count_upper, grid, flat, upper, len(flat), magnitude, _BLOCK)
        upper_sums = upper.cumsum(0)
        upper_bin = torch.searchsorted(upper_sums, dropped, right=True)
        for flat, grid in zip(flats, blocks, strict=True):
            launch(_count_lower, grid, flat, lower, upper_sums, upper_bin, len(flat), magnitude, _BLOCK)
        lower_sums = lower.cumsum(0)
        lower_bin = torch.searchsorted(lower_sums, dropped, right=True)  # 1 + the lower bits
        parts = list(zip(flats, blocks, ties.split(blocks), mask.split(sizes), strict=True))
        for flat, grid, tie, _ in parts:
            launch(_count_ties, grid, flat, tie, upper_bin, lower_bin, len(flat), magnitude, _BLOCK)
        tie_sums = ties.cumsum(0)
        found = upper_bin, lower_bin, lower_sums
        for (flat, grid, _, part), tie in zip(parts, tie_sums.split(blocks), strict=True):
            launch(_write_mask, grid, flat, part, tie, *found, dropped, len(flat), magnitude, _BLOCK)
    return mask


def launch(kernel: Any, programs: int, *arguments: Any) -> None:
    """Queue one kernel; a tensor without values needs none.

    Args:
        kernel (`Any`):
            A kernel of this file.
        programs (`int`):
            How many programs run it.
        arguments (`Any`):
            What the kernel is called with.
    """
    if programs:
        kernel[(programs,)](*arguments)


@_jit
def _load_keys(values, size, magnitude: tl.constexpr, block: tl.constexpr):
    """Return the keys of a program's block, and which of its places are in the tensor."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    bits = tl.load(values + at, mask=inside, other=0).to(tl.float32).to(tl.int32, bitcast=True)
    unsigned = bits & 0x7FFFFFFF
    if magnitude:
        keys = unsigned
    else:  # the order of negative numbers is reversed; both zeros are 0
        keys = tl.where(bits < 0, -unsigned, unsigned)
    return keys, inside, at


@_jit
def _threshold(upper_bin, lower_bin):
    """Return the key that the two bins stand for."""
    return (((tl.load(upper_bin) - 32768) << 16) + tl.load(lower_bin) - 1).to(tl.int32)


@_jit
def _count_upper(values, histogram, size, magnitude: tl.constexpr, block: tl.constexpr):
    """Count the upper 16 bits of all keys."""
    keys, inside, _ = _load_keys(values, size, magnitude, block)
    tl.atomic_add(
        histogram + (keys >> 16) + 32768, tl.full((block,), 1, tl.int64), mask=inside, sem="relaxed"
    )


@_jit
def _count_lower(
    values, histogram, upper_sums, upper_bin, size, magnitude: tl.constexpr, block: tl.constexpr
):
    """Count the lower 16 bits of keys with the upper bits found, after the number of all smaller keys."""
    chosen = tl.load(upper_bin)
    if tl.program_id(0) == 0:  # of every tensor: all write the same number
        tl.store(histogram, tl.load(upper_sums + chosen - 1, mask=chosen > 0, other=0))
    keys, inside, _ = _load_keys(values, size, magnitude, block)
    close = inside & ((keys >> 16) + 32768 == chosen)
    tl.atomic_add(histogram + 1 + (keys & 0xFFFF), tl.full((block,), 1, tl.int64), mask=close, sem="relaxed")


@_jit
def _count_ties(values, ties, upper_bin, lower_bin, size, magnitude: tl.constexpr, block: tl.constexpr):
    """Count the keys of a block that equal the threshold."""
    keys, inside, _ = _load_keys(values, size, magnitude, block)
    tie = inside & (keys == _threshold(upper_bin, lower_bin))
    tl.store(ties + tl.program_id(0), tl.sum(tie.to(tl.int32), 0).to(tl.int64))


@_jit
def _write_mask(
    values,
    mask,
    tie_sums,
    upper_bin,
    lower_bin,
    lower_sums,
    dropped,
    size,
    magnitude: tl.constexpr,
    block: tl.constexpr,
):
    """Write the mask of a block: larger keys, and ties until enough of them are kept."""
    keys, inside, at = _load_keys(values, size, magnitude, block)
    threshold = _threshold(upper_bin, lower_bin)
    tie = (inside & (keys == threshold)).to(tl.int32)
    wanted = tl.load(lower_sums + tl.load(lower_bin)) - dropped
    before = tl.load(tie_sums + tl.program_id(0)) - tl.sum(tie, 0)  # in earlier blocks
    kept = (keys > threshold) | ((tie > 0) & (before + tl.cumsum(tie, 0) <= wanted))
    tl.store(mask + at, kept, mask=inside)
