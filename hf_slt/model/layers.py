"""Layers of a ticket: a weight that is drawn from the seed, times a mask that is stored in bits.

    weight = draw(seed, name) * mask        buffer, never saved
    mask                                    buffer, one bit a weight, saved
    y      = x @ weight

A layer either is or learns. Those that are, masked, frozen or with stored values, are here and travel with a
ticket. Those that learn are in `hf_slt.training.scores`; they put themselves into `LAYERS` when the package
is imported. Both families compute with `masked_weight()`, in the three ways below (linear, embedding, head),
and know tensors by their descriptions, not by a model's configuration.

What a weight was made from is remembered by identity and version. Whatever replaces a mask or the weight (a
load, a move, a cast back from half precision) is seen at the next forward, and the weight is drawn again: it
is never stale. Threads may share a layer as long as none of them writes to it.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .quantisation import dequantise, quantise
from .random_weights import TensorSpec, digest
from .ticket import Entry, count_bits, pack_mask, unpack_mask

# By state of the model, then by what becomes of the tensor and how it is used.
LAYERS: dict[str, dict[tuple[str, str], Callable[..., "SupermaskLayer"]]] = {}

LOSSES: dict[str, Callable] = {}  # by state too, where transformers' own is not the best


def make_layer(
    state: str, kind: str, use: str, tensors: Sequence[TensorSpec], bits: int = 32
) -> "SupermaskLayer":
    """A layer of tensors that lie side by side in the columns of one matrix.

    kind: "masked", "frozen" or "trained", the last in `bits`; use: "linear", "embedding" or "head".
    """
    if state not in LAYERS:
        raise ImportError(
            f"this model holds {state}, which only training needs, and the code that travels with a ticket "
            "does not train: pip install hf_slt, and import hf_slt first"
        )
    options = {"bits": bits} if kind == "trained" else {}
    return LAYERS[state][kind, use](tensors, **options)


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

    is_masked = False  # whether a mask, learned or stored, chooses among its weights
    inputs_first = False  # stored (inputs, outputs), as GPT-2's Conv1D; else the other way
    body_name = "weight"  # of the tensor of this shape that the layer holds
    in_float32: Sequence[str] = ()  # names of parameters that no cast may shorten

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        nn.Module.__init__(self)  # by name: a layer may also be an nn.Linear or nn.Embedding
        self.tensors = tuple(tensors)
        self.shape = (tensors[0].shape[0], sum(tensor.shape[1] for tensor in tensors))

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

    def masked_weight(self) -> Tensor:
        """The matrix that this layer computes with."""
        raise NotImplementedError

    def reset(self) -> None:
        """Fill in whatever was not loaded: transformers' `_init_weights` for this layer."""
        raise NotImplementedError

    def _begin(self) -> None:
        if not self.body.is_meta:
            self.reset()
            self._is_hf_initialized = True  # transformers would do it again

    def entries(self, path: str) -> Iterator[tuple[str, Entry, np.ndarray | None]]:
        """Name, description and stored data of every tensor, as a ticket has them; `path` is the module's."""
        raise NotImplementedError

    def resized(self, rows: int) -> "SupermaskLayer":
        """This table with other rows: those in both keep what they have, new ones are drawn."""
        raise NotImplementedError

    def _like_this(self, rows: int, **options: Any) -> Any:
        (tensor,) = self.tensors
        new = type(self)([replace(tensor, shape=(rows, tensor.shape[1]))], **options)
        return new.to(self.body.device, self.body.dtype).train(self.training)

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, {self.shape[1]}"


class Linear(SupermaskLayer):
    """y = x @ weight, the weight stored (inputs, outputs) like GPT-2's Conv1D; no bias."""

    inputs_first = True

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.masked_weight()


class Embedding(SupermaskLayer, nn.Embedding):
    """Rows of a table; also its transpose, so that a tied table is masked once for both uses."""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        super().__init__(tensors)
        self.num_embeddings, self.embedding_dim = self.shape
        self.padding_idx, self.max_norm, self.norm_type = None, None, 2.0
        self.scale_grad_by_freq, self.sparse = False, False

    def forward(self, input: Tensor, unembed: bool = False) -> Tensor:
        """Rows of the token ids, or with `unembed` the logits of hidden states.

        Both directions go through one forward, so that hooks (offload, sharding) see either use.
        """
        return (F.linear if unembed else F.embedding)(input, self.masked_weight())


class Head(SupermaskLayer, nn.Linear):
    """Logits from hidden states, the weight stored (outputs, inputs) like nn.Linear; no bias."""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        super().__init__(tensors)
        self.out_features, self.in_features = self.shape
        self.register_parameter("bias", None)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.masked_weight())


