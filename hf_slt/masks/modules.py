"""Stock modules whose parameters are computed: a single mechanism for every type of layer.

A weight is an attribute of a module. `install_plans` removes the parameter, adds the learned tensors (scores,
scales or values) in its place, and changes the module's class to a subclass of the same name in which the attribute
is a property. Every forward, every attention backend and every loss of the stock model stays as it is:

    class Conv1D(MaskedModule, Conv1D):
        weight = property(...)          # drawn * factors[rule(scores)] * scale
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cache import forward_cache, share_within_forward
from .plans import LowRankPlan, MaskedPlan, ParameterPlan, TiedPlan, is_traced
from .rules import Rule

Plans = Mapping[str, ParameterPlan]  # by path of the parameter in the model: "h.0.attn.c_attn.weight"


class MaskedModule(nn.Module):
    """Base class of modules with computed parameters. Every object also belongs to a stock class."""

    parameter_plans: dict[str, ParameterPlan]
    stock_class: type[nn.Module]

    def computed_parameter(self, name: str) -> Tensor:
        """Compute a parameter from the present scores.

        Args:
            name (`str`):
                Name of the parameter, such as `"weight"`.

        Returns:
            `Tensor`: the parameter, differentiable in the scores.
        """
        plan = self.parameter_plans[name]
        if torch.compiler.is_compiling():  # torch.compile does not know context variables
            return plan.value(self, name)
        if _initialising.get():
            return _placeholder(plan)
        store = forward_cache()
        if store is not None and store.keeps_all:
            store = None if torch.is_grad_enabled() else store
        elif store is not None:
            store = store if getattr(plan, "shared", False) else None
        if store is None:
            return plan.value(self, name)
        key = (self, name)
        if key not in store.results:
            store.results[key] = (
                plan.value(self, name) if store.kept is None else store.kept.value(plan, self, name)
            )
        return store.results[key]

    def reset_computed(self) -> None:
        """Fill whatever was not loaded, as transformers' `_init_weights` does."""
        for name, plan in self.parameter_plans.items():
            plan.reset(self, name)

    _parameters: dict[str, Any]
    _buffers: dict[str, Any]

    def _apply(self, fn, recurse=True):
        """Move with the model. Trained tensors stay in float32; frozen numbers are drawn again after a cast."""
        trained = [name for key, plan in self.parameter_plans.items() for name in plan.float32_names(key)]
        drawn = [name for key, plan in self.parameter_plans.items() for name in plan.buffer_names(key)]
        kept = {name: self._parameters[name].detach() for name in trained}
        before = {name: (self._buffers[name].dtype, self._buffers[name].is_meta) for name in drawn}
        super()._apply(fn, recurse)
        for name, old in kept.items():
            new = self._parameters[name]
            if new.dtype != torch.float32 and not new.is_meta:
                gradient, new.grad = new.grad, None
                new.data = old.to(new.device, torch.float32)
                new.grad = None if gradient is None else gradient.to(torch.float32)
        after = {name: (self._buffers[name].dtype, self._buffers[name].is_meta) for name in drawn}
        if after != before and not any(is_meta for _, is_meta in after.values()):
            for name, plan in self.parameter_plans.items():
                plan.redraw(self, name)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time; this tells pickle how to make it again.
        return _rebuild, (self.stock_class, tuple(_computed_names(self.parameter_plans))), self.__dict__


class _SparseEmbedding(nn.Embedding):
    """A trainable table. The gradient of a lookup is sparse: a few rows, which autograd adds to that of the logits.

    Otherwise these rows would first be copied into a table of zeros. The attribute `sparse` stays false, because an
    adapter of the table would read it as its own setting.
    """

    parameter_plans: dict[str, ParameterPlan]

    def forward(self, input: Tensor) -> Tensor:
        plan = self.parameter_plans["weight"]
        sparse = isinstance(plan, MaskedPlan) and not is_traced(plan.scores(self, "weight"))
        options = self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq
        return F.embedding(input, self.weight, *options, self.sparse or sparse)


@cache
def masked_class(stock_class: Any, names: tuple[str, ...]) -> type[MaskedModule]:
    """Return the subclass of a stock module's class in which these parameters are computed.

    Args:
        stock_class (`type`):
            The class of the module.
        names (`tuple[str, ...]`):
            Names of the computed parameters.
    """
    bases: tuple[type, ...] = (stock_class,)
    if issubclass(stock_class, nn.Embedding) and "weight" in names:
        # In the place of nn.Embedding: a subclass of it may do more in its own forward.
        bases = (_SparseEmbedding,) if stock_class is nn.Embedding else (stock_class, _SparseEmbedding)
    # transformers matches classes by their names, so the name stays.
    return type(
        stock_class.__name__,
        (MaskedModule, *bases),
        {
            "__doc__": f"{stock_class.__name__} whose {', '.join(names) or 'parameters'} follow from a seed.",
            "__module__": stock_class.__module__,
            "__qualname__": stock_class.__qualname__,
            "stock_class": stock_class,
            **{name: _computed_property(name) for name in names},
        },
    )


