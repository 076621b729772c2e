"""Attention by pruning: the existence proof of arXiv 2511.04217 as a program.

A random network with enough hidden width already contains the target network. Each entry of a
target matrix is a subset sum over products of random weights, which `subset_sum.py` finds:

    (W1 * M1) @ (W2 * M2) ~ W        W1 (d1, n), W2 (n, d2)

Attention has two such products per head, W_Q W_K^T / sqrt(d_K) and W_V W_O, with nothing nonlinear
between the factors, so a source of the same depth is enough. A linear map through a ReLU needs a second
layer (Pensia et al. 2020), because each input needs units for its positive and for its negative part.

All matrices act on rows, y = x @ W, as GPT-2's Conv1D does. Nothing above the last section needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .subset_sum import Construction, prune_relu_to_match, prune_to_match

if TYPE_CHECKING:
    from ..models.gpt2 import FreeWidthAttention, SupermaskGPT2Config, SupermaskGPT2LMHeadModel


# -- bounds ----------------------------------------------------------------------------------------


def softmax_bound(logit_error: float, alpha: float, d1: int) -> float:
    """Compute the bound of Lemma 5 on how far an attention average can move.

    With |x_i| <= alpha and every logit off by at most `logit_error` <= 1/2, the attention average
    softmax(logits) @ X moves by at most 4 sqrt(d1) alpha logit_error, for any length and mask.

    Args:
        logit_error (`float`):
            Largest error of a logit.
        alpha (`float`):
            Bound on the norm of the inputs.
        d1 (`int`):
            Width of the inputs.

    Returns:
        `float`: the bound.

    Raises:
        `ValueError`: for an error that is not between 0 and 1/2.

    Example:

    >>> softmax_bound(0.1, alpha=1.0, d1=4)
    0.8
    """
    if not 0 <= logit_error <= 0.5:
        raise ValueError(f"logit_error={logit_error}: Lemma 5 holds for errors between 0 and 1/2")
    return 4 * math.sqrt(d1) * alpha * logit_error


def tight_softmax_bound(logit_error: float, alpha: float) -> float:
    """Compute the sharp form of Lemma 5, for any error: 2 alpha tanh(logit_error / 2), independent of d1.

    Before normalising, each probability changes by a factor in [exp(-e), exp(e)]. The worst case is two tokens with
    half of the probability each: tanh(e / 2) of it moves from one to the other, over a distance of at most 2 alpha.

    Args:
        logit_error (`float`):
            Largest error of a logit.
        alpha (`float`):
            Bound on the norm of the inputs.

    Returns:
        `float`: the bound.

    Raises:
        `ValueError`: for a negative error.
    """
    if logit_error < 0:
        raise ValueError(f"logit_error={logit_error} must not be negative")
    return 2 * alpha * math.tanh(logit_error / 2)


def _logs(eps: float, d1: int, d2: int, heads: int, alpha: float | None) -> tuple[float, float]:
    alpha = math.sqrt(max(d1, d2)) if alpha is None else alpha
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
    """Compute the widths for which masks with error <= eps exist with probability >= 1 - eps: Theorem 3.

        n_qk >= C d1 log(8 H alpha^3 d1^(3/2) / eps),  n_v >= C d1 log(2 H alpha d1 sqrt(d2) / eps)

    The theorem only says that some C exists; `estimate_constant` measures it, and the default holds for
    both constructions.

    Args:
        eps (`float`):
            The error, which is also a probability.
        d1 (`int`):
            Width of the inputs.
        d2 (`int`):
            Width of the outputs.
        heads (`int`, defaults to 1):
            Number of heads, H.
        alpha (`float`, *optional*):
            Bound on the norm of the inputs. Default: the smallest that the theorem allows, sqrt(max(d1, d2)).
        constant (`float`, defaults to `CONSTANT`):
            The constant C.

    Returns:
        `tuple[int, int]`: n_qk and n_v.

    Raises:
        `ValueError`: if eps is not between 0 and 1, or alpha too small.
    """
    least = math.sqrt(max(d1, d2))
    if not 0 < eps < 1:
        raise ValueError(f"eps={eps} is both an error and a probability: choose it between 0 and 1")
    if alpha is not None and alpha < least:
        raise ValueError(f"alpha={alpha}: the theorem needs at least sqrt(max(d1, d2)) = {least:.4g}")
    n_qk, n_v = (max(d1, math.ceil(constant * d1 * log)) for log in _logs(eps, d1, d2, heads, alpha))
    return n_qk, n_v


def achieved_eps(errors: np.ndarray) -> float:
    """Compute the smallest eps such that at most a fraction eps of the measured errors exceeds eps.

    Args:
        errors (`np.ndarray`):
            Measured errors.

    Returns:
        `float`: eps.

    Example:

    >>> achieved_eps(np.array([0.01] * 95 + [3.0] * 5))
    0.05
    """
    ordered = np.sort(np.asarray(errors, dtype=np.float64))[::-1]
    fails = np.arange(len(ordered)) / len(ordered)  # with eps = ordered[k], k errors exceed it
    return float(np.maximum(ordered, fails).min())


def estimate_constant(
    widths: list[int], errors: np.ndarray, d1: int, d2: int, heads: int = 1, alpha: float | None = None
) -> float:
    """Compute the smallest C for which Theorem 3 agrees with measured errors, with n_qk = n_v = width.

    Args:
        widths (`list[int]`):
            Widths that were measured.
        errors (`np.ndarray`):
            Errors, (widths, sources).
        d1 (`int`):
            Width of the inputs.
        d2 (`int`):
            Width of the outputs.
        heads (`int`, defaults to 1):
            Number of heads.
        alpha (`float`, *optional*):
            Bound on the norm of the inputs, as in `required_width`.

    Returns:
        `float`: the constant.

    Raises:
        `ValueError`: for a width whose error is too large for the theorem.
    """
    found = 0.0
    for n, row in zip(widths, errors, strict=True):
        eps = achieved_eps(row)
        log = max(_logs(max(eps, np.finfo(float).tiny), d1, d2, heads, alpha))
        if log <= 0:
            raise ValueError(f"width {n}: error {eps:.3g} is too large for the theorem; leave this width out")
        found = max(found, n / (d1 * log))
    return found


# -- targets: what is approximated, and its plain computation in float64 ---------------------------


@dataclass(frozen=True)
class TargetAttention:
    """Multi-head attention: sum over heads of softmax(x W_Q W_K^T x^T / sqrt(d_k)) x W_V W_O.

    Args:
        query (`np.ndarray`):
            Query weights, (heads, d1, d_k).
        key (`np.ndarray`):
            Key weights, (heads, d1, d_k).
        value (`np.ndarray`):
            Value weights, (heads, d1, d_v).
        output (`np.ndarray`):
            Output weights, (heads, d_v, d2).
    """

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
        """The product W_Q W_K^T / sqrt(d_k) per head, (heads, d1, d1)."""
        return self.query.astype(np.float64) @ self.key.swapaxes(1, 2) / math.sqrt(self.query.shape[2])

    @property
    def vo(self) -> np.ndarray:
        """The product W_V W_O per head, (heads, d1, d2)."""
        return self.value.astype(np.float64) @ self.output

    def __call__(self, x: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
        """Compute (..., T, d2) from x (..., T, d1); `allowed` (..., T, T) is True where a row may see a column."""
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
    """A block of a transformer: h = x + attention(x);  h + relu(h @ c_fc) @ c_proj.

    Args:
        attention ([`TargetAttention`]):
            The attention.
        c_fc (`np.ndarray`):
            First matrix of the MLP, (d, m).
        c_proj (`np.ndarray`):
            Second matrix of the MLP, (m, d).
    """

    attention: TargetAttention
    c_fc: np.ndarray  # (d, m)
    c_proj: np.ndarray  # (m, d)

    def __call__(self, x: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
        h = x + self.attention(x, allowed)
        return h + np.maximum(h @ self.c_fc, 0) @ self.c_proj


@dataclass(frozen=True)
class TargetTransformer:
    """A causal GPT-2 without LayerNorm and biases, with ReLU and tied embeddings.

    Args:
        wte (`np.ndarray`):
            Token table, (vocabulary, d).
        wpe (`np.ndarray`):
            Position table, (positions, d).
        blocks (`tuple[TargetBlock, ...]`):
            The blocks.
    """

    wte: np.ndarray  # (vocabulary, d)
    wpe: np.ndarray  # (positions, d)
    blocks: tuple[TargetBlock, ...]

    def hidden(self, x: np.ndarray) -> np.ndarray:
        """Run only the blocks, without embeddings and head.

        Args:
            x (`np.ndarray`):
                Inputs (..., T, d) with positions already added.

        Returns:
            `np.ndarray`: outputs, in the same shape.
        """
        allowed = np.tri(x.shape[-2], dtype=bool)
        for block in self.blocks:
            x = block(x, allowed)
        return x

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Compute logits (..., T, vocabulary) from token ids (..., T)."""
        x = self.wte[tokens].astype(np.float64) + self.wpe[: tokens.shape[-1]]
        return self.hidden(x) @ self.wte.T

    @classmethod
    def from_gpt2(cls, model) -> TargetTransformer:
        """Take the weights of a stock GPT-2 whose ln_1, ln_2 and ln_f are nn.Identity.

        Args:
            model:
                A `GPT2Model` or `GPT2LMHeadModel`.

        Returns:
            [`TargetTransformer`]: the target.

        Raises:
            `ValueError`: for a structure that the construction cannot express.
        """
        base = getattr(model, "transformer", model)
        config = base.config
        if (activation := config.activation_function) != "relu":
            raise ValueError(f"activation_function={activation!r}: the construction needs 'relu'")
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

        d, heads, blocks = config.n_embd, config.n_head, []
        for b in range(config.n_layer):
            leaves = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
            qkv, o, c_fc, c_proj = (weights[f"h.{b}.{leaf}.weight"] for leaf in leaves)
            q, k, v = qkv.reshape(d, 3, heads, -1).transpose(1, 2, 0, 3).copy()  # each (heads, d, width)
            blocks.append(TargetBlock(TargetAttention(q, k, v, o.reshape(heads, -1, d)), c_fc, c_proj))
        return cls(weights["wte.weight"], weights["wpe.weight"], tuple(blocks))


