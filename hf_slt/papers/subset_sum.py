"""Writes a matrix as the product of two pruned random matrices. Each entry is a subset sum.

Mask M1 gives every input i its own run of hidden units, and M2 chooses, for each output, which of them to keep:

    (W1 * M1) @ (W2 * M2) ~ W        W1 (d1, n), W2 (n, d2)
    W_ij ~ sum_k  m_kj w1_ik w2_kj   over the n' = n / d1 units k of input i

With n' values there are 2^n' sums, so the error falls like 2^-n' (Lemma 4 of arXiv 2511.04217).
"""

import math
from typing import Literal, NamedTuple

import numpy as np

Construction = Literal["proof", "balanced"]

# -- subset sums -----------------------------------------------------------------------------------


class Subset(NamedTuple):
    """A subset per problem, the distance of its sum from the target, and how much a better subset could gain at most.

    `error - slack` is a lower bound of the smallest possible error: slack 0 means that no subset is nearer
    (up to float64 rounding of the sums).
    """

    mask: np.ndarray  # (..., n) bool
    error: np.ndarray  # (...)
    slack: np.ndarray  # (...)


def best_subset(values: np.ndarray, target: np.ndarray | float, *, core: int = 40) -> Subset:
    """Find the subset of `values` (last axis) whose sum is nearest to `target`; leading axes are a batch.

    The result is exact for up to `core` values. The method is meeting in the middle: 2^(n/2) sums of each half,
    sorted. With more values, the large ones are placed greedily, and the `core` smallest exactly. Each of three
    more rounds (for problems with slack above 1e-8) frees `core` values at random and places those exactly, so
    the error never grows. The result is deterministic. Time and memory grow like 2^(core/2).

    Args:
        values (`np.ndarray`):
            Values to choose from, (..., n).
        target (`np.ndarray` or `float`):
            What the sums should be, one per leading index.
        core (`int`, defaults to 40):
            How many values are placed exactly.

    Returns:
        [`Subset`]: mask and error of each subset.

    Raises:
        `ValueError`: for a scalar, values that are not finite, or a core below 1.

    Example:

    >>> best_subset(np.array([0.5, -0.2, 0.9]), 0.25).mask.tolist()
    [True, True, False]
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim == 0:
        raise ValueError("values must have at least one axis, the values to choose from; got a scalar")
    if core < 1:
        raise ValueError(f"core={core}: at least one value must be placed exactly")
    batch, n = values.shape[:-1], values.shape[-1]
    target = np.broadcast_to(np.asarray(target, dtype=np.float64), batch)
    if not (np.isfinite(values).all() and np.isfinite(target).all()):
        raise ValueError("values and target must be finite")
    v, t = values.reshape(-1, n), target.reshape(-1)

    if n <= core:
        mask = _meet_in_the_middle(v, t)
    else:
        mask = _greedy_then_core(v, t, core)
        for r in range(1, 4):
            open_ = np.flatnonzero(_error(v, mask, t) - _out_of_reach(v, t) > 1e-8)
            if open_.size == 0:
                break
            free = np.random.default_rng(r).permuted(np.tile(np.arange(n), (open_.size, 1)), axis=1)[:, :core]
            trial = _replace(v[open_], t[open_], mask[open_], free)
            better = _error(v[open_], trial, t[open_]) < _error(v[open_], mask[open_], t[open_])
            mask[open_[better]] = trial[better]
    error = _error(v, mask, t)
    slack = np.zeros_like(error) if n <= core else np.maximum(error - _out_of_reach(v, t), 0.0)
    return Subset(mask.reshape(*batch, n), error.reshape(batch), slack.reshape(batch))


def _error(v: np.ndarray, mask: np.ndarray, t: np.ndarray) -> np.ndarray:
    # fsum: at 40 values the gap can be near the rounding of a plain sum
    return np.array([abs(math.fsum([*row[keep], -goal])) for row, keep, goal in zip(v, mask, t, strict=True)])


def _out_of_reach(v: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Return how far the target is outside [sum of negatives, sum of positives]. No subset can be nearer."""
    above = t - np.where(v > 0, v, 0).sum(axis=1)
    below = np.where(v < 0, v, 0).sum(axis=1) - t
    return np.maximum(0.0, np.maximum(above, below))


def _all_sums(v: np.ndarray) -> np.ndarray:
    """Return the sums of all subsets, (P, 2^n). Bit k of the index says whether value k is in the subset."""
    sums = np.zeros((len(v), 1))
    for k in range(v.shape[1]):
        sums = np.concatenate([sums, sums + v[:, k : k + 1]], axis=1)
    return sums


def _bits(index: np.ndarray, n: int) -> np.ndarray:
    return (index[:, None] >> np.arange(n) & 1).astype(bool)


