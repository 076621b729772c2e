"""Compares a ticket with its controls: one table, one figure, one report.

gap closed = (random mask - ticket) / (random mask - dense twin)       of validation losses
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..about import require_packages
from ..errors import SLTError
from ..sharing.card import LABELS, describe_environment, gap_closed, write_card
from ..sharing.mask_algebra import ticket_factors
from ..sharing.plots import plot_comparison, plot_masks, plot_run
from ..text.blocks import load_blocks
from ..tickets.files import replacing
from ..tickets.format import MASK_FILE, read_ticket
from .arguments import Arguments
from .checkpoints import check_free
from .monitoring import read_log
from .plan import plan_run
from .run import check_twin


def train_and_compare(
    arguments: Arguments, train: Callable[..., dict[str, Any] | None], template: Path
) -> dict[str, Any] | None:
    """Train a ticket, then its controls on the same text, and write figures, card and report.

    Args:
        arguments ([`Arguments`]):
            All options.
        train (`Callable`):
            Takes arguments and the keyword `corpus`, and returns a report, or None if it was interrupted.
        template (`Path`):
            Template of the model card.

    Returns:
        `dict` or `None`: the report of the ticket, empty in all processes except the first, or None if a run was
        interrupted.
    """
    own: str = arguments.run.control or "ticket"
    prompt = arguments.run.prompt
    if "dense" in (own, *(arguments.run.compare or ())):
        check_twin(arguments.model)  # an error should come now, not after hours of training
    require_packages("the figures at the end of a run", "matplotlib")
    if arguments.run.encoding == "entropy":
        require_packages("encoding entropy", "constriction")
    if arguments.run.dry_run is not None:
        print(plan_run(arguments, arguments.run.dry_run).table())
        return {}
    for name in (own, *(arguments.run.compare or ())):
        check_free(_folder(arguments, name), arguments.run.resume_from_checkpoint, arguments.run.overwrite)
    state = PartialState(parse_flag_from_env("ACCELERATE_USE_CPU"))  # as `Accelerator` makes it
    _check_launch(state.num_processes)
    if arguments.default_preset and state.is_main_process:
        print(f"no --config was given: the preset {arguments.default_preset} applies", flush=True)
    if state.is_main_process:
        print("reading the text, and tokenising it unless it is in the cache", flush=True)
    with state.main_process_first():  # the first process tokenises, the others read its cache
        corpus = load_blocks(arguments.data)  # one copy for all controls
    if state.is_main_process:
        print(plan_run(arguments, state.num_processes, tokenizer=corpus.tokenizer).summary())
    reports, folders = {}, {own: _folder(arguments, own)}
    for name in (own, *(arguments.run.compare or ())):
        run = arguments.run
        if name != own:
            folders[name] = _folder(arguments, name)
            resume = run.resume_from_checkpoint and "true"  # a path names a checkpoint of the ticket only
            changes = {"control": name, "compare": None, "output_dir": str(folders[name])}
            run = replace(run, resume_from_checkpoint=resume, **changes)
        found = train(replace(arguments, run=run), corpus=corpus)
        if found is None:
            return None
        reports[name] = found
    if not all(reports.values()):
        return {}
    logs = {name: read_log(folder / "log.jsonl") for name, folder in folders.items()}
    for name, folder in folders.items():
        plot_run(logs[name], folder / "curves.png", f"{LABELS.get(name, name)}: {folder.name}")
    report = reports[own]
    print(table(reports))
    if len(reports) > 1:
        report |= {name: one["loss"] for name, one in reports.items()}
        report["gap_closed"] = gap_closed(reports)
        labelled = {LABELS.get(name, name): records for name, records in logs.items()}
        plot_comparison(labelled, folders[own] / "comparison.png", "Validation loss at equal steps")
        if report["gap_closed"] is not None:
            print(f"gap closed between random mask and dense twin: {report['gap_closed']:.1%}")
    if own != "dense":
        add_card_and_figures(folders[own], template, own, reports, logs[own])
    if prompt is not None:
        report["samples"] = {name: sample(one["saved"], prompt) for name, one in reports.items()}
        for name, text in report["samples"].items():
            print(f"\n--- {LABELS.get(name, name)} continues {prompt!r}:\n{text}")
    with replacing(folders[own] / "report.json") as temporary:
        temporary.write_text(json.dumps(report, indent=1) + "\n")
    names = sorted(path.name for path in folders[own].iterdir() if not path.name.startswith("."))
    print(f"\nsaved in {folders[own]}: " + ", ".join(names))
    if own != "dense":
        print("\nNext steps:")
        page = ("page {} page.html",) if arguments.base.architecture == "gpt2" else ()
        for words in ("generate {}", "inspect {}", *page):
            print("  slt " + words.format(report["saved"]))
    return report


def _folder(arguments: Arguments, name: str) -> Path:
    """Return the folder of the ticket of a run, or of one of its controls."""
    own = Path(arguments.run.output_dir)
    return own if name == (arguments.run.control or "ticket") else own / name


def _check_launch(processes: int) -> None:
    """Raise `SLTError` if several processes were launched, but each of them runs alone."""
    launched = int(os.environ.get("WORLD_SIZE") or 1)
    if launched > processes:
        raise SLTError(
            f"{launched} processes were launched, but each of them runs alone, because there is no GPU here; to make "
            "them share the work on the processor, write ACCELERATE_USE_CPU=true before accelerate launch"
        )


def table(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with one row per run: its losses and the size of its file.

    Args:
        reports (`Mapping[str, Mapping[str, Any]]`):
            The report of each run by its name, with `loss`, `bytes` and others.

    Returns:
        `str`: the table as text.
    """
    rows = [f"{'validation':18}{'loss':>8}{'perplexity':>12}{'bits/byte':>11}{'best loss':>11}{'file':>11}"]
    for name, one in sorted(reports.items(), key=lambda item: -item[1]["loss"]):
        size = f"{one['bytes'] / 1e3:,.0f} kB"
        rows.append(
            f"{LABELS.get(name, name):18}{one['loss']:8.3f}{one['perplexity']:12.1f}"
            f"{one['bits_per_byte']:11.3f}{one.get('best_loss', one['loss']):11.3f}{size:>11}"
        )
    return "\n".join(rows)


