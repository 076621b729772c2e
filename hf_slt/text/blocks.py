"""Documents in, blocks of token ids out.

Documents are tokenised, each followed by end-of-text, laid end to end and cut:

    doc_1 <eot> doc_2 <eot> ...  ->  block_1 | block_2 | ... | remainder (dropped)

The merges that a tokenizer learns and the places where blocks begin are functions of the text alone:
blocks are cached under a digest of all that made them.
"""

import hashlib
import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub.constants import HF_HOME
from torch.utils.data import IterableDataset, get_worker_info

from ..sharing.files import replacing
from .corpus import CorpusArguments, DataError, digest_documents, explained, load_documents, option

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
PIECE = 1 << 16  # characters tokenised at a time: tokenizers hold many bytes for each
TOKENIZER_TEXT = 64 << 20  # characters a tokenizer is trained on, about
STREAMED_VALIDATION = 256  # validation blocks of a stream, which has no end to wait for
CACHE_FORMAT = 1  # raise when packing changes, so that no older cache is read


@dataclass
class DataArguments(CorpusArguments):
    """Where the text comes from and how it becomes blocks.

    With nothing given: the embedded corpus and a tokenizer of 2048 tokens trained on it.
    """

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


# -- tokenizer ------------------------------------------------------------------------------------


def load_tokenizer(name: str) -> Any:
    """A pretrained tokenizer from the Hub or a local folder; it must have an end-of-text token."""
    from transformers import AutoTokenizer

    cure = "check name and network, give a local folder, or leave tokenizer out to train one"
    with explained(f"load tokenizer {name!r}", cure):
        tokenizer = AutoTokenizer.from_pretrained(name)
    if not tokenizer.is_fast:
        raise DataError(f"tokenizer {name!r} is a slow one, without offsets to count bytes by; convert it")
    if tokenizer.eos_token_id is None:
        raise DataError(f"tokenizer {name!r} has no end-of-text token; set its eos_token and save it again")
    return tokenizer


def train_tokenizer(documents: Iterable[str], vocab_size: int, model_max_length: int) -> Any:
    """Byte-level BPE of `vocab_size` tokens (fewer if the text is short), a function of the text alone.

    Every text can be encoded and comes back unchanged. One token, <|endoftext|>, begins, ends and pads.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_beginning(documents), trainer)
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=model_max_length, **ends)


def _beginning(documents: Iterable[str]) -> Iterator[str]:
    left = TOKENIZER_TEXT
    for piece, _ in _pieces(documents):
        yield piece
        if (left := left - len(piece)) <= 0:
            return


def _pieces(documents: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Pieces of at most PIECE characters, cut before a line break; and whether each ends its document."""
    for text in documents:
        start = 0
        while len(text) - start > PIECE:
            cut = text.rfind("\n", start + 1, start + PIECE)
            cut = cut if cut > 0 else start + PIECE
            yield text[start:cut], False
            start = cut
        yield text[start:], True


# -- blocks ---------------------------------------------------------------------------------------


