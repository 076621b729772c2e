"""Layers whose weight is random, frozen and masked.

A layer is in one of two states:

    scores   weight = draw(seed, name)          buffer, never saved     y = x @ MaskedWeight(weight, scores)
             scores                             parameter, float32
    ticket   weight = draw(seed, name) * mask   buffer, never saved     y = x @ weight
             mask                               buffer, one bit a weight, saved

An embedding may also be `frozen` (nothing to learn or to save) or `trained` (weight is a parameter).

What the weight was made from is remembered by identity and version. Whatever replaces the mask or
the weight (a load, a move, a cast back from half precision) is seen at the next forward, and the
weight is drawn again: it is never stale.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .configuration_supermask_gpt2 import SupermaskGPT2Config
from .masking import (
    RULES,
    MaskedLogits,
    MaskedRows,
    MaskedWeight,
    Selector,
    TracedMaskedWeight,
    apply_mask,
    keep_largest,
    kept_count,
    traced_mask,
)
from .quantisation import dequantise, largest_code, quantise
from .random_weights import digest, draw
from .ticket import pack_mask, unpack_mask


@dataclass(frozen=True)
class Part:
    """One named random tensor with a mask of its own: a whole weight, or some columns of a fused one."""

    name: str  # what it is drawn by, relative to the base model: "h.0.attn.c_attn.query"
    prefix: str  # of its attributes in the layer: "query_" gives query_scores, query_mask
    shape: tuple[int, int]
    columns: slice

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]


class _Stamp:
    """A tensor as it stands: equal to another stamp of the same tensor, unless written in between.

    Holds the tensor, not its address, which the allocator may give to another.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = 0 if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stamp) and self.tensor is other.tensor and self.version == other.version

    __hash__ = None  # type: ignore[assignment]  # equal only for a moment

    def __deepcopy__(self, memo: dict) -> "_Stamp":
        twin = _Stamp(copy.deepcopy(self.tensor, memo))  # which counts its versions anew
        if self != _Stamp(self.tensor):
            twin.version = -1
        return twin


