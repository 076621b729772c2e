"""Atomic writes, safe against crashes and concurrent writers.

A file or a new folder is written under a temporary name in the same parent folder, then renamed. An existing folder
is exchanged, in one system call, with a complete new folder, in which the other files of the old one are linked. A
reader finds all files of the old folder or all of the new one: weights, configuration, tokenizer, generation settings.

If a folder cannot be exchanged (it has subfolders, or the system cannot exchange folders), it is replaced in four
steps:

    .ticket-UUID/       all new files are written here
    .next-DIGEST/       the new name of that folder; DIGEST is the digest of the new config.json
    config.json         replaced by a rename: the moment of change
    the other files     replaced, while .next-DIGEST still has them all; then .next-DIGEST is removed

Weights are read from .next-DIGEST if config.json has exactly that digest (`weights_folder` in tickets/format.py).
If a writer is killed, the next writer completes its work. Until then the tokenizer in the folder may be that of the
older ticket.

Writers of one folder wait for each other, if the system can lock a folder. No folder above it is locked. Readers
take no lock: `read_unchanged` reads again if the folder was replaced meanwhile.
"""

import ctypes
import glob
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from ..errors import SLTError, TicketError
from .format import CONFIG_FILE, STAGING_PREFIX, next_folder

try:
    import fcntl
except ImportError:  # not on this operating system
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

# A save removes files of these names that it does not write: they are of an older save, and would be loaded.
WEIGHT_FILES = r"mask\.safetensors|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
WARN_SECONDS = 1.0  # after this time, a writer that waits for another prints a warning
LOCK_SECONDS = 60.0  # after this time, it gives up
READ_ATTEMPTS = 20

_LONGEST_NAME = 100  # characters of a name that a temporary folder repeats; a file system allows 255 bytes
_OWN: set[Path] = set()  # temporary folders that this process writes in: it holds their locks


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """Write one file atomically.

    Args:
        path (`str` or `os.PathLike`):
            The file to write or to replace.

    Yields:
        `Path`: a temporary path to write to. It takes the place of `path` at the end, but not after an error.
    """
    path = Path(path)
    with _stage(path, path.parent) as stage:
        new = stage / ("file" + path.suffix)
        yield new
        _flush(new)
        os.replace(new, path)  # a link at this place is replaced, not followed


def check_output_folder(directory: str | os.PathLike) -> None:
    """Raise `NotADirectoryError` if a folder cannot be made because a file has this name.

    Args:
        directory (`str` or `os.PathLike`):
            The folder. It may be new.
    """
    path = Path(directory)
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is a file, not a folder; give the name of a folder")


@contextmanager
def staged(directory: str | os.PathLike, *, keep: bool = True) -> Iterator[Path]:
    """Write several files of a folder atomically.

    Other files of the folder stay, except weights, which would be loaded in place of the new ones.

    Args:
        directory (`str` or `os.PathLike`):
            The folder to write to. It may be new.
        keep (`bool`, defaults to `True`):
            False for a process that must write too, while another process keeps the files. They are then discarded.

    Yields:
        `Path`: a temporary folder. Its files all move to `directory` at the end, or none of them after an error.

    Raises:
        `NotADirectoryError`: if there is a file of that name.
    """
    check_output_folder(directory)
    target = Path(os.path.realpath(directory))
    with _stage(target, _place_beside(target)) as stage:
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
                if not target.is_dir():  # if it is a folder, another writer was first
                    raise
        if target in _OWN:  # no other process uses it
            _put_files(stage, target)
            return
        with _locked(target):
            _refuse_folders(stage, target)
            _end_switch(target)
            if not _exchange(stage, target):
                _switch(stage, target)


def read_unchanged(folder: str | os.PathLike, read: Callable[[], Result]) -> Result:
    """Read a folder that a writer may replace at any moment.

    Args:
        folder (`str` or `os.PathLike`):
            The folder. Anything else, such as a Hub name, is read once.
        read (`Callable`):
            Reads files of the folder. It is called again if the folder was replaced meanwhile, because it may have
            read files of two different saves.

    Returns:
        What `read` returns.

    Raises:
        [`TicketError`]: if the folder was replaced during each of several attempts.
    """
    for attempt in range(READ_ATTEMPTS):
        before = _version(folder)
        try:
            result = read()
            if _version(folder) == before:
                return result
        except (ValueError, OSError, LookupError):
            if _version(folder) == before:
                raise
        time.sleep(0.01 * attempt)
    raise TicketError(f"{folder}: replaced {READ_ATTEMPTS} times while it was read; load it again")


