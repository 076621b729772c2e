"""Checks the folder of a ticket, and names every fault. Does not need torch.

A digest proves that nothing was altered since the ticket was made, and that the weights drawn here are those
it was trained on. It does not prove who made it; and the tokenizer in the folder has no digest.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import TicketError
from ..weights.random_weights import PRETRAINED
from ..weights.threads import map_in_threads
from .files import read_unchanged
from .format import (
    CONFIG_FILE,
    INDEX_FILE,
    MASK_FILE,
    MODEL_FILE,
    Ticket,
    check_weights,
    config_faults,
    read_json,
    read_table,
    ticket_and_faults,
    weights_folder,
)

GENERATION_FILE = "generation_config.json"


def mask_path(directory: str | os.PathLike) -> Path:
    """Return the mask file of a ticket's folder, under either of its names. It may not exist.

    Args:
        directory (`str` or `os.PathLike`):
            Folder of a ticket.

    Returns:
        `Path`: path of the file.
    """
    return _mask_path_in(weights_folder(Path(directory)))


def _mask_path_in(folder: Path) -> Path:
    masks, model = folder / MASK_FILE, folder / MODEL_FILE
    return model if model.exists() and not masks.exists() else masks


def verify_files(directory: str | os.PathLike, *, weights: bool = True) -> Ticket:
    """Check the files of a ticket's folder, and read them.

    All files must be present and readable, of known versions, and agree with the configuration. Every mask is compared
    with its digest, and so is every frozen weight, which is drawn again. `hf_slt.verify_ticket` also checks that the
    files describe a model, which needs torch.

    Args:
        directory (`str` or `os.PathLike`):
            The folder.
        weights (`bool`, defaults to `True`):
            Whether to draw the weights, which takes most of the time.

    Returns:
        [`Ticket`]: the ticket, so that the caller need not read it again.

    Raises:
        [`TicketError`]: at the first fault.
    """
    faults, ticket = check_files(directory, weights=weights)
    for fault in faults:
        raise fault
    assert ticket is not None
    return ticket


def check_files(
    directory: str | os.PathLike, *, weights: bool = True
) -> tuple[list[TicketError], Ticket | None]:
    """Find everything that is wrong with the files of a ticket's folder. `models/checks.py` checks the model too.

    Args:
        directory (`str` or `os.PathLike`):
            The folder.
        weights (`bool`, defaults to `True`):
            Whether to draw the weights and compare them too.

    Returns:
        `tuple[list[TicketError], Ticket | None]`: the faults, in the order in which `verify_files` would raise
        them, and the ticket as far as it can be read.
    """

    def check() -> tuple[list[TicketError], Ticket | None]:
        read: list[Ticket] = []
        faults = list(_find_faults(directory, weights, read))
        return faults, read[0] if read else None

    return read_unchanged(directory, check)


def _find_faults(directory: str | os.PathLike, weights: bool, read: list[Ticket]) -> Iterator[TicketError]:
    """Yield every fault, and append the ticket to `read`."""
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
        yield TicketError(
            f"{path.with_name(MODEL_FILE)}: the folder also has {MASK_FILE}; remove one of them"
        )
    try:
        ticket, faults = ticket_and_faults(path)
    except TicketError as fault:
        yield fault
        return
    if (generation := directory / GENERATION_FILE).exists():
        try:
            read_json(generation)
        except TicketError as fault:
            yield fault
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
    # Pretrained weights are checked in models/checks.py: to load them needs torch.
    tensors = ticket.header.tensors.items() if weights else ()
    drawn = [name for name, one in tensors if one.law not in (None, PRETRAINED)]
    digests = map_in_threads(lambda name: ticket.header.spec(name).drawn_digest(), drawn)
    for name, found in zip(drawn, digests, strict=True):
        try:
            check_weights(path, name, ticket.header.tensors[name], found)
        except TicketError as fault:
            yield fault
