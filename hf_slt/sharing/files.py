"""Files that are there whole or not at all, whoever is killed and whoever else writes.

A file, or a folder that is new, is written beside its place and renamed into it. A folder that is there, with
files of its own, cannot be replaced by one rename; its new files take four steps:

    .ticket-UUID/       all new files are written here
    .next-DIGEST/       by one rename; DIGEST is that of the new config.json
    config.json         replaced by a rename: the moment of change
    the other files     put in their places, while .next-DIGEST still has them all; then that goes

Whoever reads weights takes them from .next-DIGEST if config.json has that very digest (`weights_folder` in
model/ticket.py): each state in between is the old folder or the new one. The next writer ends what a killed
one began, and removes what it left. Writers of one folder wait for each other, where the system can lock a
folder. Readers take no lock: one that reads in the moment of change may be told that config.json and masks do
not fit, and loads again; it is never given a mixture.
"""

import glob
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

try:
    import fcntl
except ImportError:  # not on this operating system
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)
# Of these, what a new save does not write is of an older one, and would be loaded in its place.
WEIGHT_FILES = r"mask\.safetensors|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"

_OWN: set[Path] = set()  # stages that this process writes in: it holds their locks


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A temporary path to write to; it takes the place of `path` at the end, but not after an error."""
    path = Path(path)
    with _stage(path, path.parent) as stage:
        yield stage / path.name
        _flush(stage / path.name)
        os.replace(stage / path.name, path)  # a link that lies there is replaced, not followed


@contextmanager
def staged(directory: str | os.PathLike, *, keep: bool = True) -> Iterator[Path]:
    """A temporary folder whose files all move to `directory` at the end, or none of them on an error.

    A new folder appears by one rename. In an existing one other files stay, except weights, which would be
    loaded in place of the new ones. With `keep` false nothing moves: for a process that takes part in the
    writing of another.
    """
    target = Path(directory)
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file, not a folder")
    # Within a folder that is there, which may be on another disk than its parent.
    with _stage(target, target if target.exists() else target.parent) as stage:
        yield stage
        if not keep:
            return
        for path in stage.iterdir():
            _flush(path)
        if not target.exists():
            try:
                os.rename(stage, target)
                return
            except OSError:
                if not target.is_dir():  # else another writer was here first
                    raise
        with _locked(target):
            _switch(stage, target)


def is_own_file(path: Path) -> bool:
    """Whether this is a file of its folder, and not a link, which may lead to anybody's secrets.

    In the cache of the Hub, all files are links to the folder `blobs` beside them.
    """
    blobs = path.parent.resolve().parent.parent / "blobs"
    return path.is_file() and (not path.is_symlink() or path.resolve().parent == blobs)


def copy_own_file(path: Path, folder: Path) -> None:
    """Copy a file, if it is there, into a folder; a link is named in a warning, and not copied."""
    if is_own_file(path):
        shutil.copyfile(path, folder / path.name)
    elif path.is_file():
        logger.warning(f"{path} is a link, and is not copied; put the file itself in its place")


def _switch(stage: Path, target: Path) -> None:
    from ..model.ticket import CONFIG_FILE, next_folder  # not at the top: plots do without transformers

    _end_switch(target)
    new_config = (stage if (stage / CONFIG_FILE).exists() else target) / CONFIG_FILE
    following = next_folder(target, new_config)
    os.rename(stage, following)
    if (following / CONFIG_FILE).exists():
        os.replace(following / CONFIG_FILE, target / CONFIG_FILE)
    _end_switch(target)


def _end_switch(target: Path) -> None:
    """Put all files that belong to config.json in their places, and remove those that never will."""
    from ..model.ticket import NEXT, next_folder

    following, done = next_folder(target), _stage_name(target, target)
    done.mkdir()
    if following.is_dir() and not following.is_symlink():
        names = [path.name for path in following.iterdir() if is_own_file(path)]
        for path in list(target.iterdir()):
            if path.name not in names and re.fullmatch(WEIGHT_FILES, path.name):
                path.unlink()
        for name in names:
            _copy(following / name, done / name)
            os.replace(done / name, target / name)
    for left in target.glob(f"{NEXT}*"):
        os.rename(left, done / left.name)
    shutil.rmtree(done, ignore_errors=True)


@contextmanager
def _stage(path: Path, place: Path) -> Iterator[Path]:
    """A new folder in `place` for what will be `path`; removed at the end, or by the next writer of `path`.

    Nobody can have laid a link there: nobody knows its name.
    """
    place.mkdir(parents=True, exist_ok=True)
    stage = _stage_name(path, place)
    for folder in dict.fromkeys((path.parent, place)):
        with _locked(folder):
            for left in folder.glob(f".{glob.escape(path.name)}-{'[0-9a-f]' * 32}"):
                if lock := _lock(left, wait=False):  # else its writer lives
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(lock)
            if folder == place:
                stage.mkdir()
                alive = _lock(stage)
    _OWN.add(stage)
    try:
        yield stage
    finally:
        _OWN.discard(stage)
        shutil.rmtree(stage, ignore_errors=True)
        if alive:
            os.close(alive)


def _stage_name(path: Path, place: Path) -> Path:
    return place / f".{path.name}-{uuid4().hex}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = None if folder in _OWN else _lock(folder)
    try:
        yield
    finally:
        if lock:
            os.close(lock)


def _lock(folder: Path, *, wait: bool = True) -> int | None:
    """A lock on a folder, as the descriptor that holds it until it is closed; None if it cannot be had."""
    if fcntl is None:
        return None
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # another has it, or the file system knows no locks
        os.close(lock)
        return None
    return lock


def _copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # not on this file system
        shutil.copyfile(source, target)


def _flush(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
