"""A ticket as one HTML file: it opens from disk, needs no server and no network, and generates text.

    page = page.html + page.css + engine.js + page.js        # what runs
         + mask.safetensors, base64                          # the ticket, byte for byte
         + vocabulary and merges, deflated, base64           # the tokenizer

Like `from_pretrained`, the page first draws the weights from the seed and checks every digest; only then can it
generate text. `engine.js` has the computation, independent of a page; `page.js` has the user interface.
"""

import base64
import html
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

from ..errors import SLTError
from ..models.checks import verify_ticket
from ..tickets.files import replacing
from ..tickets.format import sha256
from ..tickets.verify import mask_path
from .tokenizer import load_fast_tokenizer, refuse_unknown_ids

ACTIVATIONS = ("gelu_new", "gelu", "relu", "silu")  # those of engine.js
_ARCHITECTURE = "SupermaskGPT2LMHeadModel"
# What `_lean` matches. It keeps strings, and lines with a regular expression (a slash without a space after it). It
# drops spaces without a meaning. In a style " :" begins a selector; in a script "+ +" is not "++".
_SPACES = {
    ".js": r"""(^.*/\S.*$|"[^"]*"|`[^`]*`)|(?<=[][{}();:,=<>?*&|!])\s+|\s+(?=[][{}();:,=<>?*&|!])"""
    r"""|(?<=[^+-])\s+(?=[+-][^+-])|(?<=[^+-][+-])\s+(?=[^+-])""",
    ".css": r"""("[^"]*")|(?<=[{};:,])\s+|\s+(?=[{};,])""",
}


def write_page(folder: str | os.PathLike, output: str | os.PathLike, **options: str | None) -> Path:
    """Write the page of a ticket.

    Args:
        folder (`str` or `os.PathLike`):
            The ticket's folder.
        output (`str` or `os.PathLike`):
            The HTML file to write.
        options:
            As in `make_page`.

    Returns:
        `Path`: the file.

    Raises:
        [`SLTError`]: if the ticket does not verify, or if a page cannot compute with it.
    """
    output = Path(output)
    if output.suffix.lower() not in (".html", ".htm"):  # this also protects the files of the ticket
        raise SLTError(f"{output}: a page is a file whose name ends in .html, such as {output.stem}.html")
    text = make_page(folder, **options)
    try:
        with replacing(output) as path:
            path.write_text(text, "utf-8")
    except OSError as error:
        raise SLTError(f"{output}: cannot be written ({error.strerror}); give another path") from error
    return output


def make_page(folder: str | os.PathLike, *, name: str | None = None, prompt: str | None = None) -> str:
    """Make the page of a ticket.

    Args:
        folder (`str` or `os.PathLike`):
            The ticket's folder.
        name (`str`, *optional*):
            What the page calls the ticket. Default: the name of the folder.
        prompt (`str`, *optional*):
            The text in its prompt box when the page opens.

    Returns:
        `str`: the HTML text.

    Raises:
        [`SLTError`]: if the ticket does not verify, or if a page cannot compute with it.
    """
    folder = Path(folder)
    header = verify_ticket(folder)
    config = header.config
    if (found := config["architectures"][0]) != _ARCHITECTURE:
        raise SLTError(f"{folder}: a page generates text, which {found} cannot do; only {_ARCHITECTURE} can")
    if backbone := header.options.get("backbone"):
        raise SLTError(f"{folder}: a page draws all weights, and cannot fetch those of {backbone}")
    if (act := config["activation_function"]) not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise SLTError(f"{folder}: a page cannot compute activation_function {act!r}, only {known}")
    if rank := header.options.get("embedding_rank"):
        raise SLTError(f"{folder}: embedding_rank {rank}: a page has no table of low rank")
    tokenizer = json.dumps(compact_tokenizer(folder, config["vocab_size"]), separators=(",", ":"))
    name = name or folder.resolve().name
    facts = {"prompt": "The" if prompt is None else prompt, "tokenizer_sha256": sha256(tokenizer)}
    parts = {
        "name": html.escape(name),
        "style": _lean("page.css"),
        "facts": json.dumps(facts).replace("<", "\\u003c"),  # a name cannot end the script element
        "ticket": _base64(mask_path(folder).read_bytes()),
        "tokenizer": _base64(zlib.compress(tokenizer.encode(), 9)),
        "engine": _lean("engine.js"),
        "script": _lean("page.js"),
    }
    return re.sub(r"\{\{ (\w+) \}\}", lambda match: parts[match[1]], _asset("page.html"))


