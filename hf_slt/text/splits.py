"""Splits documents into training and validation. The split depends only on the text, so a digest names the data.

side(document) = validation  if  sha256(document) / 2**256 < fraction  else  train
"""

import hashlib
from dataclasses import dataclass
from itertools import islice
from typing import Any

from .corpus import CorpusArguments, iterate_texts, load_texts

FEW_DOCUMENTS = 100  # below this a split by document could leave one side empty
HALVED_WHOLE = 8  # with this many documents or more, held-out text is halved by whole documents
JUDGED = 10_000  # a split is judged by this many documents: a stream may have no end


def split_texts(texts: Any, fraction: float, lines: bool = False) -> tuple[Any, Any, str]:
    """Split documents into a train and a validation part. The same text always falls on the same side.

    Many documents are split by their hashes: two copies of a document are always on the same side. With `lines`,
    rows are consecutive lines of a text, and the last rows are for validation. If documents are few, or so uneven that
    less than half or more than twice the fraction would be held out, the end of each document is for validation.

    Args:
        texts (`datasets.Dataset` or `datasets.IterableDataset`):
            The documents, in the column `text`.
        fraction (`float`):
            Fraction of the text to hold out.
        lines (`bool`, defaults to `False`):
            Whether rows are lines of one text.

    Returns:
        `tuple`: the train part, the validation part, and a description of the validation part.
    """
    few = [len(text) for text in islice(iterate_texts(texts), FEW_DOCUMENTS)]
    if lines:
        cut = len(texts) - max(1, round(len(texts) * fraction))
        train, validation = texts.select(range(cut)), texts.select(range(cut, len(texts)))
        share = _length(validation) / max(1, _length(texts))
        if fraction / 2 <= share <= 2 * fraction:
            return train, validation, f"the last rows, {share:.1%} of the text"
    elif len(few) == FEW_DOCUMENTS:
        length = held_out = 0
        validates = _SplitByHash(fraction, True)
        for text in islice(iterate_texts(texts), JUDGED):
            length, held_out = length + len(text), held_out + len(text) * validates(text)
        if fraction / 2 <= held_out / length <= 2 * fraction:
            parts = (
                texts.filter(_SplitByHash(fraction, side), input_columns=["text"]) for side in (False, True)
            )
            return (*parts, f"documents chosen by their hash, {held_out / length:.1%} of the text")
    why = f"{len(few)} documents" if len(few) < FEW_DOCUMENTS else "documents of very uneven lengths"
    parts = (texts.map(_SplitEach(fraction, side), input_columns=["text"]) for side in (False, True))
    return (*parts, f"the last {fraction:.1%} of each document, as there are {why}")


def halve_texts(texts: Any) -> tuple[Any, Any]:
    """Cut held-out text in two: one half for choosing settings, the other half for reporting results.

    Documents alternate, and the first one goes to the first half. If there are fewer than 8, each of them is
    cut in the middle, at a line break if there is one nearby.

    Args:
        texts (`datasets.Dataset` or `datasets.IterableDataset`):
            The held-out documents, in the column `text`.

    Returns:
        `tuple`: the two halves.
    """
    if sum(1 for _ in islice(iterate_texts(texts), HALVED_WHOLE)) < HALVED_WHOLE:
        first, second = (texts.map(_SplitEach(0.5, side), input_columns=["text"]) for side in (False, True))
    else:
        first, second = (
            texts.filter(_EverySecond(rest), input_columns=["text"], with_indices=True) for rest in (0, 1)
        )
    return first, second


def embedded_validation() -> Any:
    """Return the validation part of the embedded corpus that runs with default arguments use.

    Returns:
        The documents.
    """
    args = CorpusArguments()
    return split_texts(load_texts(args)[0], args.validation_fraction)[1]


def _length(texts: Any) -> int:
    return sum(map(len, iterate_texts(texts)))


# Plain data and plain functions: `datasets` names its cache files by a hash of these objects.


@dataclass(frozen=True)
class _SplitByHash:
    """Returns whether a document is on a given side of the split by hash."""

    fraction: float
    held_out: bool

    def __call__(self, text: str) -> bool:
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        return (place < self.fraction * 2**64) == self.held_out


@dataclass(frozen=True)
class _SplitEach:
    """Returns the beginning of a document, or its held-out end. It cuts after a line break if one is near."""

    fraction: float
    held_out: bool

    def __call__(self, text: str) -> dict[str, str]:
        place = round(len(text) * (1 - self.fraction))
        slack = round(len(text) * min(self.fraction, 1 - self.fraction) / 2)
        cut = text.rfind("\n", place - slack, place) + 1 or place
        return {"text": text[cut:] if self.held_out else text[:cut]}


@dataclass(frozen=True)
class _EverySecond:
    """Returns whether the number of a document is even (`rest` 0) or odd (`rest` 1)."""

    rest: int

    def __call__(self, text: str, number: int) -> bool:
        return number % 2 == self.rest