def _meet_in_the_middle(v: np.ndarray, t: np.ndarray) -> np.ndarray:
    p, n = v.shape
    if n <= 10:  # one table per problem is smaller than two sorts
        return _bits(np.abs(_all_sums(v) - t[:, None]).argmin(axis=1), n)
    mask, half = np.empty((p, n), dtype=bool), n // 2
    at_once = max(1, 2**21 >> (n - half))  # at most 2^21 sums in memory per half
    for lo in range(0, p, at_once):
        part = slice(lo, lo + at_once)
        left, right = _all_sums(v[part, :half]), _all_sums(v[part, half:])
        left_sorted, right_sorted = np.sort(left, axis=1), np.sort(right, axis=1)
        pick = np.empty((len(left), 2), dtype=np.int64)
        for i, goal in enumerate(t[part]):
            a, b = left_sorted[i], right_sorted[i][::-1]
            wanted = goal - b  # ascending, so the search stays in cache
            above = np.searchsorted(a, wanted)
            up, down = a[np.minimum(above, a.size - 1)], a[np.maximum(above - 1, 0)]
            nearest = np.where(np.abs(up - wanted) < np.abs(wanted - down), up, down)
            best = np.abs(nearest - wanted).argmin()
            # sorting lost the indices, but the two winning sums are still in the tables bit for bit
            pick[i] = (left[i] == nearest[best]).argmax(), (right[i] == b[best]).argmax()
        mask[part, :half], mask[part, half:] = _bits(pick[:, 0], half), _bits(pick[:, 1], n - half)
    return mask


