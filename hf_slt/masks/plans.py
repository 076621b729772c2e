"""How one parameter of a stock module is made: the plan of a parameter.

    MaskedPlan     frozen random numbers times a mask, and a learned scale per output if wanted
    TrainedPlan    numbers that are trained and stored, in 4 to 32 bits
    LowRankPlan    rows of trained numbers times a masked basis
    FixedPlan      random numbers that are all kept, or a constant: nothing is learned, nothing is stored
    TiedPlan       the parameter of another module

A plan holds no tensor. While a model learns, the module holds scores, scales and values, and the plan computes
the parameter from them (`value`). In a ticket the parameter is an ordinary one, and the plan computes its values
(`dense`) from the arrays that the ticket stores.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..weights.codes import Observer, full_codes, pack_codes, search_pattern, weights_of
from ..weights.quantisation import as_stored
from ..weights.random_weights import PRETRAINED, TensorSpec
from .cache import forward_cache
from .gradients import Layout, MaskedWeight, rounded, traced_product
from .rules import Rule, ScoreContext
from .trellis import numbers_of_path

Arrays = Mapping[str, np.ndarray]  # what a ticket stores, by tensor name: packed codes, or float32 values


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a ticket.

    Args:
        tensor ([`TensorSpec`]):
            Name, shape and law.
        kind (`str`):
            `"masked"` (codes are stored), `"trained"` (values are stored) or `"frozen"` (nothing is stored).
        bits (`int`, defaults to 32):
            Bits per trained value.
    """

    tensor: TensorSpec
    kind: str
    bits: int = 32


class ParameterPlan(ABC):
    """How one parameter is made. `name` is the parameter's attribute in its module, usually `"weight"`."""

    computed = True  # whether the module computes the parameter whenever it is read

    def stored_tensors(self) -> list[StoredTensor]:
        """Return the tensors that a ticket describes for this parameter.

        Returns:
            `list[StoredTensor]`: their descriptions.
        """
        return []

    @abstractmethod
    def install(self, module: nn.Module, name: str) -> None:
        """Replace the stock parameter by the tensors that are learned: scores, scales or values.

        Args:
            module (`nn.Module`):
                The module that has the parameter.
            name (`str`):
                Name of the parameter, such as `"weight"`.
        """

    def reset(self, module: nn.Module, name: str) -> None:  # noqa: B027  a tied parameter has nothing to fill
        """Fill what no checkpoint has filled: frozen numbers, and the initial values of learned tensors.

        Args:
            module (`nn.Module`):
                The module that has the parameter.
            name (`str`):
                Name of the parameter.
        """

    def redraw(self, module: nn.Module, name: str) -> None:  # noqa: B027  many plans draw nothing
        """Draw the frozen numbers again, after a cast.

        Args:
            module (`nn.Module`):
                The module that has the parameter.
            name (`str`):
                Name of the parameter.
        """

    def value(self, module: nn.Module, name: str) -> Tensor:
        """Return the parameter as the module computes with it, differentiable in what is learned.

        Args:
            module (`nn.Module`):
                The module that has the parameter.
            name (`str`):
                Name of the parameter.

        Returns:
            `Tensor`: the parameter.
        """
        return getattr(module, name)  # a fixed parameter is a buffer of this name

    def stored(self, module: nn.Module, name: str) -> dict[str, np.ndarray]:
        """Return what a ticket stores for this parameter, by tensor name.

        Args:
            module (`nn.Module`):
                The module that has the parameter.
            name (`str`):
                Name of the parameter.

        Returns:
            `dict[str, np.ndarray]`: packed codes and trained values by tensor name.
        """
        return {}

    def dense(self, arrays: Arrays, observe: Observer | None = None) -> Tensor | None:
        """Compute the parameter from what a ticket stores.

        Args:
            arrays (`Mapping[str, np.ndarray]`):
                Packed codes and trained values by tensor name. A missing tensor is as before training: every weight
                is kept.
            observe (`Callable`, *optional*):
                Called with every tensor that is drawn and the digest of its numbers, before any mask.

        Returns:
            `Tensor | None`: the parameter in float32; None if it belongs to another module.
        """
        return None

    def float32_names(self, name: str) -> list[str]:
        """Return the attributes of the module that are trained. They stay in float32 after every cast.

        Args:
            name (`str`):
                Name of the parameter.

        Returns:
            `list[str]`: names of attributes.
        """
        return []

    def buffer_names(self, name: str) -> list[str]:
        """Return the attributes of the module that follow from the seed. They are never saved or sent.

        Args:
            name (`str`):
                Name of the parameter.

        Returns:
            `list[str]`: names of attributes.
        """
        return []


