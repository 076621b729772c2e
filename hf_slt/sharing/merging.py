"""A ticket as a stock GPT-2: ordinary weights that need no code of ours."""

import copy
import dataclasses
import re
from typing import Any

import torch
from transformers import GPT2Config, PreTrainedModel


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
