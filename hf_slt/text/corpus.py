"""Where documents come from: this Python installation, local files, or the Hub.

A document is a string; documents are walked, as often as one likes, and never held in memory.
Nothing here draws a random number: which text validates is a function of the text, so that a digest names
the data.

    side(document) = validation  if  sha256(document) / 2**256 < fraction  else  train
"""

import ast
import glob
import hashlib
import inspect
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from ..model.ticket import SLTError

SUFFIXES = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# Name beginnings in the standard library that are not prose, not the library, or one machine's build.
SKIPPED = (
    *("_sysconfigdata", "config-", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3"),
    *("lib-dynload", "pydoc_data", "site-packages", "test", "turtledemo", "__pycache__"),
)
PART = 8000  # characters, about, of a document of the embedded corpus
FEW_DOCUMENTS = 100  # below this a split by document could leave one side empty
JUDGED = 10_000  # documents by which a split is judged: a stream may have no end

# Strings and comments of a Python source in one pass; other strings are matched so as to be passed over.
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
    """The text cannot become blocks; the message names the value and the cure."""


LIBRARIES = (
    "what is read is not at fault: a library here is missing or does not fit another; install the one named,"
    " or all anew: pip install --upgrade numpy pyarrow datasets"
)


@contextmanager
def explained(action: str, cure: str) -> Iterator[None]:
    """Any error inside as a DataError: loaders raise a dozen kinds, the cause often two levels down."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        causes: list[str] = []
        cause: BaseException | None = error
        while cause is not None:
            causes.append(f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}")
            if _is_of_a_library(cause):
                cure = LIBRARIES
            cause = cause.__cause__
        raise DataError(f"cannot {action}: {' <- '.join(causes)}; {cure}") from error


def _is_of_a_library(error: BaseException) -> bool:
    """Whether no text could cause it: a module that cannot be imported, or lacks a name."""
    lacking = isinstance(error, AttributeError) and isinstance(error.obj, ModuleType)
    return lacking or isinstance(error, ImportError)


def option(text: str, default: Any = None, **keywords: Any) -> Any:
    """A field of a dataclass of arguments, with its help and other keywords of `add_argument`."""
    return field(default=default, metadata={"help": text, **keywords})


@dataclass
class CorpusArguments:
    """Where the text comes from; with nothing given, the embedded corpus."""

    dataset: str | None = option(
        "Data set on the Hub, or a local folder in the same form, such as Salesforce/wikitext."
        " Without this and without train_files, the text embedded in every Python installation."
    )
    dataset_config: str | None = option("Configuration of the data set, such as wikitext-103-raw-v1.")
    train_split: str = option("Split of the data set to train on.", "train")
    validation_split: str = option(
        "Split of the data set to validate on; if it has none, validation_fraction of the train split.",
        "validation",
    )
    train_files: list[str] | None = option(  # noqa: RUF009 (the default is None)
        "Local .txt, .md, .json, .jsonl or .parquet files, folders of them or glob patterns, instead of a"
        " data set."
    )
    validation_files: list[str] | None = option(  # noqa: RUF009
        "Local files to validate on; without them, validation_fraction of train_files."
    )
    validation_fraction: float = option(
        "Share held out where no validation text is given: documents chosen by their hash, or the end of"
        " each document where there are fewer than 100 or their lengths make that choice uneven.",
        0.05,
    )
    text_column: str = option("Column that holds the text; plain text files have only 'text'.", "text")
    sample_by: Literal["document", "paragraph", "line"] = option(
        "What one document is in a plain text file: the file, a paragraph, or a line.", "document"
    )
    end_of_text: bool = option(
        "Put end-of-text after every document. Turn off where rows are lines of one text (WikiText).", True
    )
    streaming: bool = option("Read and tokenise while training, and keep nothing on disk.", False)

    def __post_init__(self) -> None:
        if not 0 < (fraction := self.validation_fraction) < 1:
            raise DataError(f"validation_fraction {fraction} is not between 0 and 1; try 0.05")
        if self.sample_by not in ("document", "paragraph", "line"):
            raise DataError(f"sample_by {self.sample_by!r} is unknown; use document, paragraph or line")
        if self.dataset and self.train_files:
            raise DataError(f"dataset {self.dataset!r} and train_files are both given; leave one of them out")
        if self.validation_files and not self.train_files:
            raise DataError("validation_files without train_files: name the files to train on as well")


class Documents:
    """Texts that can be walked any number of times without being held in memory; empty ones are left out."""

    def __init__(self, walk: Callable[[], Iterable[str]]) -> None:
        self._walk = walk

    def __iter__(self) -> Iterator[str]:
        return (text for text in self._walk() if text)


def digest_documents(documents: Iterable[str]) -> str:
    """SHA-256 over the documents, each after its length, so that moving a boundary changes it."""
    digest = hashlib.sha256()
    for text in documents:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


# -- this Python installation ---------------------------------------------------------------------


@cache
def embedded_corpus() -> tuple[str, ...]:
    """Prose of this Python installation: the language reference, then the standard library's.

    Sources are read, never imported. The order is that of names, so that equal installations give
    equal text; another Python version gives other text, which the digest shows.
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
        # Parts of like size, cut between paragraphs: a few long modules would make the split uneven.
        while (cut := text.find("\n\n", PART)) >= 0:
            parts.append(text[:cut])
            text = text[cut + 2 :]
        parts.append(text)
    return tuple(text for text in parts if text)


def _prose(source: str) -> str:
    r"""Docstrings of a Python source under their signatures, and its longer comments, in their order.

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
            docstring = inspect.cleandoc(match["docstring"].replace("\\\n", ""))  # a line goes on
            parts += filter(None, (match["signature"], docstring))
    return "\n\n".join(parts)


# -- local files and the Hub ----------------------------------------------------------------------


def load_documents(args: CorpusArguments) -> tuple[Documents, Documents, str, str]:
    """Train documents, validation documents, the name of their source, and what validates, in words."""
    validation, held_out = None, "text of its own"
    if args.train_files:
        source, options = ", ".join(args.train_files), (args.text_column, args.sample_by, args.streaming)
        train = read_files(args.train_files, *options)
        if args.validation_files:
            validation = read_files(args.validation_files, *options)
    elif args.dataset:
        source = f"{args.dataset} {args.dataset_config or ''}".strip()
        cure = "check name and network, use train_files, or leave dataset out for the embedded corpus"
        with explained(f"load data set {source}", cure):
            from datasets import load_dataset  # slow to import, and the embedded corpus does without

            splits = load_dataset(args.dataset, args.dataset_config, streaming=args.streaming)
        if args.train_split not in splits:
            found = ", ".join(splits)
            raise DataError(f"{source} has no split {args.train_split!r}; set train_split to one of: {found}")
        train = _column(splits[args.train_split], args.text_column, source)
        if args.validation_split in splits:
            validation = _column(splits[args.validation_split], args.text_column, source)
    else:
        source, train = "embedded corpus", Documents(embedded_corpus)
    if validation is None:
        if args.streaming and not args.end_of_text:
            raise DataError(f"{source}: a stream of lines has no known end to hold out; name validation text")
        lines = not args.end_of_text
        train, validation, held_out = split_documents(train, args.validation_fraction, lines)
    return train, validation, source, held_out


def read_files(
    patterns: Iterable[str], text_column: str = "text", sample_by: str = "document", streaming: bool = False
) -> Documents:
    """Documents of local text, JSON lines or Parquet files, in the order of the patterns, then of names.

    A folder stands for the files in it that have one of these suffixes.
    """
    files: dict[str, str] = {}  # path -> kind, each once
    for pattern in patterns:
        # A file is itself even if its name looks like a pattern. Path.glob takes no absolute pattern.
        found = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)
        if is_folder := Path(pattern).is_dir():
            found = [str(path) for path in Path(pattern).iterdir() if path.suffix.lower() in SUFFIXES]
        matches = sorted(match for match in found if Path(match).is_file())
        if not matches:
            kind = "no file matches the pattern" if glob.has_magic(pattern) else "there is no file"
            kind = f"no {', '.join(SUFFIXES)} file lies in the folder" if is_folder else kind
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
    # Line breaks are kept: the blocks are to hold the text of the file.
    options = {"sample_by": sample_by, "keep_linebreaks": True} if kinds == ["text"] else {}
    source = ", ".join(files)
    with explained(f"read {source}", "check that the files are whole and in UTF-8"):
        from datasets import load_dataset

        loaded = load_dataset(kinds[0], data_files={"train": list(files)}, streaming=streaming, **options)
    return _column(loaded["train"], text_column, source)


def _column(dataset: Any, column: str, source: str) -> Documents:
    reading = (f"read {source}", "check that the text is whole and in UTF-8")
    with explained(*reading):  # a stream learns its columns by reading
        columns = dataset.column_names or list(next(iter(dataset), {}))
    if columns and column not in columns:
        raise DataError(f"{source} has no column {column!r}; set text_column to one of: {', '.join(columns)}")

    def walk() -> Iterator[str]:
        with explained(*reading):
            for batch in dataset.select_columns([column]).iter(1000) if columns else ():
                for text in batch[column]:
                    if not isinstance(text, (str, type(None))):
                        held = f"column {column!r} holds {type(text).__name__}"
                        raise DataError(f"{source}: {held}; set text_column to one of text")
                    yield text or ""

    return Documents(walk)


# -- train and validation -------------------------------------------------------------------------


def split_documents(
    documents: Iterable[str], fraction: float, lines: bool = False
) -> tuple[Documents, Documents, str]:
    """Train and validation documents, and what validates; the same text always falls on the same side.

    Many documents: each goes by its own hash, so that a copy never validates what was trained on. With
    `lines`, rows continue one another: the last rows. Where documents are few, or so uneven that this would
    hold out less than half or more than twice the fraction of the text: the end of each.
    """
    count = sum(1 for _ in (documents if lines else islice(documents, FEW_DOCUMENTS)))
    cut = count - max(1, round(count * fraction))

    def validates(row: int, text: str) -> bool:
        if lines:
            return row >= cut
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < fraction * 2**64

    def cut_at(text: str) -> int:
        """Where the held-out end begins: after a line break, if there is one shortly before that place."""
        place = round(len(text) * (1 - fraction))
        slack = round(len(text) * min(fraction, 1 - fraction) / 2)
        return text.rfind("\n", place - slack, place) + 1 or place

    def part(held_out: bool) -> Documents:
        return Documents(
            lambda: (text for row, text in enumerate(documents) if validates(row, text) == held_out)
        )

    length = held = 0
    for row, text in enumerate(documents if lines else islice(documents, JUDGED)):
        length, held = length + len(text), held + len(text) * validates(row, text)
    share = held / max(1, length)
    if (lines or count == FEW_DOCUMENTS) and fraction / 2 <= share <= 2 * fraction:
        how = "the last rows" if lines else "documents chosen by their hash"
        return part(False), part(True), f"{how}, {share:.1%} of the text"
    few = f"{count} documents" if count < FEW_DOCUMENTS else "documents of very uneven lengths"
    return (
        Documents(lambda: (text[: cut_at(text)] for text in documents)),
        Documents(lambda: (text[cut_at(text) :] for text in documents)),
        f"the last {fraction:.1%} of each document, as there are {few}",
    )