class DrawnLayer(SupermaskLayer):
    """A layer that keeps what it drew in a buffer, and sees when that is no longer what it should be."""

    _made_from: Sequence[Stamp] = ()  # what the buffer was made from
    _is_replica = False  # torch sets it on the copies that DataParallel makes of a current layer

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        super().__init__(tensors)
        self.register_buffer(self.body_name, torch.empty(self.shape), persistent=False)

    def stored(self) -> list[Tensor]:
        """What a state dict brings: masks or scores, by tensor."""
        raise NotImplementedError

    def materialise(self) -> None:
        """Draw into the buffer, in its dtype."""
        raise NotImplementedError

    def _sources(self) -> list[Stamp]:
        """What the buffer must still be made from to be current: at least itself."""
        return [Stamp(self.body)]

    @property
    def is_current(self) -> bool:
        return self._is_replica or self._sources() == self._made_from

    def _make_current(self) -> None:
        if not torch.compiler.is_compiling() and not self.is_current:
            self.materialise()

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        # At once, not at the next forward: a compiled forward does not look.
        if self._made_from and not self.body.is_meta:
            self._make_current()
        return self

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.body.is_meta and not any(tensor.is_meta for tensor in self.stored()):  # assign=True
            setattr(self, self.body_name, torch.empty_like(self.body, device="cpu"))
        if any(stamp.tensor.is_inference() for stamp in self._made_from):
            self._made_from = ()  # such a tensor counts no versions
        if not self.body.is_meta:
            self._make_current()


# -- layers of a ticket --------------------------------------------------------------------------------


class TicketLayer(DrawnLayer):
    """A drawn weight times a stored mask."""

    is_masked = True

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        super().__init__(tensors)
        self.weight_digests: dict[str, str] = {}  # of the last draw, before masking
        for tensor in self.tensors if self.is_masked else ():
            self.register_buffer(self.attribute(tensor, "mask"), torch.empty_like(full_mask(tensor)))
        self._begin()

    def stored(self) -> list[Tensor]:
        return [getattr(self, self.attribute(tensor, "mask")) for tensor in self.tensors if self.is_masked]

    @torch.no_grad()
    def reset(self) -> None:
        if self.weight.is_meta:
            return
        for tensor in self.tensors if self.is_masked else ():
            mask = self.packed_mask(tensor)
            if not getattr(mask, "_is_hf_initialized", False):  # not what a checkpoint gave
                mask.copy_(full_mask(tensor))
        self._make_current()

    def packed_mask(self, tensor: TensorSpec) -> Tensor:
        """The stored bits of a tensor's mask."""
        packed = getattr(self, self.attribute(tensor, "mask"))
        if packed.is_meta and not self.weight.is_meta:
            raise RuntimeError(
                f"the mask of {tensor.name} was offloaded and holds no data: load with offload_buffers=False; "
                "masks are small"
            )
        return packed

    def masked_part(self, tensor: TensorSpec) -> np.ndarray:
        """The drawn weights of a tensor times its mask."""
        drawn = tensor.draw()
        self.weight_digests[tensor.name] = digest(drawn)
        if self.is_masked:
            drawn *= unpack_mask(self.packed_mask(tensor).cpu().numpy(), tensor.shape)
        return drawn

    @torch.no_grad()
    def materialise(self) -> None:
        for tensor, columns in self.places():
            self.weight[:, columns].copy_(torch.from_numpy(self.masked_part(tensor)))
        self._made_from = self._sources()

    def masked_weight(self) -> Tensor:
        self._make_current()
        return self.weight

    def entries(self, path: str) -> Iterator[tuple[str, Entry, np.ndarray | None]]:
        for tensor in self.tensors:
            drawn = self.weight_digests.get(tensor.name) or digest(tensor.draw())
            packed = self.packed_mask(tensor).cpu().numpy() if self.is_masked else None
            key = f"{path}.{self.attribute(tensor, 'mask')}"
            yield tensor.name, *masked_entry(tensor, drawn, key, packed)

    @torch.no_grad()
    def resized(self, rows: int) -> "TicketLayer":
        new, (tensor,) = self._like_this(rows), self.tensors
        if self.is_masked:
            mask = unpack_mask(self.packed_mask(tensor).cpu().numpy(), tensor.shape)[:rows]
            more = np.ones((rows - len(mask), tensor.shape[1]), bool)
            new.packed_mask(new.tensors[0]).copy_(torch.from_numpy(pack_mask(np.concatenate([mask, more]))))
            new.materialise()
        return new

    def _sources(self) -> list[Stamp]:
        return super()._sources() + [Stamp(mask) for mask in self.stored()]


