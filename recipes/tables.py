"""Write Markdown tables. This module imports almost nothing, because the benchmark measures memory."""

from collections.abc import Iterable, Mapping
from typing import Any


def markdown_table(rows: Iterable[Mapping[str, Any]], numbers: Iterable[str] = ()) -> str:
    """Return rows as a Markdown table. The keys of the first row are the column headings.

    Args:
        rows (`Iterable[Mapping[str, Any]]`):
            Rows with the same keys. None is shown as an empty cell.
        numbers (`Iterable[str]`, *optional*):
            Columns to align at the right.

    >>> print(markdown_table([{"": "a", "loss": 1.5}, {"": "b", "loss": None}], ["loss"]))
    | | loss |
    |---|---:|
    | a | 1.5 |
    | b | |
    """
    rows, numbers = list(rows), set(numbers)
    heads = list(rows[0]) if rows else []
    lines = [heads, *([row[head] for head in heads] for row in rows)]
    text = ["| " + " | ".join("" if cell is None else str(cell) for cell in one) + " |" for one in lines]
    text.insert(1, "|" + "".join("---:|" if head in numbers else "---|" for head in heads))
    return "\n".join(text).replace("|  |", "| |")