@dataclass
class FixedPlan(ParameterPlan):
    """A parameter that is not learned: drawn and all kept, or a constant.

    Args:
        tensor ([`TensorSpec`]):
            What to draw. The law `"constant"` fills with `scale`.
        shape (`tuple[int, ...]`):
            Shape of the parameter.
        parts ([`MaskedPlan`], *optional*):
            If the parameter consists of several tensors: the plan that has them. `tensor` then only gives its name.
    """

    tensor: TensorSpec
    shape: tuple[int, ...]
    parts: "MaskedPlan | None" = None
    computed = False

    @property
    def is_constant(self) -> bool:
        """Whether the parameter is filled with one number, so that nothing is drawn."""
        return self.parts is None and self.tensor.law == "constant"

    def stored_tensors(self) -> list[StoredTensor]:
        drawn = [self.tensor] if self.parts is None else self.parts.tensors
        return [] if self.is_constant else [StoredTensor(one, "frozen") for one in drawn]

    def install(self, module: nn.Module, name: str) -> None:
        old = _remove_parameter(module, name)
        empty = torch.empty(old.shape, dtype=old.dtype, device=_buffer_device(old))
        module.register_buffer(name, empty, persistent=False)

    def reset(self, module: nn.Module, name: str) -> None:
        self.redraw(module, name)

    @torch.no_grad()
    def redraw(self, module: nn.Module, name: str) -> None:
        if not (buffer := getattr(module, name)).is_meta:
            buffer.copy_(self.dense({}))

    def dense(self, arrays: Arrays, observe: Observer | None = None) -> Tensor:
        if self.is_constant:
            return torch.full(self.shape, self.tensor.scale)
        if self.parts is not None:
            return self.parts.unmasked(observe)
        return torch.from_numpy(weights_of(self.tensor, observe=observe)).view(self.shape)

    def buffer_names(self, name: str) -> list[str]:
        return [name]


