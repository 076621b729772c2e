"""Tokenised text on the disk: `datasets` tokenises it once, in several processes, into memory-mapped Arrow.

    cache_dir/tokens-KEY.arrow     one row per piece of a document: its token ids, and its place in the text
    cache_dir/tokens-KEY.json      digests of the text and of the Arrow files, written last

KEY is a hash of the fingerprint of the text, the tokenizer and the options. Files without a correct digest are
damaged or half written, and are made again.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..tickets.files import replacing
from ..tickets.format import sha256
from .corpus import DataError, digest_documents, iterate_texts, wrap_errors
from .tokenizer import PIECE, pieces

logger = logging.getLogger(__name__)

CACHE_FORMAT = 2  # increase it when the stored data change: older files are then not read


@dataclass(frozen=True)
class Tokenise:
    """Tokenises a batch of documents, for `datasets.Dataset.map`. It holds only plain data, so it can be hashed.

    Args:
        tokenizer (`str`):
            The tokenizer of the `tokenizers` library, as JSON.
        end_of_text (`int` or `None`):
            Token to append to every document.
        piece (`int`):
            Longest number of characters to tokenise at a time.
        cache_format (`int`, defaults to `CACHE_FORMAT`):
            Version of what is stored. It is part of the fingerprint of a cache.
    """

    tokenizer: str
    end_of_text: int | None
    piece: int = PIECE
    cache_format: int = CACHE_FORMAT

    @classmethod
    def by(cls, tokenizer: Any, end_of_text: bool) -> "Tokenise":
        """Build the function from a tokenizer of transformers.

        Args:
            tokenizer:
                A fast tokenizer of transformers.
            end_of_text (`bool`):
                Whether to append the end-of-text token to every document.

        Returns:
            [`Tokenise`]: the function.
        """
        return cls(
            tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id if end_of_text else None, PIECE
        )

    def __call__(self, texts: list[str], indices: list[int]) -> dict[str, list[Any]]:
        """Return one row per piece: token ids, UTF-8 bytes, the document's index, and the piece's place in it."""
        places = [
            (index, start, end, end == len(text))
            for index, text in zip(indices, texts, strict=True)
            if text
            for start, end in pieces(text)
        ]
        by_index = dict(zip(indices, texts, strict=True))
        parts = [by_index[index][start:end] for index, start, end, _ in places]
        rows: list[list[int]] = [one.ids for one in self.encode(parts)]
        if self.end_of_text is not None:
            for row, (_, _, _, is_last) in zip(rows, places, strict=True):
                row += [self.end_of_text] * is_last
        return {
            "input_ids": rows,
            "bytes": [len(part.encode()) for part in parts],
            "document": [index for index, _, _, _ in places],
            "start": [start for _, start, _, _ in places],
            "end": [end for _, _, end, _ in places],
        }

    def encode(self, parts: list[str]) -> list[Any]:
        """Return the encodings of the `tokenizers` library.

        Args:
            parts (`list[str]`):
                Texts.

        Returns:
            `list[Any]`: an encoding for each text.
        """
        return _backend(self.tokenizer).encode_batch(parts, add_special_tokens=False)

    def bytes_before(self, text: str, tokens: int) -> int:
        """Return how many UTF-8 bytes of a piece its first `tokens` tokens cover.

        Args:
            text (`str`):
                A piece of a text.
            tokens (`int`):
                Number of tokens.

        Returns:
            `int`: number of bytes.
        """
        offsets = self.encode([text])[0].offsets
        return len(text[: offsets[min(tokens, len(offsets)) - 1][1]].encode()) if tokens and offsets else 0


@cache
def _backend(text: str) -> Any:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(text)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # text that spells <|endoftext|> is text, not the end of a document
    return backend


class ArrowBlocks:
    """Blocks of token ids in memory-mapped Arrow, read by index like a NumPy array of shape (blocks, block_size).

    Documents are joined end to end, and the remainder that does not fill a block is left out:

        doc_1 <eot> doc_2 <eot> ...  ->  block_1 | block_2 | ... | remainder

    Args:
        rows (`datasets.Dataset`):
            What [`Tokenise`] made, without an indices mapping.
        block_size (`int`):
            Tokens in a block.
        limit (`int`, *optional*):
            Largest number of blocks.
    """

    def __init__(self, rows: Any, block_size: int, limit: int | None = None) -> None:
        self.rows, self.block_size = rows, block_size
        self._map()
        blocks = int(self._starts[-1]) // block_size
        self.shape = (blocks if limit is None else min(limit, blocks), block_size)
        self.size = self.shape[0] * block_size

    def _map(self) -> None:
        """Memory-map the chunks of the column. No token is copied."""
        chunks = self.rows.data.column("input_ids").chunks
        self._chunks = [chunk.flatten().to_numpy(zero_copy_only=True) for chunk in chunks]
        self._starts = np.concatenate([[0], np.cumsum([len(one) for one in self._chunks], dtype=np.int64)])

    def __getstate__(self) -> dict[str, Any]:  # a copy in another process maps the same files
        return {name: value for name, value in self.__dict__.items() if name not in ("_chunks", "_starts")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    @property
    def tokens(self) -> int:
        """Number of tokens of the text, in blocks or not."""
        return int(self._starts[-1])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        if isinstance(index, slice):
            index = np.arange(len(self))[index]
        if np.ndim(index):
            rows = [self[int(one)] for one in np.asarray(index)]
            return np.stack(rows) if rows else np.empty((0, self.block_size), np.int64)
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start, end = place * self.block_size, (place + 1) * self.block_size
        parts = []
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < end:
            inside = start - int(self._starts[number])
            part = self._chunks[number][inside : inside + end - start]
            parts.append(part)
            start, number = start + len(part), number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self._chunks[0].dtype, copy=False)

    def bytes(self, texts: Any, tokenise: Tokenise) -> int:
        """Return the UTF-8 bytes of the text that the blocks cover.

        The count is exact, except if the end of the last block splits a character.

        Args:
            texts:
                The documents.
            tokenise ([`Tokenise`]):
                What tokenised them.

        Returns:
            `int`: number of bytes.
        """
        lengths = np.concatenate([chunk.value_lengths().to_numpy() for chunk in self._column("input_ids")])
        ends = np.cumsum(lengths, dtype=np.int64)
        whole = int(np.searchsorted(ends, self.size, side="right"))  # pieces that lie in blocks as a whole
        sizes = np.concatenate([chunk.to_numpy() for chunk in self._column("bytes")])
        total = int(sizes[:whole].sum())
        inside = self.size - int(ends[whole - 1] if whole else 0)
        if inside:
            row = self.rows[whole]
            text = texts[row["document"]]["text"][row["start"] : row["end"]]
            total += tokenise.bytes_before(text, inside)
        return total

    def _column(self, name: str) -> list[Any]:
        return self.rows.data.column(name).chunks


def tokenise_beginning(texts: Any, tokenise: Tokenise, tokens: int) -> tuple[Any, list[dict[str, str]]]:
    """Tokenise the beginning of a text in memory.

    Args:
        texts (`datasets.Dataset` or `datasets.IterableDataset`):
            The documents, in the column `text`.
        tokenise ([`Tokenise`]):
            Tokenizer and options.
        tokens (`int`):
            Number of tokens after which to stop.

    Returns:
        `tuple`: the rows, as a `datasets.Dataset`, and the documents they were made of.
    """
    from datasets import Dataset

    documents: list[dict[str, str]] = []
    columns: dict[str, list[Any]] = {}
    count = 0
    for text in iterate_texts(texts):
        rows = tokenise([text], [len(documents)])
        documents.append({"text": text})
        for name, values in rows.items():
            columns.setdefault(name, []).extend(values)
        if (count := count + sum(map(len, rows["input_ids"]))) >= tokens:
            break
    return Dataset.from_dict(columns, features=_features(tokenise)), documents


def _features(tokenise: Tokenise) -> Any:
    from datasets import Features, Sequence, Value

    largest = max(_backend(tokenise.tokenizer).get_vocab().values())
    ids = Value("uint16" if largest < 2**16 else "int32")
    places = {name: Value("int64") for name in ("bytes", "document", "start", "end")}
    return Features({"input_ids": Sequence(ids), **places})


def tokenise_cached(
    texts: Any, tokenise: Tokenise, folder: Path, workers: int | None, name: str
) -> tuple[Any, str]:
    """Tokenise a data set, or read the tokens from the cache.

    Args:
        texts (`datasets.Dataset`):
            The documents, in the column `text`.
        tokenise ([`Tokenise`]):
            Tokenizer and options.
        folder (`Path`):
            Folder of the cache. Any file there may be deleted; it is made again when it is needed.
        workers (`int`, *optional*):
            Processes that tokenise. By default one, with the threads of the `tokenizers` library.
        name (`str`):
            Name of the split, for the progress bar.

    Returns:
        `tuple`: the rows, as a memory-mapped `datasets.Dataset`, and the SHA-256 of the text.

    Raises:
        [`DataError`]: if the cache cannot be written.
    """
    from datasets import Dataset, concatenate_datasets
    from datasets.fingerprint import Hasher

    key = sha256(f"{texts._fingerprint} {Hasher.hash(tokenise)}")[:32]
    index = folder / f"tokens-{key}.json"
    facts = _read_index(index)
    if facts is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            rows = texts.map(
                tokenise,
                with_indices=True,
                input_columns=["text"],
                batched=True,
                batch_size=256,
                remove_columns=texts.column_names,
                features=_features(tokenise),
                num_proc=workers,
                load_from_cache_file=False,
                cache_file_name=str(folder / f"tokens-{key}.arrow"),
                new_fingerprint=key,
                desc=f"tokenising {name}",
            )
            files = [Path(one["filename"]).name for one in rows.cache_files]
            facts = {
                "text": digest_documents(texts),
                "files": {one: file_sha256(folder / one) for one in files},
            }
            with replacing(index) as temporary:
                temporary.write_text(json.dumps(facts, indent=1) + "\n")
        except OSError as error:
            raise DataError(f"cannot write to {folder}: {error}; choose another cache_dir") from error
    with wrap_errors(f"read {index}", "delete it, and the text is tokenised again"):
        parts = [Dataset.from_file(str(folder / one)) for one in facts["files"]]
        return concatenate_datasets(parts), facts["text"]


def _read_index(index: Path) -> dict[str, Any] | None:
    """Return the content of the index, or None if it does not exist or its files are damaged."""
    try:
        facts = json.loads(index.read_text())
        for name, expected in facts["files"].items():
            if file_sha256(index.parent / name) != expected:
                raise ValueError(f"{name} does not have its digest")
        return {"text": str(facts["text"]), "files": dict(facts["files"])}
    except FileNotFoundError as error:
        if error.filename == str(index):
            return None
        logger.warning("%s is damaged (%s); tokenising the text again", index, error)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s is damaged (%s); tokenising the text again", index, error)
    return None


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal.

    Args:
        path (`Path`):
            The file.

    Returns:
        `str`: 64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
