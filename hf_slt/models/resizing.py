"""Changes the number of rows of tables. Rows that exist before and after keep their values.

New rows of masked and frozen tables are drawn from the seed, like all other rows. New rows of trained tables are the
mean of the old rows, as in transformers, or drawn too.

No list says which parameters have a row per token. Instead, an empty model of the same class is built for the new
vocabulary: the parameters that have another shape there are those to resize.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import SLTError
from ..masks.modules import attach_plan, parameter_plans, set_siblings
from ..masks.plans import LowRankPlan, MaskedPlan, ParameterPlan, TiedPlan, TrainedPlan
from ..weights.codes import code_array, full_codes, pack_codes
from ..weights.quantisation import as_stored
from .base import MixinBase
from .ternary import TernaryLayer

_SIZES = (
    "num_embeddings",
    "out_features",
    "vocab_size",
)  # attributes in which modules of torch and transformers store their number of rows


@dataclass
class _Resized:
    """A parameter that gets another number of rows: where it is, and how it was and will be made."""

    path: str
    module: Any
    name: str
    before: Any
    plan: Any


class ResizingMixin(MixinBase):
    """The method that changes the vocabulary of a model."""

    config: Any
    ticket_arrays: dict[str, np.ndarray]

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Module:
        """Change the number of tokens, as in transformers.

        Args:
            new_num_tokens (`int`, *optional*):
                New number of rows.
            pad_to_multiple_of (`int`, *optional*):
                Round the number of rows up to a multiple of this.
            mean_resizing (`bool`, defaults to `True`):
                Whether new rows of trained tables are the mean of the others; otherwise they are drawn, as at the
                start of training. (transformers adds a little noise to the mean; here there is none, so a resize
                can be repeated.)

        Returns:
            `nn.Module`: the table.

        Raises:
            [`SLTError`]: for pretrained weights, for a ternary table, and if only a part of the table is searched.
        """
        model: Any = self
        before = getattr(self.config.get_text_config(), "vocab_size", None)
        if before is None:
            raise SLTError(f"{type(self).__name__} has no vocabulary that could be resized")
        multiple = pad_to_multiple_of or 1
        rows = -(-(new_num_tokens or before) // multiple) * multiple
        if rows != before:
            resized, sizes = self._find_resized(rows)
            model.vocab_size = rows  # as in transformers
            for module, values in sizes:
                module.__dict__.update(values)
            for _, inner in model._inner_models():  # those of T5 have configurations of their own
                text = inner.config.get_text_config()
                if getattr(text, "vocab_size", None) == before:
                    text.vocab_size = rows
            if self.config.state == "ticket":
                self._resize_ticket(resized, mean_resizing)
            else:
                _resize_scores(resized, mean_resizing)
                set_siblings(model)
            model._mark_initialised()
            model.describe_parameters()
        return model.get_input_embeddings()

    def _find_resized(self, rows: int) -> tuple[list[_Resized], list[tuple[nn.Module, dict[str, int]]]]:
        """Return the parameters to resize, and the sizes that modules store. Nothing is changed yet."""
        if self.config.backbone:
            raise SLTError(
                "the vocabulary of pretrained weights cannot be resized; resize the checkpoint, then mask it"
            )
        model: Any = self
        config = copy.deepcopy(self.config)
        config.get_text_config().vocab_size = rows
        with torch.device("meta"):
            wanted: Any = type(self)(config)
        modules, sizes = dict(self.named_modules()), []
        for path, module in wanted.named_modules():
            values = {name: module.__dict__[name] for name in _SIZES if name in module.__dict__}
            if path in modules and values:
                sizes.append((modules[path], values))
        found = []
        plan: Any
        for path, _, name, plan in parameter_plans(wanted):
            if isinstance(plan, TiedPlan):
                continue
            module = model._stock_module(path)
            before = module.__dict__.get("parameter_plans", {}).get(name)
            if before is None or (plan.shape != before.shape and modules.get(path) is not module):
                raise SLTError(
                    f"{path} was replaced, or has an adapter; resize the vocabulary before you do that"
                )
            if plan.shape != before.shape:
                found.append(_Resized(path, module, name, before, plan))
        for one in found:
            _refuse(one)
        return found, sizes

    @torch.no_grad()
    def _resize_ticket(self, resized: Sequence[_Resized], mean: bool) -> None:
        model: Any = self
        arrays = self.ticket_arrays
        for one in resized:
            for old, new in zip(one.before.stored_tensors(), one.plan.stored_tensors(), strict=True):
                name = new.tensor.name
                if name not in arrays or old.tensor.shape == new.tensor.shape:
                    continue
                if new.kind == "masked":
                    codes = code_array(old.tensor, arrays[name]).astype(np.uint8)[: new.tensor.shape[0]]
                    more = code_array(new.tensor, full_codes(new.tensor)).astype(np.uint8)[len(codes) :]
                    arrays[name] = pack_codes(np.concatenate([codes, more]), len(new.tensor.factors))
                else:
                    arrays[name] = as_stored(_resized_values(arrays[name], new.tensor, mean), new.bits)
            attach_plan(one.module, one.name, one.plan)
            like = getattr(one.module, one.name)
            dense = one.plan.dense(arrays).to(like.device, like.dtype)
            one.module._parameters[one.name] = nn.Parameter(dense, requires_grad=False)
        model.tie_weights()


@torch.no_grad()
def _resize_scores(resized: Sequence[_Resized], mean: bool) -> None:
    """Give modules that learn the tensors that the new plans need, and copy what the common rows have learned."""
    for one in resized:
        module, name = one.module, one.name
        learned = {key: getattr(module, key) for key in one.before.float32_names(name)}
        drawn = getattr(module, one.before.buffer_names(name)[0])
        for key in (*learned, *one.before.buffer_names(name)):
            delattr(module, key)
        empty = torch.empty(one.plan.shape, dtype=drawn.dtype, device=drawn.device)
        module._parameters[name] = nn.Parameter(empty)
        _keep_settings(one.before, one.plan)
        attach_plan(module, name, one.plan)
        one.plan.install(module, name)
        one.plan.reset(module, name)
        _copy_learned(one.plan, name, SimpleNamespace(**learned), module, mean)
        for key, values in learned.items():
            getattr(module, key).requires_grad_(values.requires_grad)


def _keep_settings(before: Any, plan: Any) -> None:
    """Copy settings that changed after a plan was made: a rule that the loop changed, a table that is read twice."""
    if isinstance(plan, LowRankPlan):
        _keep_settings(before.basis, plan.basis)
    if isinstance(plan, MaskedPlan):
        plan.rule = before.rule
    if isinstance(plan, LowRankPlan | MaskedPlan):
        plan.shared = before.shared


def _refuse(one: _Resized) -> None:
    """Raise `SLTError` for a parameter that cannot be resized."""
    if isinstance(one.module, TernaryLayer):
        raise SLTError("a ternary table cannot be resized; resize the ticket, then call to_ternary()")
    own = (*one.module.parameters(recurse=False), *one.module.buffers(recurse=False))
    if any(values.is_meta for values in own):
        raise SLTError(
            f"{one.path}.{one.name} is offloaded; load the model without a device_map to resize it"
        )
    if isinstance(one.plan, MaskedPlan):
        name = one.plan.tensors[0].name
        if not one.plan.is_searched_whole:
            raise SLTError(f"{name}: which weights are searched depends on its rows; it cannot be resized")
        if one.plan.shape[1:] != one.before.shape[1:] or len(one.plan.tensors) > 1:
            raise SLTError(f"{name}: its rows are not tokens; it cannot be resized")


def _copy_learned(plan: ParameterPlan, name: str, old: Any, new: nn.Module, mean: bool) -> None:
    """Copy what was learned for the rows that both tables have."""
    if isinstance(plan, LowRankPlan):
        _copy_learned(plan.rows, "rows", old, new, mean)
        for one in plan.basis.float32_names("basis"):
            getattr(new, one).copy_(getattr(old, one))
    elif isinstance(plan, TrainedPlan):
        values, before = (getattr(module, plan.values_name(name)) for module in (new, old))
        values.copy_(
            torch.from_numpy(_resized_values(before.detach().cpu().numpy(), plan.tensor, mean)).to(
                values.device
            )
        )
    elif isinstance(plan, MaskedPlan):
        for one in plan.float32_names(name):
            values, before = getattr(new, one), getattr(old, one)
            if values.shape == before.shape:
                values.copy_(before)
                continue
            axis = 1 if one.endswith("scale") else 0  # scales are one row
            both = min(values.shape[axis], before.shape[axis])
            values.narrow(axis, 0, both).copy_(before.narrow(axis, 0, both))


def _resized_values(values: np.ndarray, tensor: Any, mean: bool) -> np.ndarray:
    """Return trained values with another number of rows, or a row with another length."""
    new = tensor.draw()
    if values.shape[0] == 1 and new.shape[0] == 1:  # scales or biases
        both = min(values.shape[1], new.shape[1])
        new[:, :both] = values[:, :both]
        return new
    both = min(len(values), len(new))
    if mean:
        new[:] = torch.from_numpy(values).float().mean(0).numpy()
    new[:both] = values[:both]
    return new
