"""Turns text into blocks of token ids.

    sources (corpus.py) -> train and validation (splits.py) -> tokenizer (tokenizer.py)
      -> memory-mapped Arrow, read by index (tokens.py), or a stream (streams.py)

The merges that a tokenizer learns and the places where blocks begin depend only on the text.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub.constants import HF_HOME

from ..tickets.format import sha256
from .corpus import CorpusArguments, DataError, iterate_texts, load_texts, option
from .splits import halve_texts, split_texts
from .streams import StreamedBlocks, model_inputs, too_little_text
from .tokenizer import load_tokenizer, train_tokenizer, train_tokenizer_cached
from .tokens import ArrowBlocks, Tokenise, tokenise_beginning, tokenise_cached

STREAMED_VALIDATION = 256  # validation blocks of a stream, which may have no end


@dataclass
class DataArguments(CorpusArguments):
    """Where the text comes from and how it becomes blocks.

    By default: the embedded corpus and a tokenizer of 2048 tokens trained on it.
    """

    train_blocks: int | None = option(
        "Use at most this many training blocks, the first of the text; all by default."
    )
    validation_blocks: int | None = option(
        "Use at most this many validation blocks; all by default, 256 when streaming."
    )
    tokenizer: str | None = option(
        "Pretrained tokenizer: a name on the Hub (gpt2) or a local folder. Without it, one is trained."
    )
    vocab_size: int = option(
        "Size of the trained tokenizer, at least 257 (all bytes and end-of-text); a short text"
        " may hold fewer merges and give a smaller one. A pretrained tokenizer has its own size.",
        2048,
    )
    block_size: int = option("Tokens in a block, the length the model is trained on.", 128)
    preprocessing_num_workers: int | None = option(
        "Processes that tokenise; one by default, with as many threads as there are cores."
    )
    cache_dir: str | None = option("Folder for tokenised text; by default hf_slt in the Hugging Face home.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 2:
            raise DataError(f"block_size {self.block_size} leaves nothing to predict; use at least 2")
        if self.tokenizer is None and self.vocab_size < 257:
            raise DataError(
                f"vocab_size {self.vocab_size} cannot hold 256 bytes and end-of-text; use 257 or more"
            )
        if self.validation_blocks is not None and self.validation_blocks < 1:
            raise DataError(f"validation_blocks {self.validation_blocks} validates on nothing; use 1 or more")
        if self.train_blocks is not None and self.train_blocks < 1:
            raise DataError(f"train_blocks {self.train_blocks} trains on nothing; use 1 or more")
        if self.train_blocks is not None and self.streaming:
            raise DataError("train_blocks works only without streaming; limit max_steps instead")
        if self.preprocessing_num_workers is not None and self.preprocessing_num_workers < 1:
            raise DataError(
                f"preprocessing_num_workers {self.preprocessing_num_workers} tokenise nothing; use 1 or more"
            )


@dataclass
class TokenBlocks:
    """Packed text for a DataLoader. An index gives one block, a slice several, as `input_ids` and `labels`.

    Args:
        array (`np.ndarray` or [`ArrowBlocks`]):
            Token ids, (blocks, block_size).
        bytes (`int`):
            UTF-8 bytes of the text that these blocks cover.
    """

    array: Any
    bytes: int

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        return model_inputs(self.array[index])

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token. End-of-text is a token without bytes, but bits per byte include its cost."""
        return self.bytes / self.array.size


@dataclass
class Corpus:
    """Everything that training needs from its text.

    Args:
        train ([`TokenBlocks`] or [`StreamedBlocks`]):
            Blocks to train on.
        validation ([`TokenBlocks`]):
            Blocks to validate on.
        tokenizer (`PreTrainedTokenizerFast`):
            The tokenizer.
        source (`str`):
            Name of the source.
        digest (`str` or `None`):
            SHA-256 of the text. None for a stream, whose text is not known before it is read.
        held_out (`str`):
            Description of the validation text.
        test ([`TokenBlocks`], *optional*):
            Text that was not used to choose any setting, if it was asked for.
    """

    train: TokenBlocks | StreamedBlocks
    validation: TokenBlocks
    tokenizer: Any
    source: str
    digest: str | None
    held_out: str = "text of its own"
    test: TokenBlocks | None = None

    def summary(self) -> str:
        """Return one line: source, digest, sizes, and a description of the validation text.

        Returns:
            `str`: the line.
        """
        text = "streamed"
        if isinstance(self.train, TokenBlocks):
            size = f"{self.train.array.size} tokens of {self.train.bytes_per_token:.2f} bytes"
            text = f"sha256 {self.digest}, {len(self.train)} train blocks ({size})"
        sizes = (
            f"{len(self.validation)} validation blocks ({self.held_out}), vocabulary {len(self.tokenizer)}"
        )
        return f"{self.source}: {text}, {sizes}"


