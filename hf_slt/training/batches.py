"""Which blocks belong to a step.

For stored text this is a function of (seed, step): every pass over the blocks is a permutation drawn from the seed,
and steps cut the endless sequence of passes into global batches. Two processes each get half of the batch of a single
process, and a checkpoint needs no place in the data. A stream is read in its own order, every process reads its own
part, and a checkpoint stores the place.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

from ..text.blocks import StreamedBlocks, TokenBlocks, model_inputs
from ..weights.random_weights import draw

INPUTS = ("input_ids", "labels")  # a block has its own labels: -100 for a token that is not to be learned


def block_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """Return the permutation of the blocks in a pass, from the same generator as the weights.

    Args:
        seed (`int`):
            Seed of the run.
        epoch (`int`):
            Number of the pass.
        size (`int`):
            Number of blocks.

    Returns:
        `np.ndarray`: the permutation.
    """
    return np.argsort(draw(seed, f"order.{epoch}", (size,), "uniform"), kind="stable")


class Batches:
    """The micro-batches of one process, read ahead by a `DataLoader`.

    The global batch of a step is `width` blocks: micro-batch after micro-batch, and in each of them process
    after process.

    Args:
        blocks ([`TokenBlocks`] or [`StreamedBlocks`]):
            The text.
        seed (`int`):
            Seed of the order of stored blocks.
        batch_size (`int`):
            Blocks in a micro-batch of one process.
        accumulation (`int`):
            Micro-batches in a step.
        accelerator (`Accelerator`):
            The processes.
        workers (`int`, *optional*):
            Processes that read ahead. Default: none for stored blocks, which are fast to read, and one for a stream,
            which must be tokenised.
    """

    def __init__(
        self,
        blocks: Any,
        seed: int,
        batch_size: int,
        accumulation: int,
        accelerator: Accelerator,
        workers: int | None = None,
    ) -> None:
        self.blocks, self.seed, self.device = blocks, seed, accelerator.device
        self.rank, self.processes = accelerator.process_index, accelerator.num_processes
        self.batch_size, self.accumulation = batch_size, accumulation
        self.width = batch_size * accumulation * self.processes
        self.streams = isinstance(blocks, StreamedBlocks)
        self.workers = int(self.streams) if workers is None else workers
        if self.streams and self.workers > 1:
            self.workers = 1  # with a single reader there is a single place in the stream
        self.place: Any = None  # the place in the stream before step `_step`
        self._step = 0
        self._loaded: Iterator[Any] | None = None

    def restore(self, step: int, place: Any) -> None:
        """Continue from a step.

        Args:
            step (`int`):
                Number of the step.
            place:
                The value of `place` that this process had at that step: None for stored blocks.
        """
        self._step, self.place, self._loaded = step, place, None

    def of_step(self, step: int) -> Iterator[dict[str, Tensor]]:
        """Yield the micro-batches of a step for this process, on its device.

        Args:
            step (`int`):
                Number of the step.

        Yields:
            A micro-batch.
        """
        if step != self._step or self._loaded is None:
            self._loaded = self._load_from(step)
        self._step = step + 1
        for _ in range(self.accumulation):
            batch, self.place = next(self._loaded)
            yield {name: batch[name].to(self.device, non_blocking=True) for name in INPUTS}

    def _load_from(self, step: int) -> Iterator[Any]:
        options: dict[str, Any] = {
            "num_workers": self.workers,
            "pin_memory": self.device.type == "cuda",
            "generator": torch.Generator(),  # torch's own would advance, and dropout would depend on resuming
        }
        if not self.streams:
            sampler = _StepSampler(self, step * self.width)
            return iter(DataLoader(self.blocks, batch_sampler=sampler, collate_fn=_collate, **options))
        if step < self._step:
            self._step, self.place = 0, None
        stream = _EndlessStream(self.blocks.share(self.rank, self.processes), self.place)
        options |= {"collate_fn": _collate_stream, "worker_init_fn": _quiet_tokenizers}
        loaded = iter(DataLoader(stream, self.batch_size, **options))
        for _ in range((step - self._step) * self.accumulation):
            next(loaded)
        return loaded


class _StepSampler(Sampler[list[int]]):
    """Yields the indices of this process's micro-batches, without end, from a given place in the passes."""

    def __init__(self, batches: Batches, first: int) -> None:
        self.batches, self.first = batches, first

    def __iter__(self) -> Iterator[list[int]]:
        batches, size = self.batches, len(self.batches.blocks)
        place = self.first + batches.rank * batches.batch_size
        epoch, order = -1, np.empty(0, int)
        while True:
            rows = []
            for one in range(place, place + batches.batch_size):
                if one // size != epoch:
                    epoch = one // size
                    order = block_order(batches.seed, epoch, size)
                rows.append(int(order[one % size]))
            yield rows
            place += batches.batch_size * batches.processes


class _EndlessStream(IterableDataset):
    """Yields a stream again and again, from a given place: pairs of a block and the place after it."""

    def __init__(self, blocks: StreamedBlocks, place: Mapping[str, Any] | None) -> None:
        self.blocks, self.place = blocks, place

    def __iter__(self) -> Iterator[tuple[dict[str, np.ndarray], Any]]:
        place = self.place
        while True:
            for ids, after in self.blocks.read(place):
                yield model_inputs(ids), after
            place = None


def _collate(rows: list[Mapping[str, np.ndarray]]) -> tuple[dict[str, Tensor], None]:
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in INPUTS}, None


def _collate_stream(rows: list[tuple[Mapping[str, np.ndarray], Any]]) -> tuple[dict[str, Tensor], Any]:
    return _collate([row for row, _ in rows])[0], rows[-1][1]


def _quiet_tokenizers(worker: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # otherwise `tokenizers` warns of the fork, then does this


def validation_batches(
    blocks: TokenBlocks, size: int, accelerator: Accelerator
) -> Iterator[dict[str, np.ndarray]]:
    """Yield this process's share. All processes get the same number of batches; extra rows have labels of -100.

    Args:
        blocks ([`TokenBlocks`]):
            The validation blocks.
        size (`int`):
            Blocks in a batch of one process.
        accelerator (`Accelerator`):
            The accelerator of the run.

    Yields:
        A batch.
    """
    for start in range(0, len(blocks), accelerator.num_processes * size):
        rows = start + accelerator.process_index * size + np.arange(size)
        batch = blocks[np.minimum(rows, len(blocks) - 1)]
        yield {**batch, "labels": np.where((rows < len(blocks))[:, None], batch["labels"], -100)}
