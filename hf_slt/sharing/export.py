"""A ticket in other forms: stock GPT-2, which needs no code of ours; and ternary, for a CPU."""

import copy
import dataclasses
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, PreTrainedModel

from ..model.layers import SupermaskLayer, TicketLayer


def merge_and_unload(model: Any) -> PreTrainedModel:
    """A stock GPT-2 with the masked weights: the same logits, no code of ours, ordinary size."""
    config = model.config
    if not config.layer_norm:
        raise ValueError("stock GPT-2 always has LayerNorm; a model with layer_norm=False cannot be merged")
    width = config.n_embd / config.n_head
    if not config.qk_width == config.v_width == width:
        raise ValueError(
            f"stock GPT-2 has heads of n_embd / n_head = {width:g}; n_qk {config.qk_width} and n_v "
            f"{config.v_width} cannot be merged"
        )
    names = {field.name for field in dataclasses.fields(GPT2Config)} - {"architectures"}
    with torch.device("meta"):
        stock = model._stock_class(GPT2Config(**{name: getattr(config, name) for name in names}))
    weights = {
        f"{path}.weight": layer.masked_weight().detach().clone() for path, layer in model.supermask_layers()
    }
    for name, meta in stock.state_dict().items():
        if name not in weights:  # biases, and LayerNorm's gain
            value = 1.0 if re.search(r"ln_\w+\.weight$", name) else 0.0
            weights[name] = torch.full(meta.shape, value, dtype=model.dtype, device=model.device)
    if config.tie_word_embeddings and "lm_head.weight" in weights:
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
    stock.load_state_dict(weights, assign=True)
    stock.tie_weights()
    stock.set_attn_implementation(config._attn_implementation)
    stock.train(model.training)
    if model.can_generate():
        stock.generation_config = copy.deepcopy(model.generation_config)
    return stock


def to_ternary(model: Any) -> Any:
    """A ticket that computes with the signs of its weights: faster token by token on a CPU.

    For weights drawn as plus or minus a constant (`law="signed_constant"`); layers of another law or
    with trained values stay as they are. What it does is float32 arithmetic with exact weights, so logits
    differ from the ticket's by rounding only. It can be saved like any ticket, and loads as one.
    """
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise RuntimeError("to_ternary needs a torch with fbgemm, which builds for x86 have")
    ticket = model.to_ticket()
    suited = [
        (path, layer)
        for path, layer in ticket.supermask_layers()
        if isinstance(layer, TicketLayer) and {one.law for one in layer.tensors} == {"signed_constant"}
    ]
    if not suited:
        raise ValueError(
            f"no weights here are ternary: law {model.config.law!r}, not 'signed_constant', drew them; "
            "use the ticket as it is"
        )
    for path, layer in suited:
        ticket.set_submodule(path, TernaryLayer(layer))
    return ticket


class TernaryLayer(TicketLayer):
    """A ticket's layer of weights -c, 0 and +c, on a CPU: signs in 16 bits, all arithmetic in float32.

        y = (x @ sign) * c              # c of each output; no weight is rounded

    Half the memory to read is what makes it fast. The masks stay, and with them all that a ticket can do.
    """

    def __init__(self, layer: TicketLayer) -> None:
        SupermaskLayer.__init__(self, layer.tensors)
        self.kind, self.inputs_first = layer.kind, layer.inputs_first
        self.is_table = isinstance(layer, nn.Embedding)
        self.weight_digests = layer.weight_digests
        self.register_buffer("weight", layer.weight.new_empty(0), persistent=False)  # tells the dtype
        for tensor, mask in zip(self.tensors, layer.stored(), strict=False):
            self.register_buffer(self.attribute(tensor, "mask"), mask)
        self.materialise()

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
