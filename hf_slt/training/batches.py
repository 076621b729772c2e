"""Which blocks make up a step: a function of (seed, step), so that there is no place in the data to save.

Every pass over the blocks is a permutation drawn from the seed, and steps cut the endless row of passes
into global batches. Two processes take the halves of what one process would have taken.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from ..model.random_weights import draw
from ..text.blocks import StreamedBlocks, TokenBlocks


def block_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """A permutation of the blocks for each pass, from the same generator as the weights."""
    return np.argsort(draw(seed, f"order.{epoch}", (size,), "uniform"), kind="stable")


class Batches:
    """The blocks of a step, as this process sees them; any step can be asked for after the last.

    The global batch of a step is `width` blocks: micro-batch after micro-batch, and in each of them
    process after process.
    """

    def __init__(self, blocks: Any, seed: int, batch_size: int, accumulation: int, accelerator: Accelerator):
        self.blocks, self.seed, self.device = blocks, seed, accelerator.device
        self.rank, self.processes = accelerator.process_index, accelerator.num_processes
        self.batch_size, self.accumulation = batch_size, accumulation
        self.width = batch_size * accumulation * self.processes
        self._stream: Iterator[dict] | None = None
        self._streamed = 0  # blocks taken from the stream
        self._epoch, self._order = -1, np.empty(0, int)

    def of_step(self, step: int) -> Iterator[dict[str, Tensor]]:
        """The micro-batches of a step for this process, on its device."""
        first = step * self.width
        streamed = self._from_stream(first) if isinstance(self.blocks, StreamedBlocks) else None
        for micro in range(self.accumulation):
            start = (micro * self.processes + self.rank) * self.batch_size
            if streamed is not None:
                rows = streamed[start : start + self.batch_size]
            else:  # only this process's share is read
                places = range(first + start, first + start + self.batch_size)
                rows = [self.blocks[self._index(place)] for place in places]
            # A block names its own labels: -100 where a token is not to be learned.
            yield {
                name: torch.from_numpy(np.stack([row[name] for row in rows])).to(self.device)
                for name in ("input_ids", "labels")
            }

    def _index(self, place: int) -> int:
        epoch, place = divmod(place, len(self.blocks))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, block_order(self.seed, epoch, len(self.blocks))
        return int(self._order[place])

    def _from_stream(self, first: int) -> list[dict[str, np.ndarray]]:
        if self._stream is None:
            self._stream = self._endless()
        for _ in islice(self._stream, first - self._streamed):  # resumed: read past what was seen
            pass
        self._streamed = first + self.width
        return list(islice(self._stream, self.width))

    def _endless(self) -> Iterator[dict]:
        while True:
            yield from self.blocks


def validation_batches(
    blocks: TokenBlocks, size: int, accelerator: Accelerator
) -> Iterator[dict[str, np.ndarray]]:
    """The share of this process; all take equally many batches, what is over has labels of -100."""
    for start in range(0, len(blocks), accelerator.num_processes * size):
        rows = start + accelerator.process_index * size + np.arange(size)
        batch = blocks[np.minimum(rows, len(blocks) - 1)]
        yield {**batch, "labels": np.where((rows < len(blocks))[:, None], batch["labels"], -100)}