@dataclass
class MaskedPlan(ParameterPlan):
    """Frozen random numbers times a mask.

    Args:
        tensors (`Sequence[TensorSpec]`):
            The tensors that the parameter consists of, side by side along `axis`. Each is masked by itself.
        rule ([`Rule`]):
            How scores become codes. A training loop may replace it between steps.
        axis (`int`, defaults to 0):
            The axis along which the tensors lie.
        scales (`Sequence[TensorSpec]`, *optional*):
            For each tensor, a row of learned numbers that its outputs are multiplied by.
        scale_bits (`int`, defaults to 16):
            Bits per learned scale in the ticket.
        heads (`int`, *optional*):
            If given, the tensors are not stored one after the other but head by head: for each of this many heads,
            its rows of every tensor. All tensors then have the same size, and `axis` is 0.
        shared (`bool`, defaults to `False`):
            Whether a forward reads the parameter more than once, so that it pays to keep the result.
        siblings (`Sequence[tuple[nn.Module, str]]`, *optional*):
            Set by `set_siblings`: all parameters that a joint rule ranks together.
    """

    tensors: Sequence[TensorSpec]
    rule: Rule
    axis: int = 0
    scales: Sequence[TensorSpec] = ()
    scale_bits: int = 16
    heads: int | None = None
    shared: bool = False  # whether a forward reads the parameter more than once
    siblings: Sequence[tuple[nn.Module, str]] = field(
        default=(), repr=False
    )  # ranked together by a joint rule

    @property
    def is_searched_whole(self) -> bool:
        """Whether every weight has a score. Otherwise the seed decides which weights have one."""
        return self.tensors[0].search == 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        shape = list(self.tensors[0].shape)
        shape[self.axis] = sum(tensor.shape[self.axis] for tensor in self.tensors)
        return tuple(shape)

    def attribute(self, name: str, tensor: TensorSpec, what: str) -> str:
        """Return the attribute that holds the scores or the scale of a tensor.

        `"scores"` for a weight of one tensor, `"query_scores"` for one of several.

        Args:
            name (`str`):
                Name of the parameter.
            tensor ([`TensorSpec`]):
                One of its tensors.
            what (`str`):
                `"scores"`, `"scale"` or `"searched"`.

        Returns:
            `str`: name of the attribute.
        """
        parts = [] if name == "weight" else [name]
        if len(self.tensors) > 1:
            parts.append(tensor.name.rsplit(".", 1)[-1])
        return "_".join([*parts, what])

    def drawn_name(self, name: str) -> str:
        """Return the buffer that holds the frozen numbers.

        Args:
            name (`str`):
                Name of the parameter.

        Returns:
            `str`: name of the attribute.
        """
        return "drawn" if name == "weight" else f"{name}_drawn"

    def _attributes(self, name: str, what: str) -> list[str]:
        return [self.attribute(name, tensor, what) for tensor in self.tensors]

    def stored_tensors(self) -> list[StoredTensor]:
        masks = [StoredTensor(tensor, "masked") for tensor in self.tensors]
        return masks + [StoredTensor(scale, "trained", self.scale_bits) for scale in self.scales]

    def install(self, module: nn.Module, name: str) -> None:
        old = _remove_parameter(module, name)
        device = _buffer_device(old)
        drawn = torch.empty(self.shape, dtype=old.dtype, device=device)
        module.register_buffer(self.drawn_name(name), drawn, persistent=False)
        for tensor in self.tensors:
            shape = tensor.shape if self.is_searched_whole else (tensor.searched,)
            module.register_parameter(self.attribute(name, tensor, "scores"), _float32(shape, old.device))
            if not self.is_searched_whole:  # indices of the searched weights in the flat parameter
                positions = torch.empty(tensor.searched, dtype=torch.int64, device=device)
                module.register_buffer(self.attribute(name, tensor, "searched"), positions, persistent=False)
        for tensor, scale in zip(self.tensors, self.scales, strict=False):
            module.register_parameter(
                self.attribute(name, tensor, "scale"), _float32(scale.shape, old.device)
            )

    @torch.no_grad()
    def reset(self, module: nn.Module, name: str) -> None:
        for tensor in self.tensors:
            scores = getattr(module, self.attribute(name, tensor, "scores"))
            _fill(scores, lambda size, tensor=tensor: self.first_scores(tensor, size))
        for tensor, scale in zip(self.tensors, self.scales, strict=False):
            values = getattr(module, self.attribute(name, tensor, "scale"))
            _fill(values, lambda _size, scale=scale: scale.draw())
        self.redraw(module, name)

    def first_scores(self, tensor: TensorSpec, size: tuple[int, ...]) -> np.ndarray:
        """Return the scores that training starts from: those of the rule.

        For pretrained weights they are sorted: a larger weight gets a larger score. The first mask then drops the
        smallest weights, which matter least.

        Args:
            tensor ([`TensorSpec`]):
                One of its tensors.
            size (`tuple[int, ...]`):
                Shape of the scores.

        Returns:
            `np.ndarray`: the scores in float32.
        """
        scores = self.rule.first_scores(ScoreContext(tensor), size)
        if tensor.law != PRETRAINED:
            return scores
        weights = np.abs(tensor.draw()).reshape(-1)
        weights = weights if self.is_searched_whole else weights[search_pattern(tensor)[0]]
        ordered = np.empty_like(scores).reshape(-1)
        ordered[np.argsort(weights, kind="stable")] = np.sort(np.abs(scores), axis=None)
        return ordered.reshape(size)

    @torch.no_grad()
    def redraw(self, module: nn.Module, name: str) -> None:
        drawn = getattr(module, self.drawn_name(name))
        if drawn.is_meta:
            return
        for tensor, place in zip(self.tensors, self._places(), strict=True):
            part = tensor.base()
            if not self.is_searched_whole:
                searched, factors = search_pattern(tensor)
                factors[searched] = 1
                part *= factors.reshape(tensor.shape)
                index = list(np.unravel_index(searched, tensor.shape))
                index[self.axis] = index[self.axis] + place[self.axis].start
                flat = np.ravel_multi_index(tuple(index), self.shape)
                getattr(module, self.attribute(name, tensor, "searched")).copy_(torch.from_numpy(flat))
            drawn[place].copy_(torch.from_numpy(part))

    def _places(self) -> Iterator[tuple[slice, ...]]:
        """Yield the place of every tensor in the parameter."""
        start = 0
        for tensor in self.tensors:
            stop = start + tensor.shape[self.axis]
            yield (*(slice(None),) * self.axis, slice(start, stop))
            start = stop

    def arranged(self, whole: Tensor) -> Tensor:
        """Bring tensors that lie one after the other into the order of the parameter, which may be head by head.

        Args:
            whole (`Tensor`):
                The tensors one after the other.

        Returns:
            `Tensor`: the same numbers in the order of the parameter.
        """
        if self.heads is None:
            return whole
        return whole.unflatten(0, (len(self.tensors), self.heads, -1)).transpose(0, 1).flatten(0, 2)

    def unmasked(self, observe: Observer | None = None) -> Tensor:
        """Return the parameter without any mask or scale: all numbers as they are drawn.

        Args:
            observe (`Observer`, *optional*):
                Called with every tensor and its numbers.

        Returns:
            `Tensor`: the parameter in float32.
        """
        parts = [weights_of(tensor, observe=observe) for tensor in self.tensors]
        return self.arranged(torch.from_numpy(np.concatenate(parts, self.axis)))

    def layout(self, module: nn.Module, name: str) -> Layout:
        """Return where each tensor is in the parameter.

        Args:
            module (`nn.Module`):
                The module that has the parameter.
            name (`str`):
                Name of the parameter.

        Returns:
            [`Layout`]: the layout.
        """
        positions = None
        if not self.is_searched_whole:
            positions = tuple(getattr(module, one) for one in self._attributes(name, "searched"))
        return Layout(self.axis, tuple(tensor.shape[self.axis] for tensor in self.tensors), positions)

    def scores(self, module: nn.Module, name: str) -> list[Tensor]:
        """Return the scores of every tensor.

        Args:
            module (`nn.Module`):
                The module that has the parameter.
            name (`str`):
                Name of the parameter.

        Returns:
            `list[Tensor]`: scores of each tensor.
        """
        return [getattr(module, one) for one in self._attributes(name, "scores")]

    @torch.no_grad()
    def codes(self, module: nn.Module, name: str, training: bool = False) -> list[Tensor]:
        """Return the code of every score, by tensor: the codes for a ticket, or those for a training step.

        Args:
            module (`nn.Module`):
                The module that has the parameter.
            name (`str`):
                Name of the parameter.
            training (`bool`, defaults to `False`):
                Whether the codes are for a training step. Rules that sample need to know.

        Returns:
            `list[Tensor]`: codes of each tensor.
        """
        if not self.rule.joint:
            contexts = [ScoreContext(tensor, training) for tensor in self.tensors]
            return self.rule.codes_of_all([one.detach() for one in self.scores(module, name)], contexts)
        cache = forward_cache()
        siblings = self.siblings or ((module, name),)
        if cache is None or siblings not in cache.results:
            found = _joint_codes(siblings, training)
            if cache is None:
                return found[module, name]
            cache.results[siblings] = found
        return cache.results[siblings][module, name]

    def scale(self, module: nn.Module, name: str) -> Tensor | None:
        """Return the learned factor of every output, in a shape that multiplies the parameter.

        Args:
            module (`nn.Module`):
                The module that has the parameter.
            name (`str`):
                Name of the parameter.

        Returns:
            `Tensor | None`: the factors, or None if no scales are learned.
        """
        if not self.scales:
            return None
        rows = [rounded(getattr(module, one), self.scale_bits) for one in self._attributes(name, "scale")]
        shaped = [_as_scale(row, tensor) for row, tensor in zip(rows, self.tensors, strict=True)]
        return shaped[0] if len(shaped) == 1 else torch.cat(shaped, self.axis)

    def value(self, module: nn.Module, name: str) -> Tensor:
        codes, scores = self.codes(module, name, module.training), self.scores(module, name)
        if self.tensors[0].state_bits is not None:  # the numbers of the path are used as factors
            codes = [
                some if some.is_floating_point() else numbers_of_path(some, tensor)  # relaxed: no path
                for some, tensor in zip(codes, self.tensors, strict=True)
            ]
        layout, scale = self.layout(module, name), self.scale(module, name)
        drawn = getattr(module, self.drawn_name(name))
        if is_traced(scores):
            return self.arranged(traced_product(self.rule, layout, codes, drawn, scale, scores))
        return self.arranged(MaskedWeight.apply(self.rule, layout, codes, drawn, scale, *scores))

    def stored(self, module: nn.Module, name: str) -> dict[str, np.ndarray]:
        levels = len(self.rule.factors)
        found = {
            tensor.name: pack_codes(codes.cpu().numpy(), levels)
            for tensor, codes in zip(self.tensors, self.codes(module, name), strict=True)
        }
        for tensor, scale in zip(self.tensors, self.scales, strict=False):
            values = getattr(module, self.attribute(name, tensor, "scale"))
            found[scale.name] = as_stored(_numpy(values), self.scale_bits)
        return found

    def dense(self, arrays: Arrays, observe: Observer | None = None) -> Tensor:
        parts = [self._dense_part(number, arrays, observe) for number in range(len(self.tensors))]
        # By NumPy, as in `unmasked`: it asks the system for large pages, which come with fewer page faults.
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, self.axis)
        return self.arranged(torch.from_numpy(np.ascontiguousarray(whole)))

    def _dense_part(self, number: int, arrays: Arrays, observe: Observer | None) -> np.ndarray:
        """Return one tensor of the parameter, masked and scaled."""
        tensor = self.tensors[number]
        packed = arrays.get(tensor.name)
        packed = full_codes(tensor) if packed is None else packed
        part = weights_of(tensor, packed, observe)
        if self.scales:
            scale = self.scales[number]
            row = arrays.get(scale.name)
            row = as_stored(scale.draw(), self.scale_bits) if row is None else row
            part *= _as_scale(torch.from_numpy(row), tensor).numpy()
        return part

    def float32_names(self, name: str) -> list[str]:
        return self._attributes(name, "scores") + (self._attributes(name, "scale") if self.scales else [])

    def buffer_names(self, name: str) -> list[str]:
        searched = [] if self.is_searched_whole else self._attributes(name, "searched")
        return [self.drawn_name(name), *searched]


