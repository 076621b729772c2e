"""The parser that all command lines of hf_slt use, and the options of `slt`.

--top_k 3, --top_k=3 and --top-k 3 mean the same; help shows the underscore. --overwrite and --overwrite true
mean the same. For example, --stepz 3 fails with: unknown option --stepz; did you mean --max_steps?

The options of `slt` are at the end. Only Python's standard library is imported here: help and errors appear
before torch is loaded.
"""

import argparse
import difflib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import Field
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin


class _Help(argparse.HelpFormatter):
    """Adds the default to each help text, except for flags and for options without a default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is False or action.default in (None, "", argparse.SUPPRESS)
        return action.help if silent else f"{action.help} (default: %(default)s)"


class OptionParser(argparse.ArgumentParser):
    """ArgumentParser with errors of one line. For an unknown option the error suggests the nearest one.

    Args:
        names:
            As in `argparse.ArgumentParser`.
        hints (`Mapping[str, str]`, *optional*):
            For an option that other programs have and this one does not: what to do instead.
        keywords:
            As in `argparse.ArgumentParser`.
    """

    def __init__(self, *names: Any, hints: Mapping[str, str] | None = None, **keywords: Any) -> None:
        super().__init__(*names, **{"formatter_class": _Help, "allow_abbrev": False, **keywords})
        self.hints = hints or {}

    def add_fields(self, title: str, fields: Iterable[Field], texts: Mapping[str, str] | None = None) -> None:
        """Add an option for each field of a dataclass: its name, type and default, and the help in its metadata.

        Args:
            title (`str`):
                Title of the group of options in the help.
            fields (`Iterable[Field]`):
                Fields of a dataclass. Metadata other than the help are keywords of `add_argument`.
            texts (`Mapping[str, str]`, *optional*):
                Help for fields that have none.
        """
        group = self.add_argument_group(title)
        for field in fields:
            text = (texts or {}).get(field.name, "")
            keywords = {"help": text, **_keywords(field.type), **field.metadata}
            group.add_argument(f"--{field.name}", default=field.default, **keywords)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does. An unknown option is an error that names the nearest one."""
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        words[:end] = map(_underscored, words[:end])
        namespace, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._explain(unknown))
        return namespace, unknown

    def _explain(self, unknown: list[str]) -> str:
        """Return the error message for words that no option takes."""
        known = self._option_string_actions
        word = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
        if word in self.hints:
            return f"unknown option {word}; {self.hints[word]}"
        if not word.startswith("-"):
            hint = f"; to continue a text, give it as --prompt {word!r}" if "--prompt" in known else ""
            return f"{word!r} is one word too many{hint}"
        return f"unknown option {word}{did_you_mean(word, known)}"

    def error(self, message: str) -> NoReturn:
        """Print one line to stderr and exit with code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown word: a suggestion.

    It is the shortest known word that contains the unknown one, or else the most similar.

    Args:
        word (`str`):
            The unknown word.
        known (`Iterable[str]`):
            All known words.

    Returns:
        `str`: a suggestion that begins with "; did you mean", or an empty text.

    Example:

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
    """Return argparse's keywords for a type. For a union: those of its first type that fits, except None."""
    kinds = [one for one in get_args(kind) or (kind,) if one is not NoneType]
    if get_origin(kind) is Literal:
        return {"choices": kinds}
    if get_origin(kind) is list or get_origin(kinds[0]) is list:
        return {"nargs": "+", "metavar": "TEXT"}
    if kinds[0] is list:
        return {"nargs": "+", "type": _number, "metavar": "X"}
    if kinds[0] is bool:
        read, more = (_truth_or_text, "|TEXT") if str in kinds else (_truth, "")
        return {"type": read, "nargs": "?", "const": True, "metavar": "true|false" + more}
    if str in kinds:
        return {"type": _number_or_text if float in kinds else str, "metavar": "TEXT"}
    return {"type": float, "metavar": "X"} if float in kinds else {"type": int, "metavar": "N"}


