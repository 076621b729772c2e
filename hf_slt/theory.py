"""Attention by pruning: the existence proof of arXiv 2511.04217 as a program.

A random network with enough hidden width already contains the network you want. Each entry of a
target matrix W (d1 x d2) is a subset sum over products of random weights: give every input i its own
run of hidden units (mask M1), and let M2 choose, per output, which of them to keep.

    (W1 * M1) @ (W2 * M2) ~ W        W1 (d1, n), W2 (n, d2)
    W_ij ~ sum_k  m_kj w1_ik w2_kj   over the n' = n / d1 units k of input i

With n' values there are 2^n' sums, so the error falls like 2^-n'. Attention holds two such products per
head, W_Q W_K^T / sqrt(d_K) and W_V W_O, with nothing nonlinear between the factors; so a source of the
same depth suffices. A linear map through a ReLU costs a second layer (Pensia et al. 2020), because each
input needs units for its positive and for its negative part.

All matrices act on rows, y = x @ W, as GPT-2's Conv1D does. Nothing above the last section needs torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from .random_weights import draw

if TYPE_CHECKING:
    from .configuration_supermask_gpt2 import SupermaskGPT2Config
    from .modeling_supermask_gpt2 import SupermaskGPT2Attention, SupermaskGPT2LMHeadModel

Construction = Literal["proof", "balanced"]

# ---------------------------------------------------------------------------------------------------
# Subset sums


class Subset(NamedTuple):
    """A subset per problem, how far its sum is from the target, and what that leaves to be gained.

    `error - slack` is a lower bound of the optimum: slack 0 means that no subset is nearer
    (up to float64 rounding of the sums).
    """

    mask: np.ndarray  # (..., n) bool
    error: np.ndarray  # (...)
    slack: np.ndarray  # (...)


def best_subset(
    values: np.ndarray,
    target: np.ndarray | float,
    *,
    core: int = 40,
    tolerance: float = 1e-8,
    rounds: int = 4,
) -> Subset:
    """The subset of `values` (last axis) whose sum is nearest to `target`; leading axes are a batch.

    Exact for up to `core` values, by meeting in the middle: 2^(n/2) sums of either half, sorted. Beyond
    that the large values are placed greedily, and the `core` smallest exactly; each further round (for
    problems with slack above `tolerance`) frees `core` values at random and places those exactly, so the
    error never grows. Deterministic. Time and memory grow like 2^(core/2).

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
        for r in range(1, rounds):
            open_ = np.flatnonzero(_error(v, mask, t) - _out_of_reach(v, t) > tolerance)
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
    """How far the target lies outside [sum of negatives, sum of positives]: no subset is nearer."""
    above = t - np.where(v > 0, v, 0).sum(axis=1)
    below = np.where(v < 0, v, 0).sum(axis=1) - t
    return np.maximum(0.0, np.maximum(above, below))


def _all_sums(v: np.ndarray) -> np.ndarray:
    """Sums of all subsets, (P, 2^n): bit k of the index says whether value k is in."""
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
            a, wanted = (
                left_sorted[i],
                goal - right_sorted[i][::-1],
            )  # ascending, so the search stays in cache
            above = np.searchsorted(a, wanted)
            up, down = a[np.minimum(above, a.size - 1)], a[np.maximum(above - 1, 0)]
            nearest = np.where(np.abs(up - wanted) < np.abs(wanted - down), up, down)
            best = np.abs(nearest - wanted).argmin()
            # sorting lost the indices, but the two winning sums are still in the tables bit for bit
            pick[i] = (left[i] == nearest[best]).argmax(), (right[i] == right_sorted[i][::-1][best]).argmax()
        mask[part, :half], mask[part, half:] = _bits(pick[:, 0], half), _bits(pick[:, 1], n - half)
    return mask


def _replace(v: np.ndarray, t: np.ndarray, mask: np.ndarray, free: np.ndarray) -> np.ndarray:
    """`mask` with the values at indices `free` (P, core) placed exactly, the others held."""
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


