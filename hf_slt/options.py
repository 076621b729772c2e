"""What every command line here shares: one spelling of options, and the nearest to a misspelt one.

--top_k 3, --top_k=3 and --top-k 3 are one option, shown with an underscore. --overwrite and --overwrite true
are one value. Of --stepz 3 one learns: unknown option --stepz; did you mean --max_steps?
"""

import argparse
import difflib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import Field
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin


class _Help(argparse.HelpFormatter):
    """Adds the default to each help text; that of a flag, or none at all, goes without saying."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is False or action.default in (None, "", argparse.SUPPRESS)
        return action.help if silent else f"{action.help} (default: %(default)s)"


class OptionParser(argparse.ArgumentParser):
    """ArgumentParser whose errors are one line, and which knows what was meant."""

    def __init__(self, *names: Any, **keywords: Any) -> None:
        super().__init__(*names, **{"formatter_class": _Help, "allow_abbrev": False, **keywords})

    def add_fields(self, title: str, fields: Iterable[Field], texts: Mapping[str, str] | None = None) -> None:
        """An option for each field of a dataclass: its name, type and default, and the help in its metadata.

        Further metadata are keywords of `add_argument`; `texts` has help for fields without any.
        """
        group = self.add_argument_group(title)
        for field in fields:
            text = (texts or {}).get(field.name, "")
            keywords = {"help": text, **_keywords(field.type), **field.metadata}
            group.add_argument(f"--{field.name}", default=field.default, **keywords)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As in argparse, but what is not known is an error: here, where the nearest option is known."""
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        words[:end] = map(_underscored, words[:end])
        namespace, unknown = super().parse_known_args(words, namespace)
        if unknown:
            word = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
            self.error(f"unknown option {word}{did_you_mean(word, self._option_string_actions)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """One line on stderr, exit code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a complaint about an unknown word: the shortest that contains it, or else the most alike.

    >>> known = ["--max_steps", "--batch_size", "--seed"]
    >>> [did_you_mean(word, known) for word in ("--stepz", "--batch", "--xyz")]
    ['; did you mean --max_steps?', '; did you mean --batch_size?', '']
    """
    word, bare = word.lstrip("-"), {one.lstrip("-"): one for one in known}
    near = sorted((one for one in bare if word in one), key=len)
    near = near or difflib.get_close_matches(word, bare, n=1, cutoff=0.5)
    return f"; did you mean {bare[near[0]]}?" if near else ""


def _underscored(word: str) -> str:
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if word.startswith("--") else word


def _keywords(kind: Any) -> dict[str, Any]:
    """How argparse reads a type: the first of a union that fits, None aside."""
    kinds = [one for one in get_args(kind) or (kind,) if one is not NoneType]
    if get_origin(kind) is Literal:
        return {"choices": kinds}
    if get_origin(kind) is list or get_origin(kinds[0]) is list:
        return {"nargs": "+", "metavar": "TEXT"}
    if kinds == [bool]:
        return {"type": _truth, "nargs": "?", "const": True, "metavar": "true|false"}
    if str in kinds:
        return {"type": _number_or_text if float in kinds else str, "metavar": "TEXT"}
    return {"type": float, "metavar": "X"} if float in kinds else {"type": int, "metavar": "N"}


def _truth(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{word!r} is neither true nor false")
    return word.lower() == "true"


def _number_or_text(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word
