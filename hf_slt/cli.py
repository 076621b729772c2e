"""The `slt` command: inspect, check, convert, share and run tickets. It only calls the rest of the library.

The options are declared in options.py. An error prints one line on stderr and gives exit code 1; `slt --debug
COMMAND ...` also shows the Python traceback.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .errors import SLTError, printable
from .options import parse_slt


def main(arguments: list[str] | None = None) -> int:
    """Run `slt` with these arguments. Default: those of the command line."""
    return run(parse_slt(arguments))


def run(args: argparse.Namespace) -> int:
    """Run one command. Return 0 on success, 1 after an error (one line on stderr), 130 if interrupted."""
    if args.version:
        print(f"hf_slt {__version__}")
        return 0
    commands = (
        inspect, verify, diff, combine, pack, push, merge, export, page, generate, evaluate, curvature,
    )  # fmt: skip
    try:
        return {one.__name__: one for one in commands}[args.command](args) or 0
    except BrokenPipeError:  # the reader closed the pipe, as in `slt inspect ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("slt: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if args.debug:
            raise
        print(f"slt: {printable(_one_line(error))}", file=sys.stderr)
        return 1


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    chain = (error, error.__cause__)  # the Hub's HTTP client raises errors of its own types
    cause = next((one for one in chain if type(one).__module__.startswith("httpx")), None)
    if cause is not None and type(cause).__name__ != "HTTPStatusError":
        what = lines[0] if type(error) is RuntimeError else "No answer from the Hub."  # it names a file
        return f"{what} The connection failed or was cut ({str(cause) or type(cause).__name__}); try again"
    if type(error).__module__.startswith("huggingface_hub"):
        return _explain_refusal(error) or " ".join(lines)
    if isinstance(error, (SLTError, OSError)):
        return lines[0]
    return f"{type(error).__name__}: {lines[0]} (slt --debug shows where)"


def _explain_refusal(error: Any) -> str | None:
    """Explain an error of the Hub, if we know more than its client. The Hub's own words follow in brackets."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = " ".join(str(getattr(error, "server_message", None) or f"status {status}").split())
    if type(error).__name__ == "RevisionNotFoundError":
        return f"no such branch, tag or commit on the Hub ({said})"
    if status == 401 and "credentials" in said:
        return f"the Hub does not accept the token ({said}); see `hf auth login`, HF_TOKEN or --token"
    if status == 401 or type(error).__name__ in ("RepositoryNotFoundError", "GatedRepoError"):
        hint = "check the name, and the token: `hf auth login`, HF_TOKEN or --token"
        name = f"{error.repo_id}: " if getattr(error, "repo_id", None) else ""
        return f"{name}no such name on the Hub, or no permission ({said}); {hint}"
    if status == 403:
        return f"no permission on the Hub ({said}); use a token with write permission"
    return None


# -- commands that need no torch ----------------------------------------------------------------------


