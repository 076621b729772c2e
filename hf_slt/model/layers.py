"""Layers of a ticket: a weight that is drawn from the seed, times a factor that a stored code stands for.

    weight = draw(seed, name) * factors[code]        buffer, never saved
    mask                                             buffer, the packed codes, saved
    y      = x @ weight

A layer either is or learns. Those that are, masked, frozen or with stored values, are here and travel with a
ticket; those that learn are in `hf_slt.training.scores`. Both compute with `masked_weight()`, in the ways
below, and know tensors by their descriptions, not by a model's configuration.

What a weight was made from is remembered by identity and version: whatever replaces a mask or the weight (a
load, a move, a cast) is seen at the next forward, and the weight is drawn again. Threads may share a layer as
long as none of them writes to it.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from .codes import factors_of, full_codes, packed_bytes
from .random_weights import TensorSpec, digest

Specs = Sequence[TensorSpec]
# By state of the model, then by what becomes of the tensor and how it is used.
LAYERS: dict[str, dict[tuple[str, str], Callable[..., "SupermaskLayer"]]] = {}
LOSSES: dict[str, Callable] = {}  # by state too, where transformers' own is not the best
FORWARDS: dict[str, Callable[[], AbstractContextManager]] = {}  # within which layers share what they can


def make_layer(
    state: str, kind: str, use: str, tensors: Specs, bits: int = 32, scales: Specs = ()
) -> "SupermaskLayer":
    """A layer of tensors that lie side by side in the columns of one matrix.

    kind: "masked", "frozen" or "trained", the last in `bits`; use: "linear", "embedding", "head" or "vector".
    scales: trained numbers that the outputs of each tensor are multiplied by; in `bits` too.
    """
    if state not in LAYERS:
        raise ImportError(f"a model of {state} is to be trained: pip install hf_slt, and import hf_slt")
    options = {"bits": bits} if kind == "trained" else {}
    layer = LAYERS[state][kind, use](tensors, **options)
    for tensor, scale in zip(tensors, scales, strict=False):
        name = layer.attribute(tensor, "scale")
        layer.add_module(name, make_layer(state, "trained", "vector", [scale], bits))
        layer.scale_names.append(name)
    return layer


class Stamp:
    """A tensor as it stands: equal to another stamp of the same tensor, unless written in between.

    Holds the tensor, not its address, which the allocator may give to another.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = 0 if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stamp) and self.tensor is other.tensor and self.version == other.version

    __hash__ = None  # type: ignore[assignment]  # equal only for a moment

    def __deepcopy__(self, memo: dict) -> "Stamp":
        twin = Stamp(copy.deepcopy(self.tensor, memo))  # which counts its versions anew
        if self != Stamp(self.tensor):
            twin.version = -1
        return twin


# -- what both families share --------------------------------------------------------------------------


class SupermaskLayer(nn.Module):
    """A matrix of one or several named tensors, side by side in its columns."""

    kind = "masked"  # or "frozen", all of it kept, or "trained", its values stored
    bits = 1  # that a ticket stores for each weight; of trained values 32, 8 or 4
    inputs_first = False  # stored (inputs, outputs), as GPT-2's Conv1D; else the other way
    body_name = "weight"  # of the tensor of this shape that the layer holds
    in_float32: Sequence[str] = ()  # names of parameters that no cast may shorten
    weight: Any
    masked_weight: Callable[[], Tensor]  # the matrix that the layer computes with
    data: Callable[[], list[np.ndarray | None]]  # what a ticket stores of each tensor: codes or values
    reset: Callable[[], None]  # fills in whatever was not loaded, as transformers' _init_weights

    def __init__(self, tensors: Specs) -> None:
        nn.Module.__init__(self)  # by name: a layer may also be an nn.Linear or nn.Embedding
        self.tensors = tuple(tensors)
        self.shape = (tensors[0].shape[0], sum(tensor.shape[1] for tensor in tensors))
        self.scale_names: list[str] = []  # of the vectors of scales, one a tensor, if there are any

    def output_scale(self) -> Tensor | None:
        """The learned factor of every output, to be multiplied with the matrix."""
        if not self.scale_names:
            return None
        rows = [getattr(self, name).masked_weight() for name in self.scale_names]
        if not self.inputs_first:
            return rows[0].T
        widths = (tensor.shape[1] for tensor in self.tensors)
        return torch.cat([row.expand(1, width) for row, width in zip(rows, widths, strict=True)], 1)

    @property
    def body(self) -> Tensor:
        """The tensor that the layer holds: its device and dtype are the layer's."""
        return getattr(self, self.body_name)

    def attribute(self, tensor: TensorSpec, what: str) -> str:
        """Under which name a tensor's mask or scores stand here: "mask", or "query_mask" of several."""
        return what if len(self.tensors) == 1 else f"{tensor.name.rsplit('.', 1)[-1]}_{what}"

    def places(self) -> Iterator[tuple[TensorSpec, slice]]:
        """Every tensor, and its columns in the matrix."""
        start = 0
        for tensor in self.tensors:
            yield tensor, slice(start, start := start + tensor.shape[1])

    def drawn_weight(self) -> np.ndarray:
        """The frozen matrix before any mask, in float32."""
        return np.concatenate([tensor.draw() for tensor in self.tensors], axis=1)

    def _begin(self) -> None:
        if not self.body.is_meta:
            self.reset()
            self._is_hf_initialized = True  # transformers would do it again

    def join(self, layers: Sequence["SupermaskLayer"]) -> None:
        """Know the other layers of the model, if that matters."""

    def key(self, tensor: TensorSpec) -> str:
        """Under which name a ticket's layer has what it stores of a tensor."""
        return "weight" if self.kind == "trained" else self.attribute(tensor, "mask")

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, {self.shape[1]}"


