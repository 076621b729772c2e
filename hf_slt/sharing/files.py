"""Files that are there whole or not at all: written beside their place, then renamed into it."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A temporary path beside `path` to write to; it takes its place at the end, but not after an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def staged(
    directory: str | os.PathLike, *, keep: bool = True, last: str = "config.json", stale: str = ""
) -> Iterator[Path]:
    """A temporary folder whose files all move to `directory` at the end, or none of them on an error.

    A new folder appears by one rename. In an existing one each file is replaced by a rename, that called
    `last` after the others; then older files whose names match `stale` go. With `keep` false nothing
    moves: for a process that takes part in the writing of another.
    """
    target = Path(directory)
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file, not a folder")
    stage = target.parent / f".{target.name}-{uuid4().hex}"
    stage.mkdir(parents=True)
    try:
        yield stage
        if not keep:
            return
        names = sorted((path.name for path in stage.iterdir()), key=lambda name: (name == last, name))
        for name in names:
            _flush(stage / name)
        if not target.exists():
            os.rename(stage, target)
            return
        for name in names:
            os.replace(stage / name, target / name)
        for path in target.iterdir():
            if path.name not in names and re.fullmatch(stale, path.name):
                path.unlink()
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _flush(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