def _version(folder: str | os.PathLike) -> tuple:
    """Return values that change when a folder is replaced: the identity of the folder and of its config.json."""
    found: list[tuple] = []
    for path in (Path(folder), Path(folder, CONFIG_FILE)):
        try:
            facts = path.stat()
            times = () if path == Path(folder) else (facts.st_mtime_ns, facts.st_size)
            found.append((facts.st_dev, facts.st_ino, *times))
        except OSError:
            found.append(())
    return tuple(found)


def is_own_file(path: Path) -> bool:
    """Return whether this is a file of its folder, and not a link, which may lead to a private file elsewhere.

    In the cache of the Hub, all files are links to the folder `blobs` beside them.

    Args:
        path (`Path`):
            Path of a file.

    Returns:
        `bool`: True for a file, and for a link of the Hub's cache.
    """
    blobs = path.parent.resolve().parent.parent / "blobs"
    return path.is_file() and (not path.is_symlink() or path.resolve().parent == blobs)


def copy_own_file(path: Path, folder: Path) -> None:
    """Copy a file into a folder, if it exists. A link is not copied, and a warning names it.

    Args:
        path (`Path`):
            Path of a file.
        folder (`Path`):
            Where the copy goes.
    """
    if is_own_file(path):
        shutil.copyfile(path, folder / path.name)
    elif path.is_file():
        logger.warning(f"{path} is a link, and is not copied; put the file itself in its place")


# -- from a temporary folder to its place -----------------------------------------------------------------


def _exchange(stage: Path, target: Path) -> bool:
    """Exchange a folder with a new one, with links to its other files. Return False if that is impossible."""
    if any(path.is_dir() and not path.is_symlink() for path in target.iterdir()):
        return False
    written = {path.name for path in stage.iterdir()}
    linked = []
    try:
        for path in _other_files(target, written):
            _copy(path, stage / path.name)
            linked.append(stage / path.name)
        shutil.copymode(target, stage)
        swapped = swap_folders(stage, target)
    except OSError:
        swapped = False
    if not swapped:
        for path in linked:
            path.unlink(missing_ok=True)
        return False
    for path in _other_files(stage, written):  # files that another program wrote meanwhile
        if not (target / path.name).exists():
            os.replace(path, target / path.name)
    return True


def _other_files(folder: Path, written: set[str]) -> Iterator[Path]:
    """Yield the files of a folder that a save does not replace."""
    for path in list(folder.iterdir()):
        if path.name not in written and not re.fullmatch(WEIGHT_FILES, path.name):
            yield path