def _replace(v: np.ndarray, t: np.ndarray, mask: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Return `mask` with the values at indices `free` (P, core) placed exactly. The others stay."""
    held = mask.copy()
    np.put_along_axis(held, free, False, axis=1)
    placed = _meet_in_the_middle(np.take_along_axis(v, free, axis=1), t - (v * held).sum(axis=1))
    np.put_along_axis(held, free, placed, axis=1)
    return held


def _greedy_then_core(v: np.ndarray, t: np.ndarray, core: int) -> np.ndarray:
    order = np.argsort(-np.abs(v), axis=1, kind="stable")
    large, small = order[:, :-core], order[:, -core:]
    # the greedy pass aims at the middle of what the core can reach, where its sums are densest
    rest = t - np.take_along_axis(v, small, axis=1).sum(axis=1) / 2
    mask = np.zeros(v.shape, dtype=bool)
    for column in large.T:
        value = v[np.arange(len(v)), column]
        take = np.abs(rest - value) < np.abs(rest)
        mask[np.arange(len(v)), column] = take
        rest = rest - value * take
    return _replace(v, t, mask, small)


# -- matrices --------------------------------------------------------------------------------------


class Pruned(NamedTuple):
    """Two masks, and for each entry the product minus the target."""

    mask1: np.ndarray  # (d1, n) bool
    mask2: np.ndarray  # (n, d2) bool
    error: np.ndarray  # (d1, d2)


def prune_to_match(
    W: np.ndarray, W1: np.ndarray, W2: np.ndarray, *, construction: Construction = "proof", core: int = 40
) -> Pruned:
    """Find masks with (W1 * mask1) @ (W2 * mask2) ~ W: Lemma 4.

    `"proof"` gives input i the i-th run of n // d1 units, as the proof does. `"balanced"` differs in two ways. Units
    belong to the shorter side of W (to outputs when d2 < d1), so each subset sum has n / min(d1, d2) values in place
    of n / d1. And units are not given out in runs: the input whose targets are farthest outside its reach takes the
    free unit that brings them nearest, because at small n the problem is reach, not resolution.

    Args:
        W (`np.ndarray`):
            The target, (d1, d2).
        W1 (`np.ndarray`):
            Random weights, (d1, n).
        W2 (`np.ndarray`):
            Random weights, (n, d2).
        construction (`Construction`, defaults to `"proof"`):
            `"proof"` or `"balanced"`.
        core (`int`, defaults to 40):
            How many values of a subset sum are placed exactly.

    Returns:
        [`Pruned`]: both masks, and the error of each entry of the product.

    Raises:
        `ValueError`: for an unknown construction, or shapes that do not fit.
    """
    W, W1, W2 = (np.asarray(a, dtype=np.float64) for a in (W, W1, W2))
    _check(W, W1, W2, construction)
    if construction == "balanced" and W.shape[1] < W.shape[0]:
        mask2, mask1, error = prune_to_match(W.T, W2.T, W1.T, construction=construction, core=core)
        return Pruned(mask1.T, mask2.T, error.T)
    owner = _draft(W1, W2, W) if construction == "balanced" else _runs(*W1.shape)
    mask1 = owner == np.arange(len(W))[:, None]
    return Pruned(mask1, *_choose(W, W1 * mask1, W2, core))


def prune_relu_to_match(
    positive: np.ndarray,
    negative: np.ndarray,
    W1: np.ndarray,
    W2: np.ndarray,
    *,
    construction: Construction = "proof",
    core: int = 40,
) -> Pruned:
    """Find masks with relu(x @ (W1 * mask1)) @ (W2 * mask2) ~ relu(x) @ positive + relu(-x) @ negative.

    ReLU units with a single input can express only this form, one function of one variable per input and
    output: a linear map W is (W, -W); W after a ReLU is (W, 0). A unit with a positive kept weight
    computes relu(x_i), a unit with a negative one relu(-x_i), so each input has two groups of units. With
    `"balanced"`, a group with nothing to express (a zero row) gets no unit.

    Args:
        positive (`np.ndarray`):
            What multiplies relu(x), (d1, d2).
        negative (`np.ndarray`):
            What multiplies relu(-x), (d1, d2).
        W1 (`np.ndarray`):
            Random weights, (d1, n).
        W2 (`np.ndarray`):
            Random weights, (n, d2).
        construction (`Construction`, defaults to `"proof"`):
            `"proof"` or `"balanced"`.
        core (`int`, defaults to 40):
            How many values of a subset sum are placed exactly.

    Returns:
        [`Pruned`]: both masks, and the error of each entry of `positive` and `negative`.

    Raises:
        `ValueError`: for an unknown construction, or shapes that do not fit.
    """
    positive, negative, W1, W2 = (np.asarray(a, dtype=np.float64) for a in (positive, negative, W1, W2))
    if positive.shape != negative.shape:
        raise ValueError(f"positive {positive.shape} and negative {negative.shape} must have one shape")
    _check(positive, W1, W2, construction)
    targets = np.concatenate([positive, negative])  # (2 d1, d2)
    gains = np.concatenate([np.maximum(W1, 0), np.maximum(-W1, 0)])  # (2 d1, n)
    d1 = len(W1)
    if construction == "proof":
        run = _runs(*W1.shape)  # the run of an input is for both signs
        sign = np.take_along_axis(W1, np.maximum(run, 0)[None], axis=0)[0] < 0
        owner = np.where(run < 0, -1, run + d1 * sign)
    else:
        owner = _draft(gains, W2, targets)
    owned = owner == np.arange(2 * d1)[:, None]
    return Pruned(owned[:d1] | owned[d1:], *_choose(targets, gains * owned, W2, core))


def _check(W: np.ndarray, W1: np.ndarray, W2: np.ndarray, construction: str) -> None:
    if construction not in ("proof", "balanced"):
        raise ValueError(f"construction={construction!r}: choose 'proof' or 'balanced'")
    if W1.shape[0] != W.shape[0] or W2.shape[1] != W.shape[1] or W1.shape[1] != W2.shape[0]:
        raise ValueError(
            f"W {W.shape}, W1 {W1.shape}, W2 {W2.shape} do not fit: need (d1, d2), (d1, n), (n, d2)"
        )


def _runs(groups: int, n: int) -> np.ndarray:
    """Return the group that owns each of n units, in equal runs; -1 for the few left over."""
    per = n // groups
    return np.concatenate([np.repeat(np.arange(groups), per), np.full(n - groups * per, -1)])


def _draft(gains: np.ndarray, W2: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the group that owns each of n units, -1 for none. The group with the greatest need chooses next.

    This is the group that is farthest from its targets, then the one with the fewest units. gains (G, n), W2 (n, d2),
    targets (G, d2); the reach of a group is the sum of its terms with the right sign.
    """
    groups, n = gains.shape
    owner, reach, count = np.full(n, -1), np.zeros(targets.shape), np.zeros(groups)
    # there are few sums near the edge of the reach; of the factors tried, 1.5 was best
    wanted = 1.5 * np.abs(targets)
    active = wanted.max(axis=1, initial=0.0) > 0
    while active.any():
        short = np.where(active[:, None], np.maximum(wanted - reach, 0), 0)
        lacking = short.max(axis=1)
        g = int(lacking.argmax()) if lacking.max() > 0 else int(np.where(active, count, np.inf).argmin())
        free = (owner < 0) & (gains[g] != 0)
        if not free.any():
            active[g] = False
            continue
        helps = np.maximum(np.sign(targets[g]) * gains[g][:, None] * W2, 0)  # (n, d2)
        use = np.minimum(helps, short[g]).sum(axis=1)
        use = use if use[free].max() > 0 else np.abs(gains[g])
        unit = int(np.where(free, use, -1.0).argmax())
        owner[unit] = g
        reach[g] += helps[unit]
        count[g] += 1
    return owner


def _choose(
    targets: np.ndarray, gains: np.ndarray, W2: np.ndarray, core: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return M2 (for group g and output j: units k of g whose gains_gk w2_kj sum to about targets_gj), and errors."""
    mask2 = np.zeros(W2.shape, dtype=bool)
    units = [np.flatnonzero(row) for row in gains]
    for size in sorted({len(u) for u in units} - {0}):
        same = [g for g, u in enumerate(units) if len(u) == size]
        index = np.stack([units[g] for g in same])  # (groups, size)
        values = gains[same][np.arange(len(same))[:, None], index][:, None] * W2[index].swapaxes(1, 2)
        keep = np.zeros(values.shape, dtype=bool)  # (groups, d2, size)
        at = targets[same] != 0  # zero is the empty subset
        keep[at] = best_subset(values[at], targets[same][at], core=core).mask
        mask2[index] = keep.swapaxes(1, 2)
    return mask2, gains @ (W2 * mask2) - targets
