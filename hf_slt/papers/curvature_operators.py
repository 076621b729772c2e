"""The Hessian of a token loss, and its outer part, as operators: only their products with vectors are computed.

Over one block w of a model's weights, with logits F(w), their Jacobian J and one-hot targets y, the summed
cross-entropy has

    gradient(w, s) = J^T (softmax(F + s) - y)    # at s = 0
    H v            = (d gradient / dw)^T v       # H is its own transpose
    B J v          = (d gradient / ds)^T v       # by the same pass; B = d2 loss / dF2 = diag(p) - p p^T
    H_o v          = J^T (B J v)

Therefore everything is reverse differentiation of a gradient that is recorded once for many v. Norms and traces
are estimated by products with random vectors, extreme eigenvalues by Lanczos' method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn.functional import one_hot

Logits = Callable[[Tensor], Tensor]  # block of weights -> a row of logits for each target


class CurvatureOperator:
    """H and H_o of the mean cross-entropy over one block of weights, row-major.

    The recorded gradient of a single batch is kept for all products. With several batches it is recorded every time.

    Args:
        batches (`Sequence[tuple[Logits, Tensor]]`):
            For each batch, its logits as a function of the block, and its targets.
        block (`Tensor`):
            The weights of the block.
        step (`Tensor`, *optional*):
            Frozen weights w. If given, the operator is diag(w) H diag(w), the Hessian over straight-through
            scores. Both factors are applied outside of differentiation, which would keep more copies of the
            block.

    Example:

    >>> batch = lambda block: block, torch.tensor([0])  # one target; the block itself is its logits
    >>> CurvatureOperator([batch], torch.zeros(1, 2)) @ torch.eye(2)  # diag(p) - p p^T, p = 1/2
    tensor([[ 0.2500, -0.2500],
            [-0.2500,  0.2500]])
    """

    def __init__(
        self, batches: Sequence[tuple[Logits, Tensor]], block: Tensor, step: Tensor | None = None
    ) -> None:
        self.batches, self.block, self.step = batches, block, step
        self.tokens = sum(len(targets) for _, targets in batches)
        self.size, self.device, self.dtype = block.numel(), block.device, block.dtype
        self._recorded: tuple[Callable, Callable] | None = None

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Multiply H by one vector, or by the columns of a matrix, which go through the model together."""
        return self._products(vectors, outer=False)[0]

    def with_outer(self, vectors: Tensor) -> list[Tensor]:
        """Multiply vectors by H and by H_o.

        Args:
            vectors (`Tensor`):
                Vectors as columns, (size, number).

        Returns:
            `list[Tensor]`: both products.
        """
        return self._products(vectors, outer=True)

    @torch.no_grad()  # otherwise products would be recorded too
    def _products(self, vectors: Tensor, outer: bool) -> list[Tensor]:
        step = 1 if self.step is None else self.step[:, None]
        columns = (step * vectors.reshape(self.size, -1)).view(*self.block.shape, -1)
        sums: list[Tensor] = []
        for batch in self.batches:
            found = self._of_batch(*batch, columns, outer)
            sums = list(map(torch.add, sums, found)) if sums else found
        means = [summed.reshape(self.size, -1) / self.tokens for summed in sums]
        return [mean.mul_(step).view_as(vectors) for mean in means]

    def _of_batch(self, logits: Logits, targets: Tensor, columns: Tensor, outer: bool) -> list[Tensor]:
        recorded = self._recorded or _record(logits, self.block, targets)
        if len(self.batches) == 1:
            self._recorded = recorded
        of_gradient, of_logits = (vmap(one, in_dims=-1, out_dims=-1) for one in recorded)
        curved, pushed = of_gradient(columns)  # H v, B J v
        return [curved, *of_logits(pushed)] if outer else [curved]


def _record(logits: Logits, block: Tensor, targets: Tensor) -> tuple[Callable, Callable]:
    """Return the functions v -> (H v, B J v) of the summed loss, and u -> (J^T u,)."""
    predicted, of_logits = vjp(logits, block)
    y = one_hot(targets, predicted.shape[-1])

    def gradient(block: Tensor, shift: Tensor) -> Tensor:
        predicted, transposed = vjp(logits, block)
        return transposed((predicted + shift).softmax(-1) - y)[0]

    return vjp(gradient, block, torch.zeros_like(predicted))[1], of_logits


