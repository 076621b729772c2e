"""A progress bar on a terminal and in a notebook; elsewhere, such as in a log file, a line every 30 seconds."""

import sys
from typing import Any

from tqdm.asyncio import tqdm as TerminalBar
from tqdm.auto import tqdm

SECONDS = 30.0  # between two lines
LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s, {elapsed} elapsed, {remaining} left{postfix}"


class WholeLines:
    """A file that writes every update of a progress bar as a line of its own.

    Args:
        file (`TextIO`):
            Where to write.
    """

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, text: str) -> None:
        """Write an update as a line. Text that only moves the cursor is left out.

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
    """A tqdm bar that shows a new text at the end with the next line, instead of printing a line for it."""

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Set the text at the end of the line."""
        super().set_postfix_str(s, refresh=False)


def progress_bar(*args: Any, **options: Any) -> Any:
    """Return a tqdm bar. It takes the same arguments as tqdm.

    Args:
        args, options:
            As for `tqdm.tqdm`.

    Returns:
        `tqdm.tqdm`: the bar. If stderr is not a terminal, it prints a line at the beginning, at the end, and
        every 30 seconds.
    """
    if sys.stderr.isatty() or tqdm is not TerminalBar:  # in a notebook it is another class
        return tqdm(*args, **options)
    lines = {"file": WholeLines(sys.stderr), "mininterval": SECONDS, "bar_format": LINE}
    return ProgressLines(*args, **lines, **options)