# ---------------------------------------------------------------------------------------------------
# Matrices


class Pruned(NamedTuple):
    """Two masks, and product minus target per entry."""

    mask1: np.ndarray  # (d1, n) bool
    mask2: np.ndarray  # (n, d2) bool
    error: np.ndarray  # (d1, d2)


def prune_to_match(
    W: np.ndarray,
    W1: np.ndarray,
    W2: np.ndarray,
    *,
    construction: Construction = "proof",
    core: int = 40,
) -> Pruned:
    """Masks with (W1 * mask1) @ (W2 * mask2) ~ W: Lemma 4.

    `"proof"` gives input i the i-th run of n // d1 units, as the proof does. `"balanced"` departs from
    it twice. Units belong to the shorter side of W (to outputs when d2 < d1), so each subset sum has
    n / min(d1, d2) values in place of n / d1. And units are not dealt out in runs: the input whose
    targets are farthest from its reach takes the free unit that brings them nearest, because at small n
    what fails is reach, not resolution.
    """
    W, W1, W2 = (np.asarray(a, dtype=np.float64) for a in (W, W1, W2))
    _check(W, W1, W2, construction)
    if construction == "balanced" and W.shape[1] < W.shape[0]:
        mask2, mask1, error = prune_to_match(W.T, W2.T, W1.T, construction=construction, core=core)
        return Pruned(mask1.T, mask2.T, error.T)
    owner = _draft(W1, W2, W) if construction == "balanced" else _runs(*W1.shape)
    mask1 = owner == np.arange(len(W))[:, None]
    mask2 = _choose(W, W1 * mask1, W2, core)
    return Pruned(mask1, mask2, (W1 * mask1) @ (W2 * mask2) - W)


def prune_relu_to_match(
    positive: np.ndarray,
    negative: np.ndarray,
    W1: np.ndarray,
    W2: np.ndarray,
    *,
    construction: Construction = "proof",
    core: int = 40,
) -> Pruned:
    """Masks with relu(x @ (W1 * mask1)) @ (W2 * mask2) ~ relu(x) @ positive + relu(-x) @ negative.

    That form, one function of one variable per input and output, is all that single-input ReLU units
    can express: a linear map W is (W, -W); W after a ReLU is (W, 0). A unit whose kept weight is
    positive sees relu(x_i), one whose kept weight is negative sees relu(-x_i), so each input owns two
    groups of units. A group with nothing to express (a zero row) gets no unit under `"balanced"`.
    """
    positive, negative, W1, W2 = (np.asarray(a, dtype=np.float64) for a in (positive, negative, W1, W2))
    if positive.shape != negative.shape:
        raise ValueError(f"positive {positive.shape} and negative {negative.shape} must have one shape")
    _check(positive, W1, W2, construction)
    targets = np.concatenate([positive, negative])  # (2 d1, d2)
    gains = np.concatenate([np.maximum(W1, 0), np.maximum(-W1, 0)])  # (2 d1, n)
    d1 = len(W1)
    if construction == "proof":
        run = _runs(*W1.shape)  # an input's run serves both its signs
        sign = np.take_along_axis(W1, np.maximum(run, 0)[None], axis=0)[0] < 0
        owner = np.where(run < 0, -1, run + d1 * sign)
    else:
        owner = _draft(gains, W2, targets)
    owned = owner == np.arange(2 * d1)[:, None]
    mask2 = _choose(targets, gains * owned, W2, core)
    error = (gains * owned) @ (W2 * mask2) - targets
    return Pruned(owned[:d1] | owned[d1:], mask2, error)


def _check(W: np.ndarray, W1: np.ndarray, W2: np.ndarray, construction: str) -> None:
    if construction not in ("proof", "balanced"):
        raise ValueError(f"construction={construction!r}: choose 'proof' or 'balanced'")
    if W1.shape[0] != W.shape[0] or W2.shape[1] != W.shape[1] or W1.shape[1] != W2.shape[0]:
        raise ValueError(
            f"W {W.shape}, W1 {W1.shape}, W2 {W2.shape} do not fit: need (d1, d2), (d1, n), (n, d2)"
        )


