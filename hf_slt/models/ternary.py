"""A ticket that computes with the signs of its weights: faster token by token on a CPU.

    y = (x @ sign) * c              # one c per output, with its learned scale; no weight is rounded

It is fast because only half as much memory is read.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..masks.plans import MaskedPlan
from .base import MixinBase


class TernaryMixin(MixinBase):
    """Adds the method that makes a ticket ternary."""

    config: Any

    @property
    def is_ternary(self) -> bool:
        """Whether `to_ternary` returned this model."""
        return any(isinstance(module, TernaryLayer) for module in self.modules())

    def to_ternary(self) -> Any:
        """Return a ticket that computes with the signs of its weights.

        This works for weights drawn as plus or minus a constant (`law="signed_constant"`). Layers of another law or
        with trained values stay as they are. The arithmetic is float32 with exact weights, so logits differ from the
        ticket's only by rounding. The model can be saved like any ticket, and loads as one.

        Returns:
            The model. It runs on a CPU only.

        Raises:
            `RuntimeError`: if torch has no fbgemm, which builds for x86 have.
            `ValueError`: if no weight is ternary.

        Example:

        ```python
        fast = AutoModelForCausalLM.from_pretrained("ticket").to_ternary()
        fast.generate(**prompt)
        ```
        """
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            raise RuntimeError("to_ternary needs a torch with fbgemm, which builds for x86 have")
        model: Any = self
        ticket = model.to_ticket() if self.config.state == "scores" else copy.deepcopy(model)
        tied = {id(ticket.get_input_embeddings()), id(ticket.get_output_embeddings())}
        is_tied = bool(getattr(ticket, "all_tied_weights_keys", None))
        suited = []
        for path, module in list(ticket.named_modules()):
            plan = module.__dict__.get("parameter_plans", {}).get("weight")
            if isinstance(plan, MaskedPlan) and _is_ternary(plan):
                suited.append((path, module, plan))
            elif is_tied and id(module) in tied and _is_ternary(_table_plan(ticket)):
                suited.append((path, module, _table_plan(ticket)))
        if not suited:
            raise ValueError(
                f"no weights here are ternary: law {self.config.law!r} drew them, and the mask has factors "
                f"{self.config.factors}; law signed_constant and factors -1, 0 and 1 are needed"
            )
        for path, module, plan in suited:
            ticket.set_submodule(path, TernaryLayer(module, plan))
        ticket._tied_weights_keys = {}
        ticket.all_tied_weights_keys = {}
        return ticket


def _table_plan(ticket: Any) -> Any:
    return ticket.get_input_embeddings().__dict__.get("parameter_plans", {}).get("weight")


def _is_ternary(plan: Any) -> bool:
    return (
        isinstance(plan, MaskedPlan)
        and {tensor.law for tensor in plan.tensors} == {"signed_constant"}
        and {-1.0, 0.0, 1.0}.issuperset(plan.tensors[0].factors)
    )


class TernaryLayer(nn.Module):
    """A layer of weights -c, 0 and +c on a CPU: signs in 16 bits, all arithmetic in float32.

    Args:
        module (`nn.Module`):
            The layer of a ticket: an embedding, a linear layer or a `Conv1D`.
        plan ([`MaskedPlan`]):
            How its weight is made.
    """

    size: Tensor  # magnitude of the weights of each output; zero where nothing is kept
    bias: Tensor | None

    def __init__(self, module: nn.Module, plan: MaskedPlan) -> None:
        super().__init__()
        self.parameter_plans = module.__dict__.get("parameter_plans", {})
        self.is_table = isinstance(module, nn.Embedding)
        weight: Any = module.weight
        self.outputs_first, self.compute_dtype = plan.tensors[0].input_axes == (1,), weight.dtype
        bias: Any = getattr(module, "bias", None)
        self.register_buffer("bias", None if bias is None else bias.detach().clone(), persistent=False)
        if self.is_table:
            self.num_embeddings, self.embedding_dim = weight.shape
        self.set_weight(weight)

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Compute with the signs of another weight of the same shape.

        Args:
            weight (`Tensor`):
                Dense weights -c, 0 and +c, c for each output.
        """
        rows = weight.detach().float() if self.outputs_first else weight.detach().float().T.contiguous()
        signs = rows.sign()  # outputs, inputs
        self.register_buffer("size", rows.abs().amax(1), persistent=False)
        self._signs = signs.to(torch.int8) if self.is_table else None
        self._packed = None if self.is_table else torch.ops.quantized.linear_prepack_fp16(signs, None)

    @property
    def weight(self) -> Tensor:
        """The dense weight, computed when it is read."""
        if self._signs is not None:
            rows = self._signs.float()
        else:
            rows = torch.ops.quantized.linear_unpack_fp16(self._packed)[0].float()
        dense = (rows * self.size[:, None]).to(self.compute_dtype)
        return dense if self.outputs_first else dense.T

    def forward(self, input: Tensor) -> Tensor:
        if self._signs is not None:
            return (self._signs[input] * self.size[input].unsqueeze(-1)).to(self.compute_dtype)
        product = torch.ops.quantized.linear_dynamic_fp16(input.float(), self._packed).mul_(self.size)
        product = product if self.bias is None else product + self.bias
        return product.to(input.dtype)

    def _apply(self, fn, recurse=True):
        probe = fn(torch.empty(0))
        if probe.device.type != "cpu":
            raise RuntimeError("a ternary model runs on a CPU only; move the ticket that it was made from")
        if probe.is_floating_point():
            self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return self  # sizes stay in float32
