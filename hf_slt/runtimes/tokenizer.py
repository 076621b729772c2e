"""Loads the tokenizer of a folder. It has no digest: any fault raises `SLTError`, and its ids are checked."""

import os
from typing import Any

from ..errors import SLTError


def load_fast_tokenizer(source: str | os.PathLike) -> Any:
    """Load the tokenizer of a folder or Hub name. None of its code is run.

    Args:
        source (`str` or `os.PathLike`):
            The folder or Hub name.

    Returns:
        `PreTrainedTokenizerFast`: the tokenizer.

    Raises:
        [`SLTError`]: if no tokenizer can be loaded, or only a slow one.
    """
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except BaseException as error:  # a malformed file can raise any exception type
        # A panic of the Rust library is not an Exception, but a BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        hint = "save one there (tokenizer.save_pretrained)"
        raise SLTError(f"{source}: the folder has no tokenizer that can be loaded; {hint}") from error
    if not getattr(loaded, "is_fast", False):
        raise SLTError(f"{source}: a slow tokenizer ({type(loaded).__name__}); save a fast one there")
    return loaded


def refuse_unknown_ids(tokenizer: Any, rows: int) -> None:
    """Raise `SLTError` for an id beyond the rows of a model's table.

    Call this before `to_str()` of the tokenizer, and before making a list of its tokens: time and memory of both grow
    with the largest id, which one line of a file can set.

    Args:
        tokenizer (`PreTrainedTokenizerFast`):
            The tokenizer.
        rows (`int`):
            The rows of the model's table of tokens.

    Raises:
        [`SLTError`]: if the tokenizer has more tokens than the table has rows.
    """
    if (size := max(tokenizer.get_vocab().values(), default=-1) + 1) > rows:
        raise SLTError(
            f"the tokenizer has {size} tokens, the model {rows}; use the tokenizer that the model was trained with"
        )