class BlockPacker:
    """Iterates the blocks of a text; `bytes` counts the text that the blocks so far cover.

    The count is of UTF-8 bytes and exact, but for the bytes of one character when a block edge splits it.
    """

    def __init__(
        self, documents: Iterable[str], tokenizer: Any, block_size: int, end_of_text: bool = True
    ) -> None:
        self.documents, self.tokenizer = documents, tokenizer
        self.block_size, self.end_of_text = block_size, end_of_text

    def __iter__(self) -> Iterator[np.ndarray]:
        self.read = 0  # tokens seen, in blocks or not
        self._bytes = 0  # of pieces wholly in blocks
        self._open: deque[tuple[str, int]] = deque()  # (text, tokens) of the pieces that are not
        self._inside = 0  # tokens of the first of these that are in blocks
        pending: list[int] = []
        pieces = _pieces(self.documents)
        while batch := list(islice(pieces, 256)):
            encoded = self._encode([text for text, _ in batch])["input_ids"]
            for (text, is_last), ids in zip(batch, encoded, strict=True):
                if is_last and self.end_of_text:
                    ids = [*ids, self.tokenizer.eos_token_id]
                self.read += len(ids)
                self._open.append((text, len(ids)))
                pending += ids
                whole = len(pending) // self.block_size * self.block_size
                for start in range(0, whole, self.block_size):
                    self._cover(self.block_size)
                    yield np.array(pending[start : start + self.block_size], np.int64)
                del pending[:whole]

    def _encode(self, texts: list[str], **options: Any) -> Any:
        # split_special_tokens: text that spells <|endoftext|> is text, not the end of a document.
        # verbose: no warning that a document is longer than a block; cutting it is our work.
        options |= {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return self.tokenizer(texts, **options)

    def _cover(self, tokens: int) -> None:
        self._inside += tokens
        while self._open and self._inside >= self._open[0][1]:
            text, count = self._open.popleft()
            self._inside -= count
            self._bytes += len(text.encode())

    @property
    def bytes(self) -> int:
        if not self._inside:
            return self._bytes
        text, _ = self._open[0]
        offsets = self._encode([text], return_offsets_mapping=True)["offset_mapping"][0]
        return self._bytes + len(text[: offsets[self._inside - 1][1]].encode())

    def too_little(self, split: str) -> DataError:
        return DataError(
            f"the {split} split has {self.read} tokens, too few for one block of {self.block_size};"
            " give more text or a smaller block_size"
        )


def _model_inputs(ids: np.ndarray) -> dict[str, np.ndarray]:
    ids = np.asarray(ids, np.int64)
    return {"input_ids": ids, "labels": ids}  # a causal LM of Transformers shifts the labels itself


@dataclass
class TokenBlocks:
    """Packed text: `array` (blocks, block_size), and the UTF-8 `bytes` of the text these blocks cover.

    An index gives a block, a slice several, as `input_ids` and `labels`: what DataLoader and Trainer take.
    """

    array: np.ndarray
    bytes: int

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        return _model_inputs(self.array[index])

    @property
    def bytes_per_token(self) -> float:
        """End-of-text counts as a token and adds no byte: bits per byte then pay for it."""
        return self.bytes / self.array.size


class StreamedBlocks(IterableDataset):
    """Blocks packed while they are read, the same and in the same order as TokenBlocks would hold."""

    def __init__(self, packer: BlockPacker) -> None:
        self.packer = packer

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        worker = get_worker_info()
        count = 0
        for count, ids in enumerate(self.packer, 1):
            # Every worker reads all of the stream and keeps its turn: no block is lost or repeated.
            if worker is None or (count - 1) % worker.num_workers == worker.id:
                yield _model_inputs(ids)
        if not count:
            raise self.packer.too_little("train")


def pack(packer: BlockPacker, split: str, limit: int | None = None) -> TokenBlocks:
    """All blocks of a text, or the first `limit`."""
    dtype = np.uint16 if max(packer.tokenizer.get_vocab().values()) < 2**16 else np.int32
    rows = [block.astype(dtype) for block in islice(packer, limit)]
    if not rows:
        raise packer.too_little(split)
    return TokenBlocks(np.stack(rows), packer.bytes)


# -- cache ----------------------------------------------------------------------------------------


def pack_cached(
    packer: BlockPacker, split: str, folder: Path, limit: int | None = None
) -> tuple[TokenBlocks, str]:
    """The blocks and the digest of their documents; packed only where no whole cache file is found."""
    digest = digest_documents(packer.documents)
    rules = (packer.tokenizer.backend_tokenizer.to_str(), packer.tokenizer.eos_token_id)
    parts = (CACHE_FORMAT, digest, *rules, packer.block_size, packer.end_of_text, limit)
    # Any file there may be deleted; it is made again when needed.
    path = folder / f"blocks-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}.npz"
    try:
        with np.load(path, allow_pickle=False) as file:  # zip: each array is checked by its CRC
            return TokenBlocks(file["array"], int(file["bytes"])), digest
    except FileNotFoundError:
        pass
    except Exception as error:  # numpy and zipfile raise many kinds
        logger.warning("%s is damaged (%s); packing the text again", path, error)
    blocks = pack(packer, split, limit)
    try:
        with replacing(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, array=blocks.array, bytes=blocks.bytes)
    except OSError as error:
        raise DataError(f"cannot write to {folder}: {error}; choose another cache_dir") from error
    return blocks, digest


# -- everything -----------------------------------------------------------------------------------


@dataclass
class Corpus:
    """All that training needs of its text. A stream, not known beforehand, has the digest None."""

    train: TokenBlocks | StreamedBlocks
    validation: TokenBlocks
    tokenizer: Any
    source: str
    digest: str | None
    held_out: str = "text of its own"  # what validates, in words

    def summary(self) -> str:
        """One line: source, digest, sizes, and what validates."""
        text = "streamed"
        if isinstance(self.train, TokenBlocks):
            size = f"{self.train.array.size} tokens of {self.train.bytes_per_token:.2f} bytes"
            text = f"sha256 {self.digest}, {len(self.train)} train blocks ({size})"
        sizes = (
            f"{len(self.validation)} validation blocks ({self.held_out}), vocabulary {len(self.tokenizer)}"
        )
        return f"{self.source}: {text}, {sizes}"


def load_blocks(args: DataArguments) -> Corpus:
    """Read, split, tokenise and pack: the same arguments and the same text give the same blocks."""
    train, validation, source, way = load_documents(args)
    for split, documents in (("train", train), ("validation", validation)):
        if next(iter(documents), None) is None:
            cure = "check the files, text_column and fraction"
            raise DataError(f"{source}: the {split} split holds no text; {cure}")
    if args.tokenizer:
        tokenizer = load_tokenizer(args.tokenizer)
    else:
        tokenizer = train_tokenizer(train, args.vocab_size, args.block_size)
    how = (tokenizer, args.block_size, args.end_of_text)
    trains, validates = BlockPacker(train, *how), BlockPacker(validation, *how)
    if args.streaming:
        held_out = pack(validates, "validation", args.validation_blocks or STREAMED_VALIDATION)
        return Corpus(StreamedBlocks(trains), held_out, tokenizer, source, None, way)
    folder = Path(args.cache_dir or Path(HF_HOME) / "hf_slt").expanduser()
    blocks, digest = pack_cached(trains, "train", folder)
    held_out, other = pack_cached(validates, "validation", folder, args.validation_blocks)
    digest = hashlib.sha256(f"{digest} {other}".encode()).hexdigest()
    return Corpus(blocks, held_out, tokenizer, source, digest, way)