# -- sources: masks in the form of a ticket; the model of hf_slt computes with them ----------------


@dataclass(frozen=True)
class ApproximateAttention:
    """Masks that make the attention of a `SupermaskGPT2Model` compute the target.

    Args:
        target ([`TargetAttention`]):
            The attention to be computed.
        config ([`SupermaskGPT2Config`]):
            Configuration of the source.
        masks (`dict[str, np.ndarray]`):
            Masks by tensor name, as in a ticket.
        qk_error (`np.ndarray`):
            Error of the product of query and key weights, (heads, d1, d1), source minus target.
        vo_error (`np.ndarray`):
            Error of the product of value and output weights, (heads, d1, d2), source minus target.
    """

    target: TargetAttention
    config: SupermaskGPT2Config
    masks: dict[str, np.ndarray]  # by tensor name, as in a ticket
    qk_error: np.ndarray  # (heads, d1, d1), source minus target
    vo_error: np.ndarray  # (heads, d1, d2)

    def bound(self, alpha: float) -> float:
        """Compute a bound on the error of any output, for inputs with |x_i| <= alpha, any length and attention mask.

        Per head, in spectral norms:  2 alpha tanh(e / 2) |W_VO| + alpha |vo_error|,  e = alpha^2 |qk_error|.

        Args:
            alpha (`float`):
                Bound on the norm of the inputs.

        Returns:
            `float`: the bound.
        """
        matrices = (self.qk_error, self.vo_error, self.target.vo)
        norms = np.stack([np.linalg.norm(heads, 2, axis=(1, 2)) for heads in matrices], axis=1).tolist()
        return sum(tight_softmax_bound(alpha**2 * qk, alpha) * W + alpha * vo for qk, vo, W in norms)

    def layer(self) -> FreeWidthAttention:
        """Build the attention layer of hf_slt with these masks, in float64 (the weights are drawn in float32).

        Returns:
            [`FreeWidthAttention`]: the layer.
        """
        from ..models.gpt2 import SupermaskGPT2Model

        return SupermaskGPT2Model.from_mask_arrays(self.config, self.masks).double().h[0].attn

    def __call__(self, x: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
        """Approximate the target with `layer()`: from x (..., T, d1) and allowed (..., T, T) to (..., T, d2)."""
        return run_attention(self.layer(), x, self.target.output.shape[2], allowed)


def run_attention(
    layer: FreeWidthAttention, x: np.ndarray, d2: int, allowed: np.ndarray | None = None
) -> np.ndarray:
    """Run x (..., T, d1) through an attention layer that may be wider, to (..., T, d2).

    Args:
        layer ([`FreeWidthAttention`]):
            The layer.
        x (`np.ndarray`):
            Inputs, (..., T, d1).
        d2 (`int`):
            Width of the outputs.
        allowed (`np.ndarray`, *optional*):
            Which positions see which, as for the target. Default: every position sees all.

    Returns:
        `np.ndarray`: outputs, (..., T, d2).
    """
    import torch

    lead, (length, d1) = x.shape[:-2], x.shape[-2:]
    padded = np.pad(x.reshape(-1, length, d1), ((0, 0), (0, 0), (0, layer.config.n_embd - d1)))
    dtype, bias = layer.c_proj.weight.dtype, None
    if allowed is not None:
        seen = np.broadcast_to(allowed, (*lead, length, length)).reshape(-1, 1, length, length)
        bias = torch.from_numpy(np.where(seen, 0.0, -np.inf)).to(dtype)
    with torch.no_grad():
        # GPT-2's layer is causal if no mask is given
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

    The source has the target's heads, and width max(d1, d2); coordinates that the target does not have are pruned.

    Args:
        target ([`TargetAttention`]):
            The attention to be computed.
        n_qk (`int`):
            Width of a query and key per head of the source, at least d1.
        n_v (`int`):
            Width of a value per head of the source, at least d1.
        seed (`int`):
            Seed of the source.
        construction (`Construction`, defaults to `"proof"`):
            `"proof"` or `"balanced"`, see `prune_to_match`.
        qk_scale (`float` or `str`, defaults to `"paper"`):
            Factor on query and key weights. Another value than `"paper"` shows why the scale is needed.
        core (`int`, defaults to 40):
            How many values of a subset sum are placed exactly.

    Returns:
        [`ApproximateAttention`]: masks and errors.
    """
    heads, d1, _ = target.query.shape
    d2 = target.output.shape[2]
    source = _Source(
        construction, core, seed=seed, n_embd=max(d1, d2), n_head=heads, n_layer=1, n_qk=n_qk, n_v=n_v,
        qk_scale=qk_scale, n_inner=1, vocab_size=1, n_positions=1, embedding="frozen",
    )  # fmt: skip
    errors = source.prune_attention(0, target)
    return ApproximateAttention(target, *source.pruned(), *errors)


@dataclass(frozen=True)
class ApproximateTransformer:
    """Masks and (trained) embeddings of a supermask GPT-2 that computes the target.

    Args:
        target ([`TargetTransformer`]):
            The transformer to be computed.
        config ([`SupermaskGPT2Config`]):
            Configuration of the source.
        masks (`dict[str, np.ndarray]`):
            Masks by tensor name, as in a ticket.
        error (`float`):
            The largest entry of all matrix errors.
    """

    target: TargetTransformer
    config: SupermaskGPT2Config
    masks: dict[str, np.ndarray]
    error: float  # the largest entry of all matrix errors

    def model(self) -> SupermaskGPT2LMHeadModel:
        """Build a ticket in memory, in float32, ready for `save_ticket`.

        Returns:
            [`SupermaskGPT2LMHeadModel`]: the ticket.
        """
        from ..models.gpt2 import SupermaskGPT2LMHeadModel

        model = SupermaskGPT2LMHeadModel.from_mask_arrays(self.config, self.masks)
        d = self.target.wte.shape[1]
        for name in ("wte", "wpe"):
            # Scratch coordinates start at zero and are not read by the tied head.
            table = np.zeros(self.config.shape_of(name), np.float32)
            table[:, :d] = getattr(self.target, name)
            model.ticket_arrays[name] = table
        model.fill_parameters()
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
    them its m pre-activations are in coordinates that the residual stream of the source has in addition to the
    d of the target:

        source block 2b      h = x + attention(x);  s = h @ c_fc     s into the scratch coordinates
        source block 2b + 1  h + relu(s) @ c_proj                    its attention is pruned to nothing

    Embeddings are those of the target, stored as `embedding="trained"`.

    Args:
        target ([`TargetTransformer`]):
            The transformer to be computed, of width d with MLPs of width m.
        n_qk (`int`):
            Width of a query and key per head of the source, at least d.
        n_v (`int`):
            Width of a value per head of the source, at least d.
        n_inner (`int`):
            Width of the MLPs of the source, at least 2 max(d, m).
        seed (`int`):
            Seed of the source.
        construction (`Construction`, defaults to `"proof"`):
            `"proof"` or `"balanced"`, see `prune_to_match`.
        scratch (`Literal['fresh', 'cleared']`, defaults to `"fresh"`):
            `"fresh"` gives every target block its own m coordinates: width d + blocks * m. `"cleared"` uses the same
            m for all (width d + m): the second block also subtracts s from itself. This needs units for the negative
            parts too, so n_inner must be about twice as large.
        core (`int`, defaults to 40):
            How many values of a subset sum are placed exactly.

    Returns:
        [`ApproximateTransformer`]: masks and the largest error.

    Raises:
        `ValueError`: for an unknown `scratch`, or widths that are too small.
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
    source = _Source(
        construction, core, seed=seed, n_embd=d + m * (depth if scratch == "fresh" else 1), n_head=heads,
        n_layer=2 * depth, n_qk=n_qk, n_v=n_v, n_inner=n_inner, vocab_size=vocabulary,
        n_positions=len(target.wpe), embedding="trained",
    )  # fmt: skip
    errors: list[np.ndarray] = []
    main = np.arange(d)
    for b, block in enumerate(target.blocks):
        s = d + np.arange(m) + (m * b if scratch == "fresh" else 0)
        errors += source.prune_attention(2 * b, block.attention)
        errors += [source.prune_mlp(2 * b, block.c_fc, -block.c_fc, main, s)]
        positive, negative, into = block.c_proj, np.zeros((m, d)), main
        if scratch == "cleared":  # -s = -relu(s) + relu(-s)
            positive, negative = np.hstack([positive, -np.eye(m)]), np.hstack([negative, np.eye(m)])
            into = np.concatenate([main, s])
        errors += [source.prune_mlp(2 * b + 1, positive, negative, s, into)]
    worst = max(float(np.abs(e).max()) for e in errors)
    return ApproximateTransformer(target, *source.pruned(), worst)


class _Source:
    """A random supermask GPT-2. Its masks are empty at first; then its blocks are pruned to match targets."""

    def __init__(self, construction: Construction, core: int, **options: Any) -> None:
        from ..models.gpt2 import SupermaskGPT2Config

        options |= {"law": "uniform", "layer_norm": False, "activation_function": "relu"}
        options |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        self.config = SupermaskGPT2Config(**options, bos_token_id=None, eos_token_id=None)
        masked = [name for name in self.config.tensor_names() if self.config.kind_of(name) == "masked"]
        self.masks = {name: np.zeros(self.config.shape_of(name), dtype=bool) for name in masked}
        self.how: dict[str, Any] = {"construction": construction, "core": core}

    def pruned(self) -> tuple[SupermaskGPT2Config, dict[str, np.ndarray]]:
        """Return configuration and masks. The density is a result: the construction keeps what it needs."""
        every = np.concatenate([mask.ravel() for mask in self.masks.values()])
        self.config.density = max(int(every.sum()), 1) / every.size
        return self.config, self.masks

    def _tensors(self, block: int, *leaves: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the frozen weight, in float64, and the mask of tensors of a block."""
        for name in (f"h.{block}.{leaf}" for leaf in leaves):
            yield self.config.tensor(name).draw().astype(np.float64), self.masks[name]

    def prune_attention(self, block: int, target: TargetAttention) -> tuple[np.ndarray, np.ndarray]:
        """Fill in the four attention masks of a block. Return the errors of W_QK and W_VO per head."""
        d1, d2 = target.query.shape[1], target.output.shape[2]
        n_qk, n_v = self.config.qk_width, self.config.v_width
        if min(n_qk, n_v) < d1:
            raise ValueError(f"n_qk={n_qk}, n_v={n_v}: both must be at least d1 = {d1}, one unit per input")
        leaves = ("attn.c_attn.query", "attn.c_attn.key", "attn.c_attn.value", "attn.c_proj")
        (W_Q, mask_q), (W_K, mask_k), (W_V, mask_v), (W_O, mask_o) = self._tensors(block, *leaves)
        root = n_qk**0.25  # the factor 1 / sqrt(n_qk) of the logits, divided between query and key
        qk_error, vo_error = [], []
        for h, (qk, vo) in enumerate(zip(target.qk, target.vo, strict=True)):
            at_qk = (slice(0, d1), slice(h * n_qk, (h + 1) * n_qk))
            at_v = (slice(0, d1), slice(h * n_v, (h + 1) * n_v))
            at_o = (slice(h * n_v, (h + 1) * n_v), slice(0, d2))
            found = prune_to_match(qk, W_Q[at_qk] / root, W_K[at_qk].T / root, **self.how)
            mask_q[at_qk], mask_k[at_qk] = found.mask1, found.mask2.T
            qk_error.append(found.error)
            found = prune_to_match(vo, W_V[at_v], W_O[at_o], **self.how)
            mask_v[at_v], mask_o[at_o] = found.mask1, found.mask2
            vo_error.append(found.error)
        return np.stack(qk_error), np.stack(vo_error)

    def prune_mlp(
        self, block: int, positive: np.ndarray, negative: np.ndarray, rows: np.ndarray, columns: np.ndarray
    ) -> np.ndarray:
        """Fill in the MLP masks of a block, from coordinates `rows` to `columns` of the residual stream."""
        width, needed = self.config.mlp_width, 2 * len(rows)
        if width < needed:
            raise ValueError(f"n_inner={width}: at least {needed} are needed, two per input of the MLP")
        (W1, mask1), (W2, mask2) = self._tensors(block, "mlp.c_fc", "mlp.c_proj")
        found = prune_relu_to_match(positive, negative, W1[rows], W2[:, columns], **self.how)
        mask1[rows], mask2[:, columns] = found.mask1, found.mask2
        return found.error