@dataclass
class TrainedPlan(ParameterPlan):
    """Numbers that are trained as usual and stored. A forward uses them as rounded as the ticket will hold them.

    Args:
        tensor ([`TensorSpec`]):
            Name, shape in the ticket, and initial values.
        shape (`tuple[int, ...]`):
            Shape of the parameter. A vector is stored as one row.
        bits (`int`, defaults to 32):
            Bits per value in the ticket: 32, 16, 8 or 4.
    """

    tensor: TensorSpec
    shape: tuple[int, ...]
    bits: int = 32

    def values_name(self, name: str) -> str:
        """Return the attribute that holds the values.

        Args:
            name (`str`):
                Name of the parameter.

        Returns:
            `str`: name of the attribute.
        """
        return "values" if name == "weight" else f"{name}_values"

    def drawn_name(self, name: str) -> str:
        """Return the name of an empty buffer that follows the casts of the model: its dtype is the one to compute in.

        Args:
            name (`str`):
                Name of the parameter.

        Returns:
            `str`: name of the attribute.
        """
        return "drawn" if name == "weight" else f"{name}_drawn"

    def stored_tensors(self) -> list[StoredTensor]:
        return [StoredTensor(self.tensor, "trained", self.bits)]

    def install(self, module: nn.Module, name: str) -> None:
        old = _remove_parameter(module, name)
        module.register_parameter(self.values_name(name), _float32(self.tensor.shape, old.device))
        empty = torch.empty(0, dtype=old.dtype, device=_buffer_device(old))
        module.register_buffer(self.drawn_name(name), empty, persistent=False)

    @torch.no_grad()
    def reset(self, module: nn.Module, name: str) -> None:
        _fill(getattr(module, self.values_name(name)), lambda _size: self.tensor.draw())

    def value(self, module: nn.Module, name: str) -> Tensor:
        values = rounded(getattr(module, self.values_name(name)), self.bits)
        return values.to(getattr(module, self.drawn_name(name)).dtype).view(self.shape)

    def stored(self, module: nn.Module, name: str) -> dict[str, np.ndarray]:
        values = getattr(module, self.values_name(name))
        return {self.tensor.name: as_stored(_numpy(values), self.bits)}

    def dense(self, arrays: Arrays, observe: Observer | None = None) -> Tensor:
        values = arrays.get(self.tensor.name)
        values = as_stored(self.tensor.draw(), self.bits) if values is None else values
        return torch.from_numpy(np.array(values, np.float32)).view(self.shape)

    def float32_names(self, name: str) -> list[str]:
        return [self.values_name(name)]

    def buffer_names(self, name: str) -> list[str]:
        return [self.drawn_name(name)]