def inspect(args: argparse.Namespace) -> None:
    """Print the description of a ticket. No weights are drawn, and masks are read only for a figure."""
    from .sharing.card import entropy_bits, kept_of, kind_of_ticket, measure_size
    from .sharing.hub import fetch_ticket
    from .tickets.format import CONFIG_FILE, VERSION_KEY, read_header, read_json
    from .tickets.verify import mask_path

    folder = fetch_ticket(args.ticket, revision=args.revision, token=args.token)
    path = mask_path(folder)
    header = read_header(path)
    size = measure_size(folder, header)
    config = folder / CONFIG_FILE
    written_by = read_json(config).get(VERSION_KEY) if config.exists() else None  # 0.1 did not store it
    if args.figure:
        from .sharing.mask_algebra import ticket_factors
        from .sharing.plots import plot_masks
        from .tickets.format import read_ticket

        title = f"{folder.resolve().name}, seed {header.options['seed']}"
        plot_masks(ticket_factors(read_ticket(path)), args.figure, title=title)
    if args.json:
        shown = "shape law scale size counts weight_sha256 data_sha256"
        tensors = {
            name: {**_some(entry, shown), "entropy_bits": entropy_bits(entry)}
            for name, entry in header.tensors.items()
        }
        facts = _some(header, "encoding format_version digest mask_digest config")
        facts = {"file": str(path), "kind": kind_of_ticket(header), VERSION_KEY: written_by, **facts}
        print(json.dumps({**facts, "bytes": size, "tensors": tensors}, indent=1))
        return
    writer = f", written by hf_slt {printable(str(written_by)[:40])}" if written_by else ""
    print(f"{path}: {header.encoding}, format {header.format_version}{writer}")
    print(f"digest {header.digest}\nmask digest {header.mask_digest}")
    options = header.options
    settings = [f"{name} {value}" for name, value in options["rule_options"].items()]
    if options.get("backbone"):
        revision = options.get("backbone_revision")
        print(f"backbone {options['backbone']}" + (f", revision {revision}" if revision else ""))
    print(f"seed {options['seed']}, generator {options['weight_generator']}", end=", ")
    print(", ".join([f"rule {options['rule']}", *settings]))
    print(f"{kind_of_ticket(header)}\n")
    vectors = [entry for entry in header.tensors.values() if entry.kind == "trained" and entry.shape[0] == 1]
    rows = [
        (
            name,
            " x ".join(map(str, entry.shape)),
            entry.law or "trained",
            f"{entry.scale:.4g}" if entry.scale is not None else "",
            f"{kept_of(header, entry) / sum(entry.counts or (entry.size,)):.4f}",
            f"{entropy_bits(entry) / entry.size:.4f}" if entry.kind == "masked" else "",
        )
        for name, entry in sorted(header.tensors.items(), key=_in_order_of_blocks)
        if entry not in vectors
    ]
    _print_table("tensor shape law scale density entropy".split(), rows)
    if vectors:
        numbers = sum(entry.size for entry in vectors)
        print(f"and {len(vectors)} trained vectors (scales, gains, biases) of {numbers:,} numbers")
    print("\nentropy: fewest bits per weight, if only the number of kept weights is known\n")
    kinds = size["weights_by_kind"]
    ledger = [
        ("masks", f"{kinds['masked']:,}", f"{size['mask_bytes']:,}"),
        ("trained values", f"{kinds['trained']:,}", f"{size['trained_bytes']:,}"),
        ("frozen for good, not stored", f"{kinds['frozen']:,}", "0"),
        ("description", "", f"{size['description_bytes']:,}"),
        (size["file_name"], f"{size['weights']:,}", f"{size['file']:,}"),
    ]
    _print_table(("part", "weights", "bytes"), [row for row in ledger if row[1:] != ("0", "0")])
    print(
        f"\n{size['weights']:,} weights, {size['bits_per_weight']:.4f} bits each; float32 takes "
        f"{size['times_smaller']:.1f} times as much\nentropy of the masks: {size['entropy_bytes']:,} bytes"
    )


def verify(args: argparse.Namespace) -> int:
    """Print one line for each fault, or one line that says that there is none."""
    from .models.checks import check_ticket
    from .sharing.hub import fetch_ticket

    folder = fetch_ticket(args.ticket, revision=args.revision, token=args.token)
    faults, header = check_ticket(folder, weights=not args.no_weights)
    for fault in faults:
        print(f"slt: {fault}", file=sys.stderr)
    if header is not None and not faults:
        what = "masks and configuration" if args.no_weights else "masks, weights and configuration"
        print(f"{args.ticket}: {what} as they should be, digest {header.digest}")
    return int(bool(faults))


def diff(args: argparse.Namespace) -> None:
    """Print how two masks of the same backbone differ. If the backbones differ, print how."""
    from .sharing.hub import fetch_ticket
    from .sharing.mask_algebra import compare_tickets

    found = compare_tickets(fetch_ticket(args.one), fetch_ticket(args.other))
    if args.json:
        facts = {name: _some(one, "size kept both hamming overlap chance") for name, one in found.items()}
        print(json.dumps(facts, indent=1))
        return
    rows = [
        [name]
        + [f"{count:,}" for count in (one.size, *one.kept, one.hamming)]
        + [f"{share:.4f}" for share in (one.hamming / one.size, one.overlap, one.chance)]
        for name, one in sorted(found.items(), key=lambda item: (item[0] == "all", _in_order_of_blocks(item)))
    ]
    _print_table("tensor weights one other differ share overlap chance".split(), rows)
    print("\noverlap: kept by both / kept by either; chance: overlap of random masks that keep as many")


def combine(args: argparse.Namespace) -> None:
    """Write a ticket that keeps the weights that all, any or most of several tickets keep."""
    from .sharing.card import kept_of
    from .sharing.hub import fetch_ticket
    from .sharing.mask_algebra import combine_tickets

    folders = [fetch_ticket(one) for one in args.tickets]
    header = combine_tickets(folders, args.how, args.output, encoding=args.encoding)
    masked = header.masked().values()
    density = sum(kept_of(header, entry) for entry in masked) / sum(
        sum(entry.counts or ()) for entry in masked
    )
    print(f"{args.output}: {args.how} of {len(folders)} masks, density {density:.4f}")


