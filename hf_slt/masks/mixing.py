"""The kind of each parameter by its name: masked, random and always frozen, or trained and stored.

    parameters={"*.mlp.*": "frozen", "score": "trained"}        # first match wins; all else as the options say

Patterns are those of Python's `fnmatch`. They are compared with the name of a parameter in the stock model
("model.layers.0.mlp.up_proj.weight"), and with the name of its module ("model.layers.0.mlp.up_proj").
"""

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from ..errors import SLTError
from ..weights.random_weights import TensorSpec
from .plans import FixedPlan, LowRankPlan, MaskedPlan, ParameterPlan, TrainedPlan

KINDS = ("masked", "frozen", "trained")


def read_patterns(given: Mapping[str, str] | Iterable[str] | None) -> list[str] | None:
    """Return patterns and kinds in one form, "pattern=kind", in their order.

    Args:
        given (`Mapping[str, str]` or `Iterable[str]`, *optional*):
            Kinds by pattern, or a list that has this form already.

    Returns:
        `list[str] | None`: patterns and kinds, `"pattern=kind"`; None if there are none.

    Raises:
        `ValueError`: for an entry that is not a pattern and a kind.

    Example:

    >>> read_patterns({"*.mlp.*": "frozen"})
    ['*.mlp.*=frozen']
    """
    if not given:
        return None
    pairs = [f"{pattern}={kind}" for pattern, kind in given.items()] if isinstance(given, Mapping) else given
    found = [pairs] if isinstance(pairs, str) else list(pairs)
    for one in found:
        pattern, _, kind = one.rpartition("=") if isinstance(one, str) else ("", "", one)
        if not pattern or kind not in KINDS:
            near = difflib.get_close_matches(str(kind), KINDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"parameters: {one!r} is not a pattern, =, and one of {', '.join(KINDS)}{hint}")
    return found


@dataclass(frozen=True)
class Mix:
    """Patterns, and how to make parameters of the kinds that they name.

    Args:
        patterns (`Sequence[str]`):
            What `read_patterns` returns.
        make_masked (`Callable[[TensorSpec], MaskedPlan]`):
            Makes the plan of a masked parameter of one tensor.
        bits (`int`, defaults to 32):
            Bits of a trained value in the ticket.
        vector_bits (`int`, defaults to 16):
            Bits of a trained bias or gain in the ticket.
    """

    patterns: Sequence[str]
    make_masked: Callable[[TensorSpec], MaskedPlan]
    bits: int = 32
    vector_bits: int = 16

    def pattern_of(self, names: Collection[str]) -> str | None:
        """Return the first pattern that fits one of the names of a parameter.

        Args:
            names (`Collection[str]`):
                All names of a parameter.

        Returns:
            `str | None`: a pattern with its kind, `"pattern=kind"`; None if none fits.
        """
        every = {one for name in names for one in (name, name.rpartition(".")[0])}
        fits = (
            one for one in self.patterns if any(fnmatchcase(name, one.rpartition("=")[0]) for name in every)
        )
        return next(fits, None)

    def check(self, names: Iterable[Collection[str]]) -> None:
        """Raise `SLTError` for a pattern that fits no parameter.

        Args:
            names (`Iterable[Collection[str]]`):
                The names of each parameter.
        """
        known = [one for some in names for one in some]
        known += sorted({one.rpartition(".")[0] for one in known})
        for one in self.patterns:
            pattern = one.rpartition("=")[0]
            if not any(fnmatchcase(name, pattern) for name in known):
                near = difflib.get_close_matches(pattern.replace("*", ""), known, n=1, cutoff=0.0)
                hint = f"; the nearest name is {near[0]!r}" if near else ""
                raise SLTError(f"parameters: no parameter has a name like {pattern!r}{hint}")

    def plan(self, plan: ParameterPlan, kind: str) -> ParameterPlan:
        """Return the plan of a parameter that shall be of a given kind.

        Args:
            plan ([`ParameterPlan`]):
                Its plan by the options of the model.
            kind (`str`):
                One of `KINDS`. Biases and gains are vectors, which are never masked: they stay as they are.

        Returns:
            [`ParameterPlan`]: the plan of a parameter of this kind.

        Raises:
            [`SLTError`]: if the parameter is a table with an `embedding_rank`.
        """
        if isinstance(plan, LowRankPlan):
            raise SLTError(
                "parameters: a table with an embedding_rank is of two kinds; leave one of them out"
            )
        assert isinstance(plan, MaskedPlan | FixedPlan | TrainedPlan), plan
        first = plan.tensors[0] if isinstance(plan, MaskedPlan) else plan.tensor
        shape = plan.shape
        is_vector = len(shape) < 2 or first.law == "constant"
        if kind == "masked":
            stays = is_vector or isinstance(plan, MaskedPlan)
            return plan if stays else self.make_masked(replace(first, shape=shape))
        first, name = replace(first, state_bits=None), first.name.removesuffix(".weight")
        parts = None
        if isinstance(plan, MaskedPlan) and len(plan.tensors) > 1:
            # A parameter without a mask has no path through a trellis: each of its numbers is drawn.
            parts = replace(plan, tensors=[replace(one, state_bits=None) for one in plan.tensors])
            name = name.rpartition(".")[0]
        if kind == "frozen":
            return FixedPlan(replace(first, name=name, shape=shape), shape, parts)
        flat = (1, math.prod(shape)) if is_vector else (math.prod(shape[:-1]), shape[-1])
        start = replace(first, name=name, shape=flat, origin=first.origin if parts is None else Joined(parts))
        return TrainedPlan(start, shape, self.vector_bits if is_vector else self.bits)


@dataclass(frozen=True)
class Joined:
    """Several drawn tensors as one array: the values from which training their parameter starts.

    Args:
        parts ([`MaskedPlan`]):
            The plan that has the tensors.
    """

    parts: MaskedPlan

    def read(self) -> np.ndarray:
        """Return the numbers as they lie in the parameter.

        Returns:
            `np.ndarray`: the numbers in float32.
        """
        return self.parts.unmasked().numpy()


def learned_scales(tensor: TensorSpec, scales: str) -> list[TensorSpec]:
    """Return the row of learned factors of a masked tensor, in a list, or an empty list.

    Args:
        tensor ([`TensorSpec`]):
            The tensor.
        scales (`str`):
            `"none"`, `"tensor"` for one factor, or `"row"` for one factor per output.

    Returns:
        `list[TensorSpec]`: one tensor of shape (1, number of factors), or an empty list.
    """
    if scales == "none":
        return []
    outputs = 1 if scales == "tensor" else math.prod(tensor.scale_shape)
    return [TensorSpec(f"{tensor.name}.scale", (1, outputs), tensor.seed, "constant", 1.0)]