def sample(folder: str, prompt: str, tokens: int = 60) -> str:
    """Return the text with which a saved model continues a prompt. It is the same at every call.

    Args:
        folder (`str`):
            Folder of a saved model with its tokenizer.
        prompt (`str`):
            How the text begins.
        tokens (`int`, defaults to 60):
            Number of tokens to write.

    Returns:
        `str`: prompt and continuation.
    """
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    room = (
        model.config.max_position_embeddings - tokens if model.config.max_position_embeddings > tokens else 1
    )
    inputs = tokenizer(
        prompt, return_tensors="pt", return_token_type_ids=False, truncation=True, max_length=room
    )
    limit = min(tokens, model.config.max_position_embeddings - inputs["input_ids"].shape[1])
    ids = model.generate(
        **inputs, max_new_tokens=limit, do_sample=True, top_k=40, pad_token_id=tokenizer.eos_token_id
    )
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def add_card_and_figures(
    folder: Path, template: Path, name: str, reports: Mapping[str, Any], records: list[dict]
) -> None:
    """Write figures and card into the folder of the ticket, which is then ready to share.

    Args:
        folder (`Path`):
            Folder of the run, which has the ticket in a subfolder.
        template (`Path`):
            Template of the card.
        name (`str`):
            Name of the ticket on the card.
        reports (`Mapping[str, Any]`):
            The report of each run by its name.
        records (`list[dict]`):
            The lines of the run's log.jsonl.
    """
    ticket = folder / "ticket"
    plot_masks(ticket_factors(read_ticket(ticket / MASK_FILE)), ticket / "masks.png")
    for figure in ("curves.png", "comparison.png"):
        if (folder / figure).exists():
            (ticket / figure).write_bytes((folder / figure).read_bytes())
    write_card(
        ticket,
        template,
        name=folder.name,
        records=records,
        training=reports[name]["arguments"],
        measures=reports[name],
        controls={other: one for other, one in reports.items() if other != name},
        text_sha256=reports[name]["text"],
        environment=describe_environment(),
        command=["accelerate", "launch", *sys.argv],
    )