def pack(args: argparse.Namespace) -> None:
    """Store the masks of a folder in another encoding, and update the number of bytes in its card."""
    from .sharing.card import resize_card
    from .tickets.format import read_header
    from .tickets.verify import mask_path
    from .tickets.writing import rewrite_ticket

    before = mask_path(args.ticket)
    size = before.stat().st_size if before.exists() else 0
    encoding = args.encoding or read_header(before).encoding
    output = Path(args.output or args.ticket)
    resize_card(output, rewrite_ticket(args.ticket, output, encoding=encoding))
    print(f"{mask_path(output)}: {encoding}, {mask_path(output).stat().st_size:,} bytes (before: {size:,})")


def page(args: argparse.Namespace) -> None:
    """Write a ticket as one HTML file, and print where it is."""
    from .runtimes.page import write_page
    from .sharing.hub import fetch_ticket
    from .tickets.verify import mask_path

    folder = fetch_ticket(args.ticket, revision=args.revision, token=args.token)
    name = folder.resolve().name if Path(args.ticket).exists() else args.ticket  # not a commit hash
    path = write_page(folder, args.output, name=name, prompt=args.prompt)
    size, ticket = path.stat().st_size, mask_path(folder).stat().st_size
    print(f"{path}: {size:,} bytes, of which the ticket's {ticket:,} take {-(-ticket // 3) * 4:,}; open it")


def push(args: argparse.Namespace) -> None:
    """Upload a folder, and print the address."""
    from .sharing.hub import push_ticket

    options = _some(args, "encoding private revision create_pr token")
    if args.page:
        from .runtimes.page import make_page

        options["page"] = make_page(args.ticket, name=args.repo)
    print(push_ticket(args.ticket, args.repo, commit_message=args.message, **options))


def _some(source: Any, names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names.split()}


def _in_order_of_blocks(item: tuple[str, Any]) -> list[tuple[int, str]]:
    return [(int(word), "") if word.isdigit() else (0, word) for word in item[0].split(".")]


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *rest]).rstrip())


# -- commands that run the model -----------------------------------------------------------------------


def merge(args: argparse.Namespace) -> None:
    """Write the masked weights as a stock checkpoint, with the tokenizer if there is one."""
    from .sharing.hub import TOKENIZER_FILES, fetch_ticket
    from .tickets.files import check_output_folder, copy_own_file, staged

    check_output_folder(args.output)
    if Path(args.output).is_dir() and _is_supermask(Path(args.output)):
        raise SLTError(f"{args.output}: holds a supermask model, which is kept; give another folder")
    if Path(args.output).is_dir() and any(Path(args.output).iterdir()) and not args.overwrite:
        raise SLTError(f"{args.output}: the folder exists and is not empty; give another, or add --overwrite")
    folder = fetch_ticket(args.ticket, revision=args.revision, token=args.token)
    if not _is_supermask(folder):
        raise SLTError(f"{args.ticket}: not a supermask model; there is no mask to merge")
    stock = _load_model(folder).merge_and_unload()
    with staged(args.output) as stage:
        stock.save_pretrained(stage)
        for name in TOKENIZER_FILES:
            copy_own_file(folder / name, stage)
    print(f"{args.output}: {type(stock).__name__}, {stock.num_parameters():,} parameters")


def export(args: argparse.Namespace) -> None:
    """Write a ticket as a GGUF file, and print which type its weights got and what was rounded."""
    from transformers.utils import logging

    from .runtimes.llama_cpp import export_gguf
    from .sharing.hub import fetch_ticket

    folder = fetch_ticket(args.ticket, revision=args.revision, token=args.token)
    if not _is_supermask(folder):
        raise SLTError(f"{args.ticket}: not a supermask model; use llama.cpp's own converter for it")
    logging.disable_progress_bar()
    print(export_gguf(folder, args.output, args.type, args.tokenizer))


