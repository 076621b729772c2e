"""A ticket beside its controls: one table, one figure, one report.

gap closed = (random mask - ticket) / (random mask - dense twin)       of validation losses
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..model.ticket import MASK_FILE, read_ticket
from ..sharing.card import LABELS, describe_environment, gap_closed, write_card
from ..sharing.files import replacing
from ..sharing.mask_algebra import ticket_factors
from ..sharing.plots import plot_comparison, plot_masks, plot_run
from .arguments import Arguments
from .monitoring import read_log
from .run import check_twin


def train_and_compare(
    arguments: Arguments, train: Callable[[Arguments], dict[str, Any] | None], template: Path
) -> dict[str, Any] | None:
    """Train, then the controls asked for; write figures, card and report, and return the report.

    `train` runs arguments to their end and returns a report, or None if it was interrupted; so does this.
    The report is empty in all processes but the first.
    """
    own: str = arguments.run.control or "ticket"
    prompt = arguments.run.prompt
    if "dense" in (own, *(arguments.run.compare or ())):
        check_twin(arguments.model)  # now, not after hours of training
    reports, folders = {}, {own: Path(arguments.run.output_dir)}
    for name in (own, *(arguments.run.compare or ())):
        run = arguments.run
        if name != own:
            folders[name] = folders[own] / name
            resume = run.resume_from_checkpoint and "true"  # a path is that of the ticket's checkpoint
            changes = {"control": name, "compare": None, "output_dir": str(folders[name])}
            run = replace(run, resume_from_checkpoint=resume, **changes)
        found = train(replace(arguments, run=run))
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
        _dress(folders[own], template, own, reports, logs[own])
    if prompt is not None:
        report["samples"] = {name: sample(one["saved"], prompt) for name, one in reports.items()}
        for name, text in report["samples"].items():
            print(f"\n--- {LABELS.get(name, name)} goes on after {prompt!r}:\n{text}")
    with replacing(folders[own] / "report.json") as temporary:
        temporary.write_text(json.dumps(report, indent=1) + "\n")
    names = sorted(path.name for path in folders[own].iterdir() if not path.name.startswith("."))
    print(f"\nsaved in {folders[own]}: " + ", ".join(names))
    if own != "dense":
        print("\nTo go on:")
        for words in ("generate {}", "inspect {}", "page {} page.html"):
            print("  slt " + words.format(report["saved"]))
    return report


def table(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Runs by rows: what was learned, and what it weighs."""
    rows = [f"{'validation':18}{'loss':>8}{'perplexity':>12}{'bits/byte':>11}{'best loss':>11}{'file':>11}"]
    for name, one in sorted(reports.items(), key=lambda item: -item[1]["loss"]):
        size = f"{one['bytes'] / 1e3:,.0f} kB"
        rows.append(
            f"{LABELS.get(name, name):18}{one['loss']:8.3f}{one['perplexity']:12.1f}"
            f"{one['bits_per_byte']:11.3f}{one.get('best_loss', one['loss']):11.3f}{size:>11}"
        )
    return "\n".join(rows)


def sample(folder: str, prompt: str, tokens: int = 60) -> str:
    """Text that a saved model goes on with, the same at every call."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    room = model.config.n_positions - tokens if model.config.n_positions > tokens else 1
    inputs = tokenizer(
        prompt, return_tensors="pt", return_token_type_ids=False, truncation=True, max_length=room
    )
    limit = min(tokens, model.config.n_positions - inputs["input_ids"].shape[1])
    ids = model.generate(
        **inputs, max_new_tokens=limit, do_sample=True, top_k=40, pad_token_id=tokenizer.eos_token_id
    )
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def _dress(folder: Path, template: Path, name: str, reports: Mapping[str, Any], records: list[dict]) -> None:
    """Put figures and card beside the masks: the folder is then ready to share."""
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
