"""Is a ticket's folder what it says? Every fault of it, by name.

A digest proves that nothing was altered since the ticket was made, and that the weights drawn here are those
it was trained on. It does not prove who made it; and code and tokenizer in the folder have no digest.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils import GENERATION_CONFIG_NAME

from ..model.configuration_supermask_gpt2 import SupermaskGPT2Config
from ..model.pretrained import read_generation_config
from ..model.random_weights import GENERATOR, digest, draw
from ..model.ticket import (
    CONFIG_FILE,
    DIGITS,
    INDEX_FILE,
    MASK_FILE,
    MODEL_FILE,
    Header,
    Ticket,
    TicketError,
    check_weights,
    config_faults,
    read_json,
    read_table,
    ticket_and_faults,
    weights_folder,
)


def mask_path(directory: str | os.PathLike) -> Path:
    """The mask file of a ticket's folder, under either of its names; there may be none."""
    return _mask_path_in(weights_folder(Path(directory)))


def _mask_path_in(folder: Path) -> Path:
    masks, model = folder / MASK_FILE, folder / MODEL_FILE
    return model if model.exists() and not masks.exists() else masks


def verify_ticket(directory: str | os.PathLike, *, weights: bool = True) -> Header:
    """Check everything in a ticket's folder and return its header; raise TicketError at the first fault.

    Files present and readable, versions known, configuration, every mask, and (with `weights`) every
    frozen weight drawn again and compared with its digest.
    """
    return verified_ticket(directory, weights=weights).header


def verified_ticket(directory: str | os.PathLike, *, weights: bool = True) -> Ticket:
    """As `verify_ticket`, but all of the ticket, which is then read once."""
    read: list[Ticket] = []
    for fault in find_faults(directory, weights=weights, read=read):
        raise fault
    return read[0]


def find_faults(
    directory: str | os.PathLike, *, weights: bool = True, read: list[Ticket] | None = None
) -> Iterator[TicketError]:
    """All that is wrong with a ticket's folder, as `verify_ticket` would raise it; `read` gets its ticket."""
    directory = Path(directory)
    if not directory.is_dir():
        yield TicketError(f"{directory}: no such folder")
        return
    config, path = None, _mask_path_in(directory)
    try:
        path = mask_path(directory)
        config = read_json(directory / CONFIG_FILE)
    except TicketError as fault:
        yield fault
    if path.name == MASK_FILE and path.exists() and path.with_name(MODEL_FILE).exists():
        yield TicketError(f"{path.with_name(MODEL_FILE)}: lies beside {MASK_FILE}; remove one of them")
    try:
        ticket, faults = ticket_and_faults(path)
    except TicketError as fault:
        yield fault
        return
    if (generation := directory / GENERATION_CONFIG_NAME).exists():
        try:
            read_generation_config(generation)
        except TicketError as fault:
            yield fault
    if read is not None:
        read.append(ticket)
    if path.name == MASK_FILE:
        try:
            listed = read_json(path.with_name(INDEX_FILE)).get("weight_map")
            if listed != dict.fromkeys(read_table(path)[1], MASK_FILE):
                fault = f"does not list the tensors of {MASK_FILE}; save the ticket again"
                yield TicketError(f"{path.with_name(INDEX_FILE)}: {fault}")
        except TicketError as fault:
            yield fault
    yield from faults
    if config is not None:
        yield from config_faults(path, ticket.header, config)
        try:
            SupermaskGPT2Config.from_dict(config)
        except TicketError as fault:
            yield TicketError(f"{directory / CONFIG_FILE}: {fault}")
    for name, entry in ticket.header.tensors.items() if weights else ():
        if entry.law is not None and entry.scale is not None:
            drawn = draw(ticket.header.config["seed"], name, entry.shape, entry.law, entry.scale)
            try:
                check_weights(path, name, entry, digest(drawn))
            except TicketError as fault:
                yield fault


def from_version_1(facts: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a file of version 1 as those of version 2.

    Without what the configuration says too, and with the counts of all codes.
    """
    config = facts["config"]
    same = {"seed": config["seed"], "rule": config["rule"], "density": config["density"]}
    same |= {"rule": "edge_popup", "generator": GENERATOR, "bit_order": "little"}
    for key, value in same.items():
        if repr(facts[key]) != repr(value):
            raise ValueError(f"{key} {facts[key]!r}, not {value!r}")
    tensors = {}
    for name, one in facts["tensors"].items():
        kept = one["kept"]
        counts = None if kept is None else [math.prod(one["shape"]) - kept, kept]
        short = {key: one[key] and one[key][:DIGITS] for key in ("data_sha256", "weight_sha256")}
        tensors[name] = (
            {key: value for key, value in one.items() if key != "kept"} | short | {"counts": counts}
        )
    return {key: one for key, one in facts.items() if key not in same} | {
        "tensors": tensors,
        "format_version": 2,
    }