def generate(args: argparse.Namespace) -> None:
    """Generate text, and print each token as soon as it is sampled."""
    from transformers import AutoTokenizer, TextStreamer, set_seed

    from .sharing.card import model_cards
    from .sharing.hub import TOKENIZER_FILES, fetch_ticket

    class PlainStreamer(TextStreamer):
        """Prints each token as soon as it is sampled. Control characters are escaped, to protect the terminal."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            super().on_finalized_text(printable(text), stream_end)

    if not args.greedy and not args.temperature > 0:
        raise SLTError(
            f"--temperature {args.temperature:g} is not positive; --greedy always takes the most likely token"
        )
    if (
        args.ticket
        and not Path(args.ticket).exists()
        and not re.fullmatch(r"[\w.~/-]*/[\w./-]*", args.ticket)
    ):
        raise SLTError(
            f"{args.ticket}: no such folder, and not a name on the Hub (such as me/ticket); to continue a text, "
            f"give it as --prompt {args.ticket!r}"
        )
    _check_device(args.device)
    if args.ticket is None:
        args.ticket, args.prompt = model_cards() / "prose", args.prompt or "The city was founded in"
    folder = fetch_ticket(args.ticket, revision=args.revision, token=args.token)
    if args.mask and not _is_supermask(folder):
        raise SLTError(f"{args.ticket}: not a supermask model; --mask works only with one")
    options = {"mask": fetch_ticket(args.mask)} if args.mask else {}
    model = _load_model(folder, dtype=args.dtype, **options).to(args.device)
    if not args.tokenizer and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        hint = "save one there (tokenizer.save_pretrained), or give --tokenizer"
        raise SLTError(f"{args.ticket}: there is no tokenizer in the model's folder; {hint}")
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or folder, trust_remote_code=False)
    begin = args.prompt or tokenizer.bos_token or tokenizer.eos_token
    if not begin:
        raise SLTError(f"{args.ticket}: its tokenizer has no start token to begin with; give --prompt")
    ids = tokenizer(begin, return_tensors="pt", verbose=False).input_ids
    if not ids.numel():
        raise SLTError(f"the prompt {args.prompt!r} has no tokens; give another")
    positions = model.config.max_position_embeddings
    room = positions - ids.shape[1]
    if room < 1:
        most = f"the model takes {positions - 1} at most"
        raise SLTError(f"the prompt has {ids.shape[1]} tokens, {most}; shorten it")
    if room < args.max_new_tokens:
        print(f"slt: at most {room} new tokens: the model has {positions} positions", file=sys.stderr)
    set_seed(args.seed)
    drawing = {} if args.greedy else {"temperature": args.temperature, "top_k": args.top_k}
    model.generate(
        ids.to(args.device),
        attention_mask=ids.new_ones(ids.shape).to(args.device),
        max_new_tokens=min(args.max_new_tokens, room),
        do_sample=not args.greedy,
        pad_token_id=tokenizer.eos_token_id,
        streamer=PlainStreamer(tokenizer, skip_special_tokens=True),
        **drawing,
    )


def evaluate(args: argparse.Namespace) -> None:
    """Print loss, perplexity and bits per byte of a model on text."""
    from transformers.utils import logging

    from .sharing.hub import refuse_missing
    from .text.corpus import wrap_errors
    from .text.evaluation import evaluate_saved

    refuse_missing(args.model)
    _check_device(args.device)
    with wrap_errors("read text", "install datasets anew"):
        from datasets import disable_progress_bars
    disable_progress_bars()  # of reading and loading; ours tells how long it takes
    logging.disable_progress_bar()
    options = _some(args, "text_column tokenizer device dtype block_size stride batch_size")
    measures = evaluate_saved(args.model, args.files, **options, progress=not args.json)
    shown = "  ".join(f"{name} {value:.6g}" for name, value in measures.items())
    print(json.dumps(measures) if args.json else shown)


def curvature(args: argparse.Namespace) -> None:
    """Print a table of Hessian norms, by layer and block, and the ratio of value to query."""
    import torch
    from datasets import disable_progress_bars
    from transformers.utils import logging

    from .papers.curvature_report import format_report, measure_saved, plot_report, report_facts
    from .sharing.hub import refuse_missing

    refuse_missing(args.model)
    _check_device(args.device)
    disable_progress_bars()  # of reading and loading; ours tells how long it takes
    logging.disable_progress_bar()
    report = measure_saved(
        args.model,
        args.files,
        **_some(args, "text_column tokenizer sequences block_size layer_norm device space probes seed"),
        dtype=getattr(torch, args.dtype),
        parts=args.json,
        eigenvalues=args.json and args.eigenvalues,
        progress=not args.json,
    )
    if args.figure:
        plot_report(report, args.figure, title=f"{args.model}: curvature by layer and block")
    facts = {"model": args.model, **report_facts(report)}
    print(json.dumps(facts, indent=1) if args.json else format_report(report))


def _is_supermask(folder: Path) -> bool:
    from .tickets.format import CONFIG_FILE, read_json

    path = folder / CONFIG_FILE
    return path.exists() and str(read_json(path).get("model_type")).startswith("supermask_")


def _check_device(name: str) -> None:
    import torch

    try:
        torch.empty(0, device=name)
    except (AssertionError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise SLTError(f"--device {name} cannot be used here ({why}); try cpu") from None


def _load_model(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from .tickets.format import CONFIG_FILE, check_loading_keys, read_json

    logging.disable_progress_bar()
    if _is_supermask(folder):
        check_loading_keys(folder / CONFIG_FILE, read_json(folder / CONFIG_FILE))
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **options)


if __name__ == "__main__":
    sys.exit(main())