def compact_tokenizer(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Return what engine.js needs to know about a byte-level BPE tokenizer.

    Args:
        folder (`Path`):
            The folder of the tokenizer.
        vocab_size (`int`):
            The rows of the model's table.

    Returns:
        `dict[str, Any]`: an object that JSON can hold.

    Raises:
        [`SLTError`]: if there is no tokenizer, or if the page would give other tokens than Python.
    """
    loaded = load_fast_tokenizer(folder)
    refuse_unknown_ids(loaded, vocab_size)
    tokenizer = loaded.backend_tokenizer
    facts = json.loads(tokenizer.to_str())
    _refuse_other_kinds(folder, facts)
    vocabulary, added = facts["model"]["vocab"], facts["added_tokens"]
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokens: list[str | None] = [None] * (max(ids.values()) + 1)
    for text, index in ids.items():
        if tokens[index] is not None:
            raise SLTError(
                f"{folder}: its tokenizer has two tokens with id {index}; save the tokenizer again"
            )
        tokens[index] = text
    pairs = [one.split(" ") if isinstance(one, str) else one for one in facts["model"]["merges"]]
    plain, whole = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    start = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
    return {
        "tokens": _without_made(tokens, ["".join(pair) for pair in pairs]),
        "merges": [vocabulary[part] for pair in pairs for part in pair],
        # Added tokens that are not normalised are searched first. There is no normalizer, but the order matters.
        "added": [[one["content"] for one in added if one["normalized"] is late] for late in (False, True)],
        "special": [one["id"] for one in added if one["special"]],
        "prefix_space": facts["pre_tokenizer"]["add_prefix_space"],
        "before": whole[:start],
        "after": whole[start + len(plain) :],
    }


def _without_made(tokens: list[str | None], made: list[str]) -> list[str | None]:
    """Return the tokens, with None for those that merges make, if their ids are in the order of the merges."""
    new = set(made)
    places = [index for index, text in enumerate(tokens) if text is None or text in new]
    if [tokens[index] for index in places] != list(dict.fromkeys(made)):
        return tokens
    return [None if text in new else text for text in tokens]


def _refuse_other_kinds(folder: Path, facts: dict[str, Any]) -> None:
    model, before = facts["model"], facts["pre_tokenizer"] or {}
    strange = [
        f"{key} {value!r}"
        for key, value in {
            "model": model["type"] if model["type"] != "BPE" else None,
            "normalizer": facts["normalizer"] and facts["normalizer"]["type"],
            "pre_tokenizer": before.get("type", "none") if before.get("type") != "ByteLevel" else None,
            "use_regex": False if before.get("use_regex") is False else None,
            **{key: model.get(key) or None for key in ("byte_fallback", "ignore_merges", "dropout")},
            **{key: model.get(key) or None for key in ("continuing_subword_prefix", "end_of_word_suffix")},
            # Python and the page drop a letter that is not in the vocabulary, unless there is an unk_token.
            "unk_token": model.get("unk_token") if not {*_letters()} <= model["vocab"].keys() else None,
            "added_tokens": next(
                (one["content"] for one in facts["added_tokens"] if _is_stretchy(one)), None
            ),
        }.items()
        if value is not None
    ]
    if strange:
        raise SLTError(f"{folder}: a page needs a byte-level BPE tokenizer as GPT-2's; this has {strange[0]}")


def _letters() -> list[str]:
    """Return the letters that stand for the 256 bytes in a byte-level tokenizer."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


def _is_stretchy(token: dict[str, Any]) -> bool:
    """Return whether an added token includes the spaces around it, or is found only between spaces."""
    return token["single_word"] or token["lstrip"] or token["rstrip"]


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


def _lean(name: str) -> str:
    """Return a script or style without comments and needless spaces: a third shorter, and still readable.

    Our scripts have strings in double quotes or backticks that end on their line and hold no " //".
    """
    spaces = _SPACES[Path(name).suffix]
    lines = (re.sub(r"(^|\s)//.*", "", line).strip() for line in _asset(name).splitlines())
    return "\n".join(re.sub(spaces, lambda found: found[1] or "", line) for line in lines if line)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
