"""Masks of one backbone compared and combined, from file to file: no weight is drawn.

overlap(A, B)  = |A and B| / |A or B|    of what they keep; two random masks of density d overlap d / (2 - d)
hamming(A, B)                            weights on which they disagree: kept or not, or by which factor

Masks of different rules can be compared; to be combined they must have the same codes.
"""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..model.codes import factors_of, pack_codes, unpack_codes
from ..model.configuration_supermask_gpt2 import SupermaskGPT2Config
from ..model.random_weights import TensorSpec
from ..model.ticket import ADDED, Header, Ticket, TicketError, read_ticket
from .card import CARD_FILE, FIGURES, factors_told, write_card
from .files import staged
from .named_masks import backbone_differences
from .saving import rewrite_ticket, stored_data
from .verify import mask_path

Masks = Mapping[str, np.ndarray]  # by tensor name


@dataclass(frozen=True)
class Comparison:
    """Two masks of one tensor, or of all of them together."""

    size: int
    kept: tuple[int, int]
    both: int
    hamming: int

    @property
    def overlap(self) -> float:
        either = sum(self.kept) - self.both
        return self.both / either if either else 1.0

    @property
    def chance(self) -> float:
        """The overlap of two random masks that keep as many, in expectation (of both, over either)."""
        both = self.kept[0] * self.kept[1] / self.size if self.size else 0.0
        either = sum(self.kept) - both
        return both / either if either else 1.0


def compare_masks(one: Masks, other: Masks) -> dict[str, Comparison]:
    """Comparison of factors by tensor, and under `"all"` of all tensors as one.

    >>> found = compare_masks({"w": np.array([0, 1, 1, 1])}, {"w": np.array([1, 1, 1, 0])})["w"]
    >>> found.hamming, found.overlap
    (2, 0.5)
    """
    found = {}
    for name, first in one.items():
        second = other[name]
        some = (first != 0, second != 0, (first != 0) & (second != 0), first != second)
        one_keeps, other_keeps, both, differ = (int(np.count_nonzero(mask)) for mask in some)
        found[name] = Comparison(first.size, (one_keeps, other_keeps), both, differ)
    every = found.values()
    kept = sum(item.kept[0] for item in every), sum(item.kept[1] for item in every)
    both, differ = sum(item.both for item in every), sum(item.hamming for item in every)
    found["all"] = Comparison(sum(item.size for item in every), kept, both, differ)
    return found


def intersection(masks: Sequence[np.ndarray], zero: int) -> np.ndarray:
    """What all keep, as the first has it."""
    return np.where(np.logical_and.reduce([mask != zero for mask in masks]), masks[0], zero)


def union(masks: Sequence[np.ndarray], zero: int) -> np.ndarray:
    """What any keeps, as the first that keeps it has it."""
    result = masks[-1]
    for mask in reversed(masks[:-1]):
        result = np.where(mask != zero, mask, result)
    return result


def majority(masks: Sequence[np.ndarray], zero: int | None) -> np.ndarray:
    """The code that most have; where several are as frequent, that of zero, or the lowest.

    >>> majority([np.array([0, 1, 1]), np.array([1, 1, 0]), np.array([0, 1, 0])], 0).tolist()
    [0, 1, 0]
    """
    codes = sorted(set(range(1 + max(int(mask.max()) for mask in masks))), key=lambda code: code != zero)
    votes = np.stack([sum((mask == code).astype(np.int16) for mask in masks) for code in codes])
    return np.array(codes, np.uint8)[votes.argmax(0)]


COMBINATIONS: dict[str, Callable[..., np.ndarray]] = {
    "intersection": intersection,
    "union": union,
    "majority": majority,
}


def compare_tickets(one: str | os.PathLike, other: str | os.PathLike) -> dict[str, Comparison]:
    """Masks of two ticket folders compared, by tensor; they must be of one backbone."""
    first, second = _read_alike([one, other])
    return compare_masks(ticket_factors(first), ticket_factors(second))


def ticket_factors(ticket: Ticket) -> dict[str, np.ndarray]:
    """The factor of every weight, by name of the masked tensors."""
    config = SupermaskGPT2Config.from_dict(dict(ticket.header.config))
    return {name: factors_of(config.tensor(name), ticket.arrays[name]) for name in ticket.header.masked()}


