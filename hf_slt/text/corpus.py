"""Where text comes from: this Python installation, local files, or data sets of the Hub.

Every source becomes a `datasets.Dataset`, or an `IterableDataset` when it is streamed, with the single column
`text`. One row is one document, and no document is empty. The text is memory-mapped Arrow on the disk, or is
streamed; it is never held in memory as a whole, except for the embedded corpus of 3 MB.
"""

import ast
import glob
import hashlib
import inspect
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from ..errors import SLTError

SUFFIXES = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# Beginnings of names in the standard library that are skipped: not prose, not the library, or built on this machine.
SKIPPED = (
    *("_sysconfigdata", "config-", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3"),
    *("lib-dynload", "pydoc_data", "site-packages", "test", "turtledemo", "__pycache__"),
)
PART = 8000  # approximate number of characters of a document of the embedded corpus
MIXING_SEED = 0  # of the random order in which documents of several sources are mixed

# Matches docstrings and comments of a Python source in one pass. Other strings are matched too, to skip them.
_PROSE = re.compile(
    r"""
    (?P<comment> (?: ^[ \t]*\#.*\n )+ ) | \#.*
    | (?: (?: ^[ \t]*(?:async\ def|def|class)\ (?P<signature> \w+(?:\([^"'#]*?\))? )[^"'#\n]*:\s*
            | (?P<alone> ^[ \t]* ) ) [rRuU]? )?
      (?P<quote> \"{3}|'{3} ) (?P<docstring> (?s:.*?) ) (?<!\\)(?P=quote)
    | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
    """,
    re.MULTILINE | re.VERBOSE,
)


class DataError(SLTError):
    """The text cannot become blocks. The message names the value and says what to do."""


LIBRARY_HINT = (
    "the text is not the cause: a library is missing or does not fit another one; install the named library, or"
    " upgrade all: pip install --upgrade numpy pyarrow datasets"
)


@contextmanager
def wrap_errors(action: str, hint: str) -> Iterator[None]:
    """Turn any error inside into a `DataError`. Loaders raise a dozen types, with the cause two levels down.

    Args:
        action (`str`):
            What failed, as in "cannot {action}".
        hint (`str`):
            What the user can do.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        causes: list[str] = []
        cause: BaseException | None = error
        while cause is not None:
            causes.append(f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}")
            if _is_library_error(cause):
                hint = LIBRARY_HINT
            cause = cause.__cause__
        raise DataError(f"cannot {action}: {' <- '.join(causes)}; {hint}") from error


def _is_library_error(error: BaseException) -> bool:
    """Return whether no text could cause the error: a module cannot be imported, or lacks a name."""
    lacks_name = isinstance(error, AttributeError) and isinstance(error.obj, ModuleType)
    return lacks_name or isinstance(error, ImportError)


def option(text: str, default: Any = None, **keywords: Any) -> Any:
    """Declare a field of a dataclass of arguments, with its help and other keywords of `add_argument`.

    Args:
        text (`str`):
            Help text.
        default (*optional*):
            Value of the option if it is left out.
        keywords:
            Other keywords of `add_argument`.

    Returns:
        A field of a dataclass.
    """
    return field(default=default, metadata={"help": text, **keywords})


@dataclass
class CorpusArguments:
    """Where the text comes from. By default it is the embedded corpus."""

    dataset: list[str] | None = option(  # noqa: RUF009 (the default is None)
        "Data set on the Hub, or a local folder in the same form, such as Salesforce/wikitext; several are"
        " joined. Without this and without train_files, the text embedded in every Python installation."
    )
    dataset_config: list[str] | None = option(  # noqa: RUF009
        "Configuration of each data set, such as wikitext-103-raw-v1."
    )
    train_split: str = option("Split of the data set to train on.", "train")
    validation_split: str = option(
        "Split of the data set to validate on; if it has none, validation_fraction of the train split.",
        "validation",
    )
    train_files: list[str] | None = option(  # noqa: RUF009 (the default is None)
        "Local .txt, .md, .json, .jsonl or .parquet files, folders of them or glob patterns, instead of a"
        " data set."
    )
    mixing_weights: list[float] | None = option(  # noqa: RUF009
        "Mix the data sets, or the entries of train_files, in a random order with these probabilities, until"
        " each was read once. Without this they follow one another."
    )
    validation_files: list[str] | None = option(  # noqa: RUF009
        "Local files to validate on; without them, validation_fraction of train_files."
    )
    validation_fraction: float = option(
        "Fraction to validate on if no validation text is given: documents chosen by their hash, or the end of each"
        " document if there are fewer than 100 documents or their lengths are very uneven.",
        0.05,
    )
    text_column: str = option("Column that holds the text; plain text files have only 'text'.", "text")
    sample_by: Literal["document", "paragraph", "line"] = option(
        "What one document is in a plain text file: the file, a paragraph, or a line.", "document"
    )
    end_of_text: bool = option(
        "Put end-of-text after every document. Turn off if rows are lines of one text (WikiText).", True
    )
    streaming: bool = option("Read and tokenise while training, and keep nothing on disk.", False)

    def __post_init__(self) -> None:
        if not 0 < (fraction := self.validation_fraction) < 1:
            raise DataError(f"validation_fraction {fraction} is not between 0 and 1; try 0.05")
        if self.sample_by not in ("document", "paragraph", "line"):
            raise DataError(f"sample_by {self.sample_by!r} is unknown; use document, paragraph or line")
        if isinstance(self.dataset, str):
            self.dataset = [self.dataset]
        if isinstance(self.dataset_config, str):
            self.dataset_config = [self.dataset_config]
        if self.dataset and self.train_files:
            names = ", ".join(self.dataset)
            raise DataError(f"dataset {names} and train_files are both given; leave one of them out")
        if self.dataset_config and len(self.dataset_config) != len(self.dataset or ()):
            raise DataError(
                f"dataset_config has {len(self.dataset_config)} entries for {len(self.dataset or ())} data sets;"
                " give one for each, or none"
            )
        if self.mixing_weights is not None:
            sources = len(self.dataset or self.train_files or ())
            if len(self.mixing_weights) != sources or not all(one > 0 for one in self.mixing_weights):
                raise DataError(
                    f"mixing_weights {self.mixing_weights} for {sources} data sets or entries of train_files;"
                    " give one positive number for each"
                )
        if self.validation_files and not self.train_files:
            raise DataError("validation_files without train_files: name the files to train on as well")


def iterate_texts(texts: Any) -> Iterator[str]:
    """Yield the documents of a data set, or of any iterable of strings. At most a thousand are in memory.

    Args:
        texts:
            A data set with a column of text, or an iterable of strings.

    Yields:
        One document at a time.
    """
    if not hasattr(texts, "select_columns"):
        yield from texts
        return
    with wrap_errors("read the text", "check that it is whole and in UTF-8"):
        for batch in texts.iter(1000):
            yield from batch["text"]


def digest_documents(documents: Any) -> str:
    """Return the SHA-256 of the documents, each preceded by its length: moving a boundary changes the digest.

    Args:
        documents:
            A data set with a column of text, or an iterable of strings.

    Returns:
        `str`: 64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for text in iterate_texts(documents):
        data = text.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


# -- this Python installation ---------------------------------------------------------------------


@cache
def embedded_corpus() -> tuple[str, ...]:
    """Return the prose of this Python installation: the language reference, then docstrings of the standard library.

    Sources are read, never imported, in the order of their names. Equal installations give equal text. Another
    Python version gives other text, which the digest shows.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    documents: list[str] = []
    topics = root / "pydoc_data" / "topics.py"
    if topics.is_file():
        for node in ast.parse(topics.read_bytes()).body:
            if isinstance(node, ast.Assign):
                documents += [text for _, text in sorted(ast.literal_eval(node.value).items())]
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(SKIPPED))
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith(SKIPPED):
                documents.append(_prose((Path(folder) / name).read_text("utf-8", "replace")))
    parts = []
    for text in documents:
        # Parts of similar size, cut between paragraphs: otherwise a few long modules would make the split uneven.
        while (cut := text.find("\n\n", PART)) >= 0:
            parts.append(text[:cut])
            text = text[cut + 2 :]
        parts.append(text)
    return tuple(text for text in parts if text)


def _prose(source: str) -> str:
    r"""Return the docstrings of a Python source under their signatures, and its longer comments, in order.

    >>> _prose('x = "#"\n\ndef add(a, b):\n    \'\'\'The sum.\'\'\'\n')
    'add(a, b)\n\nThe sum.'
    """
    parts = []
    for match in _PROSE.finditer(source):
        if match["comment"]:
            comment = re.sub(r"(?m)^[ \t]*#+ ?", "", match["comment"]).strip()
            if len(comment.split()) >= 8:  # shorter ones are labels and switched-off code
                parts.append(comment)
        elif match["signature"] or match["alone"] is not None:
            docstring = inspect.cleandoc(match["docstring"].replace("\\\n", ""))  # a continued line
            parts += filter(None, (match["signature"], docstring))
    return "\n\n".join(parts)


# -- local files and the Hub ----------------------------------------------------------------------


def load_texts(args: CorpusArguments) -> tuple[Any, Any, str]:
    """Load the documents that the arguments name.

    Args:
        args ([`CorpusArguments`]):
            Where the text comes from.

    Returns:
        `tuple`: the documents to train on, those to validate on if the arguments or the data set name any, and
        the name of the source.
    """
    validation = None
    if args.train_files:
        options = (args.text_column, args.sample_by, args.streaming)
        patterns = [[one] for one in args.train_files] if args.mixing_weights else [args.train_files]
        train = [read_files(one, *options) for one in patterns]
        if args.validation_files:
            validation = read_files(args.validation_files, *options)
        source = ", ".join(args.train_files)
    elif args.dataset:
        configs = args.dataset_config or [""] * len(args.dataset)
        named = list(zip(args.dataset, configs, strict=True))
        pairs = [_read_dataset(args, *pair) for pair in named]
        train = [one for one, _ in pairs]
        held_out = [one for _, one in pairs if one is not None]
        validation = _mix(held_out, None) if len(held_out) == len(pairs) else None
        source = ", ".join(
            f"{name} {config or ''}".strip() for name, config in zip(args.dataset, configs, strict=True)
        )
    else:
        from datasets import Dataset

        source, train = "embedded corpus", [Dataset.from_dict({"text": list(embedded_corpus())})]
    return _mix(train, args.mixing_weights), validation, source


def _mix(texts: Sequence[Any], weights: Sequence[float] | None) -> Any:
    """Join several data sets into one: one after the other, or mixed with these probabilities."""
    if len(texts) == 1:
        return texts[0]
    from datasets import concatenate_datasets, interleave_datasets

    if weights is None:
        return concatenate_datasets(list(texts))
    shares = [one / sum(weights) for one in weights]
    return interleave_datasets(list(texts), shares, seed=MIXING_SEED, stopping_strategy="all_exhausted")


def _read_dataset(args: CorpusArguments, name: str, config: str) -> tuple[Any, Any]:
    """Return the train and the validation documents of one data set; the latter are None if it has none."""
    source = f"{name} {config}".strip()
    hint = "check name and network, use train_files, or leave dataset out for the embedded corpus"
    with wrap_errors(f"load data set {source}", hint):
        from datasets import load_dataset  # slow to import

        _require_hub(name)
        splits = load_dataset(name, config or None, streaming=args.streaming)
    if args.train_split not in splits:
        found = ", ".join(splits)
        raise DataError(f"{source} has no split {args.train_split!r}; set train_split to one of: {found}")
    train, validation = (
        _text_column(splits[split], args.text_column, source) if split in splits else None
        for split in (args.train_split, args.validation_split)
    )
    return train, validation


def _require_hub(name: str) -> None:
    """Raise `DataError` at once if a data set is not on this machine and cannot be downloaded.

    Without this check, `datasets` would try to reach a Hub that does not answer for half a minute.
    """
    from datasets import config
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if os.path.isdir(name) or Path(config.HF_DATASETS_CACHE, name.replace("/", "___")).is_dir():
        return
    try:
        HfApi().dataset_info(name, timeout=5)
    except (HfHubHTTPError, OfflineModeIsEnabled):
        return  # the Hub has answered; load_dataset will explain the answer
    except Exception as error:  # of the HTTP library that huggingface_hub uses
        raise DataError(
            f"cannot load data set {name}: the Hub does not answer ({error}); check the network, use train_files, "
            "or leave dataset out for the embedded corpus"
        ) from error


def read_files(
    patterns: Iterable[str], text_column: str = "text", sample_by: str = "document", streaming: bool = False
) -> Any:
    """Read local text, JSON lines or Parquet files, in the order of the patterns, then of names.

    Args:
        patterns (`Iterable[str]`):
            Files, glob patterns, or folders. A folder means all its files with a known suffix.
        text_column (`str`, defaults to `"text"`):
            Column that holds the text.
        sample_by (`str`, defaults to `"document"`):
            What one document is in a plain text file: `"document"` (the file), `"paragraph"` or `"line"`.
        streaming (`bool`, defaults to `False`):
            Whether to read the files while they are used.

    Returns:
        `datasets.Dataset` or `datasets.IterableDataset`: the documents, in the column `text`.

    Raises:
        [`DataError`]: if files are missing, or not all of one known kind.
    """
    files: dict[str, str] = {}  # path -> kind, each once
    for pattern in patterns:
        # An existing file is never read as a pattern. Path.glob does not accept absolute patterns.
        found = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)
        if is_folder := Path(pattern).is_dir():
            found = [str(path) for path in Path(pattern).iterdir() if path.suffix.lower() in SUFFIXES]
        matches = sorted(match for match in found if Path(match).is_file())
        if not matches:
            kind = "no file matches the pattern" if glob.has_magic(pattern) else "there is no file"
            kind = f"no {', '.join(SUFFIXES)} file is in the folder" if is_folder else kind
            raise DataError(f"{kind} {pattern!r} (looked from {Path.cwd()}); check the spelling")
        for file in matches:
            suffix = Path(file).suffix
            if suffix.lower() not in SUFFIXES:
                raise DataError(f"{file}: suffix {suffix!r} is unknown; use one of {', '.join(SUFFIXES)}")
            files[file] = SUFFIXES[suffix.lower()]
    kinds = sorted(set(files.values()))
    if not kinds:
        raise DataError("no files are given; name at least one")
    if len(kinds) > 1:
        several = ", ".join(kinds)
        raise DataError(f"files of several kinds ({several}) are given together; convert them to one")
    # Line breaks are kept: the blocks must hold the text of the file.
    options = {"sample_by": sample_by, "keep_linebreaks": True} if kinds == ["text"] else {}
    source = ", ".join(files)
    with wrap_errors(f"read {source}", "check that the files are whole and in UTF-8"):
        from datasets import load_dataset

        loaded = load_dataset(kinds[0], data_files={"train": list(files)}, streaming=streaming, **options)
    return _text_column(loaded["train"], text_column, source)


def _text_column(dataset: Any, column: str, source: str) -> Any:
    """Return the non-empty texts of one column, as the column `text`."""
    with wrap_errors(f"read {source}", "check that the text is whole and in UTF-8"):
        first: dict[str, Any] = next(iter(dataset), {})  # a stream learns its columns by reading
        if first and column not in first:
            raise DataError(
                f"{source} has no column {column!r}; set text_column to one of: {', '.join(first)}"
            )
        if not isinstance(first.get(column), str | None):
            kind = type(first[column]).__name__
            raise DataError(f"{source}: column {column!r} holds {kind}; set text_column to a column of text")
        if not first:
            return dataset
        dataset = dataset.select_columns([column])
        if column != "text":
            dataset = dataset.rename_column(column, "text")
        return dataset.filter(_are_not_empty, input_columns=["text"], batched=True)


def _are_not_empty(texts: Sequence[str | None]) -> list[bool]:
    return [bool(text) for text in texts]