def estimate_norms(
    operator: CurvatureOperator,
    probes: int,
    generator: torch.Generator,
    *,
    outer: bool,
    most: int,
    chunk: int,
) -> dict[str, float]:
    """Estimate Frobenius norms and traces of H, H_o and H - H_o from products with random vectors.

    |A|^2 = |A Q|^2 + |A (I - QQ^T)|^2 for orthonormal Q. Q spans the products of H and H_o with a few random
    vectors, which contain the dominant eigenvectors; the second term is Hutchinson's estimate. H and H_o are
    multiplied by the same vectors, so H_f is measured itself, not as a difference of two estimates.

    Args:
        operator ([`CurvatureOperator`]):
            The operator.
        probes (`int`):
            Number of vectors.
        generator (`torch.Generator`):
            Source of the random vectors.
        outer (`bool`):
            Whether to measure H_o. Without it all probes are used for H, and the other results are NaN.
        most (`int`):
            Largest number of vectors of Q.
        chunk (`int`):
            Vectors that go through the model together.

    Returns:
        `dict[str, float]`: norms and traces by name.
    """
    size, device, dtype = operator.size, operator.device, operator.dtype

    def products(vectors: Tensor) -> list[Tensor]:
        return operator.with_outer(vectors) if outer else [operator @ vectors]

    def random_signs(count: int) -> Iterator[Tensor]:
        """Yield Rademacher vectors, a few columns at a time."""
        for start in range(0, count, chunk):
            shape = (size, min(chunk, count - start))
            signs = torch.empty(shape, dtype=torch.int8).random_(0, 2, generator=generator)
            yield signs.to(device, dtype).mul_(2).sub_(1)

    def sums(vectors: Tensor) -> np.ndarray:
        """Return the sums of |Hv|^2, |H_o v|^2, |H_f v|^2, v.Hv, v.H_o v over the columns v, in double."""
        h, *others = products(vectors)
        o = others[0] if outer else torch.full_like(h[:1], math.nan).expand_as(h)
        found = np.zeros(5)
        for some in zip(vectors.split(2**16), h.split(2**16), o.split(2**16), strict=True):
            v, hv, ov = (part.double() for part in some)  # in slices: all at once take more memory than H
            pairs = ((hv, hv), (ov, ov), (hv - ov, hv - ov), (v, hv), (v, ov))
            found += [(a * b).sum().item() for a, b in pairs]
        return found

    total = np.zeros(5)
    if size <= probes:
        for some in torch.eye(size, dtype=dtype, device=device).split(chunk, dim=1):
            total += sums(some)
    else:
        sketched = min(probes // 5, most // 2)  # and as many basis vectors for each operator
        basis = torch.empty(size, 0, dtype=dtype, device=device)
        if sketched:
            images = [image for some in random_signs(sketched) for image in products(some)]
            basis = torch.linalg.qr(torch.cat(images, dim=1))[0]
            for some in basis.split(chunk, dim=1):
                total += sums(some)
        rest = probes - sketched - basis.shape[1]
        for some in random_signs(rest):
            if sketched:
                some -= basis @ (basis.T @ some)
            total += sums(some) / rest
    total[:3] = np.sqrt(total[:3])
    names = ("norm", "norm_outer", "norm_functional", "trace", "trace_outer")
    return dict(zip(names, total.tolist(), strict=True))


def extreme_eigenvalues(
    hessian: CurvatureOperator, norm: float, generator: torch.Generator, width: int
) -> tuple[float, float]:
    """Compute the smallest and largest eigenvalue. Errors are 1e-5 of the spectrum's width in double, 1e-4 in single.

    Args:
        hessian ([`CurvatureOperator`]):
            The operator.
        norm (`float`):
            About the norm of H.
        generator (`torch.Generator`):
            Source of the first vector.
        width (`int`):
            Number of vectors that Lanczos may hold.

    Returns:
        `tuple[float, float]`: smallest and largest eigenvalue.

    Raises:
        `ImportError`: if SciPy is missing.
    """
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    size, device, dtype = hessian.size, hessian.device, hessian.dtype
    if norm == 0:
        return 0.0, 0.0
    if size <= width:
        columns = [hessian @ one for one in torch.eye(size, dtype=dtype, device=device)]
        values = torch.linalg.eigvalsh(torch.stack(columns, dim=1).double())
        return values[0].item(), values[-1].item()

    start = torch.randn(size, generator=generator, dtype=dtype).numpy()
    # In single precision, rounding limits the accuracy.
    tol = 1e-5 if dtype == torch.float64 else 1e-4

    def farthest_from(shift: float) -> float:
        """Return the eigenvalue of H / norm that is farthest from `shift`."""

        def apply(vector: np.ndarray) -> np.ndarray:
            v = torch.from_numpy(np.ascontiguousarray(vector).reshape(-1)).to(device)
            return (hessian @ v).div_(norm).sub_(v, alpha=shift).cpu().numpy()

        # Created here and not kept, to free the memory of ARPACK afterwards.
        shifted = LinearOperator((size, size), matvec=apply, dtype=start.dtype)
        try:
            found = eigsh(shifted, k=1, v0=start, ncv=width, tol=tol, return_eigenvectors=False)
        except ArpackNoConvergence as stopped:
            raise RuntimeError(
                f"Lanczos found no eigenvalue of a block of {size} weights: measure in "
                "dtype=torch.float64, or leave eigenvalues out (eigenvalues=False)"
            ) from stopped
        return float(found[0]) + shift

    # Eigenvalues of H / norm, because ARPACK treats anything below 1e-11 as zero. The end of larger magnitude
    # comes first; the other end is then the eigenvalue farthest from it. So both converge relative to the
    # width of the spectrum, even if one of them is zero.
    one = farthest_from(0.0)
    low, high = sorted((one, farthest_from(one)))
    return norm * low, norm * high