def combine_tickets(
    sources: Sequence[str | os.PathLike], how: str, target: str | os.PathLike, *, encoding: str = "packed"
) -> Header:
    """A new ticket of the combined masks of ticket folders, with a card of its own.

    Tokenizer and code are taken from the first; its results and figures are not those of the new one.
    """
    if how not in COMBINATIONS:
        raise ValueError(f"combination {how!r} is not one of {', '.join(map(repr, COMBINATIONS))}")
    if len(sources) < 2:
        raise ValueError("give at least two tickets to combine")
    if Path(target).resolve() in [Path(source).resolve() for source in sources]:
        raise TicketError(f"{target}: one of the tickets to combine, which stay; give another folder")
    tickets = _read_alike(sources)
    for key in ("factors", "search", "frozen_density"):
        values = [(ADDED | dict(ticket.header.config))[key] for ticket in tickets]
        if values != values[:1] * len(values):
            raise TicketError(
                f"masks of {key} {values} cannot be combined: their codes mean different things"
            )
    factors, masks = list(factors_told(tickets[0].header)), {}
    zero = factors.index(0.0) if 0.0 in factors else None
    if zero is None and how != "majority":
        raise TicketError(
            f"masks of factors {factors} keep every weight and have no {how}; take the majority"
        )
    for name, entry in tickets[0].header.tensors.items():
        if entry.kind == "masked":
            size, levels = sum(entry.counts or ()), len(factors)
            codes = [unpack_codes(ticket.arrays[name], size, levels) for ticket in tickets]
            masks[name] = pack_codes(COMBINATIONS[how](codes, zero), levels)
        elif entry.kind == "trained":
            for source, ticket in zip(sources, tickets, strict=True):
                if not np.array_equal(ticket.arrays[name], tickets[0].arrays[name]):
                    raise TicketError(
                        f"{source}: its trained values of {name} are not those of {sources[0]}; only masks "
                        "can be combined"
                    )
    if zero == 0 and not any(mask.any() for mask in masks.values()):
        raise TicketError(f"the {how} of these masks keeps no weight at all")
    digests = ", ".join(f"`{ticket.header.mask_digest[:8]}`" for ticket in tickets)
    with staged(target) as stage:
        header = rewrite_ticket(sources[0], stage, encoding=encoding, masks=masks)
        for name in (CARD_FILE, *FIGURES):
            (stage / name).unlink(missing_ok=True)
        origin = f"{how} of the masks {digests}"
        write_card(stage, name=Path(target).resolve().name, origin=origin, header=header)
    for name in FIGURES:  # of a ticket that was there before
        (Path(target) / name).unlink(missing_ok=True)
    return header


def _read_alike(sources: Sequence[str | os.PathLike]) -> list[Ticket]:
    tickets: list[Ticket] = []
    for source in sources:
        tickets.append(read_ticket(mask_path(source)))
        if differences := backbone_differences(*(one.header.config for one in (tickets[0], tickets[-1]))):
            differ = "; ".join(differences[:3])
            raise TicketError(f"{sources[0]} and {source} are of different backbones: {differ}")
    return tickets


def code_array(tensor: TensorSpec, packed: np.ndarray) -> np.ndarray:
    """The codes of a tensor in its shape, or in a row where a share is searched; booleans for (0, 1)."""
    codes = unpack_codes(packed, tensor.searched, len(tensor.factors))
    codes = codes.view(bool) if tensor.factors == (0.0, 1.0) else codes
    return codes.reshape(tensor.shape) if tensor.search == 1 else codes


def mask_arrays(model: Any) -> dict[str, np.ndarray]:
    """Every mask of a model by tensor name: codes, or booleans where the factors are 0 and 1."""
    return {
        tensor.name: code_array(tensor, packed)
        for _, layer, stored in stored_data(model)
        if layer.kind == "masked"
        for tensor, packed in zip(layer.tensors, stored, strict=True)
    }


def ticket_of_masks(model_class: Any, config: SupermaskGPT2Config, masks: Masks) -> Any:
    """A ticket, in memory, of these masks by tensor name; all that the configuration has are needed."""
    config = copy.deepcopy(config)
    config.state, config.mask_digest = "ticket", None
    model = model_class(config).eval()
    layers = [layer for _, layer in model.supermask_layers() if layer.kind == "masked"]
    names = {tensor.name for layer in layers for tensor in layer.tensors}
    if names != masks.keys():
        missing, unknown = sorted(names - masks.keys()), sorted(masks.keys() - names)
        raise ValueError(f"no mask for {missing}" if missing else f"the configuration has no {unknown}")
    for layer in layers:
        for tensor, stored in zip(layer.tensors, layer.stored(), strict=True):
            wanted = tensor.shape if tensor.search == 1 else (tensor.searched,)
            if (shape := masks[tensor.name].shape) != wanted:
                raise ValueError(f"the mask of {tensor.name} has shape {shape}, not {wanted}")
            stored.copy_(torch.from_numpy(pack_codes(masks[tensor.name], len(tensor.factors))))
        layer.materialise()
    return model
