"""A cache of what a forward pass has computed, for use in the same forward pass.

A forward reads a tied table twice, and a joint rule selects for all tensors at once: both should be computed
only once. In a training step the result must not be used after the forward, because the next step has other
scores. `fixed_masks` extends the lifetime to a whole block of code in which no score changes, such as the
generation of a text. What may be used again in a later block is in `kept.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from .kept import KeptWeights


@dataclass
class ForwardCache:
    """Computed results, by a key.

    Args:
        keeps_all (`bool`, defaults to `False`):
            Whether every computed parameter is kept (within `fixed_masks`), or only those that a forward
            reads more than once.
        results (`dict[Any, Any]`, *optional*):
            The computed results, by a key that names each.
        kept ([`KeptWeights`], *optional*):
            Masked weights of earlier blocks, which are used again if nothing has changed.
    """

    keeps_all: bool = False
    results: dict[Any, Any] = field(default_factory=dict)
    kept: "KeptWeights | None" = None


_cache: ContextVar[ForwardCache | None] = ContextVar("hf_slt_forward_cache", default=None)


def forward_cache() -> ForwardCache | None:
    """Return what the current forward has computed so far.

    Returns:
        `ForwardCache | None`: the cache of the forward that this thread is in; None outside of a forward, and
        under torch.compile.
    """
    return None if torch.compiler.is_compiling() else _cache.get()


@contextmanager
def fixed_masks(kept: "KeptWeights | None" = None) -> Iterator[None]:
    """Compute every masked weight only once within this block. No score may change inside.

    It has an effect only while gradients are disabled, because a graph cannot be used for two backward passes.

    Args:
        kept ([`KeptWeights`], *optional*):
            Masked weights of earlier blocks, which are used again if nothing has changed. `generate` passes those of
            its model.

    Example:

    ```python
    >>> with torch.no_grad(), fixed_masks():  # doctest: +SKIP
    ...     for batch in batches:
    ...         model(**batch)
    ```
    """
    token = _cache.set(ForwardCache(keeps_all=True, kept=kept))
    try:
        yield
    finally:
        _cache.reset(token)


def share_within_forward(model: nn.Module) -> None:
    """Let each outermost forward of a model share what it computes.

    Args:
        model (`nn.Module`):
            A model that learns.
    """
    model.register_forward_pre_hook(_begin_forward)
    model.register_forward_hook(_end_forward, always_call=True)


# The module whose forward opened the cache of this thread, and the token that closes the cache.
_opened: ContextVar[tuple[nn.Module, Token] | None] = ContextVar("hf_slt_opened", default=None)


def _begin_forward(module: nn.Module, _arguments: Any) -> None:
    if not torch.compiler.is_compiling() and _cache.get() is None:
        _opened.set((module, _cache.set(ForwardCache())))


def _end_forward(module: nn.Module, _arguments: Any, _output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    opened = _opened.get()
    if opened is not None and opened[0] is module:
        _opened.set(None)
        _cache.reset(opened[1])
