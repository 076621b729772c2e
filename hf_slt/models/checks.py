"""Checks a ticket: its files (see `tickets/verify.py`), and whether its tensors are those of its configuration."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME, logging

from ..errors import SLTError, TicketError, require
from ..tickets.files import read_unchanged
from ..tickets.format import (
    CONFIG_FILE,
    REDOWNLOAD_HINT,
    Header,
    Ticket,
    check_weights,
    read_json,
    weights_folder,
)
from ..tickets.verify import check_files
from ..weights.random_weights import PRETRAINED

logger = logging.get_logger(__name__)


def check_tensors(header: Header, config: Any, *, sizes: bool = True) -> None:
    """Raise `ValueError` unless a header's tensors are those of a model of this configuration.

    Args:
        header ([`Header`]):
            The header of a ticket.
        config ([`SupermaskConfigMixin`]):
            The configuration to compare with.
        sizes (`bool`, defaults to `True`):
            Whether shapes are compared.
    """
    many = len(header.tensors)
    layers = config.num_hidden_layers
    require(layers <= many, f"{layers} layers of {many} tensors")  # before any name is made
    saved = header.config.get("architectures")
    saved = saved[0] if isinstance(saved, list) and saved else None
    wanted, heads = config.stored_tensors(saved), config.head_tensors()
    for name in sorted((wanted.keys() ^ header.tensors.keys()) - heads.keys()):
        raise ValueError(
            f"{name} is missing" if name in wanted else f"{name} is not a tensor of such a model"
        )
    for name, entry in header.tensors.items():
        one = (wanted | heads)[name]
        fits = not sizes or entry.shape == one.tensor.shape
        require(fits, f"{name} has shape {entry.shape}, the model wants {one.tensor.shape}")
        found = (entry.kind, entry.law, entry.scale, entry.bits if entry.kind == "trained" else None)
        if one.kind == "trained":
            expected: tuple = ("trained", None, None, one.bits)
        else:
            expected = (one.kind, one.tensor.law, float(one.tensor.scale), None)
        same = repr(found) == repr(expected)
        require(same, f"{name} is {found} (kind, law, scale, bits), the configuration says {expected}")
        path = one.tensor.input_axes if one.tensor.state_bits is not None else None
        require(entry.input_axes == path, f"{name} has paths along {entry.input_axes}, the model {path}")


def verify_ticket(directory: str | os.PathLike, *, weights: bool = True) -> Header:
    """Check everything in a ticket's folder.

    These are the checks of `tickets.verify.verify_files`, and whether the files describe a model of transformers.

    Args:
        directory (`str` or `os.PathLike`):
            The folder.
        weights (`bool`, defaults to `True`):
            Whether to draw the weights, which takes most of the time.

    Returns:
        [`Header`]: the header of the ticket.

    Raises:
        [`TicketError`]: at the first fault.

    Example:

    ```python
    >>> header = verify_ticket("ticket")  # doctest: +SKIP
    >>> header.digest  # names the ticket: compare it with the one that its maker published  # doctest: +SKIP
    ```
    """
    faults, header = check_ticket(directory, weights=weights)
    for fault in faults:
        raise fault
    assert header is not None
    return header


def check_ticket(
    directory: str | os.PathLike, *, weights: bool = True
) -> tuple[list[TicketError], Header | None]:
    """Find everything that is wrong with a ticket's folder: its files, and whether they describe a model.

    Args:
        directory (`str` or `os.PathLike`):
            The folder.
        weights (`bool`, defaults to `True`):
            Whether to draw the weights and compare them too.

    Returns:
        `tuple[list[TicketError], Header | None]`: the faults, and the header as far as it can be read.
    """

    def check() -> tuple[list[TicketError], Header | None]:
        faults, ticket = check_files(directory, weights=weights)
        if ticket is not None:
            faults += list(_model_faults(Path(directory), ticket, bool(faults), weights))
        return faults, None if ticket is None else ticket.header

    return read_unchanged(directory, check)


def _model_faults(directory: Path, ticket: Ticket, known: bool, weights: bool) -> Iterator[TicketError]:
    """Yield the reasons why a ticket describes no model.

    Args:
        directory (`Path`):
            The folder.
        ticket ([`Ticket`]):
            The ticket.
        known (`bool`):
            Whether its files were found to be wrong.
        weights (`bool`):
            Whether to compare the weights of a backbone.
    """
    try:
        config = config_of(dict(ticket.header.config))
        check_tensors(ticket.header, config)
    except ValueError as error:
        yield TicketError(f"{ticket.path}: the metadata describe no ticket ({error})")
    else:
        if weights and config.backbone:
            yield from _backbone_faults(ticket, config)
    path = directory / CONFIG_FILE
    if path.exists():
        try:
            config_of(read_json(path))
        except TicketError as fault:
            if not known:
                yield TicketError(f"{path}: {fault}")
    generation = weights_folder(directory) / GENERATION_CONFIG_NAME
    if generation.exists():
        try:
            read_generation_config(generation)
        except TicketError as fault:
            yield fault


def _backbone_faults(ticket: Ticket, config: Any) -> Iterator[TicketError]:
    """Yield an error if pretrained weights are missing, or are not those that a ticket was made for."""
    saved = ticket.header.config["architectures"][0]
    for name, one in config.stored_tensors(saved).items():
        if one.tensor.law == PRETRAINED and one.kind != "trained":
            try:
                check_weights(ticket.path, name, ticket.header.tensors[name], one.tensor.drawn_digest())
            except TicketError as fault:
                yield fault
            except SLTError as error:
                yield TicketError(f"{ticket.path}: {error}")
                return


def read_generation_config(path: Path) -> GenerationConfig:
    """Read an untrusted generation_config.json.

    Args:
        path (`Path`):
            The file.

    Returns:
        `GenerationConfig`: the settings.

    Raises:
        [`TicketError`]: if it is not a generation configuration.
    """
    try:
        return GenerationConfig.from_dict(read_json(path))
    except Exception as error:  # a malformed file can raise any exception type
        raise TicketError(f"{path}: not a generation configuration ({error}); {REDOWNLOAD_HINT}") from error


def config_of(facts: dict[str, Any]) -> Any:
    """Return the configuration that a header or a config.json describes.

    Args:
        facts (`dict[str, Any]`):
            The JSON object.

    Returns:
        A supermask configuration.

    Raises:
        [`TicketError`]: if it does not describe a supermask model.
    """
    name = facts.get("model_type")
    wrong = TicketError(f"model_type {name!r} is not that of a supermask model")
    if not isinstance(name, str) or not name.startswith("supermask_"):
        raise wrong
    try:
        config_class = type(AutoConfig.for_model(name))
    except ValueError:  # transformers knows no such architecture
        raise wrong from None
    return config_class.from_dict(facts)
