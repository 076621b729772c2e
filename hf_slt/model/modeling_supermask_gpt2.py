"""Supermask GPT-2: GPT-2's computation with layers that are drawn from a seed and masked.

    block(x) = h + mlp(ln_2(h)),  h = x + attention(ln_1(x))         # as GPT-2; no biases, and
                                                                     # LayerNorm without gain and shift
The attention is GPT-2's, with query/key and value widths of their own:

    softmax(q k^T / sqrt(n_qk)) v,   [q, k, v] = x @ c_attn,   heads * (2 n_qk + n_v) columns

Here is the forward pass and nothing else. Saving, loading and merging are in `pretrained.py`; what a layer
is, in a ticket (`config.state == "ticket"`) or while it learns (`"scores"`), is in `layers.py`.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, GPT2ForSequenceClassification, GPT2LMHeadModel, GPT2Model
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_supermask_gpt2 import SupermaskGPT2Config
from .layers import FORWARDS, LOSSES, LowRankEmbedding, SupermaskLayer, make_layer
from .pretrained import TicketPreTrainedModel
from .quantisation import BITS  # noqa: F401  older transformers copy to their cache only what is named here
from .random_weights import draw  # noqa: F401  likewise
from .ticket import TicketError  # noqa: F401  likewise


def build_layer(config: SupermaskGPT2Config, use: str, *names: str) -> SupermaskLayer:
    """The layer of these tensors as the configuration wants it: learned or of a ticket."""
    tensors, scales = ([config.tensor(one) for one in some] for some in (names, config.scale_names(*names)))
    bits = config.bits_of(scales[0].name if scales else names[0])
    return make_layer(config.state, config.kind_of(names[0]), use, tensors, bits, scales)


def sharing(forward: Callable) -> Callable:
    """A forward within which layers share what they can: a tied table that learns is masked once."""

    @wraps(forward)
    def shared(self, *args, **kwargs):
        with FORWARDS.get(self.config.state, nullcontext)():
            return forward(self, *args, **kwargs)

    return shared


def eager_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float, dropout: float = 0.0, **kwargs,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Query, key and value are (batch, heads, length, width of theirs)."""
    logits = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        logits = logits + attention_mask
    shares = nn.functional.softmax(logits, dim=-1).to(value.dtype)
    shares = nn.functional.dropout(shares, p=dropout, training=module.training)
    return (shares @ value).transpose(1, 2), shares


class SupermaskGPT2Attention(nn.Module):
    def __init__(self, config: SupermaskGPT2Config, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = True
        self.scaling = config.qk_width**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scaling /= layer_idx + 1
        parts = [f"h.{layer_idx}.attn.c_attn.{part}" for part in ("query", "key", "value")]
        self.widths = [config.shape_of(part)[1] for part in parts]
        self.c_attn = build_layer(config, "linear", *parts)
        self.c_proj = build_layer(config, "linear", f"h.{layer_idx}.attn.c_proj")
        self.dropout = config.attn_pdrop
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(
        self,
        hidden_states: Tensor,  # batch, length, n_embd
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = (
            part.unflatten(-1, (self.config.n_head, -1)).transpose(1, 2)
            for part in self.c_attn(hidden_states).split(self.widths, dim=-1)
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        options = {"dropout": self.dropout if self.training else 0.0, "scaling": self.scaling, **kwargs}
        mixed, shares = attend(self, query, key, value, attention_mask, **options)
        mixed = mixed.flatten(-2).contiguous()  # batch, length, heads * n_v
        return self.resid_dropout(self.c_proj(mixed)), shares


class SupermaskGPT2MLP(nn.Module):
    def __init__(self, config: SupermaskGPT2Config, layer_idx: int) -> None:
        super().__init__()
        self.c_fc = build_layer(config, "linear", f"h.{layer_idx}.mlp.c_fc")
        self.c_proj = build_layer(config, "linear", f"h.{layer_idx}.mlp.c_proj")
        self.act = ACT2FN[config.activation_function]
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(hidden_states))))


class SupermaskGPT2Block(GradientCheckpointingLayer):
    def __init__(self, config: SupermaskGPT2Config, layer_idx: int) -> None:
        super().__init__()
        self.ln_1 = _layer_norm(config, f"h.{layer_idx}.ln_1")
        self.attn = SupermaskGPT2Attention(config, layer_idx)
        self.ln_2 = _layer_norm(config, f"h.{layer_idx}.ln_2")
        self.mlp = SupermaskGPT2MLP(config, layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs,
    ) -> Tensor:
        attended, _ = self.attn(self.ln_1(hidden_states), past_key_values, attention_mask, **kwargs)
        hidden_states = attended + hidden_states
        return hidden_states + self.mlp(self.ln_2(hidden_states))


