"""Masks on any torch module, in place: the core of the method, without a configuration or a file.

supermask_(module, seed=7, density=0.3)      # only the scores are trainable
fix_masks_(module)                           # ordinary frozen parameters again, with the masked values
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ..weights.random_weights import TensorSpec
from ..weights.trellis import check_path
from .mixing import Mix, learned_scales, read_patterns
from .modules import MaskedModule, install_plans, parameter_plans
from .plans import MaskedPlan, ParameterPlan, TrainedPlan
from .rules import make_rule

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def input_axes(module: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of a weight that run over inputs.

    Args:
        module (`nn.Module`):
            The module that has the weight.
        shape (`tuple[int, ...]`):
            Shape of the weight.

    Returns:
        `tuple[int, ...]`: numbers of the axes.
    """
    if type(module).__name__ == "Conv1D":  # transformers' linear layer of GPT-2: (inputs, outputs)
        return (0,)
    if isinstance(module, _CONVOLUTIONS):
        return tuple(range(1, len(shape)))
    if len(shape) == 3 and getattr(module, "is_transposed", False):  # experts: (expert, inputs, outputs)
        return (1,)
    return (len(shape) - 1,)


@dataclass(frozen=True, eq=False)
class Given:
    """Numbers that exist already: the values from which the training of a bias or a gain starts.

    Args:
        values (`torch.Tensor`):
            The numbers.
    """

    values: torch.Tensor

    def read(self) -> np.ndarray:
        """Return a copy of the numbers.

        Returns:
            `np.ndarray`: the numbers in float32.
        """
        return self.values.float().cpu().numpy().copy()


def supermask_(
    module: nn.Module,
    *,
    seed: int = 0,
    rule: str = "edge_popup",
    law: str = "normal",
    scales: bool = False,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    parameters: Mapping[str, str] | None = None,
    **rule_options: Any,
) -> nn.Module:
    """Replace, in place, the weights of a module by frozen random numbers with a mask that is learned.

    Args:
        module (`nn.Module`):
            Any module. Each parameter of two or more dimensions is masked. All others are frozen as they are.
        seed (`int`, defaults to 0):
            Seed of the random numbers.
        rule (`str`, defaults to `"edge_popup"`):
            How scores become a mask, a key of `hf_slt.masks.rules.RULES`.
        law (`str`, defaults to `"normal"`):
            Distribution of the numbers. Their standard deviation is 1 / sqrt(fan in).
        scales (`bool`, defaults to `False`):
            Whether to learn, besides the mask, a factor for each output.
        filter_fn (`Callable[[nn.Module, str], bool]`, *optional*):
            Called with the module that has a parameter and the parameter's full name. False leaves the parameter
            as it is.
        parameters (`Mapping[str, str]`, *optional*):
            The kind of single parameters, by patterns of their names: `"masked"`, `"frozen"` (random, all kept) or
            `"trained"`. The first pattern that fits counts. If none fits, a parameter is masked.
        rule_options:
            Options of the rule, such as `density=0.3`.

    Returns:
        `nn.Module`: the module.

    Example:

    >>> layer = supermask_(nn.Linear(8, 4), seed=7, density=0.5)
    >>> int((layer.weight != 0).sum()), [name for name, one in layer.named_parameters() if one.requires_grad]
    (16, ['scores'])
    """
    made = make_rule(rule, rule_options)
    if made.state_bits is not None:
        check_path(len(made.factors), made.state_bits, 1, (law,))
    plans: dict[str, ParameterPlan] = {}

    def masked(tensor: TensorSpec) -> MaskedPlan:
        rows = learned_scales(tensor, "row" if scales else "none")
        tensor = replace(tensor, state_bits=made.state_bits)
        return MaskedPlan([tensor], made, 0, rows, 32, shared=len(tensor.shape) == 3)

    mix = Mix(read_patterns(parameters) or (), masked, vector_bits=32)
    mix.check([path] for path, _ in module.named_parameters())
    for path, parameter in module.named_parameters():
        holder, shape = module.get_submodule(path.rpartition(".")[0]), tuple(parameter.shape)
        kind = (mix.pattern_of([path]) or "").rpartition("=")[2]
        if filter_fn is not None and not filter_fn(holder, path):
            continue
        if len(shape) < 2:
            if kind == "trained":  # starting from the present values
                start = TensorSpec(path, (1, *shape), origin=Given(parameter.detach().clone()))
                plans[path] = TrainedPlan(start, shape)
            continue
        axes, name = input_axes(holder, shape), path.removesuffix(".weight")
        fan_in = math.prod(shape[axis] for axis in axes)
        factors = tuple(made.factors)
        tensor = TensorSpec(name, shape, seed, law, 1 / math.sqrt(fan_in), factors, input_axes=axes)
        plans[path] = mix.plan(masked(tensor), kind) if kind else masked(tensor)
    module.requires_grad_(False)
    install_plans(module, plans)
    return module


@torch.no_grad()
def fix_masks_(module: nn.Module) -> nn.Module:
    """Make the masked weights of a module ordinary frozen parameters of its stock classes, in place.

    Args:
        module (`nn.Module`):
            What `supermask_` returned.

    Returns:
        `nn.Module`: the module. It does not need hf_slt any more.
    """
    module.eval()
    found = [(holder, name, plan) for _, holder, name, plan in parameter_plans(module)]
    dense = [plan.value(holder, name).detach().clone() for holder, name, plan in found]
    for (holder, name, plan), values in zip(found, dense, strict=True):
        _remove(holder, name, plan)
        holder.__dict__.pop("parameter_plans", None)
        if isinstance(holder, MaskedModule):
            holder.__class__ = holder.stock_class  # type: ignore[assignment]
        holder.register_parameter(name, nn.Parameter(values, requires_grad=False))
    return module


def _remove(holder: nn.Module, name: str, plan: ParameterPlan) -> None:
    """Remove what a plan has put into a module."""
    for one in plan.float32_names(name):
        del holder._parameters[one]
    for one in plan.buffer_names(name):
        del holder._buffers[one]
