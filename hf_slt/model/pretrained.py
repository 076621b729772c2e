"""The life of a supermask model outside of its forward pass: loaded, saved, made a ticket, merged, resized.

    folder, file or Hub name -> find_mask_file -> read_ticket: arrays, checked -> model -> weights checked

Every ticket takes this one way in, however it is stored and with whatever mask: transformers never reads a
ticket's files itself, it is handed the arrays. What a model of scores needs is transformers' own.
"""

import contextlib
import copy
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, GPT2Config, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from .configuration_supermask_gpt2 import HEADS, SupermaskGPT2Config
from .files import staged
from .layers import DrawnLayer, SupermaskLayer, TernaryLayer, TicketLayer
from .named_masks import read_fitting_ticket
from .ticket import (
    CONFIG_FILE,
    ENCODINGS,
    MASK_FILE,
    MODEL_FILE,
    WEIGHT_FILES,
    Header,
    Ticket,
    TicketError,
    check_weights,
    find_file,
    find_mask_file,
    mask_digest,
    pack_mask,
    read_json,
    read_ticket,
    unpack_mask,
    write_masks,
)

_AUTO_MAP = {
    "AutoConfig": "configuration_supermask_gpt2.SupermaskGPT2Config",
    "AutoModel": "modeling_supermask_gpt2.SupermaskGPT2Model",
    "AutoModelForCausalLM": "modeling_supermask_gpt2.SupermaskGPT2LMHeadModel",
    "AutoModelForSequenceClassification": "modeling_supermask_gpt2.SupermaskGPT2ForSequenceClassification",
}
_DOWNLOAD_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
_HUB_OPTIONS = ("repo_id", "commit_message", "private", "token", "revision", "create_pr")


