"""The Hessian of one attention layer, in closed form (arXiv 2410.10986).

    H = H_o + H_f,    H_o = J^T (d2 loss / dF2) J,    H_f = sum_i (d loss / dF_i) (d2 F_i / dw2)

Both parts are written with three moments of the input under the attention distribution: M1 its mean, M2 and
M3 its second and third central moments. One-hot attention has M2 = M3 = 0: query and key then get neither
curvature nor gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Blocks = Mapping[tuple[str, str], Tensor]


@dataclass(frozen=True)
class AttentionHessian:
    """The Hessian of one attention layer, block by block, and the attention moments behind it.

    `total` is the sum of `outer` and `functional`.

    Args:
        outer (`Blocks`):
            The outer-product Hessian H_o. By ordered pair of block names, such as ("q", "k"), a matrix whose rows
            run over the first block's parameters and columns over the second's, each flattened row-major.
        functional (`Blocks`):
            The functional Hessian H_f, in the same form.
        M1 (`Tensor`):
            First moments of the attention, (L, d), with a leading head axis if the weights had one.
        M2 (`Tensor`):
            Second moments, (L, d, d), likewise.
        M3 (`Tensor`):
            Third moments, (L, d, d, d), likewise.
        blocks (`tuple[str, ...]`):
            Names of the blocks, in their order.
    """

    outer: Blocks
    functional: Blocks
    M1: Tensor
    M2: Tensor
    M3: Tensor
    blocks: tuple[str, ...]

    @property
    def total(self) -> Blocks:
        """H = H_o + H_f, block by block."""
        return {pair: self.outer[pair] + self.functional[pair] for pair in self.outer}


def attention_hessian(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    Y: Tensor,
    *,
    W_O: Tensor | None = None,
    softmax: bool = True,
    causal: bool = False,
    temperature: float = 1.0,
    parameterization: str = "qk",
) -> AttentionHessian:
    """Compute both parts of the Hessian of  |F - Y|^2 / (L d_out)  over an attention layer's weights.

    One head, X of shape (L, d), W_Q and W_K (d, d_K), W_V (d, d_out), Y (L, d_out):

        T = s X W_Q W_K^T X^T,   A = softmax(T) by rows,   F = A X W_V,   s = 1 / (temperature sqrt(d_K))

    Heads are a leading axis of the weights, and W_O (heads, d_V, d_out) an optional fourth weight with
    block name "o": F = sum_h A^h X W_V^h W_O^h. In what follows B = W_V W_O, or W_V without W_O.

    Row i of A is a distribution over the rows x_j of X. The Hessian depends only on its moments:

        M1_i = E[x],   M2_i = E[(x - M1_i)(x - M1_i)^T],   M3_i = E[(x - M1_i)^(x3)]

    With c = 2 / (L d_out), delta_i = F_i - Y_i, u_i = B delta_i, q_i = W_Q^T x_i, the Jacobians of F_ie

        J_V[r,f] = M1_ir W_O[f,e]             J_O[f,e'] = (M1_i W_V)_f 1[e=e']
        J_Q[p,a] = s x_ip (B^T M2_i W_K)_ea   J_K[t,b]  = s (B^T M2_i)_et q_ib

    give H_o = c J^T J, and the second derivatives of F, contracted with c delta, give H_f:

        QQ = c s^2 sum_i x_ip x_ip' (W_K^T (u_i . M3_i) W_K)_ab
        KK = c s^2 sum_i q_ia q_ib (u_i . M3_i)_rt
        QK = c s^2 sum_i x_ip q_ib ((u_i . M3_i) W_K)_ta + c s 1[a=b] sum_i x_ip (u_i^T M2_i)_t
        VQ = c s sum_i (W_O delta_i)_f x_ip (M2_i W_K)_ra      VK = c s sum_i (W_O delta_i)_f M2_i[r,t] q_ib
        OQ = c s sum_i delta_ie x_ip (W_V^T M2_i W_K)_fa       OK = c s sum_i delta_ie (W_V^T M2_i)_ft q_ib
        VO = c 1[f=f'] sum_i M1_ir delta_ie                    VV = OO = 0

    Pairs of different heads occur only in H_o; in H_f they are zero.

    `softmax=False` is linear attention, A = T: M1 = A X, M2_i is the sum of x_j x_j^T over the visible
    rows, M3 is zero, and so are the diagonal blocks of H_f. `causal` hides rows j > i.
    `parameterization="single"` differentiates by W_QK = W_Q W_K^T in place of its factors, as one block
    "qk": then the term with 1[a=b] is absent.

    Everything is computed in the dtype of X. Attention that is one-hot has M2 = M3 = 0. The query then has no
    curvature at all, as the example shows.

    Args:
        X (`Tensor`):
            Inputs, (L, d).
        W_Q (`Tensor`):
            Query weights, (d, d_K), with a leading head axis for several heads.
        W_K (`Tensor`):
            Key weights, (d, d_K), likewise.
        W_V (`Tensor`):
            Value weights, (d, d_out), or (d, d_V) with `W_O`, likewise.
        Y (`Tensor`):
            Targets, (L, d_out).
        W_O (`Tensor`, *optional*):
            Output weights, (d_V, d_out), a fourth block "o".
        softmax (`bool`, defaults to `True`):
            Whether attention is normalised. False is linear attention.
        causal (`bool`, defaults to `False`):
            Whether row i sees only rows up to i.
        temperature (`float`, defaults to 1.0):
            Divides the logits.
        parameterization (`str`, defaults to `"qk"`):
            `"qk"` for W_Q and W_K, `"single"` for their product as one block.

    Returns:
        [`AttentionHessian`]: both parts by pairs of blocks, and the moments. For NumPy arrays it has NumPy arrays.

    Raises:
        `ValueError`: for an impossible option, or shapes that do not fit.

    Example:

    >>> _ = torch.manual_seed(0)
    >>> X, Y, W_Q, W_K, W_V = (torch.randn(4, 4, dtype=torch.float64) for _ in range(5))
    >>> H = attention_hessian(X, W_Q, W_K, W_V, Y)
    >>> H.outer["q", "k"].shape, bool(H.functional["q", "q"].abs().max() > 1e-3)
    (torch.Size([16, 16]), True)
    >>> cold = attention_hessian(X, W_Q, W_K, W_V, Y, temperature=1e-4)
    >>> bool(cold.total["q", "q"].abs().max() < 1e-12)
    True
    """
    if parameterization not in ("qk", "single"):
        raise ValueError(f'parameterization={parameterization!r}: give "qk" or "single"')
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: give a number above 0")
    numpy_in = isinstance(X, np.ndarray)
    X = torch.as_tensor(X)
    W_Q, W_K, W_V, Y = (torch.as_tensor(t).to(X) for t in (W_Q, W_K, W_V, Y))
    many = W_Q.dim() == 3
    if not many:
        W_Q, W_K, W_V = W_Q[None], W_K[None], W_V[None]
    if W_O is not None:
        W_O = torch.as_tensor(W_O).to(X)
        W_O = W_O if W_O.dim() == 3 else W_O[None]
    _check_shapes(X, W_Q, W_K, W_V, W_O, Y)
    heads, d, d_K = W_Q.shape
    L, d_out = Y.shape
    c, s = 2.0 / (L * d_out), 1.0 / (temperature * d_K**0.5)

    def eye(size: int) -> Tensor:
        return torch.eye(size).to(X)

    M1, M2, M3 = _moments(X, W_Q, W_K, s, softmax, causal)
    has_output, single = W_O is not None, parameterization == "single"
    query = "qk" if single else "q"
    if single:  # the block of W_QK is that of a query whose key is the identity
        W_K = eye(d).expand(heads, d, d)
    if W_O is None:
        W_O = eye(d_out).expand(heads, d_out, d_out)
    B = W_V @ W_O  # (h, d, e)
    delta = torch.einsum("hir,hre->ie", M1, B) - Y
    u = torch.einsum("hre,ie->hir", B, delta)
    q = torch.einsum("ip,hpa->hia", X, W_Q)
    uM3 = torch.einsum("hir,hirst->hist", u, M3)  # (h, i, d, d)
    uM2 = torch.einsum("hir,hirt->hit", u, M2)
    BM2 = torch.einsum("hre,hirt->hiet", B, M2)  # B^T M2_i
    M2K = torch.einsum("hirt,hta->hira", M2, W_K)
    W_Od = torch.einsum("hfe,ie->hif", W_O, delta)

    # J[name] : (i, e, h, the two axes of that weight)
    J = {query: s * torch.einsum("ip,hiet,hta->iehpa", X, BM2, W_K)}
    if not single:
        J["k"] = s * torch.einsum("hiet,hib->iehtb", BM2, q)
    J["v"] = torch.einsum("hir,hfe->iehrf", M1, W_O)
    if has_output:
        J["o"] = torch.einsum("hir,hrf,eg->iehfg", M1, W_V, eye(d_out))
    flat = {name: j.reshape(L * d_out, -1) for name, j in J.items()}
    outer = {(m, n): c * flat[m].T @ flat[n] for m in J for n in J}

    # F[m, n] : (h, two axes of m, two axes of n), one head at a time because H_f joins no two heads
    KuM3K = torch.einsum("hist,hsa,htb->hiab", uM3, W_K, W_K)
    F = {
        (query, query): c * s**2 * torch.einsum("ip,iw,hiab->hpawb", X, X, KuM3K),
        ("v", query): c * s * torch.einsum("hif,ip,hira->hrfpa", W_Od, X, M2K),
    }
    if not single:
        F["k", "k"] = c * s**2 * torch.einsum("hia,hib,hirt->hratb", q, q, uM3)
        F["q", "k"] = c * s**2 * torch.einsum("ip,hib,hist,hsa->hpatb", X, q, uM3, W_K)
        F["q", "k"] += c * s * torch.einsum("ab,ip,hit->hpatb", eye(d_K), X, uM2)
        F["v", "k"] = c * s * torch.einsum("hif,hirt,hib->hrftb", W_Od, M2, q)
    if has_output:
        VM2 = torch.einsum("hrf,hirt->hift", W_V, M2)
        F["o", query] = c * s * torch.einsum("ie,ip,hift,hta->hfepa", delta, X, VM2, W_K)
        if not single:
            F["o", "k"] = c * s * torch.einsum("ie,hift,hib->hfetb", delta, VM2, q)
        F["v", "o"] = c * torch.einsum("fg,hir,ie->hrfge", eye(W_V.shape[2]), M1, delta)

    joined = {pair: torch.block_diag(*block.flatten(3).flatten(1, 2)) for pair, block in F.items()}
    functional = {pair: torch.zeros_like(block) for pair, block in outer.items()}
    functional |= {(n, m): block.T for (m, n), block in joined.items()} | joined

    def back(tensor: Tensor) -> Any:
        return tensor.numpy() if numpy_in else tensor

    outer, functional = ({pair: back(one) for pair, one in part.items()} for part in (outer, functional))
    moments = (back(M if many else M[0]) for M in (M1, M2, M3))
    return AttentionHessian(outer, functional, *moments, blocks=tuple(J))


def to_score_space(block: Tensor, weight: Tensor, weight_right: Tensor | None = None) -> Tensor:
    """Compute diag(w) H diag(w'): a block over weights becomes a block over straight-through scores.

    Args:
        block (`Tensor`):
            A block of a Hessian over weights.
        weight (`Tensor`):
            The frozen weights of its rows.
        weight_right (`Tensor`, *optional*):
            The frozen weights of its columns. Default: those of its rows.

    Returns:
        `Tensor`: the block over scores.

    Raises:
        `ValueError`: if the shapes do not fit.

    Example:

    >>> H = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    >>> to_score_space(H, torch.tensor([3.0, -3.0])).tolist()   # the spectrum of H, times 9
    [[18.0, -9.0], [-9.0, 18.0]]
    """
    left = weight.reshape(-1)
    right = left if weight_right is None else weight_right.reshape(-1)
    if block.shape != (left.numel(), right.numel()):
        raise ValueError(
            f"a block of shape {tuple(block.shape)} does not match weights of {left.numel()} and "
            f"{right.numel()} entries; give the frozen weights of the block's rows and columns"
        )
    return left[:, None] * block * right[None, :]


def _moments(
    X: Tensor, W_Q: Tensor, W_K: Tensor, s: float, softmax: bool, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the moments of X's rows under the attention, heads first; without softmax, their substitutes."""
    L, d = X.shape
    T = s * torch.einsum("ip,hpa,hta,jt->hij", X, W_Q, W_K, X)
    seen = torch.ones(L, L, dtype=torch.bool, device=X.device)
    seen = seen.tril() if causal else seen
    if not softmax:
        A = T * seen
        M2 = torch.einsum("ij,jr,jt->irt", seen.to(X), X, X).expand(len(T), L, d, d)
        return A @ X, M2, X.new_zeros(len(T), L, d, d, d)
    A = T.masked_fill(~seen, float("-inf")).softmax(-1)
    M1 = A @ X
    centred = X[None, None] - M1[:, :, None]  # (h, i, j, d); subtracting before squaring is more accurate
    M2 = torch.einsum("hij,hijr,hijt->hirt", A, centred, centred)
    M3 = torch.einsum("hij,hijr,hijs,hijt->hirst", A, centred, centred, centred)
    return M1, M2, M3


def _check_shapes(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, W_O: Tensor | None, Y: Tensor) -> None:
    heads, d, _ = W_Q.shape
    d_out = Y.shape[-1]
    wanted = {
        "X": (X, (Y.shape[0], d)),
        "W_K": (W_K, tuple(W_Q.shape)),
        "W_V": (W_V, (heads, d, d_out if W_O is None else W_V.shape[-1])),
    }
    if W_O is not None:
        wanted["W_O"] = (W_O, (heads, W_V.shape[-1], d_out))
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but W_Q {tuple(W_Q.shape)} and Y {tuple(Y.shape)} "
                f"need {shape} (heads come first)"
            )
