"""Supermask GPT-2: GPT-2's computation with layers that are drawn from a seed and masked.

    block(x) = h + mlp(ln_2(h)),  h = x + attention(ln_1(x))         # as GPT-2; no biases, and
                                                                     # LayerNorm without gain and shift
The attention is GPT-2's, with query/key and value widths of their own:

    softmax(q k^T / sqrt(n_qk)) v,   [q, k, v] = x @ c_attn,   heads * (2 n_qk + n_v) columns

One class serves training (`config.state == "scores"`) and inference (`"ticket"`); see `layers.py`.
"""

import contextlib
import copy
import dataclasses
import importlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    GenerationMixin,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.dynamic_module_utils import custom_object_save
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_supermask_gpt2 import SupermaskGPT2Config
from .cross_entropy import causal_lm_loss
from .entropy import decode_masks  # noqa: F401  older transformers copy to their cache only what is named here
from .files import staged
from .layers import Part, SupermaskEmbedding, SupermaskHead, SupermaskLayer, SupermaskLinear, TernaryLayer
from .masking import RULES  # noqa: F401  likewise
from .named_masks import NamedMasks, check_backbone, find_mask, find_or_raise
from .quantisation import BITS  # noqa: F401  likewise
from .random_weights import digest
from .ticket import (
    CONFIG_FILE,
    ENCODINGS,
    MASK_FILE,
    METADATA_KEY,
    MODEL_FILE,
    WEIGHT_FILES,
    Entry,
    Header,
    TicketError,
    check_config,
    check_weights,
    count_bits,
    mask_digest,
    pack_mask,
    read_arrays,
    write_masks,
)

logger = logging.get_logger(__name__)

_AUTO_MAP = {
    "AutoConfig": "configuration_supermask_gpt2.SupermaskGPT2Config",
    "AutoModel": "modeling_supermask_gpt2.SupermaskGPT2Model",
    "AutoModelForCausalLM": "modeling_supermask_gpt2.SupermaskGPT2LMHeadModel",
    "AutoModelForSequenceClassification": "modeling_supermask_gpt2.SupermaskGPT2ForSequenceClassification",
}
_HEADS = ("lm_head", "score")  # may be absent from a ticket that was trained with another head
_DOWNLOAD_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
_HUB_OPTIONS = ("repo_id", "commit_message", "private", "token", "revision", "create_pr")


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,  # batch, heads, queries, n_qk
    key: Tensor,  # batch, heads, keys, n_qk
    value: Tensor,  # batch, heads, keys, n_v
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, Tensor]:
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
        self.qk_width, self.v_width = config.qk_width, config.v_width
        qk, v = config.n_head * self.qk_width, config.n_head * self.v_width
        self.widths = {"query": qk, "key": qk, "value": v}
        self.scaling = self.qk_width**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scaling /= layer_idx + 1
        name = f"h.{layer_idx}.attn"
        self.c_attn = SupermaskLinear(config, f"{name}.c_attn", (config.n_embd, 2 * qk + v), self.widths)
        self.c_proj = SupermaskLinear(config, f"{name}.c_proj", (v, config.n_embd))
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
            for part in self.c_attn(hidden_states).split(list(self.widths.values()), dim=-1)
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        mixed, shares = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        mixed = mixed.flatten(-2).contiguous()  # batch, length, heads * n_v
        return self.resid_dropout(self.c_proj(mixed)), shares


class SupermaskGPT2MLP(nn.Module):
    def __init__(self, config: SupermaskGPT2Config, layer_idx: int) -> None:
        super().__init__()
        width, name = config.mlp_width, f"h.{layer_idx}.mlp"
        self.c_fc = SupermaskLinear(config, f"{name}.c_fc", (config.n_embd, width))
        self.c_proj = SupermaskLinear(config, f"{name}.c_proj", (width, config.n_embd))
        self.act = ACT2FN[config.activation_function]
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(hidden_states))))