class TicketMixin:
    """The part of a supermask model that reads, writes and converts it."""

    config: SupermaskGPT2Config
    _stock_class: ClassVar[type[PreTrainedModel]]
    _push_ticket: ClassVar[Callable[..., str] | None] = None  # the package puts `sharing` here

    # -- what transformers asks ------------------------------------------------------------------

    def supermask_layers(self) -> Iterator[tuple[str, SupermaskLayer]]:
        """Every layer of frozen, masked or trained tensors, with its path."""
        return ((path, module) for path, module in self.named_modules() if isinstance(module, SupermaskLayer))

    def post_init(self) -> None:
        super().post_init()
        layers = list(self.supermask_layers())
        # Every process draws the same weights; DDP would send them round before each forward.
        self._ddp_params_and_buffers_to_ignore = [
            f"{path}.{layer.body_name}" for path, layer in layers if isinstance(layer, DrawnLayer)
        ]
        self._keep_in_fp32_modules_strict |= {name for _, layer in layers for name in layer.in_float32}

    # transformers asks the first parameter; a ticket has none, and scores are float32 in any model.
    @property
    def dtype(self) -> torch.dtype:
        return next(layer.body.dtype for _, layer in self.supermask_layers())

    @property
    def device(self) -> torch.device:
        return next(layer.body.device for _, layer in self.supermask_layers())

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, SupermaskLayer):
            module.reset()
        else:
            super()._init_weights(module)

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
                    setattr(owner, name, getattr(owner, name).resized(rows))
        return self.get_input_embeddings()

    # -- in memory -------------------------------------------------------------------------------

    def mask_arrays(self) -> dict[str, np.ndarray]:
        """Every mask by tensor name, as boolean arrays."""
        header, arrays = self._describe()
        return {name: unpack_mask(arrays[name], entry.shape) for name, entry in header.masked().items()}

    @classmethod
    def from_mask_arrays(cls, config: SupermaskGPT2Config, masks: Mapping[str, np.ndarray], **kwargs):
        """A ticket, in memory, of these masks by tensor name; all that the configuration has are needed."""
        config = copy.deepcopy(config)
        config.state, config.mask_digest = "ticket", None
        model = cls(config, **kwargs).eval()
        layers = [layer for _, layer in model.supermask_layers() if layer.is_masked]
        names = {tensor.name for layer in layers for tensor in layer.tensors}
        if names != masks.keys():
            missing, unknown = sorted(names - masks.keys()), sorted(masks.keys() - names)
            raise ValueError(f"no mask for {missing}" if missing else f"the configuration has no {unknown}")
        with torch.no_grad():
            for layer in layers:
                for tensor in layer.tensors:
                    if (shape := masks[tensor.name].shape) != tensor.shape:
                        raise ValueError(f"the mask of {tensor.name} has shape {shape}, not {tensor.shape}")
                    layer.packed_mask(tensor).copy_(torch.from_numpy(pack_mask(masks[tensor.name])))
                layer.materialise()
        return model

    def to_ticket(self):
        """This model as a ticket, in memory: masks in place of scores."""
        header, arrays = self._describe()
        config = copy.deepcopy(self.config)
        config.state, config.mask_digest = "ticket", None
        with torch.device("meta"):
            ticket = type(self)(config)
        state = {str(header.tensors[name].key): torch.tensor(array) for name, array in arrays.items()}
        ticket.load_state_dict(state, assign=True)
        for _, layer in ticket.supermask_layers():
            layer._is_hf_initialized = True  # else transformers would make its masks anew
        if self.can_generate():
            ticket.generation_config = copy.deepcopy(self.generation_config)
        return ticket.to(self.device, self.dtype).eval()

    def to_ternary(self):
        """A ticket that computes with the signs of its weights: faster token by token on a CPU.

        For weights drawn as plus or minus a constant (`law="signed_constant"`); layers of another law or
        with trained values stay as they are. What it does is float32 arithmetic with exact weights, so logits
        differ from the ticket's by rounding only. It can be saved like any ticket, and loads as one.
        """
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            raise RuntimeError("to_ternary needs a torch with fbgemm, which builds for x86 have")
        ticket = self.to_ticket()
        suited = [(path, layer) for path, layer in ticket.supermask_layers() if TernaryLayer.suits(layer)]
        if not suited:
            raise ValueError(
                f"no weights here are ternary: law {self.config.law!r}, not 'signed_constant', drew them; "
                "use the ticket as it is"
            )
        for path, layer in suited:
            ticket.set_submodule(path, TernaryLayer(layer))
        return ticket

    def redraw_weights(self) -> None:
        """Draw every frozen weight again in the present dtype: undoes what a cast to 16 bits lost."""
        for _, layer in self.supermask_layers():
            if isinstance(layer, DrawnLayer):
                layer.materialise()

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
        with torch.device("meta"):
            stock = self._stock_class(GPT2Config(**{name: getattr(config, name) for name in names}))
        weights = {
            f"{path}.weight": layer.masked_weight().detach().clone()
            for path, layer in self.supermask_layers()
        }
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

    # -- out -------------------------------------------------------------------------------------

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
        header, arrays = self._describe(encoding)
        # config.json comes last: a cut before it leaves a digest that does not match, never a wrong model
        with staged(save_directory, stale=WEIGHT_FILES) as stage:
            write_masks(stage, header, arrays, file_name)
            self.config_class.from_dict(dict(header.config)).save_pretrained(stage)
            if self.can_generate():
                self.generation_config.save_pretrained(stage)
            custom_object_save(self, stage)
        return header

    def ticket_header(self) -> Header:
        """What a ticket of this model says of itself: seed, laws, what is kept, digests, configuration."""
        return self._describe()[0]

    def _describe(self, encoding: str = "packed") -> tuple[Header, dict[str, np.ndarray]]:
        """The header of a ticket of this model, and the arrays to store by tensor name."""
        found = [entry for path, layer in self.supermask_layers() for entry in layer.entries(path)]
        entries = {name: entry for name, entry, _ in found}
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
        return header, {name: array for name, _, array in found if array is not None}

    def push_to_hub(self, repo_id: str, **kwargs) -> str:
        """As in transformers; of a ticket the mask file, config, code, tokenizer and card are uploaded.

        encoding: how the masks are stored, see `save_ticket`.
        Tokenizer, card and figures are taken from the folder that the ticket was loaded from, if it holds
        them; a card that is not there is written.
        """
        if self.config.state != "ticket":
            return super().push_to_hub(repo_id, **kwargs)
        if self._push_ticket is None:  # this code came from the Hub by itself
            raise ImportError("a ticket is pushed with its card: pip install hf_slt, and import hf_slt first")
        return self._push_ticket(repo_id, **kwargs)

    # -- in --------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, mask=None, **kwargs):
        """As in transformers; a ticket is checked in full, and a fault in it raises `TicketError`.

        pretrained_model_name_or_path: also a mask file by itself, whose header rebuilds the model.
        mask: a mask file, ticket folder or Hub name of the same backbone, to be used in place of its own.
        """
        source, config = pretrained_model_name_or_path, kwargs.get("config")
        if source is None or kwargs.get("state_dict") is not None:
            if isinstance(config, PreTrainedConfig):
                kwargs["config"] = _with_dtype(config)
            return super().from_pretrained(source, *args, **kwargs)
        where = {name: kwargs[name] for name in _DOWNLOAD_OPTIONS if kwargs.get(name) is not None}
        path = find_mask_file(source, **where)
        if path is None or _holds_scores(source, path, where):
            if mask is not None:
                raise TicketError(f"{source}: not a ticket; mask= puts another mask on one")
            loaded = super().from_pretrained(source, *args, **kwargs)
            if (loaded[0] if isinstance(loaded, tuple) else loaded).config.state == "ticket":
                raise TicketError(
                    f"{source}: {CONFIG_FILE} is of a ticket, but no masks lie beside it; {MASK_FILE}, or "
                    f"{MODEL_FILE} as hf_slt writes it, is missing or was replaced: copy the folder again"
                )
            return loaded
        ticket = read_ticket(path)
        if os.path.isfile(source) and config is None:
            config = cls.config_class.from_dict(dict(ticket.header.config))
        elif not isinstance(config, PreTrainedConfig):
            dtype = {name: kwargs.pop(name) for name in ("dtype", "torch_dtype") if name in kwargs}
            config, kwargs = cls.config_class.from_pretrained(
                config or source, return_unused_kwargs=True, **kwargs
            )
            kwargs |= dtype  # the model's; that of the configuration is the file's
        if mask is not None:
            ticket = read_fitting_ticket(mask, ticket.header, **{**where, "revision": None, "subfolder": None})
        for name in (*_DOWNLOAD_OPTIONS, "config"):
            kwargs.pop(name, None)
        if cls.can_generate() and kwargs.get("generation_config") is None:
            with contextlib.suppress(OSError):  # there is none: the one of the configuration stands
                kwargs["generation_config"] = GenerationConfig.from_pretrained(source, **where)
        return cls._from_ticket(ticket, _with_dtype(config), str(source), *args, **kwargs)

    @classmethod
    def _from_ticket(cls, ticket: Ticket, config: PreTrainedConfig, name: str, *args, **kwargs):
        header, keys = ticket.header, ticket.header.tensors
        config.state, config.density, config.rule = "ticket", header.density, header.rule
        config.mask_digest = header.mask_digest
        state = {str(keys[one].key): torch.from_numpy(array) for one, array in ticket.arrays.items()}
        loaded = super().from_pretrained(None, *args, config=config, state_dict=state, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.config.name_or_path = model.name_or_path = name
        model._check_against(ticket, bool(kwargs.get("ignore_mismatched_sizes")))
        return loaded

    def _check_against(self, ticket: Ticket, ignore_mismatched_sizes: bool) -> None:
        """Raise TicketError unless every weight in this model is the one that the ticket was made with.

        The file is checked by now; but a caller may have given another configuration than its own.
        """
        path = ticket.path
        for layer, tensor in ((layer, tensor) for _, layer in self.supermask_layers() for tensor in layer.tensors):
            entry, name = ticket.header.tensors.get(tensor.name), tensor.name
            if entry is None:
                if name in HEADS:
                    continue  # a new head on a trained ticket: transformers has warned of it
                raise TicketError(f"{path}: no mask for {name}; it belongs to a smaller model")
            if entry.shape != tensor.shape:
                if ignore_mismatched_sizes:
                    continue
                raise TicketError(f"{path}: {name} has shape {entry.shape}, the model wants {tensor.shape}")
            if not isinstance(layer, TicketLayer):  # trained values
                layer.requires_grad_(False)  # transformers loads every float as trainable
                continue
            if (entry.law, entry.scale) != (tensor.law, tensor.scale):
                raise TicketError(
                    f"{path}: {name} was drawn by law and scale {entry.law, entry.scale}, the configuration "
                    f"says {tensor.law, tensor.scale}"
                )
            check_weights(path, name, entry, layer.weight_digests[name])
            if layer.is_masked and not np.array_equal(layer.packed_mask(tensor).cpu(), ticket.arrays[name]):
                raise TicketError(f"{path}: the mask of {name} was not loaded; see the load report above")


def _with_dtype(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy that tells a dtype: masks do not, and transformers would take theirs."""
    config = copy.deepcopy(config)
    config.dtype = config.dtype or torch.get_default_dtype()
    return config


def _holds_scores(source: str | os.PathLike, mask_file: Path, where: dict[str, Any]) -> bool:
    """Whether a folder or a name is of scores, with the mask of an earlier ticket left in it.

    Its configuration must say so and its scores must be there: else it is an altered ticket.
    """
    if mask_file.name != MASK_FILE or os.path.isfile(source):
        return False
    config = find_file(source, CONFIG_FILE, **where)
    says_so = config is not None and read_json(config).get("state") == "scores"
    return says_so and find_file(source, MODEL_FILE, **where) is not None
