"""Runs NumPy and hashlib in as many threads as there are cores: both release the interpreter lock."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import local
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_here = local()


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call a function with each item, in threads, and return the results in the order of the items.

    The first error, in that order, is raised, and calls that have not begun by then are cancelled. Inside a thread of
    another `map_in_threads`, all calls run in that thread, because every core is busy already. No thread is left when
    this returns. A generator would leave that to the garbage collector, which may run while another thread starts and
    holds the lock that ending a thread needs.

    Args:
        function (`Callable`):
            What to call.
        items (`Iterable`):
            What to call it with, one item for each call.

    Returns:
        `list`: what `function` returns for each item.

    Example:

    >>> map_in_threads(len, ["a", "bcd"])
    [1, 3]
    """
    items = list(items)
    threads = min(core_count(), len(items))
    if threads <= 1 or getattr(_here, "is_worker", False):
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads, initializer=_begin_worker) as pool:
        return list(pool.map(function, items))


def core_count() -> int:
    """Return the number of cores that this process may use.

    Returns:
        `int`: the number, at least 1.
    """
    affinity: Any = getattr(os, "sched_getaffinity", None)  # not on every operating system
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _begin_worker() -> None:
    _here.is_worker = True
