"""Several masks on the frozen weights of one ticket, as PEFT has several adapters on one model.

    model.load_mask("me/poems", "poems")      # checked against this backbone; one bit a weight
    model.set_mask("poems")                   # weights drawn again, in place, times the other mask
    with model.using_mask("default"): ...     # for a while
    model.set_mask(None)                      # no mask: every random weight is kept

The mask in use is in the buffers of the layers and nowhere else, so it cannot be out of date; the others
rest here, packed. A switch that fails or is interrupted is undone. Threads may call all of these at once, one
waits for the other; but none may compute with the model while another switches.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .configuration_supermask_gpt2 import SupermaskGPT2Config
from .layers import full_mask
from .ticket import LOADING_KEYS, Ticket, TicketError, find_mask_file, read_ticket

# What may differ between two masks of one backbone: also the masks, and what is done with the output.
_FREE = LOADING_KEYS | set("density rule state dtype id2label label2id problem_type return_dict".split())
_FREE |= set("output_hidden_states output_attentions bos_token_id eos_token_id pad_token_id".split())
_SWITCHING = threading.RLock()  # of all models: a lock of its own would keep a model from being copied


def backbone_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What keeps masks made for one configuration from fitting the frozen weights of another, in words.

    The tensors of a ticket are those that its configuration implies; so the configurations tell all.
    """
    return [
        f"{key} {one.get(key)!r} and {other.get(key)!r}"
        for key in sorted((one.keys() | other.keys()) - _FREE)
        if one.get(key) != other.get(key)
    ]


def read_fitting_ticket(source: str | os.PathLike, own: Mapping[str, Any], **where) -> Ticket:
    """The ticket that a path, folder or Hub name means; it must fit the weights of a configuration."""
    path = find_mask_file(source, **where)
    if path is None:
        raise TicketError(f"{source}: no ticket found; give a mask file, a ticket's folder or a Hub name")
    ticket = read_ticket(path)
    if differences := backbone_differences(own, ticket.header.config):
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise TicketError(
            f"{path}: a mask of another backbone, which differs in: {'; '.join(differences[:3])}{more}; "
            "load it as a model of its own"
        )
    return ticket


@dataclass
class _Mask:
    stored: dict[str, Tensor]  # packed bits, or trained values, by tensor name
    density: float
    rule: str
    mask_digest: str | None


class NamedMasks:
    """The part of a supermask model that holds masks by name."""

    config: SupermaskGPT2Config
    supermask_layers: Callable[[], Iterator[tuple[str, Any]]]

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._active_mask: str | None = "default"
        self._resting_masks: dict[str, _Mask] = {}

    @property
    def active_mask(self) -> str | None:
        """Name of the mask in use; `"default"` is the one that the ticket came with, None is no mask."""
        return self._active_mask

    @property
    def mask_names(self) -> list[str]:
        """Names of all masks, in alphabetic order."""
        names = {*self._resting_masks, self._active_mask}
        return sorted(name for name in names if name is not None)

    def load_mask(self, source: str | os.PathLike, name: str, **options) -> None:
        """Add a mask of the same backbone under a name; it is not yet in use.

        source: mask file, ticket folder or Hub name.
        options: cache_dir, revision, token and others of `from_pretrained` that say where to look.
        """
        self._want_ticket()
        if not isinstance(name, str) or not name:
            raise ValueError(f"{name!r} is no name for a mask")
        if name in self.mask_names:
            raise ValueError(
                f"there is a mask {name!r} already; delete_mask({name!r}) first, or take another name"
            )
        ticket = read_fitting_ticket(source, json.loads(self.config.to_json_string()), **options)
        stored = {tensor: torch.from_numpy(array) for tensor, array in ticket.arrays.items()}
        header = ticket.header
        with _SWITCHING:
            self._resting_masks[name] = _Mask(stored, header.density, header.rule, header.mask_digest)

    def set_mask(self, name: str | None) -> None:
        """Put a mask in use, by name; None keeps every weight. Weights are drawn again in place."""
        self._want_ticket()
        with _SWITCHING:
            if name == self._active_mask:
                return
            if name is not None and name not in self._resting_masks:
                raise ValueError(f"no mask {name!r}; there are {self.mask_names}")
            config = self.config
            stored = {
                tensor.name: torch.from_numpy(data.copy())
                for _, layer in self.supermask_layers()
                for tensor, data in zip(layer.tensors, layer.data(), strict=True)
                if data is not None
            }
            before = _Mask(stored, config.density, config.rule, config.mask_digest)
            active, resting = self._active_mask, self._resting_masks
            masks = resting if active is None else {**resting, active: before}
            try:
                self._put(_Mask({}, 1.0, config.rule, None) if name is None else resting[name])
                self._resting_masks = {other: mask for other, mask in masks.items() if other != name}
                self._active_mask = name
            except BaseException:
                self._put(before)
                self._active_mask, self._resting_masks = active, resting
                raise

    def delete_mask(self, name: str) -> None:
        """Forget a mask; the one in use cannot be."""
        with _SWITCHING:
            if name == self._active_mask:
                raise ValueError(f"mask {name!r} is in use; set_mask to another, or to None, first")
            if name not in self._resting_masks:
                raise ValueError(f"no mask {name!r}; there are {self.mask_names}")
            del self._resting_masks[name]

    @contextmanager
    def using_mask(self, name: str | None) -> Iterator[None]:
        """Use a mask within a `with` block, then the one before."""
        before = self._active_mask
        self.set_mask(name)
        try:
            yield
        finally:
            self.set_mask(before)

    def _want_ticket(self) -> None:
        if self.config.state != "ticket":
            raise ValueError("a model of scores has no named masks: model.to_ticket() makes a ticket of it")

    @torch.no_grad()
    def _put(self, mask: _Mask) -> None:
        for _, layer in self.supermask_layers():
            changed = False
            for tensor in layer.tensors:
                if layer.kind == "masked":
                    packed, new = layer.packed_mask(tensor), mask.stored.get(tensor.name, full_mask(tensor))
                    if not torch.equal(new, packed.cpu()):
                        packed.copy_(new)
                        changed = True
                elif tensor.name in mask.stored:
                    layer.body.copy_(mask.stored[tensor.name])
            if changed:
                layer.materialise()
        self.config.density, self.config.rule = mask.density, mask.rule
        self.config.mask_digest = mask.mask_digest
