"""Tables with other rows: those in both keep what they have.

New rows of masked and frozen tables are drawn like all others, for a mean has no seed. New rows of trained
ones are the mean of the old, as in transformers, or drawn too.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ..model.codes import full_codes, pack_codes
from ..model.layers import LowRankEmbedding, StoredLayer, TicketLayer
from ..model.quantisation import BITS
from ..model.ticket import SLTError
from ..sharing.mask_algebra import code_array
from .scores import RoundedWeight, ScoresLayer


def resize_token_embeddings(
    model: Any,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """As in transformers; returns the table.

    mean_resizing: new rows of trained tables are the mean of the others; else they are drawn, as where
    learning starts. (transformers adds a little noise to the mean; here a resize can be repeated.)
    """
    multiple = pad_to_multiple_of or 1
    rows = -(-(new_num_tokens or model.config.vocab_size) // multiple) * multiple
    if rows != model.config.vocab_size:
        model.config.vocab_size = rows
        for owner, name in ((model.base_model, "wte"), (model, "lm_head")):
            if getattr(owner, name, None) is not None:  # a tied head is the embedding
                setattr(owner, name, resized(getattr(owner, name), rows, mean_resizing))
        if getattr(model, "head_bias", None) is not None:
            model.head_bias = _lengthened(model.head_bias, rows)
        layers = [layer for _, layer in model.supermask_layers()]
        for layer in layers:
            layer.join(layers)
    return model.get_input_embeddings()


@torch.no_grad()
def resized(layer: Any, rows: int, mean: bool = False) -> Any:
    """A copy of a table with other rows. In a ticket a new row keeps all of its weights."""
    if isinstance(layer, LowRankEmbedding):
        return LowRankEmbedding(resized(layer.rows, rows, mean), layer.basis)
    if layer.shape != tuple(layer.body.shape):
        raise RuntimeError("a ternary table cannot be resized; resize the ticket, then call to_ternary()")
    (tensor,), both = layer.tensors, min(rows, layer.shape[0])
    if tensor.search < 1 and layer.kind == "masked":
        raise SLTError(f"{tensor.name}: which weights are searched depends on its rows; it cannot be resized")
    options: dict[str, Any] = {"bits": layer.bits} if layer.kind == "trained" else {}
    if isinstance(layer, TicketLayer):
        options = {"kind": layer.kind}
    new: Any = type(layer)([replace(tensor, shape=(rows, tensor.shape[1]))], **options)
    for name in layer.scale_names:
        scale = getattr(layer, name)
        new.add_module(name, scale if scale.shape[1] == 1 else _lengthened(scale, rows))
        new.scale_names.append(name)
    new = new.to(layer.body.device, layer.body.dtype).train(layer.training)
    if isinstance(layer, ScoresLayer):
        new.stored()[0][:both] = layer.stored()[0][:both]
    elif isinstance(layer, TicketLayer) and layer.kind == "masked":
        codes = code_array(tensor, layer.packed_mask(tensor).cpu().numpy()).astype(np.uint8)[:rows]
        more = code_array(new.tensors[0], full_codes(new.tensors[0]))[both:]
        packed = pack_codes(np.concatenate([codes, more]), len(tensor.factors))
        new.mask.copy_(torch.from_numpy(packed))
        new.materialise()
    elif layer.kind == "trained":
        if mean:
            new.body[:] = layer.body.float().mean(0)
        new.body[:both] = layer.body[:both]
        if isinstance(layer, StoredLayer) and layer.bits in BITS:  # a ticket's are rounded, the new ones too
            new.body.copy_(RoundedWeight.apply(new.body, layer.bits))
    return new


@torch.no_grad()
def _lengthened(vector: Any, size: int) -> Any:
    """A copy of a vector with another length; new entries are where learning starts."""
    (tensor,), both = vector.tensors, min(size, vector.shape[1])
    new = type(vector)([replace(tensor, shape=(1, size))], bits=vector.bits)
    new = new.to(vector.body.device, vector.body.dtype)
    new.body[:, :both] = vector.body[:, :both]
    return new