class RoundedWeight(torch.autograd.Function):
    """Rows rounded to what 8 or 4 bits can hold, as by `quantisation.py`; the gradient passes through."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, bits: int) -> Tensor:
        largest = weight.abs().amax(-1, keepdim=True).float()
        steps = (largest / largest_code(bits)).view(torch.int32)
        scales = ((steps + 0x1FFF) & ~0x1FFF).view(torch.float32).clamp_min(2**-14)
        return ((weight / scales).round() * scales + 0.0).to(weight.dtype)  # + 0.0: no code is a minus zero

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class SupermaskLayer(nn.Module):
    """A frozen random matrix under a mask; what the three layers below have in common.

    `widths` splits the columns into parts that are drawn, ranked and masked separately.
    """

    def __init__(
        self,
        config: SupermaskGPT2Config,
        name: str,
        shape: tuple[int, int],
        widths: dict[str, int] | None = None,
        learns: str = "masked",
    ) -> None:
        nn.Module.__init__(self)  # by name: a subclass may also be an nn.Linear or nn.Embedding
        self.weight: Any  # a buffer, or a parameter where it is trained
        self.seed, self.rule, self.density = config.seed, config.rule, config.density
        self.in_ticket = config.state == "ticket"
        self.learns = learns if learns != "masked" else config.state  # scores, ticket, frozen or trained
        self.bits = config.embedding_bits if self.learns == "trained" else 32
        self.shape = shape
        self.parts = tuple(_parts(name, shape, widths))
        self.laws = {part.name: config.law_of(part.name) for part in self.parts}
        self.weight_digests: dict[str, str] = {}  # of the last draw, before masking; filled in a ticket
        self._selectors = {part.name: Selector() for part in self.parts}
        self._masked = torch.empty(0)  # scores: weight * mask, reused while both stand
        self._masks: list[Tensor] = []  # scores: the masks in it, of each part
        self._filled: dict[str, _Stamp] = {}  # first values, as drawn
        self._made_from: list[_Stamp] = []  # what the weight was made from

        weight = torch.empty(shape)
        if self.learns == "trained":
            self.weight = nn.Parameter(weight, requires_grad=not self.in_ticket)
        else:
            self.register_buffer("weight", weight, persistent=False)
        for part in self.parts:
            if self.learns == "scores":
                scores = nn.Parameter(torch.empty(part.shape, dtype=torch.float32))
                self.register_parameter(part.prefix + "scores", scores)
            elif self.learns == "ticket":
                packed = torch.empty(-(-part.size // 8), dtype=torch.uint8)
                self.register_buffer(part.prefix + "mask", packed)
        if not weight.is_meta:
            self.reset()

    # -- what transformers calls -----------------------------------------------------------------

    @torch.no_grad()
    def reset(self) -> None:
        """Draw everything that was not loaded: transformers' `_init_weights` for this layer."""
        for part in self.parts:
            if self.learns == "scores":
                self._fill(part.prefix + "scores", self.first_scores, part)
            elif self.learns == "ticket":
                self._fill(part.prefix + "mask", self.first_mask, part)
            elif self.learns == "trained":
                self._fill("weight", self.first_values, part)
        if self.learns != "trained" and not self._is_current():
            self.materialise()

    def _fill(self, name: str, values: Callable[[Part], np.ndarray], part: Part) -> None:
        tensor = getattr(self, name)
        # Not what a checkpoint gave, nor twice: transformers calls this again after __init__.
        if not getattr(tensor, "_is_hf_initialized", False) and self._filled.get(name) != _Stamp(tensor):
            tensor.copy_(torch.from_numpy(values(part)))
            self._filled[name] = _Stamp(tensor)

    def _apply(self, fn, recurse=True):
        """Move with the model, but keep the scores in float32: bfloat16 would tie them by the thousand."""
        names = [part.prefix + "scores" for part in self.parts if self.learns == "scores"]
        before = {name: getattr(self, name).detach() for name in names}  # the values: a cast replaces .data
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if new.dtype != torch.float32 and not new.is_meta:
                gradient, new.grad = new.grad, None
                new.data = old.to(new.device, torch.float32)
                new.grad = None if gradient is None else gradient.to(torch.float32)
        # At once, not at the next forward: a compiled forward does not look.
        if self._made_from and not self.weight.is_meta and not self._is_current():
            self.materialise()
        return self

    # -- random numbers --------------------------------------------------------------------------

    def frozen_weight(self, part: Part) -> np.ndarray:
        """The random tensor of a part, before any mask, in float32."""
        return draw(self.seed, part.name, part.shape, *self.laws[part.name])

    def first_values(self, part: Part) -> np.ndarray:
        """What a trained tensor begins with; in a ticket as its bits can hold it."""
        values = self.frozen_weight(part)
        if self.in_ticket and self.bits != 32:
            values = dequantise(*quantise(values, self.bits), values.shape, self.bits)
        return values

    def first_scores(self, part: Part) -> np.ndarray:
        """Edge-popup's first scores, kaiming_uniform(a=sqrt 5): U[-1, 1] / sqrt(fan in)."""
        return draw(self.seed, part.name + ".scores", part.shape, "uniform", 1 / math.sqrt(self.fan_in))

    def first_mask(self, part: Part) -> np.ndarray:
        """The packed mask of the first scores: what a ticket is before anything was learned."""
        ranked = RULES[self.rule].rank(torch.from_numpy(self.first_scores(part)))
        return pack_mask(keep_largest(ranked, kept_count(self.density, part.size)).numpy())

    @property
    def fan_in(self) -> int:
        return self.shape[0]

    # -- masks -----------------------------------------------------------------------------------

    def _select(self, part: Part, scores: Tensor) -> Tensor:
        count = kept_count(self.density, part.size)
        return self._selectors[part.name].select(scores, count, RULES[self.rule].rank)

    def mask_of(self, part: Part) -> Tensor:
        """The boolean mask of a part, as it stands."""
        if self.learns == "scores":
            return self._select(part, getattr(self, part.prefix + "scores")).clone()
        if self.learns == "ticket":
            packed = self.packed_mask(part)
            return torch.from_numpy(unpack_mask(packed.cpu().numpy(), part.shape)).to(packed.device)
        return torch.ones(part.shape, dtype=torch.bool, device=self.weight.device)

    def packed_mask(self, part: Part) -> Tensor:
        """The stored bits of a part's mask (ticket only)."""
        packed = getattr(self, part.prefix + "mask")
        if packed.is_meta:
            raise RuntimeError(
                f"the mask of {part.name} was offloaded and holds no data: load with offload_buffers=False, "
                "masks are an eighth of a byte per weight"
            )
        return packed

    def is_untrained(self, part: Part) -> bool:
        """Whether a mask is still the one of the first scores, because none was loaded (ticket only)."""
        name = part.prefix + "mask"
        return self._filled.get(name) == _Stamp(getattr(self, name))

    @torch.no_grad()
    def set_masks(self, masks: Mapping[str, np.ndarray]) -> None:
        """Put other masks on parts, by their names (ticket only)."""
        for part in self.parts:
            if part.name in masks:
                mask = masks[part.name]
                if tuple(mask.shape) != part.shape:
                    raise ValueError(f"mask of {part.name} has shape {tuple(mask.shape)}, not {part.shape}")
                self.packed_mask(part).copy_(torch.from_numpy(pack_mask(np.asarray(mask, bool))))
        self.materialise()

    # -- weights ---------------------------------------------------------------------------------

    @torch.no_grad()
    def materialise(self) -> None:
        """Draw the frozen weight into its buffer, times the mask in a ticket, in the buffer's dtype."""
        weight = self.weight
        for part in self.parts:
            drawn = self.frozen_weight(part)
            if self.in_ticket:
                self.weight_digests[part.name] = digest(drawn)
            if self.learns == "ticket":
                drawn *= self.mask_of(part).cpu().numpy()
            weight[:, part.columns].copy_(torch.from_numpy(drawn))
        self._masks.clear()
        self._made_from = self._sources()

    def masked_weight(self) -> Tensor:
        """The weight that this layer computes with, differentiable in its scores."""
        if self.learns == "trained":
            rounds = self.bits != 32 and not self.in_ticket  # a ticket holds rounded values
            return RoundedWeight.apply(self.weight, self.bits) if rounds else self.weight
        traced = torch.compiler.is_compiling()
        if self.learns != "scores":
            if not traced and not self._is_current():
                self.materialise()
            return self.weight
        scores = self._scores()
        if not self._is_eager():
            if not traced and not self._is_current():
                self.materialise()
            masks = [
                traced_mask(RULES[self.rule].rank(one), kept_count(self.density, part.size))
                for part, one in zip(self.parts, scores, strict=True)
            ]
            masked = self.weight * torch.cat(masks, -1)
            if traced and not torch.is_grad_enabled():  # nor does Dynamo trace varargs there
                return masked
        else:
            masked = self._current_masked(scores)
        function = TracedMaskedWeight if traced else MaskedWeight
        return function.apply(masked, self.weight, self.rule, *scores)

    def _scores(self) -> list[Tensor]:
        return [getattr(self, part.prefix + "scores") for part in self.parts]

    def _is_eager(self) -> bool:
        """Whether scores are learned here the usual way; torch.func passes plain tensors for them."""
        learning = self.learns == "scores" and not torch.compiler.is_compiling()
        return learning and all(isinstance(one, nn.Parameter) for one in self._scores())

    def _current_masked(self, scores: list[Tensor]) -> Tensor:
        """weight * mask, made anew only if a mask is no longer the one in it."""
        # Outside inference mode: what is made there could never be saved for a backward.
        with torch.inference_mode(False), torch.no_grad():
            if not self._is_current():
                self.materialise()
            self._filled.clear()  # in use now: first values need not be held, and may be sharded away
            masks = [self._select(part, one) for part, one in zip(self.parts, scores, strict=True)]
            if not self._masks or not all(map(_same, masks, self._masks)):
                # A graph of the last masks may still need them; else their memory serves again, as
                # fresh memory costs more than the product.
                reusable = _alike(self._masked, self.weight) and not _is_shared(self._masked)
                out = self._masked if reusable else None
                self._masks, self._masked = masks, apply_mask(self.weight, masks, out)
            return self._masked.detach()  # another tensor: whoever keeps it counts as an owner of the memory

    @torch.no_grad()
    def resized(self, config: SupermaskGPT2Config, rows: int):
        """This table with other rows: those in both keep what they learned, new ones are drawn."""
        (part,) = self.parts
        new = type(self)(config, part.name, rows)  # type: ignore[arg-type]  # as the two tables below
        new = new.to(self.weight.device, self.weight.dtype)
        both = min(rows, self.shape[0])
        if self.learns == "ticket":
            mask = new.mask_of(new.parts[0])
            mask[:both] = self.mask_of(part)[:both]
            new.set_masks({part.name: mask.cpu().numpy()})
        elif self.learns in ("scores", "trained"):
            name = "scores" if self.learns == "scores" else "weight"
            getattr(new, name)[:both] = getattr(self, name)[:both]
        new._is_hf_initialized = True  # type: ignore[assignment]  # or transformers would draw it again at the next post_init
        return new.train(self.training)

    # -- is it still what it was made from? --------------------------------------------------------

    def _sources(self) -> list[_Stamp]:
        masks = [getattr(self, part.prefix + "mask") for part in self.parts if self.learns == "ticket"]
        return [_Stamp(tensor) for tensor in (self.weight, *masks)]

    def _is_current(self) -> bool:
        return self._sources() == self._made_from

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # At once, not at the next forward: a compiled forward does not look.
        if self.learns == "ticket" and not self.weight.is_meta:
            self.materialise()