@dataclass
class LowRankPlan(ParameterPlan):
    """A table that is the product of few stored numbers per row and a masked matrix: table = rows @ basis.

    Args:
        rows ([`TrainedPlan`]):
            The stored numbers, (rows, rank).
        basis ([`MaskedPlan`]):
            The masked matrix, (rank, width).
        shared (`bool`, defaults to `False`):
            Whether a forward reads the table more than once.
    """

    rows: TrainedPlan
    basis: MaskedPlan
    shared: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the table."""
        return (self.rows.shape[0], self.basis.shape[1])

    def stored_tensors(self) -> list[StoredTensor]:
        return self.rows.stored_tensors() + self.basis.stored_tensors()

    def install(self, module: nn.Module, name: str) -> None:
        old = _remove_parameter(module, name)
        module.register_parameter("rows", nn.Parameter(old[:, :0]))
        module.register_parameter("basis", nn.Parameter(old[:0]))
        self.rows.install(module, "rows")
        self.basis.install(module, "basis")

    def reset(self, module: nn.Module, name: str) -> None:
        self.rows.reset(module, "rows")
        self.basis.reset(module, "basis")

    def redraw(self, module: nn.Module, name: str) -> None:
        self.basis.redraw(module, "basis")

    def value(self, module: nn.Module, name: str) -> Tensor:
        return self.rows.value(module, "rows") @ self.basis.value(module, "basis")

    def stored(self, module: nn.Module, name: str) -> dict[str, np.ndarray]:
        return self.rows.stored(module, "rows") | self.basis.stored(module, "basis")

    def dense(self, arrays: Arrays, observe: Observer | None = None) -> Tensor:
        return self.rows.dense(arrays, observe) @ self.basis.dense(arrays, observe)

    def float32_names(self, name: str) -> list[str]:
        return self.rows.float32_names("rows") + self.basis.float32_names("basis")

    def buffer_names(self, name: str) -> list[str]:
        return self.rows.buffer_names("rows") + self.basis.buffer_names("basis")


@dataclass
class TiedPlan(ParameterPlan):
    """A parameter that belongs to another module, as a tied head uses the embedding.

    Args:
        source (`nn.Module`):
            The module that has the parameter.
        source_name (`str`, defaults to `"weight"`):
            Its name there.
    """

    source: nn.Module = field(repr=False)
    source_name: str = "weight"

    def install(self, module: nn.Module, name: str) -> None:
        _remove_parameter(module, name)

    def value(self, module: nn.Module, name: str) -> Tensor:
        return getattr(self.source, self.source_name)


def is_traced(scores: Sequence[Tensor]) -> bool:
    """Return whether torch.compile or torch.func is running. Both need operators that they know.

    torch.func is recognised by its plain tensors in place of parameters.

    Args:
        scores (`Sequence[Tensor]`):
            Scores of each tensor of a parameter.

    Returns:
        `bool`: True under torch.compile and torch.func.
    """
    return torch.compiler.is_compiling() or not all(isinstance(one, nn.Parameter) for one in scores)


def _joint_codes(
    siblings: Sequence[tuple[nn.Module, str]], training: bool
) -> dict[tuple[nn.Module, str], list[Tensor]]:
    """Return the codes of all tensors that a joint rule ranks together, by module and parameter."""
    plans: list[Any] = [masked_plan(module, name) for module, name in siblings]
    scores = [
        [_gathered(one) for one in plan.scores(*place)] for plan, place in zip(plans, siblings, strict=True)
    ]
    contexts = [ScoreContext(tensor, training) for plan in plans for tensor in plan.tensors]
    every = iter(plans[0].rule.codes_of_all([one for some in scores for one in some], contexts))
    return {place: [next(every) for _ in some] for place, some in zip(siblings, scores, strict=True)}


def _gathered(scores: Tensor) -> Tensor:
    """Return the values of scores. Scores of other blocks are shards under FSDP2: all processes gather them here."""
    scores = scores.detach()
    return scores.full_tensor() if hasattr(scores, "full_tensor") else scores


def masked_plan(module: nn.Module, name: str) -> MaskedPlan:
    """Return the masked plan of a parameter, or the basis of a table of low rank.

    Args:
        module (`nn.Module`):
            The module that has the parameter.
        name (`str`):
            Name of the parameter, or `"basis"`.

    Returns:
        [`MaskedPlan`]: the plan.
    """
    plans: Any = module.parameter_plans
    return plans["weight"].basis if name == "basis" else plans[name]


def _as_scale(row: Tensor, tensor: TensorSpec) -> Tensor:
    """Return a row of scales, or a single one, in a shape that multiplies the tensor."""
    if row.numel() == 1:
        return row.reshape((1,) * len(tensor.shape)).expand(tensor.scale_shape)
    return row.reshape(tensor.scale_shape)


def _remove_parameter(module: nn.Module, name: str) -> Tensor:
    old = module._parameters.pop(name)
    assert old is not None, name
    return old.detach()


def _buffer_device(parameter: Tensor) -> torch.device | None:
    """Return where the buffers of a parameter go. accelerate may put parameters on meta, but not buffers."""
    return None if parameter.is_meta else parameter.device


def _float32(shape: Sequence[int], device: torch.device) -> nn.Parameter:
    """Return an empty parameter. Kept in float32: in 16 bits many scores would be equal, and small steps lost."""
    return nn.Parameter(torch.empty(tuple(shape), dtype=torch.float32, device=device))


def _fill(values: Tensor, first: Callable[[tuple[int, ...]], np.ndarray]) -> None:
    """Fill a parameter with its initial values, unless a checkpoint has filled it."""
    if not values.is_meta and not getattr(values, "_is_hf_initialized", False):
        values.copy_(torch.from_numpy(first(tuple(values.shape))))


def _numpy(values: Tensor) -> np.ndarray:
    return values.detach().float().cpu().numpy()
