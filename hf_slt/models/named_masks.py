"""Several masks on the frozen weights of one ticket, as PEFT has several adapters on one model.

    model.load_mask("me/poems", "poems")      # checked against this backbone; kept packed
    model.set_mask("poems")                   # weights are drawn again, in place, times the other mask
    with model.using_mask("default"): ...     # only within this block
    model.set_mask(None)                      # no mask: every random weight is kept

A switch that fails or is interrupted is undone. Threads may call these methods at the same time: they wait for each
other. But no thread may compute with the model while another thread switches.
"""

import copy
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import SLTError
from ..tickets.backbones import read_fitting_ticket
from ..tickets.format import check_weights
from ..weights.random_weights import PRETRAINED
from .base import MixinBase
from .configuration import MASK_OPTIONS

_SWITCHING = threading.RLock()  # one lock for all models: a model with a lock of its own could not be copied


@dataclass
class NamedMask:
    """A mask that is not in use.

    Args:
        arrays (`dict[str, np.ndarray]`):
            Packed codes and trained values, by tensor name.
        options (`dict[str, Any]`):
            The options that belong to the mask: its rule, what its codes stand for, its digest.
    """

    arrays: dict[str, np.ndarray]
    options: dict[str, Any]


@dataclass
class MaskCollection:
    """The masks of a model: the name of the one in use, and all others.

    Args:
        active (`str`, defaults to `"default"`):
            Name of the mask in use. `"default"` is the one that the ticket came with; None is no mask at all.
        resting (`dict[str, NamedMask]`, *optional*):
            The other masks, by name.
    """

    active: str | None = "default"  # the one that the ticket came with
    resting: dict[str, NamedMask] = field(default_factory=dict)


class NamedMasksMixin(MixinBase):
    """Methods of a ticket that add, switch and delete masks."""

    config: Any
    ticket_arrays: dict[str, np.ndarray]
    stored_tensors: Any

    def _masks(self) -> MaskCollection:
        if self.config.state != "ticket":
            raise ValueError("a model of scores has no named masks: model.to_ticket() makes a ticket of it")
        return self.__dict__.setdefault("_mask_collection", MaskCollection())

    @property
    def active_mask(self) -> str | None:
        """Name of the mask in use. `"default"` is the one that the ticket came with, None is no mask."""
        return self._masks().active

    @property
    def mask_names(self) -> list[str]:
        """Names of all masks, in alphabetic order."""
        masks = self._masks()
        return sorted(name for name in {*masks.resting, masks.active} if name is not None)

    def load_mask(self, source: str | os.PathLike, name: str, **download_kwargs: Any) -> None:
        """Add a mask of the same backbone under a name. It is not yet in use.

        Args:
            source (`str` or `os.PathLike`):
                A mask file, a ticket's folder or a Hub name.
            name (`str`):
                The name of the mask in this model.
            download_kwargs:
                `cache_dir`, `revision`, `token` and others of `from_pretrained` that say where to look.

        Raises:
            [`TicketError`]: if the ticket is damaged or of another backbone.
            `ValueError`: if the name is taken.

        Example:

        ```python
        model = AutoModelForCausalLM.from_pretrained("prose")
        model.load_mask("poems", "poems")
        model.set_mask("poems")  # as if the ticket poems had been loaded
        ```
        """
        masks = self._masks()
        if not isinstance(name, str) or not name:
            raise ValueError(f"{name!r} is not a name for a mask")
        if name in self.mask_names:
            raise ValueError(
                f"there is a mask {name!r} already; delete_mask({name!r}) first, or take another name"
            )
        own = json.loads(self.config.to_json_string())
        ticket = read_fitting_ticket(source, own, **download_kwargs)
        header = ticket.header
        for key, one in self.stored_tensors().items() if self.config.backbone else ():
            if one.tensor.law == PRETRAINED and one.kind != "trained":
                check_weights(ticket.path, key, header.tensors[key], one.tensor.drawn_digest())
        options = {**header.options, "mask_digest": header.mask_digest, "digest": header.digest}
        with _SWITCHING:
            masks.resting[name] = NamedMask(dict(ticket.arrays), {key: options[key] for key in MASK_OPTIONS})

    def set_mask(self, name: str | None) -> None:
        """Put a mask in use. The weights of tensors whose codes differ are computed again, in place.

        Args:
            name (`str`, *optional*):
                Name of the mask. None keeps every weight.

        Raises:
            `ValueError`: if there is no mask of this name, or if the model is not a ticket.
            [`SLTError`]: if an adapter of PEFT is merged into the weights.
        """
        masks = self._masks()
        with _SWITCHING:
            if name == masks.active:
                return
            if name is not None and name not in masks.resting:
                raise ValueError(f"no mask {name!r}; there are {self.mask_names}")
            self._refuse_merged_adapter()
            options = {key: copy.deepcopy(self.config.supermask[key]) for key in MASK_OPTIONS}
            before = NamedMask(dict(self.ticket_arrays), options)
            none = NamedMask({}, {**options, "mask_digest": None, "digest": None})
            every = masks.resting if masks.active is None else {**masks.resting, masks.active: before}
            active, resting = masks.active, masks.resting
            try:
                self._use(none if name is None else resting[name])
                masks.resting = {other: mask for other, mask in every.items() if other != name}
                masks.active = name
            except BaseException:
                masks.active, masks.resting = active, resting
                self._use(before, redraw_all=True)
                raise

    def delete_mask(self, name: str) -> None:
        """Delete a mask. The active one cannot be deleted.

        Args:
            name (`str`):
                Name of the mask.

        Raises:
            `ValueError`: if there is no mask of this name, or if it is in use.
        """
        masks = self._masks()
        with _SWITCHING:
            if name == masks.active:
                raise ValueError(f"mask {name!r} is in use; set_mask to another, or to None, first")
            if name not in masks.resting:
                raise ValueError(f"no mask {name!r}; there are {self.mask_names}")
            del masks.resting[name]

    @contextmanager
    def using_mask(self, name: str | None) -> Iterator[None]:
        """Use a mask within a `with` block. After the block, the previous mask is in use again.

        Args:
            name (`str`, *optional*):
                Name of the mask. None keeps every weight.

        Example:

        ```python
        with model.using_mask("poems"):
            model.generate(**prompt)
        ```
        """
        before = self.active_mask
        self.set_mask(name)
        try:
            yield
        finally:
            self.set_mask(before)

    def _refuse_merged_adapter(self) -> None:
        """Raise `SLTError` if an adapter of PEFT is merged: weights drawn again would not contain it."""
        model: Any = self
        if any(getattr(module, "merged_adapters", None) for module in model.modules()):
            raise SLTError(
                "an adapter is merged into the weights; call unmerge_adapter(), set the mask, then merge_adapter()"
            )

    def _use(self, mask: NamedMask, redraw_all: bool = False) -> None:
        """Switch to a mask, which may have another rule. Only tensors whose codes differ are drawn again."""
        model: Any = self
        codes = ("factors", "search", "frozen_density")
        redraw_all = redraw_all or any(mask.options[key] != self.config.supermask[key] for key in codes)
        names = self.ticket_arrays.keys() | mask.arrays.keys()
        changed = {name for name in names if not _same(self.ticket_arrays.get(name), mask.arrays.get(name))}
        for key, value in mask.options.items():
            self.config.supermask[key] = copy.deepcopy(value)
        self.ticket_arrays.clear()
        self.ticket_arrays.update(mask.arrays)
        model.attach_plans(model.make_plans())
        model.fill_parameters(None if redraw_all else changed)


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is not None and other is not None and np.array_equal(one, other)