class SupermaskGPT2Block(GradientCheckpointingLayer):
    def __init__(self, config: SupermaskGPT2Config, layer_idx: int) -> None:
        super().__init__()
        self.ln_1 = _layer_norm(config)
        self.attn = SupermaskGPT2Attention(config, layer_idx)
        self.ln_2 = _layer_norm(config)
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


def _layer_norm(config: SupermaskGPT2Config) -> nn.Module:
    if not config.layer_norm:
        return nn.Identity()
    return nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, elementwise_affine=False)


class SupermaskGPT2PreTrainedModel(NamedMasks, PreTrainedModel):
    """Loading, saving and turning into stock GPT-2; what all supermask GPT-2 models share."""

    config: SupermaskGPT2Config
    config_class = SupermaskGPT2Config
    _stock_class: ClassVar[type[PreTrainedModel]]
    base_model_prefix = "transformer"
    input_modalities = "text"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SupermaskGPT2Block"]
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
        if config.state == "scores":  # 16 bits would tie them
            self._keep_in_fp32_modules_strict = {"scores", "query_scores", "key_scores", "value_scores"}

    def post_init(self) -> None:
        super().post_init()
        # Every process draws the same weights; DDP would send them round before each forward.
        self._ddp_params_and_buffers_to_ignore = [
            f"{path}.weight" for path, layer in self._layers() if layer.learns != "trained"
        ]

    # transformers asks the first parameter; a ticket has none, and scores are float32 in any model.
    @property
    def dtype(self) -> torch.dtype:
        return next(layer.weight.dtype for _, layer in self._layers())

    @property
    def device(self) -> torch.device:
        return next(layer.weight.device for _, layer in self._layers())

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, SupermaskLayer):
            module.reset()
        else:
            super()._init_weights(module)

    def _layers(self) -> Iterator[tuple[str, SupermaskLayer]]:
        return ((path, module) for path, module in self.named_modules() if isinstance(module, SupermaskLayer))

    def _parts(self) -> Iterator[tuple[str, SupermaskLayer, Part]]:
        return ((path, layer, part) for path, layer in self._layers() for part in layer.parts)

    # -- masks -----------------------------------------------------------------------------------

    def masks(self) -> dict[str, np.ndarray]:
        """Every mask by tensor name, as boolean arrays."""
        return {
            part.name: layer.mask_of(part).cpu().numpy()
            for _, layer, part in self._parts()
            if layer.learns in ("scores", "ticket")
        }

    @classmethod
    def from_masks(cls, config: SupermaskGPT2Config, masks: Mapping[str, np.ndarray], **kwargs):
        """A ticket, in memory, of these masks by tensor name; all that the configuration has are needed."""
        config = copy.deepcopy(config)
        config.state, config.mask_digest = "ticket", None
        model = cls(config, **kwargs).eval()
        layers = [layer for _, layer in model._layers() if layer.learns == "ticket"]
        names = {part.name for layer in layers for part in layer.parts}
        if names != masks.keys():
            missing, unknown = sorted(names - masks.keys()), sorted(masks.keys() - names)
            raise ValueError(f"no mask for {missing}" if missing else f"the configuration has no {unknown}")
        for layer in layers:
            layer.set_masks(masks)
        return model

    def to_ticket(self):
        """This model as a ticket, in memory: masks in place of scores."""
        ticket = self.from_masks(self.config, self.masks())
        with torch.no_grad():
            for path, layer in self._layers():
                if layer.learns == "trained":
                    ticket.get_parameter(f"{path}.weight").copy_(layer.masked_weight())
        return ticket.to(self.device, self.dtype)

    def to_ternary(self):
        """A ticket that computes with the signs of its weights: faster token by token on a CPU.

        For weights drawn as plus or minus a constant (`law="signed_constant"`); layers of another law or
        with trained values stay as they are. What it does is float32 arithmetic with exact weights, so logits
        differ from the ticket's by rounding only. It can be saved like any ticket, and loads as one.
        """
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            raise RuntimeError("to_ternary needs a torch with fbgemm, which builds for x86 have")
        ticket = self.to_ticket()
        suited = [(path, layer) for path, layer in ticket._layers() if TernaryLayer.suits(layer)]
        if not suited:
            raise ValueError(
                f"no weights here are ternary: law {self.config.law!r}, not 'signed_constant', drew them; "
                "use the ticket as it is"
            )
        for path, layer in suited:
            ticket.set_submodule(path, TernaryLayer(layer))
        return ticket

    def regenerate(self) -> None:
        """Draw every frozen weight again in the present dtype: undoes what a cast to 16 bits lost."""
        for _, layer in self._layers():
            if layer.learns != "trained":
                layer.materialise()

    # -- saving ----------------------------------------------------------------------------------

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        push_to_hub: bool = False,
        **kwargs,
    ) -> None:
        """As in transformers, but atomic: the scores to go on from, or the ticket if this is one.

        A ticket is one file, whatever `max_shard_size`: it is small.
        """
        hub = {name: kwargs.pop(name) for name in _HUB_OPTIONS if name in kwargs}
        if self.config.state == "ticket":
            if is_main_process:
                self._save_masks(save_directory, MODEL_FILE)
        else:
            self.config.auto_map = dict(_AUTO_MAP)
            with staged(save_directory, keep=is_main_process, stale=WEIGHT_FILES) as stage:
                super().save_pretrained(stage, is_main_process=is_main_process, **kwargs)
        if push_to_hub and is_main_process:
            self.push_to_hub(hub.pop("repo_id", Path(save_directory).name), **hub)

    def save_ticket(self, save_directory: str | os.PathLike, *, encoding: str = "packed") -> Header:
        """Write config, masks and the code that loads them; no weight is inside.

        encoding: `"packed"`, one bit a weight, or `"entropy"`, smaller where the density is not a half.
        What else is in the folder (tokenizer, card) stays; weights of an earlier save are removed.
        """
        return self._save_masks(save_directory, MASK_FILE, encoding)

    def _save_masks(
        self, save_directory: str | os.PathLike, file_name: str, encoding: str = "packed"
    ) -> Header:
        if encoding not in ENCODINGS:
            raise ValueError(f"encoding {encoding!r} is not one of {', '.join(map(repr, ENCODINGS))}")
        entries, arrays = self._entries()
        config, header = self._describe(entries, encoding)
        # config.json comes last: a cut before it leaves a digest that does not match, never a wrong model
        with staged(save_directory, stale=WEIGHT_FILES) as stage:
            write_masks(stage, header, arrays, file_name)
            config.save_pretrained(stage)
            if self.can_generate():
                self.generation_config.save_pretrained(stage)
            custom_object_save(self, stage)
        return header

    def header(self) -> Header:
        """What a ticket of this model says of itself: seed, laws, what is kept, digests, configuration."""
        return self._describe(self._entries()[0])[1]

    def _describe(
        self, entries: dict[str, Entry], encoding: str = "packed"
    ) -> tuple[SupermaskGPT2Config, Header]:
        config = copy.deepcopy(self.config)
        config.state, config.mask_digest = "ticket", mask_digest(entries)
        config.architectures = [type(self).__name__]
        config.dtype = str(self.dtype).removeprefix("torch.")
        config.auto_map = dict(_AUTO_MAP)
        header = Header(
            seed=config.seed,
            density=config.density,
            rule=config.rule,
            encoding=encoding,
            mask_digest=config.mask_digest,
            config=json.loads(config.to_json_string()),
            tensors=entries,
        )
        return config, header

    def _entries(self) -> tuple[dict[str, Entry], dict[str, np.ndarray]]:
        """Description of every tensor, and the arrays to store by key of the state dict."""
        entries, arrays = {}, {}
        for path, layer, part in self._parts():
            law, scale = layer.laws[part.name]
            if layer.learns == "trained":
                key = f"{path}.weight"
                arrays[key] = layer.masked_weight().detach().float().cpu().numpy()
                entries[part.name] = Entry(part.shape, key, bits=layer.bits, data_sha256=digest(arrays[key]))
                continue
            drawn = layer.weight_digests.get(part.name) or digest(layer.frozen_weight(part))
            entry = Entry(part.shape, None, law, scale, weight_sha256=drawn)
            if layer.learns != "frozen":
                key = f"{path}.{part.prefix}mask"
                if layer.learns == "ticket":
                    arrays[key] = layer.packed_mask(part).cpu().numpy()
                else:
                    arrays[key] = pack_mask(layer.mask_of(part).cpu().numpy())
                entry = dataclasses.replace(
                    entry, key=key, kept=count_bits(arrays[key]), data_sha256=digest(arrays[key])
                )
            entries[part.name] = entry
        return entries, arrays

    def ledger(self) -> dict[str, int]:
        """Bytes of everything in the ticket that follows from neither seed nor mask, by tensor name.

        Empty for a model of masks only; the stored values where embeddings are trained.
        """
        entries = self._entries()[0]
        return {name: entry.value_bytes for name, entry in entries.items() if entry.trained}

    def push_to_hub(self, repo_id: str, *, encoding: str = "packed", **kwargs) -> str:
        """As in transformers; of a ticket the mask file, config, code, tokenizer and card are uploaded.

        encoding: how the masks are stored, see `save_ticket`.
        Tokenizer, card and figures are taken from the folder that the ticket was loaded from, if it holds
        them; a card that is not there is written.
        """
        if self.config.state != "ticket":
            return super().push_to_hub(repo_id, **kwargs)  # type: ignore[arg-type]
        try:
            hub = importlib.import_module("hf_slt.sharing.hub")
        except ImportError:  # this code came from the Hub by itself
            raise ImportError("a ticket is pushed with its card: pip install hf_slt") from None
        with tempfile.TemporaryDirectory() as folder:
            header = self.save_ticket(folder, encoding=encoding)
            hub.copy_companions(self.name_or_path, folder, header)
            return hub.push_ticket(folder, repo_id, encoding=encoding, **kwargs)

    # -- loading ---------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, mask=None, **kwargs):
        """As in transformers; a ticket is checked in full, and a fault in it raises `TicketError`.

        mask: a mask file, ticket folder or Hub name of the same backbone, to be used in place of its own.
        """
        source, config = pretrained_model_name_or_path, kwargs.get("config")
        if isinstance(config, PreTrainedConfig) and config.dtype is None and config.state == "ticket":
            kwargs.setdefault("dtype", torch.get_default_dtype())  # a file of masks does not tell it
        if source is None or kwargs.get("state_dict") is not None:
            return super().from_pretrained(source, *args, **kwargs)
        where = {name: kwargs[name] for name in _DOWNLOAD_OPTIONS if kwargs.get(name) is not None}
        path, header = find_mask(source, where)
        if mask is not None:
            if header is None:
                raise TicketError(f"{source}: not a ticket; mask= puts another mask on one")
            _check_config_beside(path, header)
            own = header
            path, header = find_or_raise(mask, {**where, "revision": None, "subfolder": ""})
            check_backbone(path, own, header)
        if header is not None and (mask is not None or header.coded):
            if not isinstance(config, PreTrainedConfig):
                config, kwargs = cls.config_class.from_pretrained(
                    config or source, return_unused_kwargs=True, **kwargs
                )
            kwargs |= {**where, "config": config}  # the configuration's loader has used them up
            if mask is not None or config.state == "ticket":  # else scores, beside a ticket pushed before
                return cls._from_arrays(source, path, header, *args, **kwargs)
        try:
            loaded = super().from_pretrained(source, *args, **kwargs)
        except (OSError, RuntimeError, ValueError, KeyError, SafetensorError):
            if header is not None:  # is it the ticket's fault? then say so by name
                read_arrays(path, header)
                _check_config_beside(path, header)
            raise
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if model.config.state == "ticket":
            if header is not None:
                model._check_loaded(path, header, bool(kwargs.get("ignore_mismatched_sizes")))
            else:
                model._check_without_header(source)
        return loaded

    @classmethod
    def from_mask(cls, source: str | os.PathLike, **kwargs):
        """A ticket from its mask file alone: the metadata of the file rebuild the model.

        source: a mask file, or the folder or Hub name that holds one; no config.json is read.
        kwargs: as in `from_pretrained`.
        """
        where = {name: kwargs[name] for name in _DOWNLOAD_OPTIONS if kwargs.get(name) is not None}
        path, header = find_or_raise(source, where)
        kwargs.setdefault("config", cls.config_class.from_dict(dict(header.config)))
        return cls._from_arrays(source, path, header, **kwargs)

    @classmethod
    def _from_arrays(cls, source: str | os.PathLike, path: str, header: Header, *args, **kwargs):
        """Load what transformers cannot read by itself: coded masks, or those of another file."""
        arrays = read_arrays(path, header)
        state = {str(header.tensors[name].key): torch.from_numpy(array) for name, array in arrays.items()}
        config = kwargs["config"] = copy.deepcopy(kwargs["config"])
        config.density, config.rule, config.mask_digest = header.density, header.rule, header.mask_digest
        where = {name: kwargs.pop(name) for name in _DOWNLOAD_OPTIONS if name in kwargs}
        if cls.can_generate() and kwargs.get("generation_config") is None:
            with contextlib.suppress(OSError):  # there is none: the one of the configuration stands
                kwargs["generation_config"] = GenerationConfig.from_pretrained(source, **where)
        loaded = super().from_pretrained(None, *args, state_dict=state, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.config.name_or_path = model.name_or_path = str(source)
        if model.config.state == "ticket":
            model._check_loaded(path, header, bool(kwargs.get("ignore_mismatched_sizes")))
        return loaded

    def _check_without_header(self, source: str | os.PathLike) -> None:
        """Some masks of a file that does not describe itself is an error, none of them a warning."""
        untrained = {
            part.name: layer.is_untrained(part)
            for _, layer, part in self._parts()
            if layer.learns == "ticket" and part.name not in _HEADS
        }
        if all(untrained.values()):
            logger.warning(f"{source}: no mask was found; the model is an untrained ticket")
            return
        missing = next((name for name, fresh in untrained.items() if fresh), f"the {METADATA_KEY!r} metadata")
        raise TicketError(f"{source}: {missing} is missing; the mask file is incomplete or was rewritten")

    def _check_loaded(self, path: str, header: Header, ignore_mismatched_sizes: bool) -> None:
        """Raise TicketError unless every weight in this model is the one that the ticket was made with."""
        arrays = read_arrays(path, header)
        _check_config_beside(path, header)
        for _, layer, part in self._parts():
            entry = header.tensors.get(part.name)
            if entry is None:
                if part.name in _HEADS:
                    continue  # a new head on a trained ticket: transformers has warned of it
                raise TicketError(f"{path}: no mask for {part.name}; it belongs to a smaller model")
            if entry.shape != part.shape:
                if ignore_mismatched_sizes:
                    continue
                raise TicketError(
                    f"{path}: {part.name} has shape {entry.shape}, the model wants {part.shape}"
                )
            if layer.learns == "trained":
                layer.weight.requires_grad_(False)  # transformers loads every float as trainable
                continue
            if (entry.law, entry.scale) != layer.laws[part.name]:
                raise TicketError(
                    f"{path}: {part.name} was drawn by law and scale {entry.law, entry.scale}, the "
                    f"configuration says {layer.laws[part.name]}"
                )
            check_weights(path, part.name, entry, layer.weight_digests[part.name])
            if layer.learns == "ticket" and not np.array_equal(
                layer.packed_mask(part).cpu(), arrays[part.name]
            ):
                raise TicketError(
                    f"{path}: the mask of {part.name} was not loaded; see the load report above"
                )

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Module:
        """As in transformers, except that new rows are drawn like all others: a mean row has no seed."""
        rows = new_num_tokens if new_num_tokens is not None else self.config.vocab_size
        if pad_to_multiple_of is not None:
            rows = -(-rows // pad_to_multiple_of) * pad_to_multiple_of
        if rows != self.config.vocab_size:
            self.config.vocab_size = rows
            tables: list[tuple[nn.Module, str]] = [(self.base_model, "wte"), (self, "lm_head")]
            for owner, name in tables:
                if hasattr(owner, name):  # a tied head is the embedding
                    setattr(owner, name, getattr(owner, name).resized(self.config, rows))
        return self.get_input_embeddings()

    # -- out of the library ----------------------------------------------------------------------

    def merge_and_unload(self) -> PreTrainedModel:
        """A stock GPT-2 with the masked weights: the same logits, no code of ours, ordinary size."""
        config = self.config
        if not config.layer_norm:
            raise ValueError(
                "stock GPT-2 always has LayerNorm; a model with layer_norm=False cannot be merged"
            )
        width = config.n_embd / config.n_head
        if not config.qk_width == config.v_width == width:
            raise ValueError(
                f"stock GPT-2 has heads of n_embd / n_head = {width:g}; n_qk {config.qk_width} and n_v "
                f"{config.v_width} cannot be merged"
            )
        names = {field.name for field in dataclasses.fields(GPT2Config)} - {"architectures"}
        stock_config = GPT2Config(**{name: getattr(config, name) for name in names})
        with torch.device("meta"):
            stock = self._stock_class(stock_config)
        weights = {f"{path}.weight": layer.masked_weight().detach().clone() for path, layer in self._layers()}
        for name, meta in stock.state_dict().items():
            if name not in weights:  # biases, and LayerNorm's gain
                value = 1.0 if re.search(r"ln_\w+\.weight$", name) else 0.0
                weights[name] = torch.full(meta.shape, value, dtype=self.dtype, device=self.device)
        if config.tie_word_embeddings and "lm_head.weight" in weights:
            weights["lm_head.weight"] = weights["transformer.wte.weight"]
        stock.load_state_dict(weights, assign=True)
        stock.tie_weights()
        stock.set_attn_implementation(config._attn_implementation)
        stock.train(self.training)
        if self.can_generate():
            stock.generation_config = copy.deepcopy(self.generation_config)
        return stock


def _check_config_beside(path: str, header: Header) -> None:
    """Check the config.json of a mask file's folder, as stored: a caller may override some of it."""
    if (config := Path(path).with_name(CONFIG_FILE)).is_file():
        check_config(path, header, json.loads(config.read_text()))


class SupermaskGPT2Model(SupermaskGPT2PreTrainedModel):
    """The bare transformer: token ids to hidden states."""

    _stock_class = GPT2Model

    def __init__(self, config: SupermaskGPT2Config) -> None:
        super().__init__(config)
        self.wte: nn.Module = SupermaskEmbedding(config, "wte", config.vocab_size)
        self.wpe = SupermaskEmbedding(config, "wpe", config.n_positions)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList([SupermaskGPT2Block(config, index) for index in range(config.n_layer)])
        self.ln_f = _layer_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.wte = value

    @merge_with_config_defaults
    @capture_outputs
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
        if inputs_embeds is None:
            if input_ids is None:
                raise ValueError("give input_ids or inputs_embeds")
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
            inputs_embeds = self.wte(input_ids)
        elif input_ids is not None:
            raise ValueError("give input_ids or inputs_embeds, not both")
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
            hidden_states = block(
                hidden_states,
                past_key_values if not (self.gradient_checkpointing and self.training) else None,
                causal_mask,
                position_ids=position_ids,
                **kwargs,
            )
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
        if not config.tie_word_embeddings:
            self.lm_head = SupermaskHead(config, "lm_head", config.vocab_size)
        # By family, as the class name does not tell: else Trainer scales the loss by (length - 1) / length.
        self.loss_type = "ForCausalLM"
        self.loss_function = causal_lm_loss  # that very loss, in less time and memory
        self.post_init()

    @can_return_tuple
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
        hidden_states = outputs.last_hidden_state[:, kept, :]
        if self.config.tie_word_embeddings:
            logits = self.transformer.wte(hidden_states, unembed=True)
        else:
            logits = self.lm_head(hidden_states)
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
        self.score = SupermaskHead(config, "score", self.num_labels)
        self.post_init()
