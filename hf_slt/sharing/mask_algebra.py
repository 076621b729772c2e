"""Masks of one backbone compared and combined, from file to file: no weight is drawn.

overlap(A, B)  = |A and B| / |A or B|             Jaccard's; two random masks of density d overlap d / (2 - d)
hamming(A, B)  = |A xor B|                        weights on which they disagree
"""

import copy
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..model.configuration_supermask_gpt2 import SupermaskGPT2Config
from ..model.named_masks import backbone_differences
from ..model.ticket import WEIGHT_FILES, Header, Ticket, TicketError, count_bits, pack_mask, read_ticket
from .card import CARD_FILE, FIGURES, write_card
from .files import staged
from .saving import rewrite_ticket
from .verify import mask_path

Masks = Mapping[str, np.ndarray]  # by tensor name


@dataclass(frozen=True)
class Comparison:
    """Two masks of one tensor, or of all of them together."""

    size: int
    kept: tuple[int, int]
    both: int

    @property
    def hamming(self) -> int:
        return sum(self.kept) - 2 * self.both

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


def compare_masks(one: Masks, other: Masks, sizes: Mapping[str, int]) -> dict[str, Comparison]:
    """Comparison of packed masks by tensor, and under `"all"` of all tensors as one.

    >>> masks = np.array([0b0111], np.uint8), np.array([0b1110], np.uint8)
    >>> found = compare_masks({"w": masks[0]}, {"w": masks[1]}, {"w": 4})["w"]
    >>> found.hamming, found.overlap
    (2, 0.5)
    """
    found = {}
    for name, size in sizes.items():
        kept = count_bits(one[name]), count_bits(other[name])
        found[name] = Comparison(size, kept, count_bits(one[name] & other[name]))
    every = found.values()
    kept = sum(item.kept[0] for item in every), sum(item.kept[1] for item in every)
    found["all"] = Comparison(sum(item.size for item in every), kept, sum(item.both for item in every))
    return found


def majority(masks: Sequence[np.ndarray]) -> np.ndarray:
    """What more than half of them keep.

    >>> majority([np.array([0b011], np.uint8), np.array([0b110], np.uint8), np.array([0b010], np.uint8)])
    array([2], dtype=uint8)
    """
    votes = sum(np.unpackbits(mask, bitorder="little").astype(np.uint16) for mask in masks)
    return np.packbits(votes > len(masks) // 2, bitorder="little")


COMBINATIONS: dict[str, Callable[[Sequence[np.ndarray]], np.ndarray]] = {
    "intersection": np.bitwise_and.reduce,  # what all keep
    "union": np.bitwise_or.reduce,  # what any keeps
    "majority": majority,
}


def compare_tickets(one: str | os.PathLike, other: str | os.PathLike) -> dict[str, Comparison]:
    """Masks of two ticket folders compared, by tensor; they must be of one backbone."""
    first, second = _read_alike([one, other])
    sizes = {name: entry.size for name, entry in first.header.masked().items()}
    return compare_masks(first.arrays, second.arrays, sizes)


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
    masks = {}
    for name, entry in tickets[0].header.tensors.items():
        if entry.masked:
            masks[name] = COMBINATIONS[how]([ticket.arrays[name] for ticket in tickets])
        elif entry.trained:
            for source, ticket in zip(sources, tickets, strict=True):
                if not np.array_equal(ticket.arrays[name], tickets[0].arrays[name]):
                    raise TicketError(
                        f"{source}: its trained values of {name} are not those of {sources[0]}; only masks "
                        "can be combined"
                    )
    if not any(mask.any() for mask in masks.values()):
        raise TicketError(f"the {how} of these masks keeps no weight at all")
    digests = ", ".join(f"`{ticket.header.mask_digest[:8]}`" for ticket in tickets)
    with staged(target, stale="|".join([WEIGHT_FILES, *map(re.escape, FIGURES)])) as stage:
        header = rewrite_ticket(sources[0], stage, encoding=encoding, masks=masks)
        for name in (CARD_FILE, *FIGURES):
            (stage / name).unlink(missing_ok=True)
        origin = f"{how} of the masks {digests}"
        write_card(stage, name=Path(target).resolve().name, origin=origin, header=header)
    return header


def _read_alike(sources: Sequence[str | os.PathLike]) -> list[Ticket]:
    tickets: list[Ticket] = []
    for source in sources:
        tickets.append(read_ticket(mask_path(source)))
        if differences := backbone_differences(*(one.header.config for one in (tickets[0], tickets[-1]))):
            differ = "; ".join(differences[:3])
            raise TicketError(f"{sources[0]} and {source} are of different backbones: {differ}")
    return tickets


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
            if (shape := masks[tensor.name].shape) != tensor.shape:
                raise ValueError(f"the mask of {tensor.name} has shape {shape}, not {tensor.shape}")
            stored.copy_(torch.from_numpy(pack_mask(masks[tensor.name])))
        layer.materialise()
    return model
