"""Tokenizers: a pretrained one by name, or a byte-level BPE trained on the text, which depends only on the text."""

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..tickets.files import replacing
from ..tickets.format import sha256
from .corpus import DataError, iterate_texts, wrap_errors

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
PIECE = 1 << 16  # characters tokenised at a time: `tokenizers` needs many bytes of memory per character
TRAINING_TEXT = 64 << 20  # approximate number of characters that a tokenizer is trained on


def load_tokenizer(name: str) -> Any:
    """Load a pretrained tokenizer.

    Args:
        name (`str`):
            A name on the Hub, or a local folder.

    Returns:
        `PreTrainedTokenizerFast`: the tokenizer. It has an end-of-text token, or `DataError` is raised.
    """
    from transformers import AutoTokenizer

    hint = "check name and network, give a local folder, or leave tokenizer out to train one"
    with wrap_errors(f"load tokenizer {name!r}", hint):
        tokenizer = AutoTokenizer.from_pretrained(name)
    if not tokenizer.is_fast:
        raise DataError(f"tokenizer {name!r} is slow, and has no offsets for counting bytes; convert it")
    if tokenizer.eos_token_id is None:
        raise DataError(f"tokenizer {name!r} has no end-of-text token; set its eos_token and save it again")
    return tokenizer


def train_tokenizer(texts: Any, vocab_size: int, model_max_length: int) -> Any:
    """Train a byte-level BPE tokenizer. Every text can be encoded and is decoded unchanged.

    Args:
        texts (`datasets.Dataset`, `datasets.IterableDataset` or `Iterable[str]`):
            The documents. The first 64 million characters are used.
        vocab_size (`int`):
            Number of tokens. A short text may give fewer.
        model_max_length (`int`):
            Length of the sequences of the model.

    Returns:
        `PreTrainedTokenizerFast`: the tokenizer. `<|endoftext|>` is its start, end and padding token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_beginning(iterate_texts(texts)), trainer)
    return _with_special_tokens(bpe, model_max_length)


def train_tokenizer_cached(texts: Any, vocab_size: int, model_max_length: int, folder: Path, key: str) -> Any:
    """Train a tokenizer, or read it from `folder` if it was trained before on the text with this key.

    Args:
        texts:
            Documents, see [`train_tokenizer`].
        vocab_size (`int`):
            Number of tokens, see [`train_tokenizer`].
        model_max_length (`int`):
            Longest input of the model, see [`train_tokenizer`].
        folder (`Path`):
            Folder of the cache.
        key (`str`):
            Fingerprint of the text.

    Returns:
        `PreTrainedTokenizerFast`: the tokenizer.

    Raises:
        [`DataError`]: if the cache cannot be written.
    """
    from tokenizers import Tokenizer

    path = folder / f"tokenizer-{sha256(json.dumps([key, vocab_size, TRAINING_TEXT]))[:32]}.json"
    try:
        stored = json.loads(path.read_text("utf-8"))
        if sha256(stored["tokenizer"]) != stored["sha256"]:
            raise ValueError("it does not have its digest")
        return _with_special_tokens(Tokenizer.from_str(stored["tokenizer"]), model_max_length)
    except FileNotFoundError:
        pass
    except Exception as error:  # `tokenizers` raises plain Exception
        logger.warning("%s is damaged (%s); training the tokenizer again", path, error)
    tokenizer = train_tokenizer(texts, vocab_size, model_max_length)
    text = tokenizer.backend_tokenizer.to_str()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({"sha256": sha256(text), "tokenizer": text}), "utf-8")
    except OSError as error:
        raise DataError(f"cannot write to {folder}: {error}; choose another cache_dir") from error
    return tokenizer


def _with_special_tokens(bpe: Any, model_max_length: int) -> Any:
    from transformers import PreTrainedTokenizerFast

    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=model_max_length, **ends)


def _beginning(documents: Iterable[str]) -> Iterator[str]:
    left = TRAINING_TEXT
    for text in documents:
        for start, end in pieces(text):
            yield text[start:end]
            if (left := left - (end - start)) <= 0:
                return


def pieces(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the pieces of a text, of at most `PIECE` characters, cut before a line break.

    Args:
        text (`str`):
            Any text.

    Yields:
        Start and end of a piece.
    """
    start = 0
    while len(text) - start > PIECE:
        cut = text.rfind("\n", start + 1, start + PIECE)
        cut = cut if cut > 0 else start + PIECE
        yield start, cut
        start = cut
    yield start, len(text)