def swap_folders(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step.

    Args:
        one (`Path`):
            A folder.
        other (`Path`):
            A folder on the same file system.

    Returns:
        `bool`: True on success. False if the system cannot do this; then nothing is changed.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2  # only in Linux; Python has no function for it
    except (OSError, AttributeError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _refuse_folders(stage: Path, target: Path) -> None:
    """Raise `SLTError` for a folder that has the name of a file to write."""
    written = {path.name for path in stage.iterdir()}
    for path in target.iterdir():
        named = path.name in written or re.fullmatch(WEIGHT_FILES, path.name)
        if named and path.is_dir() and not path.is_symlink():
            raise SLTError(f"{path}: a folder where a file of the model belongs; remove or rename it")


def _put_files(source: Path, target: Path) -> None:
    """Move the files of a folder into another, and remove weights that are not among them."""
    names = {path.name for path in source.iterdir()}
    for path in list(target.iterdir()):
        if path.name not in names and re.fullmatch(WEIGHT_FILES, path.name):
            path.unlink()
    for name in names:
        os.replace(source / name, target / name)


def _switch(stage: Path, target: Path) -> None:
    """Replace files one by one. The order makes sure that weights and config.json always belong together."""
    new_config = (stage if (stage / CONFIG_FILE).exists() else target) / CONFIG_FILE
    following = next_folder(target, new_config)
    os.rename(stage, following)
    if (following / CONFIG_FILE).exists():
        os.replace(following / CONFIG_FILE, target / CONFIG_FILE)
    _end_switch(target)


def _end_switch(target: Path) -> None:
    """Put all files that belong to config.json in their places, and remove those of an interrupted save."""
    following = next_folder(target)
    left = list(target.glob(f"{STAGING_PREFIX}*"))
    if not left:
        return
    done = target / _stage_name(target)
    done.mkdir()
    if following.is_dir() and not following.is_symlink():
        names = [path.name for path in following.iterdir() if is_own_file(path)]
        for path in list(target.iterdir()):
            if path.name not in names and re.fullmatch(WEIGHT_FILES, path.name):
                path.unlink()
        for name in names:
            _copy(following / name, done / name)
            os.replace(done / name, target / name)
    for path in left:
        os.rename(path, done / path.name)
    shutil.rmtree(done, ignore_errors=True)


# -- temporary folders and locks --------------------------------------------------------------------------


@contextmanager
def _stage(path: Path, place: Path) -> Iterator[Path]:
    """Make a new folder in `place` for what will be `path`. It is removed at the end, or by the next writer of `path`.

    Its name is random, so nobody can have put a link there. Its lock shows that its process is running.
    """
    place.mkdir(parents=True, exist_ok=True)
    for folder in dict.fromkeys((path.parent, path, place)):
        _remove_left(folder, path)
    stage, alive = _make_stage(path, place)
    _OWN.add(stage)
    try:
        yield stage
    finally:
        _OWN.discard(stage)
        shutil.rmtree(stage, ignore_errors=True)
        if alive is not None:
            os.close(alive)


def _make_stage(path: Path, place: Path) -> tuple[Path, int | None]:
    """Make a temporary folder and lock it. Another writer may remove it as long as it is not locked."""
    while True:
        stage = place / _stage_name(path)
        stage.mkdir()
        try:
            alive = _try_lock(stage)
        except BlockingIOError:  # it is being removed
            continue
        if stage.exists():
            return stage, alive
        if alive is not None:
            os.close(alive)


def _remove_left(folder: Path, path: Path) -> None:
    """Remove the temporary folders of writers of `path` that were killed."""
    for left in folder.glob(f".{glob.escape(path.name[:_LONGEST_NAME])}-{'[0-9a-f]' * 32}"):
        try:
            lock = _try_lock(left)
        except BlockingIOError:  # its writer is still running
            continue
        if lock is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)


def _stage_name(path: Path) -> str:
    return f".{path.name[:_LONGEST_NAME]}-{uuid4().hex}"


def _place_beside(target: Path) -> Path:
    """Return where the new files of a folder are written: in its parent or, if that is impossible, inside it."""
    if not target.exists():
        return target.parent
    beside = os.access(target.parent, os.W_OK) and target.parent.stat().st_dev == target.stat().st_dev
    return target.parent if beside and target.parent != target else target


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raise `SLTError` if another writer has it for longer than `LOCK_SECONDS`."""
    start, warned = time.monotonic(), False
    while True:
        try:
            lock = _try_lock(folder)
        except BlockingIOError:
            waited = time.monotonic() - start
            if waited > LOCK_SECONDS:
                raise SLTError(
                    f"{folder}: another process has been writing to it for {LOCK_SECONDS:.0f} seconds; wait for it, "
                    "end it, or give another folder"
                ) from None
            if waited > WARN_SECONDS and not warned:
                logger.warning(
                    f"{folder}: waiting up to {LOCK_SECONDS:.0f} s for another process that writes to it"
                )
                warned = True
            time.sleep(0.01)
            continue
        if lock is None or os.path.samestat(os.fstat(lock), os.stat(folder)):
            break
        os.close(lock)  # the folder was exchanged meanwhile: lock the new one
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """Return the descriptor that holds the lock of a folder until it is closed; None where there are no locks.

    Raises:
        `BlockingIOError`: if another process has the lock.
    """
    if fcntl is None:
        return None
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return lock


def _copy(source: Path, target: Path) -> None:
    if source.is_symlink():
        target.symlink_to(os.readlink(source))
        return
    try:
        os.link(source, target)
    except OSError:  # not on this file system
        shutil.copy2(source, target)


def _flush(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