def _truth(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{word!r} is neither true nor false")
    return word.lower() == "true"


def _truth_or_text(word: str) -> bool | str:
    return _truth(word) if word.lower() in ("true", "false") else word


def _number(word: str) -> int | float:
    try:
        return int(word)
    except ValueError:
        return float(word)


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive; give 1 or more")
    return number


_positive.__name__ = "int"  # argparse prints this name if the word is not a number


def _number_or_text(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


# -- the options of slt ------------------------------------------------------------------------------


def parse_slt(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line of `slt`. Help and errors end the program here.

    Args:
        words (`list[str]`, *optional*):
            The words after `slt`. Default: those of the command line.

    Returns:
        `argparse.Namespace`: the command and its options.
    """
    parser = slt_parser()
    args = parser.parse_args(words)
    if not args.command and not args.version:
        parser.print_help()
        parser.exit()
    return args


def slt_parser() -> OptionParser:
    """Build the parser of all `slt` commands.

    Returns:
        [`OptionParser`]: the parser.
    """
    parser = OptionParser(
        "slt",
        description="Inspect, check, convert, share and run tickets. A ticket is a folder, or a name on the Hub.",
    )
    parser.add_argument("--version", action="store_true", help="show the version of hf_slt")
    parser.add_argument("--debug", action="store_true", help="show the Python traceback of an error")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")

    def command(name: str, help: str) -> Any:
        return commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")

    def ticket(one: OptionParser, name: str = "ticket", **options: Any) -> None:
        one.add_argument(
            name,
            metavar=name.upper(),
            help="folder of a ticket, its mask file, or its name on the Hub",
            **options,
        )

    def token(one: OptionParser) -> None:
        one.add_argument(
            "--token", help="access token for the Hub (default: the one that `hf auth login` saved)"
        )

    def remote(one: OptionParser) -> None:
        one.add_argument("--revision", help="branch, tag or commit on the Hub (default: main)")
        token(one)

    def text(one: OptionParser) -> None:
        one.add_argument(
            "model",
            metavar="MODEL",
            help="a ticket, or any causal language model: a folder or a name on the Hub",
        )
        files = "text files, folders or glob patterns (default: the validation part of the embedded corpus)"
        one.add_argument("--files", nargs="+", metavar="FILE", help=files)
        one.add_argument(
            "--text_column",
            default="text",
            help="name of the column that holds the text, in JSON and Parquet files",
        )
        tokenizer(one)

    def tokenizer(one: OptionParser) -> None:
        one.add_argument(
            "--tokenizer", help="folder or Hub name of the tokenizer (default: the folder of the model)"
        )

    def number(one: OptionParser, name: str, help: str, default: Any = None, kind: Any = _positive) -> None:
        one.add_argument(f"--{name}", metavar="N", type=kind, default=default, help=help)

    def choice(one: OptionParser, name: str, help: str, choices: str, default: Any = None) -> None:
        one.add_argument(f"--{name}", choices=choices.split(), default=default, help=help)

    def flag(one: OptionParser, name: str, help: str) -> None:
        one.add_argument(f"--{name}", action="store_true", help=help)

    def device(one: OptionParser, dtypes: str, default: str) -> None:
        one.add_argument("--device", default="cpu", help="device to compute on, such as cpu, cuda or mps")
        choice(
            one,
            "dtype",
            "floating-point type to compute in; auto is the type that was saved",
            dtypes,
            default,
        )

    any_dtype = "auto float32 float64 bfloat16 float16"
    encoding = "packed: whole bits per weight; entropy: a shorter file with the same masks"

    one = command("inspect", "show what is in a ticket: tensors, densities, bytes, digests")
    ticket(one)
    flag(one, "json", "print one JSON object")
    one.add_argument(
        "--figure",
        metavar="FILE",
        help="write a figure of the masks to FILE, with the weights that each row and column keeps",
    )
    remote(one)

    one = command("verify", "check masks, weights and configuration against their digests")
    ticket(one)
    flag(one, "no_weights", "do not draw the weights again; faster, but the weights are not checked")
    remote(one)

    one = command("diff", "compare two tickets: overlap and distance of their masks")
    ticket(one, "one")
    ticket(one, "other")
    flag(one, "json", "print one JSON object")

    one = command(
        "combine", "combine the masks of several tickets that have the same random weights into one ticket"
    )
    ways = ["intersection", "union", "majority"]
    one.add_argument(
        "how", choices=ways, help="keep the weights that all tickets keep, that any keeps, or that most keep"
    )
    ticket(one, "tickets", nargs="+")
    one.add_argument("--output", metavar="DIR", required=True, help="folder of the new ticket")
    choice(one, "encoding", encoding, "packed entropy", "packed")

    one = command(
        "pack", "store the masks of a ticket in another encoding, or in the latest format, without loss"
    )
    one.add_argument("ticket", metavar="DIR", help="folder of the ticket")
    choice(one, "encoding", encoding + " (default: as it is)", "packed entropy")
    one.add_argument("--output", metavar="DIR", help="folder of the new ticket (default: the same folder)")

    one = command("merge", "write a ticket as a stock Transformers checkpoint, which loads without hf_slt")
    ticket(one)
    one.add_argument("output", metavar="OUT", help="folder of the checkpoint")
    flag(one, "overwrite", "write into a folder that is not empty; other files in it stay")
    remote(one)

    one = command("export", "write a ticket as a GGUF file for llama.cpp")
    ticket(one)
    one.add_argument("output", metavar="OUT.gguf", help="the file to write")
    types = (
        "type of the weights: f32, f16, q4_0, q2_0, tq2_0, tq1_0 or q1_0; auto uses, for each matrix, the "
        "smallest type that can hold it"
    )
    one.add_argument("--type", default="auto", metavar="TYPE", help=types)
    tokenizer(one)
    remote(one)

    one = command("page", "write a ticket as one HTML file that runs in a browser, without a network")
    ticket(one)
    one.add_argument("output", metavar="OUT", help="the file to write, such as page.html")
    one.add_argument("--prompt", default="The", help="text that is in the prompt box when the page opens")
    remote(one)

    one = command("generate", "continue a text; without TICKET, with the small ticket that comes with hf_slt")
    ticket(one, nargs="?")
    one.add_argument("--prompt", default="", help="the text to continue (default: start from nothing)")
    number(one, "max_new_tokens", "largest number of tokens to add", 100)
    flag(one, "greedy", "always take the most likely token, instead of sampling")
    number(one, "temperature", "sampling temperature; larger values give more varied text", 1.0, float)
    number(one, "top_k", "sample from this many of the most likely tokens", 40)
    number(one, "seed", "seed of the sampling", 0, int)
    one.add_argument(
        "--mask",
        metavar="TICKET",
        help="use the mask of another ticket, which must have the same random weights",
    )
    tokenizer(one)
    device(one, any_dtype, "auto")
    remote(one)

    one = command("evaluate", "measure the loss, perplexity and bits per byte of a model on text")
    text(one)
    number(one, "block_size", "tokens in a window (default: what the model takes, at most 1024)")
    number(
        one, "stride", "tokens from the start of a window to the start of the next (default: half a window)"
    )
    number(one, "batch_size", "windows that are computed at once", 4)
    device(one, any_dtype, "auto")
    flag(one, "json", "print one JSON object, and no progress bar")

    one = command(
        "curvature", "measure the curvature (Hessian) of the loss for each block of a GPT-2's weights"
    )
    text(one)
    choice(
        one,
        "space",
        "measure the curvature in the weights or in the trained scores",
        "weight score",
        "weight",
    )
    choice(one, "layer_norm", "keep LayerNorm, remove it, or measure both ways", "keep remove both", "both")
    number(one, "probes", "random vectors for each block; more give a better estimate", 20)
    number(one, "seed", "seed of the random vectors", 0, int)
    number(one, "sequences", "blocks of text to measure on", 4)
    number(one, "block_size", "tokens in a block (default: what the model takes, at most 64)")
    device(one, "float32 float64", "float32")
    flag(one, "json", "print one JSON object, with both parts of each Hessian and their traces")
    flag(
        one,
        "eigenvalues",
        "with --json: also the smallest and largest eigenvalues, which takes several times as long",
    )
    one.add_argument("--figure", metavar="FILE", help="write the table as a figure to FILE")

    one = command("push", "upload a ticket to the Hub: masks, configuration, tokenizer and card")
    one.add_argument("ticket", metavar="DIR", help="folder of the ticket")
    one.add_argument(
        "repo", metavar="REPO", help="name on the Hub, such as me/ticket; it is created if it does not exist"
    )
    one.add_argument(
        "--private", action="store_true", default=None, help="make the repository private, if it is new"
    )
    one.add_argument("--revision", help="branch to push to (default: main)")
    one.add_argument("--message", help="commit message")
    flag(one, "create_pr", "open a pull request instead of pushing to the branch")
    token(one)
    choice(one, "encoding", encoding + " (default: as it is)", "packed entropy")
    flag(one, "page", "also upload the page that `slt page` makes, as index.html, and link it from the card")
    return parser
