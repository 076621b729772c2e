"""The life of a supermask model outside of its forward pass: loaded, saved, made a ticket, merged, resized.

    folder, file or Hub name -> find_mask_file -> read_ticket: arrays, checked -> model -> weights checked

Every ticket takes this one way in, however it is stored and with whatever mask: transformers never reads a
ticket's files itself, it is handed the arrays. What a model of scores needs is transformers' own.
"""

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from .configuration_supermask_gpt2 import MASK_OPTIONS, SupermaskGPT2Config
from .layers import DrawnLayer, SupermaskLayer
from .ticket import (
    ADDED,
    AGAIN,
    CONFIG_FILE,
    MASK_FILE,
    MODEL_FILE,
    Ticket,
    TicketError,
    check_tensors,
    check_weights,
    find_file,
    find_mask_file,
    read_json,
    read_ticket,
    weights_folder,
)

# Methods that do not travel with a ticket: the package puts them in their places.
NEEDS_PACKAGE = (
    "save_pretrained save_ticket push_to_hub to_ticket merge_and_unload to_ternary resize_token_embeddings "
    "mask_arrays from_mask_arrays load_mask set_mask using_mask delete_mask mask_names active_mask "
    "read_fitting_ticket head_view"
).split()
_DOWNLOAD_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class MismatchError(TicketError, RuntimeError):
    """A ticket and the configuration it is to be loaded with do not fit; transformers raises the latter."""