class Linear(SupermaskLayer, Conv1D):
    """y = x @ weight, the weight stored (inputs, outputs) like GPT-2's Conv1D; no bias."""

    inputs_first = True

    def __init__(self, tensors: Specs) -> None:
        super().__init__(tensors)
        self.nx, self.nf = self.shape
        self.register_parameter("bias", None)

    def forward(self, hidden: Tensor, unembed: bool = False) -> Tensor:
        """What is made of inputs, or with `unembed` the way back, by the transpose."""
        return (F.linear if unembed else torch.matmul)(hidden, self.masked_weight())


class Embedding(SupermaskLayer, nn.Embedding):
    """Rows of a table; also its transpose, so that a tied table is masked once for both uses."""

    padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse = None, None, 2.0, False, False

    def __init__(self, tensors: Specs) -> None:
        super().__init__(tensors)
        self.num_embeddings, self.embedding_dim = self.shape

    def forward(self, input: Tensor, unembed: bool = False) -> Tensor:
        """Rows of the token ids, or with `unembed` the logits of hidden states: hooks see either use."""
        return (F.linear if unembed else F.embedding)(input, self.masked_weight())


class LowRankEmbedding(nn.Embedding):
    """A tied table of few stored numbers a token, the rows, and a masked matrix, the basis.

    table = rows @ basis,    logits = hidden @ basis^T @ rows^T: the table itself is not made.
    """

    padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse = None, None, 2.0, False, False
    _is_hf_initialized = True  # its parts are, by themselves

    def __init__(self, rows: SupermaskLayer, basis: SupermaskLayer) -> None:
        nn.Module.__init__(self)
        self.rows, self.basis = rows, basis
        self.num_embeddings, self.embedding_dim = rows.shape[0], basis.shape[1]

    def forward(self, input: Tensor, unembed: bool = False) -> Tensor:
        if unembed:  # without an adapter, which is for lookups only
            return self.rows(getattr(self.basis, "base_layer", self.basis)(input, unembed), unembed)
        return self.basis(self.rows(input))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.rows.masked_weight() @ self.basis.masked_weight()


class Head(SupermaskLayer, nn.Linear):
    """Logits from hidden states, the weight stored (outputs, inputs) like nn.Linear; no bias."""

    def __init__(self, tensors: Specs) -> None:
        super().__init__(tensors)
        self.out_features, self.in_features = self.shape
        self.register_parameter("bias", None)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.masked_weight())


