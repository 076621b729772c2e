"""A progress bar on a terminal and in a notebook; elsewhere, such as in a log file, a line every so often."""

import sys
from typing import Any

from tqdm.asyncio import tqdm as TerminalBar
from tqdm.auto import tqdm

SECONDS = 30.0  # between two lines
LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s, {elapsed} elapsed, {remaining} left{postfix}"


class WholeLines:
    """A file that takes the states of a bar, which return to the beginning of the line, and writes lines.

    Args:
        file (`TextIO`):
            Where to write.
    """

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, text: str) -> None:
        """Write a state as a line. What only moves the cursor is left out.

        Args:
            text (`str`):
                What the bar prints.
        """
        if text.strip():
            self.file.write(text.strip() + "\n")

    def flush(self) -> None:
        """Flush the file."""
        self.file.flush()


class ProgressLines(TerminalBar):
    """A bar of tqdm whose text at the end waits for the next line, instead of printing one."""

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Set the text at the end of the line."""
        super().set_postfix_str(s, refresh=False)


def progress_bar(*args: Any, **options: Any) -> Any:
    """Return a bar of tqdm, with the same arguments.

    Args:
        args, options:
            As for `tqdm.tqdm`.

    Returns:
        `tqdm.tqdm`: if stderr is no terminal, one that prints a line at the beginning, at the end, and every
        30 seconds.
    """
    if sys.stderr.isatty() or tqdm is not TerminalBar:  # which it is unless this is a notebook
        return tqdm(*args, **options)
    lines = {"file": WholeLines(sys.stderr), "mininterval": SECONDS, "bar_format": LINE}
    return ProgressLines(*args, **lines, **options)