class TicketPreTrainedModel(PreTrainedModel):
    """The part of a supermask model that reads, writes and converts it."""

    config: SupermaskGPT2Config
    config_class: Any = SupermaskGPT2Config
    _keep_in_fp32_modules_strict: Any = None
    _stock_class: ClassVar[type[PreTrainedModel]]
    read_fitting_ticket: ClassVar[Callable[..., Ticket]]
    from_mask_arrays: ClassVar[Any]
    head_view: ClassVar[Any]

    def supermask_layers(self) -> Iterator[tuple[str, Any]]:
        """Every layer of frozen, masked or trained tensors, with its path."""
        return ((path, module) for path, module in self.named_modules() if isinstance(module, SupermaskLayer))

    def post_init(self) -> None:
        super().post_init()
        layers = list(self.supermask_layers())
        for _, layer in layers:
            layer.join([one for _, one in layers])
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

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As in torch; and the frozen weights of a ticket, which tools count and ask for dtype and device."""
        yield from super().parameters(recurse)
        if self.config.state == "ticket":
            for _, layer in self.supermask_layers():
                if isinstance(layer, DrawnLayer):
                    yield nn.Parameter(layer.body, requires_grad=False)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """As in transformers; the weights of a ticket count, though none of them can be trained."""
        if self.config.state != "ticket" or only_trainable:
            return super().num_parameters(only_trainable, exclude_embeddings)
        tables = (nn.Embedding,) if exclude_embeddings else ()
        shapes = [layer.shape for _, layer in self.supermask_layers() if not isinstance(layer, tables)]
        return sum(rows * columns for rows, columns in shapes)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, SupermaskLayer):
            module.reset()
        else:
            super()._init_weights(module)

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
            if "ticket" in (getattr(config, "state", None), _state_of(source, where)):
                cure = f"{MASK_FILE}, or {MODEL_FILE}, is missing or was replaced: copy the folder again"
                raise TicketError(f"{source}: {CONFIG_FILE} is of a ticket, but no masks lie there; {cure}")
            folder = Path(source, kwargs.get("subfolder") or "")
            if folder.is_dir() and (cut := weights_folder(folder)) != folder:
                kwargs |= {"config": config or cls.config_class.from_pretrained(folder), "subfolder": ""}
                source = cut
            return super().from_pretrained(source, *args, **kwargs)
        ticket = read_ticket(path)
        if not isinstance(config, PreTrainedConfig):
            dtype: dict = {name: kwargs.pop(name) for name in ("dtype", "torch_dtype") if name in kwargs}
            facts = cls.config_class.get_config_dict(config)[0] if config else dict(ticket.header.config)
            config, kwargs = cls.config_class.from_dict(facts, return_unused_kwargs=True, **kwargs)
            kwargs |= dtype  # the model's; that of the configuration is the file's
        if mask is not None:
            elsewhere = {**where, "revision": None, "subfolder": None}
            ticket = cls.read_fitting_ticket(mask, ticket.header.config, **elsewhere)
        elif (config.mask_digest or ticket.header.mask_digest) != ticket.header.mask_digest:
            raise MismatchError(f"{path}: not the ticket that the configuration was read from; load it again")
        kwargs = {name: one for name, one in kwargs.items() if name not in (*_DOWNLOAD_OPTIONS, "config")}
        if cls.can_generate() and kwargs.get("generation_config") is None and not os.path.isfile(source):
            beside = find_file(source, GENERATION_CONFIG_NAME, **where)
            kwargs["generation_config"] = read_generation_config(beside) if beside else None
        return cls._from_ticket(ticket, _with_dtype(config), str(source), *args, **kwargs)

    @classmethod
    def _from_ticket(cls, ticket: Ticket, config: SupermaskGPT2Config, name: str, *args, **kwargs):
        header, keys = ticket.header, ticket.header.tensors
        config.state = "ticket"
        told = ADDED | dict(header.config) | {"mask_digest": header.mask_digest}
        for key in MASK_OPTIONS:
            setattr(config, key, told[key])
        try:  # the caller may have given another configuration than the ticket's own
            check_tensors(header, config, sizes=not kwargs.get("ignore_mismatched_sizes"))
        except ValueError as error:
            raise MismatchError(f"{ticket.path}: {error}; load it with its own configuration") from None
        state = {str(keys[one].key): torch.from_numpy(array) for one, array in ticket.arrays.items()}
        loaded = super().from_pretrained(None, *args, config=config, state_dict=state, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.config.name_or_path = model.name_or_path = name
        model._check_against(ticket)
        return loaded

    def _check_against(self, ticket: Ticket) -> None:
        """Raise TicketError unless every weight in this model is the one that the ticket was made with."""
        for _, layer in self.supermask_layers():
            if layer.kind == "trained":
                layer.requires_grad_(False)  # transformers loads every float as trainable
                continue
            for tensor, mask in zip(layer.tensors, layer.data(), strict=True):
                entry = ticket.header.tensors.get(tensor.name)
                if entry is None or entry.shape != tensor.shape:
                    continue  # a new head, or a size that the caller wanted to ignore: transformers warned
                check_weights(ticket.path, tensor.name, entry, layer.weight_digests[tensor.name])
                if mask is not None and not np.array_equal(mask, ticket.arrays[tensor.name]):
                    raise TicketError(f"{ticket.path}: the mask of {tensor.name} was not loaded; see above")


def _missing(name: str) -> Callable:
    def method(*_args, **_kwargs):
        raise ImportError(f"{name} does not travel with a ticket: pip install hf_slt, and import hf_slt")

    return method


for _name in NEEDS_PACKAGE:
    setattr(TicketPreTrainedModel, _name, staticmethod(_missing(_name)))


def read_generation_config(path: Path) -> GenerationConfig:
    """A generation_config.json that may come from a stranger."""
    try:
        return GenerationConfig.from_dict(read_json(path))
    except Exception as error:  # of any kind, as a stranger's file can raise them
        raise TicketError(f"{path}: not to be generated with ({error}); {AGAIN}") from error


def _with_dtype(config: Any) -> Any:
    """A copy that tells a dtype: masks do not, and transformers would take theirs."""
    config = copy.deepcopy(config)
    config.dtype = config.dtype or torch.get_default_dtype()
    return config


def _holds_scores(source: str | os.PathLike, mask_file: Path, where: dict[str, Any]) -> bool:
    """Whether this is of scores, which are there, and config.json says so; the mask is left of a ticket."""
    if mask_file.name != MASK_FILE or os.path.isfile(source) or _state_of(source, where) != "scores":
        return False
    return find_file(source, MODEL_FILE, **where) is not None


def _state_of(source: str | os.PathLike, where: dict[str, Any]) -> Any:
    config = find_file(source, CONFIG_FILE, **where)
    return read_json(config).get("state") if config else None