def _layer_norm(config: SupermaskGPT2Config, name: str) -> nn.Module:
    if not config.layer_norm:
        return nn.Identity()
    norm = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, elementwise_affine=False)
    if config.layer_norm != "trained":
        return norm
    return nn.Sequential(OrderedDict(norm=norm, gain=build_layer(config, "vector", name)))


class SupermaskGPT2PreTrainedModel(TicketPreTrainedModel):
    """What all supermask GPT-2 models share: what transformers should know of them."""

    base_model_prefix = "transformer"
    input_modalities = "text"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SupermaskGPT2Block"]
    _input_embed_layer = "wte"
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": SupermaskGPT2Block,
        "attentions": OutputRecorder(SupermaskGPT2Attention, layer_name=".attn", index=1),
    }

    def __init__(self, config: SupermaskGPT2Config, *args, **kwargs) -> None:
        if config.qk_width != config.v_width:
            self._supports_flash_attn = False  # its kernels take one head width
        super().__init__(config, *args, **kwargs)


class SupermaskGPT2Model(SupermaskGPT2PreTrainedModel):
    """The bare transformer: token ids to hidden states."""

    _stock_class = GPT2Model

    def __init__(self, config: SupermaskGPT2Config) -> None:
        super().__init__(config)
        self.wte: Any = build_layer(config, "embedding", "wte.rows" if config.embedding_rank else "wte")
        if config.embedding_rank:
            self.wte = LowRankEmbedding(self.wte, build_layer(config, "linear", "wte.basis"))
        self.wpe = build_layer(config, "embedding", "wpe")
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList([SupermaskGPT2Block(config, index) for index in range(config.n_layer)])
        self.ln_f = _layer_norm(config, "ln_f")
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @sharing
    def forward(
        self,
        input_ids: Tensor | None = None,  # batch, length
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,  # batch, length, n_embd
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of them")
        if inputs_embeds is None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
            inputs_embeds = self.wte(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past
            position_ids = position_ids.unsqueeze(0)
        causal_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        hidden_states = inputs_embeds + self.wpe(position_ids).to(inputs_embeds.device)
        if token_type_ids is not None:
            hidden_states = hidden_states + self.wte(token_type_ids)
        hidden_states = self.drop(hidden_states)
        for block in self.h:
            cache = None if self.gradient_checkpointing and self.training else past_key_values
            hidden_states = block(hidden_states, cache, causal_mask, position_ids=position_ids, **kwargs)
        return BaseModelOutputWithPast(
            last_hidden_state=self.ln_f(hidden_states),
            past_key_values=past_key_values if use_cache else None,
        )


class SupermaskGPT2LMHeadModel(SupermaskGPT2PreTrainedModel, GenerationMixin):
    """The language model. A tied head is the token embedding itself, masked once for both uses."""

    _stock_class = GPT2LMHeadModel

    def __init__(self, config: SupermaskGPT2Config) -> None:
        super().__init__(config)
        self.transformer = SupermaskGPT2Model(config)
        self.lm_head: Any = None if config.tie_word_embeddings else build_layer(config, "head", "lm_head")
        self.head_bias = build_layer(config, "vector", "head_bias") if config.head_bias else None
        # By family, as the class name does not tell: else Trainer scales the loss by (length - 1) / length.
        self.loss_type = "ForCausalLM"
        if loss := LOSSES.get(config.state):
            self.loss_function = loss  # that very loss, in less time and memory
        self.post_init()

    def get_output_embeddings(self) -> nn.Module | None:
        if self.lm_head is not None and self.head_bias is None:
            return self.lm_head
        return self.head_view(self.lm_head or self._table(), self.head_bias)

    def _table(self) -> Any:
        """The tied table without an adapter, which is for lookups only, as in stock GPT-2."""
        return getattr(self.transformer.wte, "base_layer", self.transformer.wte)

    @can_return_tuple
    @sharing
    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,  # batch, length; shifted inside, -100 is ignored
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        outputs = self.transformer(
            input_ids,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = outputs.last_hidden_state[:, kept, :]
        logits = self.lm_head(hidden) if self.lm_head else self._table()(hidden, unembed=True)
        if self.head_bias is not None:
            logits = logits + self.head_bias.masked_weight()[0]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class SupermaskGPT2ForSequenceClassification(GenericForSequenceClassification, SupermaskGPT2PreTrainedModel):
    """Classification by the last token that is not padding; the head is masked too."""

    base_model_prefix = "transformer"
    _stock_class = GPT2ForSequenceClassification

    def __init__(self, config: SupermaskGPT2Config) -> None:
        SupermaskGPT2PreTrainedModel.__init__(self, config)  # only the forward is the generic one
        self.num_labels = config.num_labels or 2
        self.transformer = SupermaskGPT2Model(config)
        self.score: Any = build_layer(config, "head", "score")
        self.post_init()
