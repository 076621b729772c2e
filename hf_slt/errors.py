"""The errors that hf_slt raises for mistakes that the user can correct."""

import unicodedata


def printable(text: str) -> str:
    r"""Return a text that is safe to print: control characters, as in an untrusted file, are written as escapes.

    Args:
        text (`str`):
            Any text.

    Returns:
        `str`: the text with escapes in place of control characters. Line breaks, tabs and all kinds of space stay.

    Example:

    >>> printable("a" + chr(27) + "[2Jb")
    'a\\x1b[2Jb'
    >>> printable("5" + chr(160) + "km") == "5" + chr(160) + "km"
    True
    """
    return "".join(
        one if one.isprintable() or one in "\n\t" or unicodedata.category(one) == "Zs" else repr(one)[1:-1]
        for one in text
    )


class SLTError(ValueError):
    """A mistake that the user can correct. The message names the value and says what to do.

    Args:
        message (`object`, defaults to `""`):
            What is wrong, with the value and what to do.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))


class TicketError(SLTError):
    """A ticket is damaged or incomplete, belongs to another backbone, or has an unknown version."""


class MismatchError(TicketError, RuntimeError):
    """A ticket does not fit its configuration. It is also a `RuntimeError`, which transformers raises then."""


def require(condition: object, message: str) -> None:
    """Raise `ValueError` with this message unless the condition is true.

    Args:
        condition (`object`):
            What has to be true.
        message (`str`):
            Text of the error.

    Raises:
        `ValueError`: if the condition is false.
    """
    if not condition:
        raise ValueError(message)
