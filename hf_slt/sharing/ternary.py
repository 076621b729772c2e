"""A ticket for a CPU: weights that are only -c, 0 and +c, computed with by their signs."""

from typing import Any

import torch
from torch import Tensor, nn

from ..model.layers import SupermaskLayer, TicketLayer


def to_ternary(model: Any) -> Any:
    """A ticket that computes with the signs of its weights: faster token by token on a CPU.

    For weights drawn as plus or minus a constant (`law="signed_constant"`); layers of another law or
    with trained values stay as they are. What it does is float32 arithmetic with exact weights, so logits
    differ from the ticket's by rounding only. It can be saved like any ticket, and loads as one.
    """
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise RuntimeError("to_ternary needs a torch with fbgemm, which builds for x86 have")
    ticket = model.to_ticket()
    suited = [(path, layer) for path, layer in ticket.supermask_layers() if TernaryLayer.suits(layer)]
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
