"""A model in other forms: stock GPT-2, which needs no code of ours; ternary, for a CPU; its head alone."""

import copy
import dataclasses
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, PreTrainedModel

from ..model.layers import LowRankEmbedding, SupermaskLayer, TicketLayer, Vector


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
    if config.head_bias:
        raise ValueError(
            "stock GPT-2 has no bias of its logits; a model with head_bias=True cannot be merged"
        )
    names = {field.name for field in dataclasses.fields(GPT2Config)} - {"architectures"}
    with torch.device("meta"):
        stock = model._stock_class(GPT2Config(**{name: getattr(config, name) for name in names}))
    # A rule may train on other weights than it ends with, and a ticket has the latter.
    ended = model.to_ticket() if model.training and config.state == "scores" else model
    layers = dict(ended.supermask_layers())
    weights = {
        f"{path}.weight": layer.masked_weight().detach().clone()
        for path, layer in layers.items()
        if not isinstance(layer, Vector)  # scales are in the weights already
    }
    for path, table in ended.named_modules():
        if isinstance(table, LowRankEmbedding):
            del weights[f"{path}.rows.weight"], weights[f"{path}.basis.weight"]
            weights[f"{path}.weight"] = table.weight.detach()
    for path, layer in layers.items():
        if path.endswith(".gain"):
            weights[path.removesuffix("gain") + "weight"] = layer.masked_weight()[0].detach().clone()
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
        if isinstance(layer, TicketLayer)
        and not path.endswith(".basis")  # of a table, which needs its transpose too
        and {one.law for one in layer.tensors} == {"signed_constant"}
        and {-1.0, 0.0, 1.0}.issuperset(layer.tensors[0].factors)
    ]
    if not suited:
        raise ValueError(
            f"no weights here are ternary: law {model.config.law!r} drew them, and the mask has factors "
            f"{model.config.factors}; law signed_constant and factors -1, 0 and 1 are needed"
        )
    for path, layer in suited:
        ticket.set_submodule(path, TernaryLayer(layer))
    return ticket


class TernaryLayer(TicketLayer):
    """A ticket's layer of weights -c, 0 and +c, on a CPU: signs in 16 bits, all arithmetic in float32.

        y = (x @ sign) * c              # c of each output, with its learned scale; no weight is rounded

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
        for name in layer.scale_names:
            self.add_module(name, getattr(layer, name))
            self.scale_names.append(name)
        self.materialise()

    @torch.no_grad()
    def materialise(self) -> None:
        signs = self.masked_weight().float().sign()
        outputs = self.shape[1 if self.inputs_first else 0]
        signs = signs.T.contiguous() if self.inputs_first else signs  # outputs, inputs
        widths = [tensor.shape[1] if self.inputs_first else outputs for tensor in self.tensors]
        sizes = [
            torch.full((width,), abs(one.scale)) for one, width in zip(self.tensors, widths, strict=True)
        ]
        scale = self.output_scale()
        self._scale = torch.cat(sizes) * (1 if scale is None else scale.float().abs().flatten())
        self._packed = torch.ops.quantized.linear_prepack_fp16(signs, None)
        self._rows = signs.to(torch.int8) if self.is_table else None
        self._made_from = self._sources()

    def masked_weight(self) -> Tensor:
        """weight * mask * scale, drawn again: it is not kept."""
        weight = torch.cat([torch.from_numpy(self.masked_part(tensor)) for tensor in self.tensors], 1)
        scale = self.output_scale()
        return (weight if scale is None else weight * scale.float()).to(self.weight.dtype)

    def forward(self, input: Tensor, unembed: bool = False) -> Tensor:
        self._make_current()
        if self._rows is not None and not unembed:
            return (self._rows[input] * self._scale[input].unsqueeze(-1)).to(self.weight.dtype)
        product = torch.ops.quantized.linear_dynamic_fp16(input.float(), self._packed)
        return product.mul_(self._scale).to(input.dtype)

    def _apply(self, fn, recurse=True):
        if fn(torch.empty(0)).device.type != "cpu":
            raise RuntimeError("a ternary model runs on a CPU only; move the ticket that it was made from")
        return super()._apply(fn, recurse)


class HeadView(nn.Linear):
    """A tied table, or a head, with its bias, as the linear layer that tools look for; it owns nothing."""

    def __init__(self, table: Any, bias: Any) -> None:
        nn.Module.__init__(self)
        is_table = isinstance(table, nn.Embedding)
        self.out_features = table.num_embeddings if is_table else table.out_features
        self.in_features = table.embedding_dim if is_table else table.in_features
        self._owned = (table, bias)  # a tuple hides them: they are modules of the model

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        table = self._owned[0]
        return table.masked_weight() if isinstance(table, SupermaskLayer) else table.weight

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        return None if self._owned[1] is None else self._owned[1].masked_weight()[0]
