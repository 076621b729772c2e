"""Several masks on the frozen weights of one ticket, as PEFT has several adapters on one model.

    model.load_mask("poems", "me/poems")      # checked against this backbone; one bit a weight
    model.set_mask("poems")                   # weights drawn again, in place, times the other mask
    with model.mask("default"): ...           # for a while
    model.set_mask(None)                      # no mask: every random weight is kept

The mask in use is in the buffers of the layers and nowhere else, so it cannot be out of date; the others
rest here, packed.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.utils import cached_file

from .configuration_supermask_gpt2 import SupermaskGPT2Config
from .layers import Part, SupermaskLayer
from .ticket import (
    MASK_FILE,
    MODEL_FILE,
    Header,
    TicketError,
    backbone_differences,
    has_header,
    mask_digest,
    read_arrays,
    read_header,
)

_LENIENT = {
    f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")
}


def find_mask(source: str | os.PathLike, where: dict) -> tuple[str, Header | None]:
    """The mask file that a path, folder or Hub name means, and its header; None if there is no such file."""
    if os.path.isfile(source):
        return str(source), read_header(source)
    if path := cached_file(source, MASK_FILE, **(_LENIENT | where)):
        return path, read_header(path)
    if (path := cached_file(source, MODEL_FILE, **(_LENIENT | where))) and has_header(path):
        return path, read_header(path)
    return "", None


def find_or_raise(source: str | os.PathLike, where: dict) -> tuple[str, Header]:
    """As `find_mask`, where there must be one."""
    path, header = find_mask(source, where)
    if header is None:
        raise TicketError(f"{source}: no ticket found; give a mask file, a ticket's folder or a Hub name")
    return path, header


def check_backbone(path: str | os.PathLike, own: Header, other: Header) -> None:
    """Raise TicketError, naming the difference, unless the masks of a file fit these frozen weights."""
    differences = backbone_differences(own, other)
    if differences:
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise TicketError(
            f"{path}: a mask of another backbone, which differs in: {'; '.join(differences[:3])}{more}; "
            "load it as a model of its own"
        )


@dataclass
class _Mask:
    stored: dict[str, Tensor]  # packed bits, or trained values, by tensor name
    density: float
    rule: str
    mask_digest: str | None


class NamedMasks:
    """The part of a supermask model that holds masks by name."""

    config: SupermaskGPT2Config
    header: Callable[[], Header]
    _parts: Callable[[], Iterator[tuple[str, SupermaskLayer, Part]]]

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._active_mask: str | None = "default"
        self._resting_masks: dict[str, _Mask] = {}

    @property
    def active_mask(self) -> str | None:
        """Name of the mask in use; `"default"` is the one that the ticket came with, None is no mask."""
        return self._active_mask

    @property
    def mask_names(self) -> list[str]:
        """Names of all masks, in alphabetic order."""
        names = {*self._resting_masks, self._active_mask}
        return sorted(name for name in names if name is not None)

    def load_mask(self, name: str, source: str | os.PathLike, **options) -> None:
        """Add a mask of the same backbone under a name; it is not yet in use.

        source: mask file, ticket folder or Hub name.
        options: cache_dir, revision, token and others of `from_pretrained` that say where to look.
        """
        self._want_ticket()
        if not isinstance(name, str) or not name:
            raise ValueError(f"{name!r} is no name for a mask")
        if name in self.mask_names:
            raise ValueError(
                f"there is a mask {name!r} already; delete_mask({name!r}) first, or take another name"
            )
        path, header = find_or_raise(source, options)
        check_backbone(path, self.header(), header)
        stored = {tensor: torch.from_numpy(array) for tensor, array in read_arrays(path, header).items()}
        self._resting_masks[name] = _Mask(stored, header.density, header.rule, header.mask_digest)

    def set_mask(self, name: str | None) -> None:
        """Put a mask in use, by name; None keeps every weight. Weights are drawn again in place."""
        self._want_ticket()
        if name == self._active_mask:
            return
        if name is not None and name not in self._resting_masks:
            raise ValueError(f"no mask {name!r}; there are {self.mask_names}")
        if self._active_mask is not None:
            self._resting_masks[self._active_mask] = self._copy_active()
        if name is None:
            new = _Mask({}, 1.0, self.config.rule, None)
        else:
            new = self._resting_masks.pop(name)
        self._put(new)
        self._active_mask = name

    def delete_mask(self, name: str) -> None:
        """Forget a mask; the one in use cannot be."""
        if name == self._active_mask:
            raise ValueError(f"mask {name!r} is in use; set_mask to another, or to None, first")
        if name not in self._resting_masks:
            raise ValueError(f"no mask {name!r}; there are {self.mask_names}")
        del self._resting_masks[name]

    @contextmanager
    def mask(self, name: str | None) -> Iterator[None]:
        """Use a mask within a `with` block, then the one before."""
        before = self._active_mask
        self.set_mask(name)
        try:
            yield
        finally:
            self.set_mask(before)

    # -- in and out of the layers ------------------------------------------------------------------

    def _want_ticket(self) -> None:
        if self.config.state != "ticket":
            raise ValueError(
                "only a ticket has named masks; this model holds scores: model.to_ticket() makes one"
            )

    def _copy_active(self) -> _Mask:
        stored = {part.name: tensor.detach().cpu().clone() for _, part, tensor in self._stored()}
        digest = mask_digest(self.header().tensors)
        return _Mask(stored, self.config.density, self.config.rule, digest)

    @torch.no_grad()
    def _put(self, mask: _Mask) -> None:
        changed: dict[int, SupermaskLayer] = {}
        for layer, part, tensor in self._stored():
            if layer.learns == "ticket":
                new = mask.stored.get(part.name, full_mask(part))
                if not torch.equal(new, tensor.cpu()):
                    changed[id(layer)] = layer
                    tensor.copy_(new)
            elif part.name in mask.stored:
                tensor.copy_(mask.stored[part.name])
        for layer in changed.values():
            layer.materialise()
        self.config.density, self.config.rule = mask.density, mask.rule
        self.config.mask_digest = mask.mask_digest

    def _stored(self) -> Iterator[tuple[SupermaskLayer, Part, Tensor]]:
        for _, layer, part in self._parts():
            if layer.learns == "ticket":
                yield layer, part, layer.packed_mask(part)
            elif layer.learns == "trained":
                yield layer, part, layer.weight


def full_mask(part: Part) -> Tensor:
    """The packed mask that keeps every weight of a part; bits after the last are zero."""
    packed = torch.full((-(-part.size // 8),), 255, dtype=torch.uint8)
    if part.size % 8:
        packed[-1] = (1 << part.size % 8) - 1
    return packed
