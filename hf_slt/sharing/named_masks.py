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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..model.codes import full_codes
from ..model.configuration_supermask_gpt2 import MASK_OPTIONS
from ..model.random_weights import TensorSpec
from ..model.ticket import ADDED, LOADING_KEYS, Ticket, TicketError, find_mask_file, read_ticket

# What may differ between two masks of one backbone: also the masks, and what is done with the output.
_FREE = {*LOADING_KEYS, *MASK_OPTIONS, *"state dtype id2label label2id problem_type return_dict".split()}
_FREE |= set("output_hidden_states output_attentions bos_token_id eos_token_id pad_token_id".split())
_SWITCHING = threading.RLock()  # of all models: a lock of its own would keep a model from being copied


def backbone_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What keeps masks made for one configuration from fitting the frozen weights of another, in words.

    The tensors of a ticket are those that its configuration implies; so the configurations tell all.
    """
    one, other = ADDED | dict(one), ADDED | dict(other)
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
    stored: dict[str, Tensor]  # packed codes, or trained values, by tensor name
    options: dict[str, Any]  # of the configuration: rule, factors and others that belong to a mask


@dataclass
class _Masks:
    """What a model knows of its masks."""

    active: str | None = "default"  # the one that the ticket came with
    resting: dict[str, _Mask] = field(default_factory=dict)


def _masks(model: Any) -> _Masks:
    if model.config.state != "ticket":
        raise ValueError("a model of scores has no named masks: model.to_ticket() makes a ticket of it")
    return model.__dict__.setdefault("_named_masks", _Masks())


def active_mask(model: Any) -> str | None:
    """Name of the mask in use; `"default"` is the one that the ticket came with, None is no mask."""
    return _masks(model).active


def mask_names(model: Any) -> list[str]:
    """Names of all masks, in alphabetic order."""
    masks = _masks(model)
    return sorted(name for name in {*masks.resting, masks.active} if name is not None)


def load_mask(model: Any, source: str | os.PathLike, name: str, **options) -> None:
    """Add a mask of the same backbone under a name; it is not yet in use.

    source: mask file, ticket folder or Hub name.
    options: cache_dir, revision, token and others of `from_pretrained` that say where to look.
    """
    masks = _masks(model)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{name!r} is no name for a mask")
    if name in mask_names(model):
        raise ValueError(
            f"there is a mask {name!r} already; delete_mask({name!r}) first, or take another name"
        )
    ticket = read_fitting_ticket(source, json.loads(model.config.to_json_string()), **options)
    stored = {tensor: torch.from_numpy(array) for tensor, array in ticket.arrays.items()}
    told = ADDED | dict(ticket.header.config) | {"mask_digest": ticket.header.mask_digest}
    with _SWITCHING:
        masks.resting[name] = _Mask(stored, {key: told[key] for key in MASK_OPTIONS})


def set_mask(model: Any, name: str | None) -> None:
    """Put a mask in use, by name; None keeps every weight. Weights are drawn again."""
    masks = _masks(model)
    with _SWITCHING:
        if name == masks.active:
            return
        if name is not None and name not in masks.resting:
            raise ValueError(f"no mask {name!r}; there are {mask_names(model)}")
        options = {key: getattr(model.config, key) for key in MASK_OPTIONS}
        stored = {
            tensor.name: torch.from_numpy(data.copy())
            for _, layer in model.supermask_layers()
            for tensor, data in zip(layer.tensors, layer.data(), strict=True)
            if data is not None
        }
        before = _Mask(stored, options)
        active, resting = masks.active, masks.resting
        every = resting if active is None else {**resting, active: before}
        try:
            _put(model, _Mask({}, {**options, "mask_digest": None}) if name is None else resting[name])
            masks.resting = {other: mask for other, mask in every.items() if other != name}
            masks.active = name
        except BaseException:
            _put(model, before)
            masks.active, masks.resting = active, resting
            raise


def delete_mask(model: Any, name: str) -> None:
    """Forget a mask; the one in use cannot be."""
    masks = _masks(model)
    with _SWITCHING:
        if name == masks.active:
            raise ValueError(f"mask {name!r} is in use; set_mask to another, or to None, first")
        if name not in masks.resting:
            raise ValueError(f"no mask {name!r}; there are {mask_names(model)}")
        del masks.resting[name]


@contextmanager
def using_mask(model: Any, name: str | None) -> Iterator[None]:
    """Use a mask within a `with` block, then the one before."""
    before = active_mask(model)
    set_mask(model, name)
    try:
        yield
    finally:
        set_mask(model, before)


@torch.no_grad()
def _put(model: Any, mask: _Mask) -> None:
    for key, value in mask.options.items():
        setattr(model.config, key, value)
    layers = [layer for _, layer in model.supermask_layers()]
    for layer in layers:
        if layer.kind == "trained" and layer.tensors[0].name in mask.stored:
            layer.body.copy_(mask.stored[layer.tensors[0].name])
    for layer in layers:  # after the scales that they are multiplied by
        if layer.kind == "masked":
            tensors = [model.config.tensor(tensor.name) for tensor in layer.tensors]
            _put_codes(layer, tensors, [mask.stored.get(one.name, full_codes(one)) for one in tensors])


def _put_codes(layer: Any, tensors: Sequence[TensorSpec], packed: Sequence[Any]) -> None:
    """Let a layer compute with other codes, which may be of another rule."""
    for tensor, codes in zip(tensors, map(torch.as_tensor, packed), strict=True):
        old = layer.packed_mask(tensor)
        if codes.shape == old.shape:
            if not torch.equal(codes, old.cpu()):
                old.copy_(codes)
        else:
            setattr(layer, layer.attribute(tensor, "mask"), codes.to(old.device, copy=True))
    told = tuple(replace(tensor, shape=one.shape) for tensor, one in zip(tensors, layer.tensors, strict=True))
    if not layer.is_current or told != layer.tensors:
        layer.tensors = told
        layer.materialise()