def full_mask(tensor: TensorSpec) -> Tensor:
    """The packed mask that keeps every weight; bits after the last are zero."""
    packed = torch.full((-(-tensor.size // 8),), 255, dtype=torch.uint8)
    if tensor.size % 8:
        packed[-1] = (1 << tensor.size % 8) - 1
    return packed


def masked_entry(
    tensor: TensorSpec, drawn_sha256: str, key: str, packed: np.ndarray | None
) -> tuple[Entry, np.ndarray | None]:
    """The description of a drawn tensor, with a mask or (None) without, and the mask."""
    entry = Entry(tensor.shape, None, tensor.law, tensor.scale, weight_sha256=drawn_sha256)
    if packed is None:
        return entry, None
    return replace(entry, key=key, kept=count_bits(packed), data_sha256=digest(packed)), packed


def stored_entry(tensor: TensorSpec, path: str, values: Tensor, bits: int) -> tuple[str, Entry, np.ndarray]:
    """Name, description and values of a trained tensor."""
    array = values.detach().float().cpu().numpy()
    return tensor.name, Entry(tensor.shape, f"{path}.weight", bits=bits, data_sha256=digest(array)), array


class TicketLinear(TicketLayer, Linear):
    """A linear layer of a ticket."""


class TicketEmbedding(TicketLayer, Embedding):
    """A table of a ticket."""


class TicketHead(TicketLayer, Head):
    """A head of a ticket."""


class FrozenEmbedding(TicketEmbedding):
    """A random table, all of it kept: nothing to learn, nothing to store."""

    is_masked = False


class FrozenHead(TicketHead):
    """A random head, all of it kept."""

    is_masked = False


class StoredLayer(SupermaskLayer):
    """Values that were trained and are stored: they follow from no seed."""

    def __init__(self, tensors: Sequence[TensorSpec], bits: int = 32) -> None:
        super().__init__(tensors)
        self.bits = bits
        self.weight = nn.Parameter(torch.empty(self.shape), requires_grad=False)
        self._begin()

    @torch.no_grad()
    def reset(self) -> None:
        if self.weight.is_meta or getattr(self.weight, "_is_hf_initialized", False):
            return
        values = self.drawn_weight()
        if self.bits != 32:
            values = dequantise(*quantise(values, self.bits), values.shape, self.bits)
        self.weight.copy_(torch.from_numpy(values))

    def masked_weight(self) -> Tensor:
        return self.weight

    def entries(self, path: str) -> Iterator[tuple[str, Entry, np.ndarray | None]]:
        yield stored_entry(self.tensors[0], path, self.weight, self.bits)

    @torch.no_grad()
    def resized(self, rows: int) -> "StoredLayer":
        new, both = self._like_this(rows, bits=self.bits), min(rows, self.shape[0])
        new.weight[:both] = self.weight[:both]
        return new


class StoredEmbedding(StoredLayer, Embedding):
    """A table of stored values."""


class StoredHead(StoredLayer, Head):
    """A head of stored values."""


LAYERS["ticket"] = {
    ("masked", "linear"): TicketLinear,
    ("masked", "embedding"): TicketEmbedding,
    ("masked", "head"): TicketHead,
    ("frozen", "embedding"): FrozenEmbedding,
    ("frozen", "head"): FrozenHead,
    ("trained", "embedding"): StoredEmbedding,
    ("trained", "head"): StoredHead,
}


class TernaryLayer(TicketLayer):
    """A ticket's layer of weights -c, 0 and +c, on a CPU: signs in 16 bits, all arithmetic in float32.

        y = (x @ sign) * c              # c of each output; no weight is rounded

    Half the memory to read is what makes it fast. The masks stay, and with them all that a ticket can do.
    """

    def __init__(self, layer: TicketLayer) -> None:
        SupermaskLayer.__init__(self, layer.tensors)
        self.is_masked, self.inputs_first = layer.is_masked, layer.inputs_first
        self.is_table = isinstance(layer, nn.Embedding)
        self.weight_digests = layer.weight_digests
        self.register_buffer("weight", layer.weight.new_empty(0), persistent=False)  # tells the dtype
        for tensor, mask in zip(self.tensors, layer.stored(), strict=False):
            self.register_buffer(self.attribute(tensor, "mask"), mask)
        self.materialise()

    @staticmethod
    def suits(layer: SupermaskLayer) -> bool:
        """Whether this can be made of a layer."""
        return isinstance(layer, TicketLayer) and {one.law for one in layer.tensors} == {"signed_constant"}

    @torch.no_grad()
    def materialise(self) -> None:
        signs = self.masked_weight().float().sign()
        signs = signs.T.contiguous() if self.inputs_first else signs  # outputs, inputs
        scales = [abs(tensor.scale) for tensor in self.tensors for _ in range(tensor.shape[1])]
        self._scale = torch.tensor(scales if self.inputs_first else scales[:1])
        self._packed = torch.ops.quantized.linear_prepack_fp16(signs, None)
        self._rows = signs.to(torch.int8) if self.is_table else None
        self._made_from = self._sources()

    def masked_weight(self) -> Tensor:
        """weight * mask, drawn again: it is not kept."""
        parts = [torch.from_numpy(self.masked_part(tensor)) for tensor in self.tensors]
        return torch.cat(parts, 1).to(self.weight.dtype)

    def forward(self, input: Tensor, unembed: bool = False) -> Tensor:
        self._make_current()
        if self._rows is not None and not unembed:
            return (self._rows[input] * self._scale).to(self.weight.dtype)
        product = torch.ops.quantized.linear_dynamic_fp16(input.float(), self._packed)
        return product.mul_(self._scale).to(input.dtype)

    def _apply(self, fn, recurse=True):
        if fn(torch.empty(0)).device.type != "cpu":
            raise RuntimeError("a ternary model runs on a CPU only; move the ticket that it was made from")
        return super()._apply(fn, recurse)

    def resized(self, rows: int):
        raise RuntimeError("a ternary table cannot be resized; resize the ticket, then call to_ternary()")