def _runs(groups: int, n: int) -> np.ndarray:
    """The group that owns each of n units, in equal runs; -1 for the few left over."""
    per = n // groups
    return np.concatenate([np.repeat(np.arange(groups), per), np.full(n - groups * per, -1)])


def _draft(gains: np.ndarray, W2: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The group that owns each of n units, -1 for none: the group worst off chooses next.

    Worst off is who cannot yet reach its targets, then who has fewest units. gains (G, n), W2 (n, d2),
    targets (G, d2); reach is what a group's terms of the right sign add up to.
    """
    groups, n = gains.shape
    owner, reach, count = np.full(n, -1), np.zeros(targets.shape), np.zeros(groups)
    wanted = 1.5 * np.abs(
        targets
    )  # the edge of the reach is thinly covered by sums; 1.5 was best of those tried
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


def _choose(targets: np.ndarray, gains: np.ndarray, W2: np.ndarray, core: int) -> np.ndarray:
    """M2: for every group g and output j, the units of g whose gains_gk w2_kj sum nearest to targets_gj."""
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
    return mask2


# ---------------------------------------------------------------------------------------------------
# Bounds


def softmax_bound(logit_error: float, alpha: float, d1: int) -> float:
    """Lemma 5: with |x_i| <= alpha and every logit off by at most `logit_error` <= 1/2, the attention
    average softmax(logits) @ X moves by at most 4 sqrt(d1) alpha logit_error, for any length and mask.

    >>> softmax_bound(0.1, alpha=1.0, d1=4)
    0.8
    """
    if not 0 <= logit_error <= 0.5:
        raise ValueError(f"logit_error={logit_error}: Lemma 5 holds for errors between 0 and 1/2")
    return 4 * math.sqrt(d1) * alpha * logit_error


def tight_softmax_bound(logit_error: float, alpha: float) -> float:
    """The sharp form of Lemma 5, for any error: 2 alpha tanh(logit_error / 2), free of d1.

    Factors of each probability lie in [exp(-e), exp(e)] before normalising; the two-token case with
    half the mass on each side is the worst, and moves tanh(e / 2) of the mass across, over a distance
    of at most 2 alpha.
    """
    if logit_error < 0:
        raise ValueError(f"logit_error={logit_error} must not be negative")
    return 2 * alpha * math.tanh(logit_error / 2)


def _logs(eps: float, d1: int, d2: int, heads: int, alpha: float) -> tuple[float, float]:
    return (
        math.log(8 * heads * alpha**3 * d1**1.5 / eps),
        math.log(2 * heads * alpha * d1 * math.sqrt(d2) / eps),
    )


# Theorem 3's C, rounded up from the largest that recipes/figures_theory.py measures: 4.7 for d1 = 1, whose
# targets are all +-1, the edge of the norm bound; 1.4 to 2.8 for d1 = 2 to 8. The limit of exact subset
# sums is 1 / log 2 = 1.44.
CONSTANT = 5.0


def required_width(
    eps: float, d1: int, d2: int, heads: int = 1, alpha: float | None = None, *, constant: float = CONSTANT
) -> tuple[int, int]:
    """Theorem 3: the widths (n_qk, n_v) at which masks with error <= eps exist with probability >= 1 - eps.

    n_qk >= C d1 log(8 H alpha^3 d1^(3/2) / eps),  n_v >= C d1 log(2 H alpha d1 sqrt(d2) / eps)

    The theorem only says that some C exists; `estimate_constant` measures it, and the default holds for
    both constructions. alpha, the bound on the inputs' norm, defaults to the least the theorem allows,
    sqrt(max(d1, d2)).
    """
    alpha = math.sqrt(max(d1, d2)) if alpha is None else alpha
    if not 0 < eps < 1:
        raise ValueError(f"eps={eps} is both an error and a probability: choose it between 0 and 1")
    if alpha < math.sqrt(max(d1, d2)):
        raise ValueError(
            f"alpha={alpha}: the theorem needs at least sqrt(max(d1, d2)) = {math.sqrt(max(d1, d2)):.4g}"
        )
    n_qk, n_v = (max(d1, math.ceil(constant * d1 * log)) for log in _logs(eps, d1, d2, heads, alpha))
    return n_qk, n_v


def achieved_eps(errors: np.ndarray) -> float:
    """The least eps such that at most a fraction eps of the measured errors exceeds eps.

    >>> achieved_eps(np.array([0.01] * 95 + [3.0] * 5))
    0.05
    """
    ordered = np.sort(np.asarray(errors, dtype=np.float64))[::-1]
    fails = np.arange(len(ordered)) / len(ordered)  # with eps = ordered[k], k errors exceed it
    return float(np.maximum(ordered, fails).min())


def estimate_constant(
    widths: list[int], errors: np.ndarray, d1: int, d2: int, heads: int = 1, alpha: float | None = None
) -> float:
    """The least C for which Theorem 3 agrees with measured errors (widths, sources), n_qk = n_v = width."""
    alpha = math.sqrt(max(d1, d2)) if alpha is None else alpha
    found = 0.0
    for n, row in zip(widths, errors, strict=True):
        log = max(_logs(max(achieved_eps(row), np.finfo(float).tiny), d1, d2, heads, alpha))
        if log <= 0:
            raise ValueError(
                f"width {n}: error {achieved_eps(row):.3g} exceeds what the theorem speaks of; drop it"
            )
        found = max(found, n / (d1 * log))
    return found


# ---------------------------------------------------------------------------------------------------
# Targets: what is to be approximated, and the plain computation of it in float64


@dataclass(frozen=True)
class TargetAttention:
    """Multi-head attention: sum over heads of softmax(x W_Q W_K^T x^T / sqrt(d_k)) x W_V W_O."""

    query: np.ndarray  # (heads, d1, d_k)
    key: np.ndarray  # (heads, d1, d_k)
    value: np.ndarray  # (heads, d1, d_v)
    output: np.ndarray  # (heads, d_v, d2)

    def __post_init__(self) -> None:
        q, k, v, o = self.query.shape, self.key.shape, self.value.shape, self.output.shape
        if len(q) != 3 or k != q or v[:2] != q[:2] or o[:2] != (v[0], v[2]):
            raise ValueError(
                f"query {q}, key {k}, value {v}, output {o} do not fit: need (heads, d1, d_k) twice, "
                "(heads, d1, d_v), (heads, d_v, d2)"
            )

    @property
    def qk(self) -> np.ndarray:
        """W_Q W_K^T / sqrt(d_k) per head, (heads, d1, d1)."""
        return self.query.astype(np.float64) @ self.key.swapaxes(1, 2) / math.sqrt(self.query.shape[2])

    @property
    def vo(self) -> np.ndarray:
        """W_V W_O per head, (heads, d1, d2)."""
        return self.value.astype(np.float64) @ self.output

    def __call__(self, x: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
        """From x (..., T, d1) to (..., T, d2); `allowed` (..., T, T) is True where a row may see a column."""
        out = np.zeros((*x.shape[:-1], self.output.shape[2]))
        for qk, vo in zip(self.qk, self.vo, strict=True):
            share = x @ qk @ np.swapaxes(x, -1, -2)  # (..., T, T), and in place from here: T may be 8192
            if allowed is not None:
                share[~np.broadcast_to(allowed, share.shape)] = -np.inf
            share -= share.max(axis=-1, keepdims=True)
            np.exp(share, out=share)
            out += share @ (x @ vo) / share.sum(axis=-1, keepdims=True)
        return out


@dataclass(frozen=True)
class TargetBlock:
    """h = x + attention(x);  h + relu(h @ c_fc) @ c_proj."""

    attention: TargetAttention
    c_fc: np.ndarray  # (d, m)
    c_proj: np.ndarray  # (m, d)

    def __call__(self, x: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
        h = x + self.attention(x, allowed)
        return h + np.maximum(h @ self.c_fc, 0) @ self.c_proj


@dataclass(frozen=True)
class TargetTransformer:
    """A causal GPT-2 without LayerNorm and biases, with ReLU and tied embeddings."""

    wte: np.ndarray  # (vocabulary, d)
    wpe: np.ndarray  # (positions, d)
    blocks: tuple[TargetBlock, ...]

    def hidden(self, x: np.ndarray) -> np.ndarray:
        """The blocks alone: x (..., T, d) with positions already added."""
        allowed = np.tri(x.shape[-2], dtype=bool)
        for block in self.blocks:
            x = block(x, allowed)
        return x

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Logits (..., T, vocabulary) of token numbers (..., T)."""
        x = self.wte[tokens].astype(np.float64) + self.wpe[: tokens.shape[-1]]
        return self.hidden(x) @ self.wte.T

    @classmethod
    def from_gpt2(cls, model) -> TargetTransformer:
        """The weights of a stock GPT2Model or GPT2LMHeadModel whose ln_1, ln_2 and ln_f are nn.Identity."""
        base = getattr(model, "transformer", model)
        config = base.config
        if config.activation_function != "relu":
            raise ValueError(
                f"activation_function={config.activation_function!r}: the construction needs 'relu'"
            )
        if not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx:
            raise ValueError(
                "attention must be scaled by 1 / sqrt(head width), as in GPT-2's default configuration"
            )
        weights = {name: p.detach().cpu().numpy().astype(np.float64) for name, p in base.named_parameters()}
        for name, p in weights.items():
            if "ln_" in name:
                raise ValueError(
                    f"{name}: the theorem is for transformers without LayerNorm; put nn.Identity() there"
                )
            if name.endswith("bias") and p.any():
                raise ValueError(f"{name} is not zero: a supermask source has no biases; set it to zero")

        def heads(w: np.ndarray) -> np.ndarray:  # (d, heads * width) -> (heads, d, width)
            return np.stack(np.split(w, config.n_head, axis=1))

        blocks = []
        for b in range(config.n_layer):
            q, k, v = np.split(weights[f"h.{b}.attn.c_attn.weight"], 3, axis=1)
            o = np.stack(np.split(weights[f"h.{b}.attn.c_proj.weight"], config.n_head))
            attention = TargetAttention(heads(q), heads(k), heads(v), o)
            blocks.append(
                TargetBlock(attention, weights[f"h.{b}.mlp.c_fc.weight"], weights[f"h.{b}.mlp.c_proj.weight"])
            )
        return cls(weights["wte.weight"], weights["wpe.weight"], tuple(blocks))


# ---------------------------------------------------------------------------------------------------
# Sources: masks in the ticket's own form; the library's own model computes with them


@dataclass(frozen=True)
class ApproximateAttention:
    """Masks that make the attention of `SupermaskGPT2Model.from_masks(config, masks)` compute the target."""

    target: TargetAttention
    config: SupermaskGPT2Config
    masks: dict[str, np.ndarray]  # by tensor name, as in a ticket
    qk_error: np.ndarray  # (heads, d1, d1), source minus target
    vo_error: np.ndarray  # (heads, d1, d2)

    def bound(self, alpha: float) -> float:
        """What no output can be off by, for inputs with |x_i| <= alpha, any length and any attention mask.

        Per head, in spectral norms:  2 alpha tanh(e / 2) |W_VO| + alpha |vo_error|,  e = alpha^2 |qk_error|.
        """
        total = 0.0
        for qk, vo, W in zip(self.qk_error, self.vo_error, self.target.vo, strict=True):
            moved = tight_softmax_bound(alpha**2 * _norm(qk), alpha)
            total += moved * _norm(W) + alpha * _norm(vo)
        return total

    def layer(self) -> SupermaskGPT2Attention:
        """The library's attention layer with these masks, in float64 (the weights are float32 draws)."""
        from .modeling_supermask_gpt2 import SupermaskGPT2Model

        return SupermaskGPT2Model.from_masks(self.config, self.masks).double().h[0].attn

    def __call__(self, x: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
        """As the target, computed by `layer()`: x (..., T, d1), allowed (..., T, T), to (..., T, d2)."""
        return run_attention(self.layer(), x, self.target.output.shape[2], allowed)


def run_attention(
    layer: SupermaskGPT2Attention, x: np.ndarray, d2: int, allowed: np.ndarray | None = None
) -> np.ndarray:
    """Run x (..., T, d1) through an attention layer that may be wider, to (..., T, d2).

    `allowed` as for the target; without it, all see all.
    """
    import torch

    lead, (length, d1) = x.shape[:-2], x.shape[-2:]
    padded = np.zeros((math.prod(lead), length, layer.config.n_embd))
    padded[..., :d1] = x.reshape(-1, length, d1)
    dtype, bias = layer.c_proj.weight.dtype, None
    if allowed is not None:
        seen = np.broadcast_to(allowed, (*lead, length, length)).reshape(-1, 1, length, length)
        bias = torch.from_numpy(np.where(seen, 0.0, -np.inf)).to(dtype)
    with torch.no_grad():
        # GPT-2's layer takes itself for causal when no mask is given
        y, _ = layer(torch.from_numpy(padded).to(dtype), attention_mask=bias, is_causal=False)
    return y.numpy()[..., :d2].reshape(*lead, length, d2).astype(np.float64)


def approximate_attention(
    target: TargetAttention,
    n_qk: int,
    n_v: int,
    seed: int,
    *,
    construction: Construction = "proof",
    qk_scale: float | str = "paper",
    core: int = 40,
) -> ApproximateAttention:
    """Prune the random attention of this seed and these head widths down to the target (Theorem 3).

    Needs n_qk, n_v >= d1. The source has the target's heads and width max(d1, d2); what the target
    lacks of it is pruned. A `qk_scale` other than "paper" shows what the scale is for.
    """
    heads, d1, _ = target.query.shape
    d2 = target.output.shape[2]
    config = _config(
        seed=seed, n_embd=max(d1, d2), n_head=heads, n_layer=1, n_qk=n_qk, n_v=n_v, qk_scale=qk_scale,
        n_inner=1, vocab_size=1, n_positions=1, embedding="frozen",
    )  # fmt: skip
    masks = _nothing_kept(config)
    qk_error, vo_error = _prune_attention(config, masks, 0, target, construction, core)
    return ApproximateAttention(target, _with_density(config, masks), masks, qk_error, vo_error)


@dataclass(frozen=True)
class ApproximateTransformer:
    """Masks and (trained) embeddings of a supermask GPT-2 that computes the target."""

    target: TargetTransformer
    config: SupermaskGPT2Config
    masks: dict[str, np.ndarray]
    error: float  # the largest entry of all matrix errors

    def model(self) -> SupermaskGPT2LMHeadModel:
        """A ticket in memory, ready for `save_ticket`; float32."""
        import torch

        from .modeling_supermask_gpt2 import SupermaskGPT2LMHeadModel

        model = SupermaskGPT2LMHeadModel.from_masks(self.config, self.masks)
        d = self.target.wte.shape[1]
        with torch.no_grad():
            for layer, values in (
                (model.transformer.wte, self.target.wte),
                (model.transformer.wpe, self.target.wpe),
            ):
                layer.weight.zero_()  # scratch coordinates start at zero and are not read by the tied head
                layer.weight[:, :d] = torch.from_numpy(values)
        return model


def approximate_transformer(
    target: TargetTransformer,
    n_qk: int,
    n_v: int,
    n_inner: int,
    seed: int,
    *,
    construction: Construction = "proof",
    scratch: Literal["fresh", "cleared"] = "fresh",
    core: int = 40,
) -> ApproximateTransformer:
    """Prune a random GPT-2 of twice the depth down to the target (Theorem 6, FFN after Pensia et al.).

    GPT-2's MLP has one hidden layer, and pruning turns that into one *linear* layer (see
    `prune_relu_to_match`); so the target's two-layer MLP takes the MLPs of two source blocks. Between
    them its m pre-activations live in coordinates that the source's residual stream has beyond the
    target's d:

        source block 2b      h = x + attention(x);  s = h @ c_fc     s into the scratch coordinates
        source block 2b + 1  h + relu(s) @ c_proj                    its attention is pruned to nothing

    `scratch="fresh"` gives every target block m coordinates of its own, width d + blocks * m.
    `"cleared"` reuses the same m (width d + m): the second block also subtracts s from itself, which
    takes units for the negative parts too and so about doubles the n_inner needed. Embeddings are the
    target's own, carried by `embedding="trained"`. Needs n_qk, n_v >= d and n_inner >= 2 max(d, m).
    """
    if scratch not in ("fresh", "cleared"):
        raise ValueError(f"scratch={scratch!r}: choose 'fresh' or 'cleared'")
    (vocabulary, d), depth = target.wte.shape, len(target.blocks)
    heads, m = target.blocks[0].attention.query.shape[0], target.blocks[0].c_fc.shape[1]
    for b, block in enumerate(target.blocks):
        if block.attention.query.shape[:2] != (heads, d) or block.attention.output.shape[2] != d:
            raise ValueError(f"block {b}: attention does not have {heads} heads from width {d} to {d}")
        if block.c_fc.shape != (d, m) or block.c_proj.shape != (m, d):
            raise ValueError(
                f"block {b}: MLP {block.c_fc.shape}, {block.c_proj.shape} is not ({d}, {m}), ({m}, {d})"
            )
    config = _config(
        seed=seed, n_embd=d + m * (depth if scratch == "fresh" else 1), n_head=heads, n_layer=2 * depth,
        n_qk=n_qk, n_v=n_v, n_inner=n_inner, vocab_size=vocabulary, n_positions=len(target.wpe),
        embedding="trained",
    )  # fmt: skip
    masks = _nothing_kept(config)
    errors: list[np.ndarray] = []
    main = np.arange(d)
    for b, block in enumerate(target.blocks):
        s = d + np.arange(m) + (m * b if scratch == "fresh" else 0)
        errors += _prune_attention(config, masks, 2 * b, block.attention, construction, core)
        errors += [_prune_mlp(config, masks, 2 * b, block.c_fc, -block.c_fc, main, s, construction, core)]
        positive, negative, into = block.c_proj, np.zeros((m, d)), main
        if scratch == "cleared":  # -s = -relu(s) + relu(-s)
            positive, negative = np.hstack([positive, -np.eye(m)]), np.hstack([negative, np.eye(m)])
            into = np.concatenate([main, s])
        errors += [_prune_mlp(config, masks, 2 * b + 1, positive, negative, s, into, construction, core)]
    worst = max(float(np.abs(e).max()) for e in errors)
    return ApproximateTransformer(target, _with_density(config, masks), masks, worst)


def _config(**options) -> SupermaskGPT2Config:
    from .configuration_supermask_gpt2 import SupermaskGPT2Config

    return SupermaskGPT2Config(
        law="uniform", layer_norm=False, activation_function="relu", bos_token_id=None, eos_token_id=None,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **options,
    )  # fmt: skip


def _with_density(config: SupermaskGPT2Config, masks: dict[str, np.ndarray]) -> SupermaskGPT2Config:
    """The construction keeps what it needs, so density is an outcome: the fraction kept over all tensors."""
    kept, size = sum(int(m.sum()) for m in masks.values()), sum(m.size for m in masks.values())
    config.density = max(kept, 1) / size
    return config


def _nothing_kept(config: SupermaskGPT2Config) -> dict[str, np.ndarray]:
    d, qk, v, inner = (
        config.n_embd, config.n_head * config.qk_width, config.n_head * config.v_width, config.mlp_width
    )  # fmt: skip
    shapes = {
        "attn.c_attn.query": (d, qk),
        "attn.c_attn.key": (d, qk),
        "attn.c_attn.value": (d, v),
        "attn.c_proj": (v, d),
        "mlp.c_fc": (d, inner),
        "mlp.c_proj": (inner, d),
    }
    return {
        f"h.{b}.{leaf}": np.zeros(shape, dtype=bool)
        for b in range(config.n_layer)
        for leaf, shape in shapes.items()
    }


def _frozen(config: SupermaskGPT2Config, masks: dict[str, np.ndarray], name: str) -> np.ndarray:
    return draw(config.seed, name, masks[name].shape, *config.law_of(name)).astype(np.float64)


def _prune_attention(
    config: SupermaskGPT2Config,
    masks: dict[str, np.ndarray],
    block: int,
    target: TargetAttention,
    construction: Construction,
    core: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Fill in the four attention masks of a block; the errors of W_QK and W_VO per head."""
    d1, d2, n_qk, n_v = target.query.shape[1], target.output.shape[2], config.qk_width, config.v_width
    if min(n_qk, n_v) < d1:
        raise ValueError(f"n_qk={n_qk}, n_v={n_v}: both must be at least d1 = {d1}, one unit per input")
    names = [f"h.{block}.attn.{leaf}" for leaf in ("c_attn.query", "c_attn.key", "c_attn.value", "c_proj")]
    W_Q, W_K, W_V, W_O = (_frozen(config, masks, name) for name in names)
    mask_q, mask_k, mask_v, mask_o = (masks[name] for name in names)
    root = n_qk**0.25  # the logits' 1 / sqrt(n_qk), half of it to either factor
    qk_error, vo_error = [], []
    for h, (qk, vo) in enumerate(zip(target.qk, target.vo, strict=True)):
        at_qk = (slice(0, d1), slice(h * n_qk, (h + 1) * n_qk))
        at_v = (slice(0, d1), slice(h * n_v, (h + 1) * n_v))
        at_o = (slice(h * n_v, (h + 1) * n_v), slice(0, d2))
        found = prune_to_match(
            qk, W_Q[at_qk] / root, W_K[at_qk].T / root, construction=construction, core=core
        )
        mask_q[at_qk], mask_k[at_qk] = found.mask1, found.mask2.T
        qk_error.append(found.error)
        found = prune_to_match(vo, W_V[at_v], W_O[at_o], construction=construction, core=core)
        mask_v[at_v], mask_o[at_o] = found.mask1, found.mask2
        vo_error.append(found.error)
    return np.stack(qk_error), np.stack(vo_error)


def _prune_mlp(
    config: SupermaskGPT2Config,
    masks: dict[str, np.ndarray],
    block: int,
    positive: np.ndarray,
    negative: np.ndarray,
    rows: np.ndarray,
    columns: np.ndarray,
    construction: Construction,
    core: int,
) -> np.ndarray:
    """Fill in the two MLP masks of a block, from coordinates `rows` to `columns` of the residual stream."""
    fc, proj = f"h.{block}.mlp.c_fc", f"h.{block}.mlp.c_proj"
    if config.mlp_width < 2 * len(rows):
        raise ValueError(
            f"n_inner={config.mlp_width}: at least {2 * len(rows)} are needed, two per input of the MLP"
        )
    W1, W2 = _frozen(config, masks, fc)[rows], _frozen(config, masks, proj)[:, columns]
    found = prune_relu_to_match(positive, negative, W1, W2, construction=construction, core=core)
    masks[fc][rows], masks[proj][:, columns] = found.mask1, found.mask2
    return found.error


def _norm(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix, 2))