class Vector(SupermaskLayer):
    """A row of numbers that others are multiplied by, or that is added to them."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.masked_weight()[0]


class DrawnLayer(SupermaskLayer):
    """A layer that keeps what it drew in a buffer, and sees when that is no longer what it should be."""

    _made_from: Sequence[Stamp] = ()  # what the buffer was made from
    _is_replica = False  # torch sets it on the copies that DataParallel makes of a current layer
    stored: Callable[[], list[Tensor]]  # what a state dict brings, by tensor: masks or scores
    materialise: Callable[[], None]  # draws into the buffer, in its dtype

    def __init__(self, tensors: Specs) -> None:
        super().__init__(tensors)
        self.register_buffer(self.body_name, torch.empty(self.shape), persistent=False)
        self.register_load_state_dict_post_hook(type(self)._after_load)  # after its scales were loaded too

    def _sources(self) -> list[Stamp]:
        """What the buffer must still be made from to be current: at least itself."""
        return [Stamp(self.body)]

    @property
    def is_current(self) -> bool:
        return self._is_replica or self._sources() == self._made_from

    def _make_current(self) -> None:
        if torch.compiler.is_compiling() or self.is_current:
            return
        if not any(stamp.tensor.is_meta for stamp in self._sources()):  # else a load is not finished
            self.materialise()

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        # At once, not at the next forward: a compiled forward does not look.
        if self._made_from and not self.body.is_meta:
            self._make_current()
        return self

    def _after_load(self, _keys: Any) -> None:
        if self.body.is_meta and not any(tensor.is_meta for tensor in self.stored()):  # assign=True
            setattr(self, self.body_name, torch.empty_like(self.body, device="cpu"))
        if any(stamp.tensor.is_inference() for stamp in self._made_from):
            self._made_from = ()  # such a tensor counts no versions
        if not self.body.is_meta:
            self._make_current()


# -- layers of a ticket --------------------------------------------------------------------------------


class TicketLayer(DrawnLayer):
    """A drawn weight times a stored mask; or all of it, where the kind is "frozen"."""

    def __init__(self, tensors: Specs, kind: str = "masked") -> None:
        super().__init__(tensors)
        self.kind = kind
        self.weight_digests: dict[str, str] = {}  # of the last draw, before masking
        for tensor in self.tensors if self.kind == "masked" else ():
            packed = torch.empty(packed_bytes(tensor), dtype=torch.uint8)
            self.register_buffer(self.attribute(tensor, "mask"), packed)
        self._begin()

    def stored(self) -> list[Tensor]:
        names = [self.attribute(tensor, "mask") for tensor in self.tensors if self.kind == "masked"]
        return [getattr(self, name) for name in names]

    @torch.no_grad()
    def reset(self) -> None:
        if self.weight.is_meta:
            return
        for tensor in self.tensors if self.kind == "masked" else ():
            mask = self.packed_mask(tensor)
            if not getattr(mask, "_is_hf_initialized", False):  # not what a checkpoint gave
                mask.copy_(torch.from_numpy(full_codes(tensor)))
        self._make_current()

    def packed_mask(self, tensor: TensorSpec) -> Tensor:
        """The stored codes of a tensor."""
        packed = getattr(self, self.attribute(tensor, "mask"))
        if packed.is_meta and not self.weight.is_meta:
            raise RuntimeError(f"the mask of {tensor.name} was offloaded; load with offload_buffers=False")
        return packed

    def masked_part(self, tensor: TensorSpec) -> np.ndarray:
        """The drawn weights of a tensor times the factors of its codes."""
        drawn = tensor.draw()
        self.weight_digests[tensor.name] = digest(drawn)
        if self.kind == "masked":
            drawn *= factors_of(tensor, self.packed_mask(tensor).cpu().numpy())
        return drawn

    @torch.no_grad()
    def materialise(self) -> None:
        scale = self.output_scale()
        for tensor, columns in self.places():
            part = torch.from_numpy(self.masked_part(tensor))
            if scale is not None:
                part *= (scale[:, columns] if self.inputs_first else scale).float().cpu()
            self.weight[:, columns].copy_(part)
        self._made_from = self._sources()

    def masked_weight(self) -> Tensor:
        self._make_current()
        return self.weight

    def data(self) -> list[np.ndarray | None]:
        return [mask.cpu().numpy() for mask in self.stored()] or [None]

    def _sources(self) -> list[Stamp]:
        scales = [getattr(self, name).body for name in self.scale_names]
        return super()._sources() + [Stamp(one) for one in (*self.stored(), *scales)]


class TicketLinear(TicketLayer, Linear):
    """A linear layer of a ticket."""


class TicketEmbedding(TicketLayer, Embedding):
    """A table of a ticket."""


class TicketHead(TicketLayer, Head):
    """A head of a ticket."""


class StoredLayer(SupermaskLayer):
    """Values that were trained and are stored: they follow from no seed."""

    kind = "trained"

    def __init__(self, tensors: Specs, bits: int = 32) -> None:
        super().__init__(tensors)
        self.bits = bits
        self.weight = nn.Parameter(torch.empty(self.shape), requires_grad=False)
        self._begin()

    @torch.no_grad()
    def reset(self) -> None:
        if not self.weight.is_meta and not getattr(self.weight, "_is_hf_initialized", False):
            self.weight.copy_(torch.from_numpy(self.drawn_weight()))

    def masked_weight(self) -> Tensor:
        return self.weight

    def data(self) -> list[np.ndarray | None]:
        return [self.weight.detach().float().cpu().numpy()]


class StoredEmbedding(StoredLayer, Embedding):
    """A table of stored values."""


class StoredHead(StoredLayer, Head):
    """A head of stored values."""


class StoredVector(StoredLayer, Vector):
    """A vector of stored values."""


LAYERS["ticket"] = {
    ("masked", "linear"): TicketLinear,
    ("masked", "embedding"): TicketEmbedding,
    ("masked", "head"): TicketHead,
    ("frozen", "embedding"): partial(TicketEmbedding, kind="frozen"),
    ("frozen", "head"): partial(TicketHead, kind="frozen"),
    ("trained", "embedding"): StoredEmbedding,
    ("trained", "head"): StoredHead,
    ("trained", "vector"): StoredVector,
}