def _computed_property(name: str) -> property:
    def read(self: MaskedModule) -> Tensor:
        return self.computed_parameter(name)

    return property(read, doc=f"The {name} as the module computes with it.")


def _computed_names(plans: Mapping[str, ParameterPlan]) -> list[str]:
    return [name for name, plan in plans.items() if plan.computed]


def _rebuild(stock_class: Any, names: tuple[str, ...]) -> MaskedModule:
    made = masked_class(stock_class, names)
    return made.__new__(made)


def install_plans(model: nn.Module, plans: Plans) -> None:
    """Replace parameters of a model by computed ones, in place.

    Args:
        model (`nn.Module`):
            Any module.
        plans (`Mapping[str, ParameterPlan]`):
            How each parameter is made, by its path in the model. Parameters that are not named stay.
    """
    for path, plan in plans.items():
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        attach_plan(module, name, plan)
        plan.install(module, name)
    for module in {id(one): one for one in _planned_modules(model)}.values():
        stock: Any = module.stock_class if isinstance(module, MaskedModule) else type(module)
        module.__class__ = masked_class(stock, tuple(_computed_names(module.parameter_plans)))
        module.reset_computed()
        if any(getattr(plan, "shared", False) for plan in module.parameter_plans.values()):
            share_within_forward(
                module
            )  # gradient checkpointing runs this module again alone, outside of the model's forward
    for plan in plans.values():
        if isinstance(plan, TiedPlan):
            source: Any = plan.source
            source.parameter_plans[plan.source_name].shared = True
    set_siblings(model)
    share_within_forward(model)


def attach_plan(module: nn.Module, name: str, plan: ParameterPlan) -> None:
    """Store the plan of a parameter in its module.

    Args:
        module (`nn.Module`):
            A module.
        name (`str`):
            Name of the parameter.
        plan ([`ParameterPlan`]):
            How the parameter is made.
    """
    module.__dict__.setdefault("parameter_plans", {})[name] = plan


def set_siblings(model: nn.Module) -> None:
    """Give each parameter of a joint rule its siblings, all masked parameters of the model: they are ranked together.

    Args:
        model (`nn.Module`):
            A model that learns.
    """
    masked = [(module, name) for _, module, name, _ in masked_parameters(model)]
    for _, _, _, plan in masked_parameters(model):
        plan.siblings = tuple(masked) if plan.rule.joint else ()


def _planned_modules(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if "parameter_plans" in module.__dict__)


def parameter_plans(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, ParameterPlan]]:
    """Yield (path of the module, module, name of the parameter, plan) for every parameter that has a plan.

    PEFT trains copies of modules under the name `modules_to_save`. Their weights are not those of the plan.

    Args:
        model (`nn.Module`):
            A model that learns, or a ticket.

    Yields:
        Path of the module, the module, name of the parameter, and its plan.
    """
    for path, module in model.named_modules():
        if ".modules_to_save." in path:
            continue
        for name, plan in module.__dict__.get("parameter_plans", {}).items():
            yield path, module, name, plan


def masked_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, MaskedPlan]]:
    """Yield what `parameter_plans` yields, for every masked parameter and for the basis of a table of low rank.

    Args:
        model (`nn.Module`):
            A model that learns, or a ticket.

    Yields:
        Path of the module, the module, name of the parameter, and its plan.
    """
    for path, module, name, plan in parameter_plans(model):
        if isinstance(plan, LowRankPlan):
            yield path, module, "basis", plan.basis
        elif isinstance(plan, MaskedPlan):
            yield path, module, name, plan


def set_rule(model: nn.Module, rule: Rule) -> None:
    """Give all masked parameters of a model this rule. A training loop may so change an option at every step.

    Args:
        model (`nn.Module`):
            A model that learns.
        rule ([`Rule`]):
            The new rule. Its factors must be those of the old one.
    """
    for _, _, _, plan in masked_parameters(model):
        plan.rule = rule


def set_rule_options(model: nn.Module, **options: Any) -> None:
    """Change options of the rule of all masked parameters, such as `density=0.5`.

    Args:
        model (`nn.Module`):
            A model that learns.
        options:
            New values of options of the rule.
    """
    for _, _, _, plan in masked_parameters(model):
        plan.rule = replace(plan.rule, **options)


# -- while transformers initialises weights ---------------------------------------------------------------

_initialising: ContextVar[bool] = ContextVar("hf_slt_initialising", default=False)


@contextmanager
def stock_initialisation() -> Iterator[None]:
    """Let a stock `_init_weights` run over modules with computed parameters, without changing these parameters.

    It is needed because nothing else restores some buffers. Computed parameters are marked as filled already.
    """
    token = _initialising.set(True)
    try:
        yield
    finally:
        _initialising.reset(token)


def _placeholder(plan: ParameterPlan) -> Tensor:
    shape = getattr(plan, "shape", None) or (1,)
    filled = torch.empty(shape, device="meta")
    filled._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' init functions skip it
    return filled
