"""What the header of a ticket says about one tensor."""

import math
from dataclasses import dataclass

import numpy as np

from ..weights.quantisation import BITS, stored_form

SCALES = "_scales"  # key of quantised values + this = key of the scales of their rows


@dataclass(frozen=True)
class Entry:
    """One tensor of a ticket.

    Args:
        shape (`tuple[int, ...]`):
            Shape of the tensor.
        key (`str`, *optional*):
            Key of its data in the file; None if the whole tensor is drawn.
        law (`str`, *optional*):
            Distribution of the drawn numbers; None for a trained tensor, whose values are stored.
        scale (`float`, *optional*):
            Scale of the drawn numbers; None for a trained tensor.
        counts (`tuple[int, ...]`, *optional*):
            How many weights have each code; None if it has no mask.
        data_sha256 (`str`, *optional*):
            First digits of the SHA-256 of its data.
        weight_sha256 (`str`, *optional*):
            First digits of the SHA-256 of the drawn weights, before masking.
        bits (`int`, defaults to 1):
            Bits of a code, or of a trained value.
        input_axes (`tuple[int, ...]`, *optional*):
            Axes along which paths run, with rule `trellis` only.
    """

    shape: tuple[int, ...]
    key: str | None = None
    law: str | None = None
    scale: float | None = None
    counts: tuple[int, ...] | None = None  # of a mask: how many weights have each code
    data_sha256: str | None = None  # of the packed mask or the trained float32 values: the first 16 digits
    weight_sha256: str | None = None  # of the drawn float32 weights, before masking: the same
    bits: int = 1  # of a code; 32, 16, 8 or 4 of a trained value
    input_axes: tuple[int, ...] | None = (
        None  # of a trellis: the axes that paths run along; else not in a file
    )

    @property
    def size(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def kind(self) -> str:
        """Return masked (codes are stored), frozen (nothing is stored) or trained (values are stored)."""
        return "trained" if self.law is None else "frozen" if self.counts is None else "masked"

    def stored(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return keys, shapes and types of its data in a packed file.

        Returns:
            `dict[str, tuple[tuple[int, ...], np.dtype]]`: shape and type of each array, by key.
        """
        if self.key is None:
            return {}
        if self.counts is not None:
            return {self.key: ((self.bits * -(-sum(self.counts) // 8),), np.dtype(np.uint8))}
        if self.bits not in BITS:
            return {self.key: (self.shape, np.dtype(f"float{self.bits}"))}
        scales = ((self.shape[0],), np.dtype(np.float16))
        return {self.key: stored_form(self.shape, self.bits), self.key + SCALES: scales}