def pack_beginning(
    texts: Any, tokenizer: Any, block_size: int, limit: int, end_of_text: bool = True, split: str = "given"
) -> TokenBlocks:
    """Tokenise the beginning of a text in memory.

    Args:
        texts (`datasets.Dataset` or `datasets.IterableDataset`):
            The documents, in the column `text`.
        tokenizer (`PreTrainedTokenizerFast`):
            The tokenizer.
        block_size (`int`):
            Tokens in a block.
        limit (`int`):
            Largest number of blocks.
        end_of_text (`bool`, defaults to `True`):
            Whether to append end-of-text to every document.
        split (`str`):
            Name of the text, for the error if it is too short.

    Returns:
        [`TokenBlocks`]: the first `limit` blocks.
    """
    tokenise = Tokenise.by(tokenizer, end_of_text)
    rows, documents = tokenise_beginning(texts, tokenise, limit * block_size)
    return _blocks(ArrowBlocks(rows, block_size, limit), documents, tokenise, split)


def _blocks(array: ArrowBlocks, texts: Any, tokenise: Tokenise, split: str) -> TokenBlocks:
    if not len(array):
        raise too_little_text(split, array.tokens, array.block_size)
    return TokenBlocks(array, array.bytes(texts, tokenise))


def load_blocks(args: DataArguments, test_part: bool = False) -> Corpus:
    """Read, split, tokenise and pack: the same arguments and the same text give the same blocks.

    Args:
        args ([`DataArguments`]):
            Where the text comes from and how it becomes blocks.
        test_part (`bool`, defaults to `False`):
            Whether to validate on one half of the held-out documents only and to keep the other half, of at
            most `validation_blocks` blocks too, as `Corpus.test`. Training text and tokenizer are the same.

    Returns:
        [`Corpus`]: blocks to train and to validate on, and their tokenizer.

    Raises:
        [`DataError`]: if an option is impossible, or if there is too little text.
    """
    train, validation, source = load_texts(args)
    held_out = "text of its own"
    if validation is None:
        if args.streaming and not args.end_of_text:
            raise DataError(
                f"{source}: a stream of lines has no known end to validate on; give validation text"
            )
        train, validation, held_out = split_texts(train, args.validation_fraction, not args.end_of_text)
    parts = {"train": train, "validation": validation}
    if test_part:
        parts["validation"], parts["test"] = halve_texts(validation)
        held_out += ", one half of it to validate and the other to test"
    for split, texts in parts.items():
        if next(iterate_texts(texts), None) is None:
            hint = "check the files, text_column and fraction"
            raise DataError(f"{source}: the {split} split holds no text; {hint}")
    folder = Path(args.cache_dir or Path(HF_HOME) / "hf_slt").expanduser()
    tokenizer = _tokenizer(args, train, folder)
    blocks: dict[str, Any] = {}
    digest = None
    if args.streaming:
        blocks["train"] = StreamedBlocks(train, Tokenise.by(tokenizer, args.end_of_text), args.block_size)
        few = args.validation_blocks or STREAMED_VALIDATION
        for split in parts.keys() - {"train"}:
            blocks[split] = pack_beginning(
                parts[split], tokenizer, args.block_size, few, args.end_of_text, split
            )
    else:
        digests = []
        for split, texts in parts.items():
            limit = args.train_blocks if split == "train" else args.validation_blocks
            blocks[split], one = _store(args, texts, tokenizer, folder, split, limit)
            digests.append(one)
        digest = sha256(" ".join(digests))
    test = blocks.get("test")
    return Corpus(blocks["train"], blocks["validation"], tokenizer, source, digest, held_out, test)


def _tokenizer(args: DataArguments, texts: Any, folder: Path) -> Any:
    """Return the tokenizer that the arguments name, or one trained on the text."""
    if args.tokenizer:
        return load_tokenizer(args.tokenizer)
    if args.streaming:
        return train_tokenizer(texts, args.vocab_size, args.block_size)
    return train_tokenizer_cached(texts, args.vocab_size, args.block_size, folder, texts._fingerprint)


def _store(
    args: DataArguments, texts: Any, tokenizer: Any, folder: Path, split: str, limit: int | None
) -> tuple[TokenBlocks, str]:
    """Return the blocks of a text, tokenised in the cache, and the digest of the text."""
    tokenise = Tokenise.by(tokenizer, args.end_of_text)
    rows, digest = tokenise_cached(texts, tokenise, folder, args.preprocessing_num_workers, split)
    return _blocks(ArrowBlocks(rows, args.block_size, limit), texts, tokenise, split), digest
