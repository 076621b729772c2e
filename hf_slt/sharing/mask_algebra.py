"""Masks of one backbone compared and combined, from file to file: no weight is drawn, no torch is needed.

overlap(A, B)  = |A and B| / |A or B|             Jaccard's; two random masks of density d overlap d / (2 - d)
hamming(A, B)  = |A xor B|                        weights on which they disagree
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import numpy as np

from ..model.files import staged
from ..model.named_masks import backbone_differences
from ..model.random_weights import digest
from ..model.ticket import (
    CONFIG_FILE,
    ENCODINGS,
    INDEX_FILE,
    MASK_FILE,
    MODEL_FILE,
    WEIGHT_FILES,
    Header,
    TicketError,
    count_bits,
    mask_digest,
    mask_path,
    read_json,
    read_ticket,
    write_masks,
)
from .verify import verify_ticket

Masks = Mapping[str, np.ndarray]  # packed, by tensor name


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
    """Comparison by tensor, and under `"all"` of all tensors as one.

    >>> masks = np.array([0b0111], np.uint8), np.array([0b1110], np.uint8)
    >>> found = compare_masks({"w": masks[0]}, {"w": masks[1]}, {"w": 4})["w"]
    >>> found.hamming, found.overlap
    (2, 0.5)
    """
    found = {
        name: Comparison(
            sizes[name],
            (count_bits(one[name]), count_bits(other[name])),
            count_bits(one[name] & other[name]),
        )
        for name in one
    }
    every = found.values()
    kept = sum(item.kept[0] for item in every), sum(item.kept[1] for item in every)
    return {
        **found,
        "all": Comparison(sum(item.size for item in every), kept, sum(item.both for item in every)),
    }


def intersection(masks: Sequence[np.ndarray]) -> np.ndarray:
    """What all keep."""
    return reduce(np.bitwise_and, masks)


def union(masks: Sequence[np.ndarray]) -> np.ndarray:
    """What any keeps."""
    return reduce(np.bitwise_or, masks)


def majority(masks: Sequence[np.ndarray]) -> np.ndarray:
    """What more than half of them keep.

    >>> majority([np.array([0b011], np.uint8), np.array([0b110], np.uint8), np.array([0b010], np.uint8)])
    array([2], dtype=uint8)
    """
    votes = sum(np.unpackbits(mask, bitorder="little").astype(np.uint16) for mask in masks)
    return np.packbits(votes > len(masks) // 2, bitorder="little")


COMBINATIONS: dict[str, Callable[[Sequence[np.ndarray]], np.ndarray]] = {
    "intersection": intersection,
    "union": union,
    "majority": majority,
}


def compare_tickets(one: str | os.PathLike, other: str | os.PathLike) -> dict[str, Comparison]:
    """Masks of two ticket folders compared, by tensor; they must be of one backbone."""
    (header, arrays), (_, others) = _read_alike([one, other])
    return compare_masks(
        {name: arrays[name] for name, entry in header.tensors.items() if entry.masked},
        {name: others[name] for name, entry in header.tensors.items() if entry.masked},
        {name: entry.size for name, entry in header.tensors.items() if entry.masked},
    )


def combine_tickets(
    sources: Sequence[str | os.PathLike],
    how: str,
    target: str | os.PathLike,
    *,
    encoding: str = "packed",
) -> Header:
    """A new ticket of the combined masks of ticket folders; everything else is taken from the first."""
    if how not in COMBINATIONS:
        raise ValueError(f"combination {how!r} is not one of {', '.join(map(repr, COMBINATIONS))}")
    if len(sources) < 2:
        raise ValueError("give at least two tickets to combine")
    read = _read_alike(sources)
    header, first = read[0]
    masks = {}
    for name, entry in header.tensors.items():
        if entry.masked:
            masks[name] = COMBINATIONS[how]([arrays[name] for _, arrays in read])
        elif entry.trained:
            for source, (_, arrays) in zip(sources, read, strict=True):
                if not np.array_equal(arrays[name], first[name]):
                    raise TicketError(
                        f"{source}: its trained values of {name} are not those of {sources[0]}; only masks "
                        "can be combined"
                    )
    if not any(mask.any() for mask in masks.values()):
        raise TicketError(f"the {how} of these masks keeps no weight at all")
    return rewrite_ticket(sources[0], target, encoding=encoding, masks=masks)


def _read_alike(sources: Sequence[str | os.PathLike]) -> list[tuple[Header, dict[str, np.ndarray]]]:
    read: list[tuple[Header, dict[str, np.ndarray]]] = []
    for source in sources:
        ticket = read_ticket(mask_path(source))
        header = ticket.header
        if read and (differences := backbone_differences(read[0][0], header)):
            raise TicketError(
                f"{sources[0]} and {source} are of different backbones: {'; '.join(differences[:3])}"
            )
        read.append((header, ticket.arrays))
    return read


def rewrite_ticket(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    encoding: str = "packed",
    masks: Mapping[str, np.ndarray] | None = None,
) -> Header:
    """The ticket of one folder written to another (or the same), whole or not at all.

    encoding: how the new file stores its masks.
    masks: packed masks by tensor name, in place of those in `source`; the density becomes what they keep.
    """
    source, target = Path(source), Path(target)
    if encoding not in ENCODINGS:
        raise ValueError(f"encoding {encoding!r} is not one of {', '.join(map(repr, ENCODINGS))}")
    verify_ticket(source, weights=False)
    ticket = read_ticket(mask_path(source))
    header, arrays = ticket.header, dict(ticket.arrays)
    config = read_json(source / CONFIG_FILE)
    if masks is not None:
        arrays |= masks
        entries = {
            name: replace(entry, kept=count_bits(arrays[name]), data_sha256=digest(arrays[name]))
            if entry.masked
            else entry
            for name, entry in header.tensors.items()
        }
        masked = [entry for entry in entries.values() if entry.masked]
        density = sum(entry.kept or 0 for entry in masked) / sum(entry.size for entry in masked)
        digest_of_all = mask_digest(entries)
        changed = {"density": density, "mask_digest": digest_of_all}
        config |= changed
        header = replace(
            header,
            tensors=entries,
            config={**header.config, **changed},
            density=density,
            mask_digest=digest_of_all,
        )
    header = replace(header, encoding=encoding)
    with staged(target, stale=WEIGHT_FILES) as stage:
        if target.resolve() != source.resolve():
            for path in source.iterdir():
                if path.is_file() and path.name not in (MASK_FILE, MODEL_FILE, INDEX_FILE, CONFIG_FILE):
                    shutil.copyfile(path, stage / path.name)
        write_masks(stage, header, arrays)
        (stage / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return header
