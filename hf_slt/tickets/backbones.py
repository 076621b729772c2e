"""Whether a mask fits the frozen weights of another ticket.

Masks of one backbone have the same shapes, seed and law. Their rules, and what is done with the output, may
differ.
"""

import os
from collections.abc import Mapping
from typing import Any

from ..errors import TicketError
from ..weights.random_weights import PRETRAINED
from .format import LOADING_KEYS, Header, Ticket, find_mask_file, read_ticket
from .migrations import NESTED, nested_config

# What may differ between two masks of one backbone.
_FREE = LOADING_KEYS | {
    *"dtype id2label label2id problem_type return_dict output_hidden_states output_attentions".split(),
    *"bos_token_id eos_token_id pad_token_id".split(),
}
_FREE_OPTIONS = set("rule rule_options factors search frozen_density state mask_digest digest".split())
# A checkpoint may have moved: the digests of its tensors tell whether it is the same.
_NAMES_OF_BACKBONE = {"backbone_revision"}


def backbone_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return, in words, why masks made for one configuration do not fit the weights of another.

    A configuration determines the tensors of a ticket, so comparing the configurations is enough.

    Args:
        one (`Mapping[str, Any]`):
            The configuration of a ticket.
        other (`Mapping[str, Any]`):
            The configuration of another.

    Returns:
        `list[str]`: one text for each difference. The list is empty if masks of one fit the other.
    """
    sides = [_backbone(nested_config(config)) for config in (one, other)]
    return [
        f"{key} {sides[0].get(key)!r} and {sides[1].get(key)!r}"
        for key in sorted(sides[0].keys() | sides[1].keys())
        if sides[0].get(key) != sides[1].get(key)
    ]


def _backbone(config: dict[str, Any]) -> dict[str, Any]:
    options = config.pop(NESTED)
    options = {**options, "backbone": options.get("backbone") is not None}
    free = {name: value for name, value in config.items() if name not in _FREE}
    return free | {
        name: value for name, value in options.items() if name not in _FREE_OPTIONS | _NAMES_OF_BACKBONE
    }


def pretrained_differences(one: Header, other: Header) -> list[str]:
    """Return, in words, which pretrained tensors differ between two tickets.

    Args:
        one ([`Header`]):
            Header of a ticket.
        other ([`Header`]):
            Header of another.

    Returns:
        `list[str]`: one text for each difference.
    """
    sides = [
        {name: entry.weight_sha256 for name, entry in header.tensors.items() if entry.law == PRETRAINED}
        for header in (one, other)
    ]
    differ = sorted(name for name in sides[0].keys() & sides[1].keys() if sides[0][name] != sides[1][name])
    return [f"{name} of the pretrained weights" for name in differ]


def read_fitting_ticket(source: str | os.PathLike, own: Mapping[str, Any], **download_kwargs: Any) -> Ticket:
    """Read the ticket that a path, folder or Hub name means. It must fit the weights of a configuration.

    Args:
        source (`str` or `os.PathLike`):
            A mask file, a ticket's folder or a Hub name.
        own (`Mapping[str, Any]`):
            The configuration whose weights the masks are for.
        download_kwargs:
            `cache_dir`, `revision`, `token` and others of `hf_hub_download`.

    Returns:
        [`Ticket`]: the ticket, its masks checked.

    Raises:
        [`TicketError`]: if there is no ticket, or if it is of another backbone.
    """
    path = find_mask_file(source, **download_kwargs)
    if path is None:
        raise TicketError(f"{source}: no ticket found; give a mask file, a ticket's folder or a Hub name")
    ticket = read_ticket(path, by_itself=os.path.isfile(source))
    if differences := backbone_differences(own, ticket.header.config):
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise TicketError(
            f"{path}: a mask of another backbone, which differs in: {'; '.join(differences[:3])}{more}; "
            "load it as a separate model"
        )
    return ticket
