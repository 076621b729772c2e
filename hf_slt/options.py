"""What every command line here shares: one spelling of options, and the nearest to a misspelt one.

--top_k 3, --top_k=3 and --top-k 3 are one option, shown with an underscore. --overwrite and --overwrite true
are one value. Of --stepz 3 one learns: unknown option --stepz; did you mean --max_steps?

Last come the words of `slt`. Nothing is imported here but Python's own: slt_command.py runs this file alone,
so that help and a wrong word are answered before torch is there.
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


def _number_or_text(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


# -- the words of slt --------------------------------------------------------------------------------


def parse_slt(words: list[str] | None = None) -> argparse.Namespace:
    """The words of an `slt` command; help, and a wrong word, end the program here."""
    parser = slt_parser()
    args = parser.parse_args(words)
    if not args.command and not args.version:
        parser.print_help()
        parser.exit()
    return args


def slt_parser() -> OptionParser:
    """All that `slt` understands."""
    parser = OptionParser(
        "slt",
        description="Look at, check, convert, share and run tickets. A TICKET is a folder or a Hub name.",
    )
    parser.add_argument("--version", action="store_true", help="show the version of hf_slt")
    parser.add_argument("--debug", action="store_true", help="show the traceback of what goes wrong")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")

    def command(name: str, help: str) -> Any:
        return commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")

    def ticket(one: OptionParser, name: str = "ticket", **options: Any) -> None:
        one.add_argument(name, metavar=name.upper(), help="folder, mask file or Hub name", **options)

    def token(one: OptionParser) -> None:
        one.add_argument("--token", help="token of the Hub; by default that of `hf auth login`")

    def remote(one: OptionParser) -> None:
        one.add_argument("--revision", help="branch, tag or commit on the Hub; main by default")
        token(one)

    def text(one: OptionParser) -> None:
        one.add_argument("model", metavar="MODEL", help="ticket, local folder or Hub name of a causal LM")
        files = "files, folders or glob patterns; by default the validation part of the embedded corpus"
        one.add_argument("--files", nargs="+", metavar="FILE", help=files)
        one.add_argument("--text_column", default="text", help="column that holds the text")
        tokenizer(one)

    def tokenizer(one: OptionParser) -> None:
        one.add_argument("--tokenizer", help="tokenizer, if it does not lie beside the model")

    def number(one: OptionParser, name: str, help: str, default: Any = None, kind: type = int) -> None:
        one.add_argument(f"--{name}", metavar="N", type=kind, default=default, help=help)

    def choice(one: OptionParser, name: str, help: str, choices: str, default: Any = None) -> None:
        one.add_argument(f"--{name}", choices=choices.split(), default=default, help=help)

    def flag(one: OptionParser, name: str, help: str) -> None:
        one.add_argument(f"--{name}", action="store_true", help=help)

    def device(one: OptionParser, dtypes: str, default: str) -> None:
        one.add_argument("--device", default="cpu", help="where to compute: cpu, cuda, mps")
        choice(one, "dtype", "numbers to compute with; auto: as saved", dtypes, default)

    any_dtype = "auto float32 float64 bfloat16 float16"
    encoding = "one bit a weight, or the entropy of the masks"

    one = command("inspect", "show what is in a ticket: tensors, densities, bytes, digests")
    ticket(one)
    flag(one, "json", "print one JSON object")
    one.add_argument("--figure", metavar="FILE", help="draw masks and what rows and columns keep to FILE")
    remote(one)

    one = command("verify", "check masks, weights and configuration against their digests")
    ticket(one)
    flag(one, "no_weights", "do not draw the weights again: quick, but less")
    remote(one)

    one = command("diff", "compare two tickets: overlap and distance of their masks")
    ticket(one, "one")
    ticket(one, "other")
    flag(one, "json", "print one JSON object")

    one = command("combine", "make one ticket of the masks of several on the same random weights")
    ways = ["intersection", "union", "majority"]
    one.add_argument("how", choices=ways, help="keep what all of them keep, any, or most")
    ticket(one, "tickets", nargs="+")
    one.add_argument("--output", metavar="DIR", required=True, help="folder of the new ticket")
    choice(one, "encoding", encoding, "packed entropy", "packed")

    one = command("pack", "store the masks of a ticket in another encoding, without loss")
    one.add_argument("ticket", metavar="DIR", help="folder of the ticket")
    choice(one, "encoding", encoding + "; as it is by default", "packed entropy")
    one.add_argument("--output", metavar="DIR", help="folder of the new ticket; the same one by default")

    one = command("merge", "write a ticket as a stock GPT-2 checkpoint, which needs no code of ours")
    ticket(one)
    one.add_argument("output", metavar="OUT", help="folder of the checkpoint")
    remote(one)

    one = command("export", "write a ticket as a GGUF file, which llama.cpp runs")
    ticket(one)
    one.add_argument("output", metavar="OUT.gguf", help="the file")
    types = "of the weights: f32, f16, tq2_0, tq1_0, q2_0; auto: the smallest that holds them"
    one.add_argument("--type", default="auto", metavar="TYPE", help=types)
    tokenizer(one)
    remote(one)

    one = command("page", "write a ticket as one HTML file that runs in a browser, without a network")
    ticket(one)
    one.add_argument("output", metavar="OUT", help="the file, such as page.html")
    one.add_argument("--prompt", default="The", help="what stands in its prompt box at first")
    remote(one)

    one = command(
        "generate", "go on with a text, word by word; by default with the ticket that comes with hf_slt"
    )
    ticket(one, nargs="?")
    one.add_argument("--prompt", default="", help="the text to go on with; none by default")
    number(one, "max_new_tokens", "tokens to add, at most", 100)
    flag(one, "greedy", "always take the likeliest token, draw none")
    number(one, "temperature", "above 1 draws more wildly", 1.0, float)
    number(one, "top_k", "draw from this many likeliest tokens", 40)
    number(one, "seed", "seed of the draw", 0)
    one.add_argument("--mask", metavar="TICKET", help="use the mask of another ticket on the same weights")
    tokenizer(one)
    device(one, any_dtype, "auto")
    remote(one)

    one = command("evaluate", "measure loss, perplexity and bits per byte of a model on text")
    text(one)
    number(one, "block_size", "inputs in a window; at most 1024 by default")
    number(one, "stride", "tokens a window advances; half of it by default")
    number(one, "batch_size", "windows at a time", 4)
    device(one, any_dtype, "auto")
    flag(one, "json", "print one JSON object, and no progress bar")

    one = command("curvature", "measure how the loss bends along each block of a GPT-2's weights")
    text(one)
    choice(one, "space", "over weights, or over the scores that are trained", "weight score", "weight")
    choice(one, "layer_norm", "with LayerNorm, without it, or side by side", "keep remove both", "both")
    number(one, "probes", "random vectors for each block", 20)
    number(one, "seed", "seed of these vectors", 0)
    number(one, "sequences", "blocks of text to take", 4)
    number(one, "block_size", "tokens in a block; at most 64 by default")
    device(one, "float32 float64", "float32")
    flag(one, "json", "print one JSON object, with both parts of each Hessian and their traces")
    flag(one, "eigenvalues", "with --json: extreme eigenvalues too, in several times the time")
    one.add_argument("--figure", metavar="FILE", help="draw the table to FILE")

    one = command("push", "upload a ticket to the Hub: masks, configuration, code, tokenizer and card")
    one.add_argument("ticket", metavar="DIR", help="folder of the ticket")
    one.add_argument("repo", metavar="REPO", help="name on the Hub, such as me/ticket; made if not there")
    one.add_argument(
        "--private", action="store_true", default=None, help="if the repository is new, make it private"
    )
    one.add_argument("--revision", help="branch to push to; main by default")
    one.add_argument("--message", help="commit message")
    flag(one, "create_pr", "open a pull request instead")
    token(one)
    choice(one, "encoding", encoding + "; as it is by default", "packed entropy")
    flag(one, "page", "put the page of `slt page` beside it, as index.html, and link it from the card")
    return parser
