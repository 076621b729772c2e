"""Tables with other rows: those in both keep what they have, new ones are drawn like all others."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ..model.layers import StoredLayer, TicketLayer
from ..model.quantisation import BITS
from ..model.ticket import pack_mask, unpack_mask
from .scores import RoundedWeight, ScoresLayer


def resize_token_embeddings(model: Any, rows: int) -> nn.Module:
    """Token table and untied head with `rows` rows; returns the table."""
    if rows != model.config.vocab_size:
        model.config.vocab_size = rows
        for owner, name in ((model.base_model, "wte"), (model, "lm_head")):
            if hasattr(owner, name):  # a tied head is the embedding
                setattr(owner, name, resized(getattr(owner, name), rows))
    return model.get_input_embeddings()


@torch.no_grad()
def resized(layer: Any, rows: int) -> Any:
    """A copy of a table with other rows. In a ticket a new row keeps all of its weights."""
    if layer.shape != tuple(layer.body.shape):
        raise RuntimeError("a ternary table cannot be resized; resize the ticket, then call to_ternary()")
    (tensor,), both = layer.tensors, min(rows, layer.shape[0])
    options: dict[str, Any] = {"bits": layer.bits} if layer.kind == "trained" else {}
    if isinstance(layer, TicketLayer):
        options = {"kind": layer.kind}
    new: Any = type(layer)([replace(tensor, shape=(rows, tensor.shape[1]))], **options)
    new = new.to(layer.body.device, layer.body.dtype).train(layer.training)
    if isinstance(layer, ScoresLayer):
        new.stored()[0][:both] = layer.stored()[0][:both]
    elif isinstance(layer, TicketLayer) and layer.kind == "masked":
        mask = unpack_mask(layer.packed_mask(tensor).cpu().numpy(), tensor.shape)[:rows]
        more = np.ones((rows - both, tensor.shape[1]), bool)
        new.mask.copy_(torch.from_numpy(pack_mask(np.concatenate([mask, more]))))
        new.materialise()
    elif layer.kind == "trained":
        new.body[:both] = layer.body[:both]
        if isinstance(layer, StoredLayer) and layer.bits in BITS:  # a ticket's are rounded, the new ones too
            new.body.copy_(RoundedWeight.apply(new.body, layer.bits))
    return new
