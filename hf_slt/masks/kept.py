"""Masked weights that the next call may use again, as long as nothing they follow from has changed.

    mark   = rule, frozen numbers, and a hash of the contents of all scores and scales
    weight = the kept one if its mark is the present mark, else a new one

The contents are hashed, because torch's version counters do not notice a write through `.data`. Hashing reads the
scores once; masking also selects, multiplies and writes as much again.
"""

from typing import Any

import numpy as np
from torch import Tensor, nn

from ..weights.threads import map_in_threads
from .plans import MaskedPlan, ParameterPlan

_PIECE = 1 << 22  # scores that one thread hashes at a time


class KeptWeights:
    """Masked weights of a model, each with the mark of what it was computed from. Copies of it are empty."""

    def __init__(self) -> None:
        self._weights: dict[tuple[nn.Module, str], tuple[Any, Tensor]] = {}

    def __reduce__(self) -> Any:
        return KeptWeights, ()

    def __len__(self) -> int:
        return len(self._weights)

    def value(self, plan: ParameterPlan, module: nn.Module, name: str) -> Tensor:
        """Return what `plan.value` returns: the weight that was kept if its mark is still the same.

        Args:
            plan ([`ParameterPlan`]):
                How the parameter is made.
            module (`nn.Module`):
                The module that has the parameter.
            name (`str`):
                Name of the parameter.

        Returns:
            `Tensor`: the parameter.
        """
        mark = mark_of(plan, module, name)
        if mark is None:
            return plan.value(module, name)
        before = self._weights.get((module, name))
        if before is None or before[0] != mark:
            before = self._weights[module, name] = (mark, plan.value(module, name))
        return before[1]


def mark_of(plan: ParameterPlan, module: nn.Module, name: str) -> Any:
    """Return something that differs whenever a masked weight differs, or None if a weight should not be kept.

    Not kept are weights of a model in training, whose rule may sample; weights of a joint rule, which follow from the
    scores of other modules; weights on other devices, where masking takes little time; and all that is not masked.

    Args:
        plan ([`ParameterPlan`]):
            How the parameter is made.
        module (`nn.Module`):
            The module that has the parameter.
        name (`str`):
            Name of the parameter.

    Returns:
        The mark, which can be compared with another, or None.
    """
    if not isinstance(plan, MaskedPlan) or plan.rule.joint or module.training:
        return None
    drawn = getattr(module, plan.drawn_name(name))
    learned = [getattr(module, one) for one in plan.float32_names(name)]
    if not all(_is_plain(one) for one in (drawn, *learned)):
        return None
    frozen = drawn.dtype, drawn.data_ptr(), 0 if drawn.is_inference() else drawn._version
    return plan.rule, frozen, [(one.shape, _hash(one)) for one in learned]


def _is_plain(tensor: Tensor) -> bool:
    """Return whether NumPy can read a tensor: it is on a CPU, and is neither sharded nor traced."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"


def _hash(tensor: Tensor) -> list[bytes]:
    """Return hashes of the contents, piece by piece."""
    import xxhash  # loading a ticket does not need it

    flat = np.from_dlpack(tensor.detach().contiguous().view(-1))
    pieces = [flat[start : start + _PIECE] for start in range(0, len(flat), _PIECE)]
    return map_in_threads(lambda piece: xxhash.xxh3_128_digest(piece.data), pieces)