class SupermaskLinear(SupermaskLayer):
    """y = x @ (weight * mask), the weight stored (in, out) like GPT-2's Conv1D; no bias."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.masked_weight()

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, {self.shape[1]}, density={self.density}, learns={self.learns}"


class SupermaskEmbedding(SupermaskLayer, nn.Embedding):
    """Rows of a masked random table; also its transpose, so that a tied table is masked once."""

    def __init__(self, config: SupermaskGPT2Config, name: str, rows: int) -> None:
        super().__init__(config, name, (rows, config.n_embd), learns=config.embedding)
        self.num_embeddings, self.embedding_dim = rows, config.n_embd
        self.padding_idx, self.max_norm, self.norm_type = None, None, 2.0
        self.scale_grad_by_freq, self.sparse = False, False

    @property
    def fan_in(self) -> int:
        return self.shape[1]

    def forward(self, input: Tensor, unembed: bool = False) -> Tensor:
        """Rows of the token ids, or with `unembed` the logits of hidden states.

        Both directions go through one forward, so that hooks (offload, sharding) see either use.
        """
        if unembed:
            return _logits(self, input)
        if self._is_eager():
            masked = self._current_masked(self._scores())
            return MaskedRows.apply(input, masked, self.weight, self.rule, *self._scores())
        return F.embedding(input, self.masked_weight())


class SupermaskHead(SupermaskLayer, nn.Linear):
    """Logits from hidden states, the weight stored (out, in) like nn.Linear; no bias."""

    def __init__(self, config: SupermaskGPT2Config, name: str, outputs: int) -> None:
        learns = config.embedding if name == "lm_head" else "masked"
        super().__init__(config, name, (outputs, config.n_embd), learns=learns)
        self.in_features, self.out_features = config.n_embd, outputs
        self.register_parameter("bias", None)

    @property
    def fan_in(self) -> int:
        return self.shape[1]

    def forward(self, input: Tensor) -> Tensor:
        return _logits(self, input)


class TernaryLayer(SupermaskLayer):
    """A ticket's layer of weights -c, 0 and +c, on a CPU: signs in 16 bits, all arithmetic in float32.

        y = (x @ sign) * c              # c of each output; no weight is rounded

    Half the memory to read is what makes it fast. The mask stays, and with it all that a ticket can do.
    """

    def __init__(self, layer: SupermaskLayer) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)
        self._buffers = dict(layer._buffers)
        self.inputs_first = isinstance(layer, SupermaskLinear)
        self.is_table = isinstance(layer, SupermaskEmbedding)
        self.weight = self.weight.new_empty(0)  # its dtype is that of the layer
        self.materialise()

    @staticmethod
    def suits(layer: SupermaskLayer) -> bool:
        """Whether this can be made of a layer."""
        laws = {law for law, _ in layer.laws.values()}
        return layer.learns in ("ticket", "frozen") and laws == {"signed_constant"}

    @torch.no_grad()
    def materialise(self) -> None:
        signs = self.masked_weight().float().sign()  # inputs, outputs; a table and a head the other way
        scales = [abs(self.laws[part.name][1]) for part in self.parts for _ in range(part.shape[1])]
        signs = signs.T.contiguous() if self.inputs_first else signs
        self._scale = torch.tensor(scales if self.inputs_first else scales[:1])
        self._packed = torch.ops.quantized.linear_prepack_fp16(signs, None)
        self._rows = signs.to(torch.int8) if self.is_table else None
        self._made_from = self._sources()

    def masked_weight(self) -> Tensor:
        """weight * mask, drawn again: it is not kept."""
        whole = torch.empty(self.shape, dtype=self.weight.dtype)
        for part in self.parts:
            whole[:, part.columns] = torch.from_numpy(self.frozen_weight(part)) * self.mask_of(part)
        return whole

    def forward(self, input: Tensor, unembed: bool = False) -> Tensor:
        if not self._is_current():
            self.materialise()
        if self._rows is not None and not unembed:
            return (self._rows[input] * self._scale).to(self.weight.dtype)
        product = torch.ops.quantized.linear_dynamic_fp16(input.float(), self._packed)
        return product.mul_(self._scale).to(input.dtype)

    def _apply(self, fn, recurse=True):
        if fn(torch.empty(0)).device.type != "cpu":
            raise RuntimeError("a ternary model runs on a CPU only; move the ticket that it was made from")
        return super()._apply(fn, recurse)

    def resized(self, config: SupermaskGPT2Config, rows: int):
        raise RuntimeError("a ternary table cannot be resized; resize the ticket, then call to_ternary()")


def _logits(layer: SupermaskLayer, hidden: Tensor) -> Tensor:
    if layer._is_eager() and not torch.is_autocast_enabled(hidden.device.type):
        masked = layer._current_masked(layer._scores())
        return MaskedLogits.apply(hidden, masked, layer.weight, layer.rule, *layer._scores())
    return F.linear(hidden, layer.masked_weight())


def _is_shared(tensor: Tensor) -> bool:
    """Whether its memory is also that of another tensor: a view, or what a graph or NumPy holds."""
    fresh = torch.empty(1)
    owners, others = (torch._C._storage_Use_Count(one.untyped_storage()._cdata) for one in (tensor, fresh))
    return owners != others


def _alike(tensor: Tensor, other: Tensor) -> bool:
    return all(getattr(tensor, name) == getattr(other, name) for name in ("shape", "dtype", "device"))


def _same(mask: Tensor, other: Tensor) -> bool:
    return mask is other or (mask.device == other.device and torch.equal(mask, other))


def _parts(name: str, shape: tuple[int, int], widths: dict[str, int] | None) -> Iterator[Part]:
    if widths is None:
        yield Part(name, "", shape, slice(0, shape[1]))
        return
    start = 0
    for label, width in widths.items():
        yield Part(f"{name}.{label}", f"{label}_", (shape[0], width), slice(start, start + width))
        start += width
