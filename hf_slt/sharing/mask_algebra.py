"""Compares and combines masks of one backbone. It reads and writes files only: no weight is drawn.

overlap(A, B)  = |A and B| / |A or B|    of the kept weights; two random masks of density d overlap d / (2 - d)
hamming(A, B)                            number of weights with different factors, such as kept and dropped

Masks of different rules can be compared; to be combined they must have the same codes.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import TicketError
from ..tickets.backbones import backbone_differences, pretrained_differences
from ..tickets.files import staged
from ..tickets.format import Header, Ticket, read_ticket
from ..tickets.verify import mask_path
from ..tickets.writing import rewrite_ticket
from ..weights.codes import factors_of, pack_codes, unpack_codes
from .card import CARD_FILE, FIGURES, write_card

Masks = Mapping[str, np.ndarray]  # by tensor name


@dataclass(frozen=True)
class Comparison:
    """How two masks of one tensor, or of all tensors together, differ.

    Args:
        size (`int`):
            Number of weights.
        kept (`tuple[int, int]`):
            How many weights each mask keeps.
        both (`int`):
            How many weights both keep.
        hamming (`int`):
            How many weights have different factors.
    """

    size: int
    kept: tuple[int, int]
    both: int
    hamming: int

    @property
    def overlap(self) -> float:
        """Weights that both keep, as a share of the weights that at least one of them keeps."""
        either = sum(self.kept) - self.both
        return self.both / either if either else 1.0

    @property
    def chance(self) -> float:
        """Expected overlap of two random masks that keep as many weights (ratio of the two expectations)."""
        both = self.kept[0] * self.kept[1] / self.size if self.size else 0.0
        either = sum(self.kept) - both
        return both / either if either else 1.0


def compare_masks(one: Masks, other: Masks) -> dict[str, Comparison]:
    """Compare masks tensor by tensor. The key `"all"` has the comparison of all tensors together.

    Args:
        one (`Masks`):
            Factors of every weight by tensor name.
        other (`Masks`):
            Factors of another mask, with the same names and shapes.

    Returns:
        `dict[str, Comparison]`: a comparison by tensor name, and one under `"all"`.

    Example:

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
    """Keep the weights that all masks keep, with the codes of the first mask.

    Args:
        masks (`Sequence[np.ndarray]`):
            Codes of one tensor, one array per mask.
        zero (`int`):
            The code that drops a weight.

    Returns:
        `np.ndarray`: codes.
    """
    return np.where(np.logical_and.reduce([mask != zero for mask in masks]), masks[0], zero)


def union(masks: Sequence[np.ndarray], zero: int) -> np.ndarray:
    """Keep the weights that any mask keeps, with the code of the first mask that keeps each.

    Args:
        masks (`Sequence[np.ndarray]`):
            Codes of one tensor, one array per mask.
        zero (`int`):
            The code that drops a weight.

    Returns:
        `np.ndarray`: codes.
    """
    result = masks[-1]
    for mask in reversed(masks[:-1]):
        result = np.where(mask != zero, mask, result)
    return result


def majority(masks: Sequence[np.ndarray], zero: int | None) -> np.ndarray:
    """Take the code that most masks have. If several are equally frequent, take the code of zero, or else the lowest.

    Args:
        masks (`Sequence[np.ndarray]`):
            Codes of one tensor, one array per mask.
        zero (`int` or `None`):
            The code that drops a weight; None if there is none.

    Returns:
        `np.ndarray`: codes.

    Example:

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
    """Compare the masks of two tickets of one backbone. No weight is drawn, except for rule `trellis`.

    Args:
        one (`str` or `os.PathLike`):
            Folder of a ticket.
        other (`str` or `os.PathLike`):
            Folder of another ticket with the same seed, law and shapes. Its rule may differ.

    Returns:
        `dict[str, Comparison]`: a comparison by tensor name, and under `"all"` one of all tensors together.

    Raises:
        [`TicketError`]: if a ticket is damaged, or if they are of different backbones.

    Example:

    ```python
    >>> compare_tickets("prose", "poems")["all"].overlap  # doctest: +SKIP
    ```
    """
    first, second = _read_alike([one, other])
    return compare_masks(ticket_factors(first), ticket_factors(second))


def ticket_factors(ticket: Ticket) -> dict[str, np.ndarray]:
    """Return the factor of every weight of a ticket, by name of the masked tensors.

    Args:
        ticket ([`Ticket`]):
            A ticket that was read.

    Returns:
        `dict[str, np.ndarray]`: factors in float32; for a trellis, the chosen numbers in units of their law.
    """
    header = ticket.header
    return {name: factors_of(header.spec(name), ticket.arrays[name]) for name in header.masked()}


def combine_tickets(
    sources: Sequence[str | os.PathLike], how: str, target: str | os.PathLike, *, encoding: str = "packed"
) -> Header:
    """Write a new ticket with the combined masks of several tickets, and a card of its own.

    The tokenizer of the first ticket is copied. Its results and figures are not: they do not hold for the new ticket.

    Args:
        sources (`Sequence[str | os.PathLike]`):
            Folders of two or more tickets of one backbone, with the same factors.
        how (`str`):
            `"intersection"`, `"union"` or `"majority"`.
        target (`str` or `os.PathLike`):
            Folder of the new ticket.
        encoding (`str`, defaults to `"packed"`):
            How masks are stored: `"packed"` or `"entropy"`.

    Returns:
        [`Header`]: the header of the new ticket.

    Raises:
        `ValueError`: for an unknown combination, or fewer than two tickets.
        [`TicketError`]: if a ticket is damaged, if they are of different backbones, if their codes mean different
            things, or if nothing would be kept.

    Example:

    ```python
    >>> combine_tickets(["prose", "poems"], "union", "both")  # doctest: +SKIP
    ```
    """
    if how not in COMBINATIONS:
        raise ValueError(f"combination {how!r} is not one of {', '.join(map(repr, COMBINATIONS))}")
    if len(sources) < 2:
        raise ValueError("give at least two tickets to combine")
    if Path(target).resolve() in [Path(source).resolve() for source in sources]:
        raise TicketError(f"{target}: is one of the tickets to combine, which are kept; give another folder")
    tickets = _read_alike(sources)
    for key in ("factors", "search", "frozen_density"):
        values = [ticket.header.options[key] for ticket in tickets]
        if values != values[:1] * len(values):
            raise TicketError(
                f"masks of {key} {values} cannot be combined: their codes mean different things"
            )
    if (states := tickets[0].header.options.get("state_bits")) is not None:
        raise TicketError(
            f"masks of a trellis (state_bits {states}) cannot be combined: a code means something only in its path"
        )
    factors, masks = list(tickets[0].header.options["factors"]), {}
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
    for name in FIGURES:  # left from an older ticket in this folder
        (Path(target) / name).unlink(missing_ok=True)
    return header


def _read_alike(sources: Sequence[str | os.PathLike]) -> list[Ticket]:
    tickets: list[Ticket] = []
    for source in sources:
        tickets.append(read_ticket(mask_path(source)))
        first, last = tickets[0].header, tickets[-1].header
        differences = backbone_differences(first.config, last.config) + pretrained_differences(first, last)
        if differences:
            differ = "; ".join(differences[:3])
            raise TicketError(f"{sources[0]} and {source} are of different backbones: {differ}")
    return tickets
