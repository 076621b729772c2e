"""Blocks of a text that is read during training: a stream, the place in it, and how processes share it.

Every process reads its own shards (`datasets.distributed.split_dataset_by_node`), tokenises them, and joins
its documents end to end. With the same number of processes a run sees the same blocks, also after it was
resumed. With another number of processes it sees other blocks, because documents are divided differently.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from .corpus import DataError, wrap_errors
from .tokens import Tokenise

DOCUMENTS = 64  # read and tokenised at a time


def model_inputs(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Return the inputs of a causal LM of Transformers. The model itself shifts the labels.

    Args:
        ids (`np.ndarray`):
            Token ids.

    Returns:
        `dict[str, np.ndarray]`: `input_ids` and `labels`, both the ids.
    """
    ids = np.asarray(ids, np.int64)
    return {"input_ids": ids, "labels": ids}


def too_little_text(split: str, tokens: int, block_size: int) -> DataError:
    """Return the error for a text that is too short for one block.

    Args:
        split (`str`):
            Which part of the text, `"train"` or `"validation"`.
        tokens (`int`):
            Number of tokens of the text.
        block_size (`int`):
            Tokens in a block.

    Returns:
        [`DataError`]: the error, to be raised.
    """
    return DataError(
        f"the {split} split has {tokens} tokens, too few for one block of {block_size};"
        " give more text or a smaller block_size"
    )


class StreamedBlocks(IterableDataset):
    """Blocks that are packed while the text is read. They have the order of stored blocks.

    Args:
        texts (`datasets.IterableDataset`):
            The documents, in the column `text`.
        tokenise ([`Tokenise`]):
            Tokenizer and options.
        block_size (`int`):
            Tokens in a block.
    """

    def __init__(self, texts: Any, tokenise: Tokenise, block_size: int) -> None:
        self.texts, self.tokenise, self.block_size = texts, tokenise, block_size

    def share(self, rank: int, processes: int) -> "StreamedBlocks":
        """Return the part of the stream that one process reads.

        Args:
            rank (`int`):
                Number of the process.
            processes (`int`):
                Number of processes.

        Returns:
            [`StreamedBlocks`]: the stream of this process.
        """
        if processes == 1:
            return self
        from datasets.distributed import split_dataset_by_node

        return StreamedBlocks(
            split_dataset_by_node(self.texts, rank, processes), self.tokenise, self.block_size
        )

    def read(self, place: Mapping[str, Any] | None = None) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        """Read the stream once, from a given place to the end.

        Args:
            place (`Mapping`, *optional*):
                A place that an earlier call yielded, possibly saved as JSON. Default: the beginning.

        Yields:
            `tuple`: the ids of a block, and the place after it.
        """
        left: list[int] = list(place["left"]) if place else []
        skipped: int = place["blocks"] if place else 0
        state: Any = place["texts"] if place else None
        count = 0
        self.texts.load_state_dict(state)  # None: from the beginning
        with wrap_errors(
            "read the stream of text", "check the network and that the text is whole and in UTF-8"
        ):
            for batch in self.texts.iter(DOCUMENTS):
                tokens = left + self._tokens(batch["text"])
                whole = len(tokens) // self.block_size
                for number in range(skipped, whole):
                    block = np.array(tokens[number * self.block_size : (number + 1) * self.block_size])
                    yield block, {"texts": state, "left": left, "blocks": number + 1}
                count += whole
                left, skipped = tokens[whole * self.block_size :], 0
                state = self.texts.state_dict()
        if not count and place is None:
            raise too_little_text("train", len(left), self.block_size)

    def _tokens(self, texts: list[str]) -> list[int]:
        rows = self.tokenise(texts, list(range(len(texts))))["input_ids"]
        return [token for row in rows for token in row]

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        worker = get_worker_info()
        for count, (ids, _) in enumerate(self.read()):
            # Every worker reads the whole stream and keeps only its own blocks: none is lost or repeated.
            if worker is None or count % worker.num_workers == worker.id:
                yield model_inputs(ids)
