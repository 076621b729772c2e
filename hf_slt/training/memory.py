"""Memory of a training process: what a step frees is kept for the next step.

glibc returns every large block to the system as soon as it is freed. The next step gets it again as zeroed pages, one
page fault for every 4 KB, which can take longer than the arithmetic. Every step of a training run needs the same
blocks, so nothing is lost by keeping them.
"""

import ctypes
import sys

# Numbers of options in malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER = -1


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, where the C library is glibc. Results do not change.

    Returns:
        `bool`: whether the C library took the setting.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _NEVER))
