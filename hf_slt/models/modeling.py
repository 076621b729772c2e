"""What every supermask model adds to its stock class: learning masks, tickets, loading, saving, merging.

A supermask model is a stock model of transformers in one of two states, `config.state`:

    "scores"    it learns: its weights are computed from frozen numbers and scores (hf_slt/masks)
    "ticket"    it is fixed: its weights are ordinary frozen parameters, filled from a seed and stored masks

In both states the forward is that of the stock model. A ticket also keeps its stored masks, in `ticket_arrays`, for
saving it again and for switching to another mask.

Loading a ticket:

    folder, file or Hub name -> find_mask_file -> read_ticket: arrays, checked -> dense weights, each drawn tensor
    compared with its digest -> transformers' own `from_pretrained(state_dict=...)`
"""

import copy
import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import GENERATION_CONFIG_NAME, logging

from ..errors import MismatchError, SLTError, TicketError
from ..masks.cache import fixed_masks
from ..masks.kept import KeptWeights
from ..masks.modules import (
    MaskedModule,
    attach_plan,
    install_plans,
    parameter_plans,
    stock_initialisation,
)
from ..masks.plans import ParameterPlan, StoredTensor, TiedPlan
from ..sharing.card import CARD_FILE, FIGURES
from ..sharing.hub import TOKENIZER_FILES, push_ticket
from ..tickets.backbones import read_fitting_ticket
from ..tickets.entries import Entry
from ..tickets.files import copy_own_file, read_unchanged, staged
from ..tickets.format import (
    CONFIG_FILE,
    MASK_FILE,
    MODEL_FILE,
    VERSION_KEY,
    Header,
    Ticket,
    check_weights,
    find_file,
    find_mask_file,
    mask_digest,
    read_header,
    read_json,
    read_ticket,
    weights_folder,
)
from ..tickets.migrations import DIGITS, NESTED, nested_config
from ..tickets.verify import mask_path
from ..tickets.writing import check_encoding, sealed, write_masks
from ..weights.codes import Observer, code_array, count_codes, full_codes, pack_codes, planes
from ..weights.quantisation import as_stored
from ..weights.random_weights import TensorSpec, digest
from ..weights.threads import map_in_threads
from .backbone import Backbone
from .checks import check_tensors, read_generation_config
from .configuration import MASK_OPTIONS
from .loss import explain_missing_gradient
from .named_masks import NamedMasksMixin
from .remote_code import add_remote_code, auto_map
from .resizing import ResizingMixin
from .ternary import TernaryLayer, TernaryMixin

_DOWNLOAD_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
_WRAPPED = (
    "base_layer",
    "original_module",
    "token_adapter",
)  # attributes of PEFT modules: the wrapped module
_DIGESTS = ("mask_digest", "digest")
_HUB_OPTIONS = ("repo_id", "commit_message", "private", "token", "revision", "create_pr")


class SupermaskMixin(NamedMasksMixin, ResizingMixin, TernaryMixin):
    """Goes before a stock class of transformers and makes it a supermask model.

    ```python
    class SupermaskGPT2LMHeadModel(SupermaskMixin, GPT2LMHeadModel): ...
    ```
    """

    stock_class: ClassVar[type[PreTrainedModel]]
    renamed_parameters: ClassVar[
        Mapping[str, str]
    ] = {}  # pattern of the older name of a learned tensor -> its present name
    config: Any
    config_class: Any
    _keep_in_fp32_modules_strict: Any
    ticket_arrays: dict[str, np.ndarray]  # tickets only: packed codes and trained values, by tensor name

    # -- building the model

    def post_init(self) -> None:
        """Turn the stock model that was just built into one that learns, or into a ticket."""
        self.adapt_structure()
        for _, module in self.named_modules():
            supermask = self.supermask_class_of(type(module))
            if supermask is not None:  # a model within this one, such as the decoder of a language model
                # The constructor of the base class makes the class known to transformers' capture of outputs.
                PreTrainedModel.__init__(supermask.__new__(supermask), self.config)
                module.__class__ = supermask
        if "ticket_arrays" not in self.__dict__:
            self._share_arrays({})
        plans = self.make_plans()
        if self.is_ticket:
            self.attach_plans(plans)
            if not any(parameter.is_meta for parameter in self.parameters()):
                self.fill_parameters()
            self.requires_grad_(False)
            self.register_forward_hook(explain_missing_gradient)
        elif any(plans.values()) and not self._has_plans():
            for _, model in self._inner_models():
                model._tied_weights_keys = {}  # a tied head reads the computed embedding
            install_plans(self, plans)
        self._mark_initialised()
        super().post_init()
        self.describe_parameters()

    def adapt_structure(self) -> None:
        """Change modules of the stock model if options of the configuration say so."""

    @classmethod
    def supermask_class_of(cls, stock_class: type) -> Any:
        """Return the supermask class of a stock model within this one; None for any other module.

        Args:
            stock_class (`type`):
                Class of a module.

        Returns:
            The class, or None.
        """
        return None

    def make_plans(self) -> dict[str, ParameterPlan]:
        """Return how each parameter is made, by its path. The configuration decides this.

        Returns:
            `dict[str, ParameterPlan]`: plans by the path of the parameter.
        """
        model: Any = self
        if not any(hasattr(module, "base_layer") for module in model.modules()):
            return self.config.plans_of(self)
        with torch.device("meta"):  # PEFT has renamed the parameters of this one
            empty: Any = type(self)(self.config)
        found = {f"{path}.{name}": plan for path, _, name, plan in parameter_plans(empty)}
        return {path: plan for path, plan in found.items() if not isinstance(plan, TiedPlan)}

    def attach_plans(self, plans: Mapping[str, ParameterPlan]) -> None:
        """Store in the modules of a ticket how their parameters are made.

        Args:
            plans (`Mapping[str, ParameterPlan]`):
                Plans by the path of the parameter.
        """
        for path, plan in plans.items():
            owner, _, name = path.rpartition(".")
            attach_plan(self._stock_module(owner), name, plan)

    def _stock_module(self, path: str) -> nn.Module:
        """Return the stock module at a path, also if an adapter of PEFT wraps it."""
        module: Any = self
        for part in path.split(".") if path else ():
            module = getattr(module, part)
            while inner := next((one for one in _WRAPPED if hasattr(module, one)), None):
                module = getattr(module, inner)
        return module

    @torch.no_grad()
    def fill_parameters(self, changed: Collection[str] | None = None) -> None:
        """Put the weights of a ticket into its parameters: drawn from the seed, times the stored masks.

        Args:
            changed (`Collection[str]`, *optional*):
                Names of the tensors that have changed. Default: all.

        Raises:
            [`SLTError`]: if a parameter is offloaded.
        """

        @torch.no_grad()  # needed here: every thread has its own setting
        def fill(one: tuple[str, nn.Module, str, ParameterPlan]) -> None:
            path, module, name, plan = one
            names = {one.tensor.name for one in plan.stored_tensors()}
            if changed is not None and names.isdisjoint(changed):
                return
            dense = plan.dense(self.ticket_arrays)
            if dense is None:
                return
            if isinstance(module, TernaryLayer):
                module.set_weight(dense)
                return
            parameter: Any = getattr(module, name)
            if parameter.is_meta:
                raise SLTError(
                    f"{path}.{name} is offloaded; load the ticket without a device_map to change it"
                )
            parameter.copy_(dense)

        map_in_threads(fill, parameter_plans(self))
        model: Any = self
        head = model.get_output_embeddings()
        if isinstance(head, TernaryLayer) and self.config.tie_word_embeddings:
            head.set_weight(model.get_input_embeddings().weight)

    def describe_parameters(self) -> None:
        """Tell transformers and torch which tensors must stay in float32, and which need not be sent."""
        planned = [(path, name, plan) for path, _, name, plan in parameter_plans(self)]
        if self.is_ticket:
            frozen = [f"{path}.{name}" for path, name, _ in planned]
        else:
            frozen = [
                f"{path}.{buffer}" for path, name, plan in planned for buffer in plan.buffer_names(name)
            ]
            self._keep_in_fp32_modules_strict |= {
                one for _, name, plan in planned for one in plan.float32_names(name)
            }
        # Every process draws the same weights. Otherwise DDP would send them before each forward.
        self._ddp_params_and_buffers_to_ignore = frozen

    def _inner_models(self) -> Iterator[tuple[str, Any]]:
        return ((path, one) for path, one in self.named_modules() if isinstance(one, PreTrainedModel))

    def _has_plans(self) -> bool:
        return next(parameter_plans(self), None) is not None

    def _share_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Give this model and the models within it the same stored arrays."""
        for _, model in self._inner_models():
            model.ticket_arrays = arrays

    def _mark_initialised(self) -> None:
        """Tell transformers which modules and parameters are filled, so that it does not fill them again."""
        for _, module, _, _ in parameter_plans(self):
            own = [
                one for one in (*module._parameters.values(), *module._buffers.values()) if one is not None
            ]
            if not any(one.is_meta for one in own):
                filled: list[Any] = [module, *own]
                for one in filled:
                    one._is_hf_initialized = True

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: like those of transformers, our `_init_weights` does not change what is filled already.

        Returns:
            `bool`: False.
        """
        return False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        with stock_initialisation():
            super()._init_weights(module)
        if isinstance(module, MaskedModule):
            module.reset_computed()
            return
        for name, plan in module.__dict__.get("parameter_plans", {}).items():
            parameter = getattr(module, name)
            if not getattr(parameter, "_is_hf_initialized", False):
                dense = plan.dense(self.ticket_arrays)
                if dense is not None:
                    parameter.copy_(dense)
                    parameter._is_hf_initialized = True

    # -- what it is

    @property
    def is_ticket(self) -> bool:
        """Whether the masks are fixed. Otherwise the model learns."""
        return self.config.state == "ticket"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in. Scores are float32 in any model."""
        for _, module, name, plan in parameter_plans(self):
            names = [name] if self.is_ticket else plan.buffer_names(name)
            for one in names:
                if (tensor := getattr(module, one)).is_floating_point():
                    return tensor.dtype
        return super().dtype

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding, as in transformers. A ticket cannot store such a table.

        Args:
            value (`nn.Module`):
                The new table.
        """
        model: Any = self
        before = model.get_input_embeddings()
        super().set_input_embeddings(value)
        for _, _, _, plan in parameter_plans(self):
            if isinstance(plan, TiedPlan) and plan.source is before:
                plan.source = value

    def _refuse_replaced_modules(self) -> None:
        """Raise `SLTError` if a module was replaced by one whose weights do not follow from seed and mask."""
        found = self.stored_tensors()
        for name in self.config.stored_tensors(type(self).__name__):
            if name not in found:
                raise SLTError(
                    f"{name} was replaced by a module whose weights follow from no seed, which neither a ticket "
                    "nor a checkpoint of scores can store; change the vocabulary by resize_token_embeddings, or "
                    "replace the module in the stock model that merge_and_unload() of the ticket returns"
                )

    def stored_tensors(self) -> dict[str, StoredTensor]:
        """Return the tensors that a ticket of this model describes, by name.

        Returns:
            `dict[str, StoredTensor]`: tensors by name.
        """
        every = (one for _, _, _, plan in parameter_plans(self) for one in plan.stored_tensors())
        return {one.tensor.name: one for one in every}

    @torch.no_grad()
    def stored_arrays(self) -> dict[str, np.ndarray]:
        """Return what a ticket of this model stores: packed codes and trained values, by tensor name."""
        self._refuse_replaced_modules()
        if self.is_ticket:
            return {
                name: self.ticket_arrays[name] if name in self.ticket_arrays else _first_array(one)
                for name, one in self.stored_tensors().items()
                if one.kind != "frozen"
            }
        with fixed_masks():  # a joint rule then selects once for all
            found: dict[str, np.ndarray] = {}
            for _, module, name, plan in parameter_plans(self):
                found |= plan.stored(module, name)
        return found

    def mask_arrays(self) -> dict[str, np.ndarray]:
        """Return every mask by tensor name.

        Returns:
            `dict[str, np.ndarray]`: codes in the shape of the tensor, booleans if the factors are 0 and 1. If
            only a part of a tensor is searched, the codes are a row.
        """
        arrays = self.stored_arrays()
        return {
            name: code_array(one.tensor, arrays[name])
            for name, one in self.stored_tensors().items()
            if one.kind == "masked"
        }

    @classmethod
    def from_mask_arrays(cls, config: Any, masks: Mapping[str, np.ndarray]) -> Any:
        """Build a ticket from masks by tensor name.

        Args:
            config ([`SupermaskConfigMixin`]):
                Configuration of the model.
            masks (`Mapping[str, np.ndarray]`):
                As `mask_arrays` returns them. Every masked tensor of the configuration needs one.

        Returns:
            The ticket, a model in memory.

        Raises:
            `ValueError`: for a mask that is missing, unknown or of another shape.
        """
        config = _ticket_config(config)
        with torch.device("meta"):
            tensors = cls(config).stored_tensors()
        specs = {name: one.tensor for name, one in tensors.items() if one.kind == "masked"}
        missing, unknown = sorted(specs.keys() - masks.keys()), sorted(masks.keys() - specs.keys())
        if missing or unknown:
            raise ValueError(f"no mask for {missing}" if missing else f"the configuration has no {unknown}")
        for name, spec in specs.items():
            wanted = spec.shape if spec.search == 1 else (spec.searched,)
            if (shape := masks[name].shape) != wanted:
                raise ValueError(f"the mask of {name} has shape {shape}, not {wanted}")
        packed = {name: pack_codes(masks[name], len(spec.factors)) for name, spec in specs.items()}
        return cls._ticket_of_arrays(config, packed)

    @classmethod
    def _ticket_of_arrays(cls, config: Any, arrays: dict[str, np.ndarray]) -> Any:
        with torch.device("meta"):
            skeleton: Any = cls(config)
        ticket = _from_state(super(), config, skeleton._dense_state(arrays))
        ticket._share_arrays(arrays)
        return ticket.requires_grad_(False)

    def _dense_state(
        self, arrays: Mapping[str, np.ndarray], observe: Observer | None = None
    ) -> dict[str, Tensor]:
        """Return the state dict of the stock model: every weight in float32."""
        state, plans = {}, list(parameter_plans(self))
        weights = map_in_threads(lambda one: one[3].dense(arrays, observe), plans)
        for (path, _, name, _), dense in zip(plans, weights, strict=True):
            if dense is not None:
                state[f"{path}.{name}" if path else name] = dense
        return state

    def to_ticket(self) -> Any:
        """Return the model as a ticket, in memory. It has the structure of the stock model, and fixed weights.

        Returns:
            A model of the same class with `config.state == "ticket"`. If this is a ticket already, a copy.
        """
        if self.is_ticket and not self.is_ternary:
            return copy.deepcopy(self)
        ticket = type(self)._ticket_of_arrays(_ticket_config(self.config), self.stored_arrays())
        if self.can_generate():
            ticket.generation_config = copy.deepcopy(self.generation_config)
        return ticket.to(self.device, self.dtype)

    def merge_and_unload(self) -> PreTrainedModel:
        """Return the stock model with the masked weights: the same logits, no code of hf_slt, ordinary size.

        Returns:
            `PreTrainedModel`: a model of the stock class, such as `GPT2LMHeadModel`. It can be saved, exported and
            trained like any other.

        Raises:
            `ValueError`: if the stock class cannot have this structure (no LayerNorm, free head widths).

        Example:

        ```python
        AutoModelForCausalLM.from_pretrained("ticket").merge_and_unload().save_pretrained("stock")
        ```
        """
        stock_config = self.config.stock_config()
        ticket: Any = self if self.is_ticket and not self.is_ternary else self.to_ticket()
        weights = {name: value.detach().clone() for name, value in ticket.state_dict().items()}
        stock = _from_state(self.stock_class, stock_config, weights, dtype=self.dtype).to(self.device)
        stock.set_attn_implementation(self.config._attn_implementation)
        stock.train(self.training)
        if self.can_generate():
            stock.generation_config = copy.deepcopy(self.generation_config)
        return stock

    # -- loading

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, mask: Any = None, **kwargs: Any
    ) -> Any:
        """Load a model as in transformers. A ticket is checked in full; a fault raises `TicketError`.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`):
                A folder, a Hub name, or just a mask file, whose header describes the whole model.
            args:
                As in transformers.
            mask (`str` or `os.PathLike`, *optional*):
                A mask file, ticket folder or Hub name of the same backbone, to use in place of its own mask.
            kwargs:
                As in transformers.

        Returns:
            A ticket if there are masks, otherwise a model that learns.

        Raises:
            [`TicketError`]: if the ticket is damaged, incomplete or of another version.
            [`MismatchError`]: if the folder was replaced between the configuration and the masks, or if shapes do not
                fit.

        Example:

        ```python
        model = SupermaskGPT2LMHeadModel.from_pretrained("ticket")
        model = SupermaskGPT2LMHeadModel.from_pretrained("ticket", mask="poems")  # the same weights, another mask
        ```
        """
        source, config = pretrained_model_name_or_path, kwargs.get("config")
        _refuse_quantisation(source, kwargs)
        if source is None or kwargs.get("state_dict") is not None:
            if isinstance(config, PreTrainedConfig):
                kwargs["config"] = _with_dtype(config)
            return super().from_pretrained(source, *args, **kwargs)
        download_kwargs = {name: kwargs[name] for name in _DOWNLOAD_OPTIONS if kwargs.get(name) is not None}
        ticket, generation = read_unchanged(source, lambda: cls._read_ticket(source, download_kwargs))
        if ticket is None:
            if mask is not None:
                raise TicketError(f"{source}: not a ticket; mask= works only with a ticket")
            return read_unchanged(source, lambda: cls._load_scores(source, download_kwargs, *args, **kwargs))
        if not isinstance(config, PreTrainedConfig):
            dtype: dict = {name: kwargs.pop(name) for name in ("dtype", "torch_dtype") if name in kwargs}
            facts = cls.config_class.get_config_dict(config)[0] if config else dict(ticket.header.config)
            config, kwargs = cls.config_class.from_dict(facts, return_unused_kwargs=True, **kwargs)
            kwargs |= dtype  # dtype of the model; that of the configuration is the one in the file
        if mask is not None:
            elsewhere = {**download_kwargs, "revision": None, "subfolder": None}
            ticket = read_fitting_ticket(mask, ticket.header.config, **elsewhere)
        elif any(getattr(config, one) not in (None, getattr(ticket.header, one)) for one in _DIGESTS):
            raise MismatchError(
                f"{ticket.path}: not the ticket that the configuration was read from: it was replaced since; load "
                "it again"
            )
        kwargs = {name: one for name, one in kwargs.items() if name not in (*_DOWNLOAD_OPTIONS, "config")}
        if kwargs.get("generation_config") is None:
            kwargs["generation_config"] = generation
        return cls._load_ticket(ticket, _with_dtype(config), str(source), *args, **kwargs)

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        cls._fetch_backbone(config)
        return super()._from_config(config, **kwargs)

    @classmethod
    def _fetch_backbone(cls, config: Any) -> None:
        """Load the backbone, if there is one, while nothing else is being loaded."""
        if config.backbone and config.new_parameters is None:
            with torch.device("meta"):
                cls(config)  # adds to the options which parameters the backbone lacks
        elif config.backbone:
            Backbone.of(config, cls.stock_class).weights()

    @classmethod
    def _read_ticket(
        cls, source: Any, download_kwargs: dict[str, Any]
    ) -> tuple[Ticket | None, GenerationConfig | None]:
        """Read the ticket of a folder, a Hub name or a mask file, and its generation settings.

        Returns:
            `tuple[Ticket | None, GenerationConfig | None]`: no ticket if there are scores, or nothing.
        """
        path = find_mask_file(source, **download_kwargs)
        if path is None or _holds_scores(source, path, download_kwargs):
            return None, None
        by_itself = os.path.isfile(source)
        ticket = read_ticket(path, by_itself=by_itself)
        if by_itself or not cls.can_generate():
            return ticket, None
        settings = path.parent / GENERATION_CONFIG_NAME  # next to the masks, also after an interrupted save
        found = (
            settings if settings.exists() else find_file(source, GENERATION_CONFIG_NAME, **download_kwargs)
        )
        return ticket, read_generation_config(found) if found else None

    @classmethod
    def _load_scores(cls, source: Any, download_kwargs: dict, *args: Any, **kwargs: Any) -> Any:
        config, facts = kwargs.get("config"), _config_facts(source, download_kwargs)
        if f"supermask_{facts.get('model_type')}" == cls.config_class.model_type:
            raise SLTError(
                f"{source}: a checkpoint of stock weights, which are not drawn from a seed; to learn masks over them, "
                f"build the model from hf_slt.supermask_config(backbone={str(source)!r})"
            )
        options = facts.get(NESTED)
        if isinstance(options, dict) and options.get("backbone"):
            if not isinstance(config, PreTrainedConfig):
                others = {
                    name: one for name, one in kwargs.items() if name not in (*_DOWNLOAD_OPTIONS, "config")
                }
                made = cls.config_class.from_pretrained
                config, others = made(
                    config or source, return_unused_kwargs=True, **download_kwargs, **others
                )
                kwargs = {**download_kwargs, **others, "config": config}
            cls._fetch_backbone(config)
        if "ticket" in (getattr(config, "state", None), _state_of(source, download_kwargs)):
            hint = f"{MASK_FILE}, or {MODEL_FILE}, is missing or was replaced: copy the folder again"
            raise TicketError(f"{source}: {CONFIG_FILE} is of a ticket, but there are no masks; {hint}")
        folder = Path(source, kwargs.get("subfolder") or "")
        if folder.is_dir() and (staging := weights_folder(folder)) != folder:  # a save was interrupted
            kwargs |= {"config": config or cls.config_class.from_pretrained(folder), "subfolder": ""}
            source = staging
        if renamed := {**cls.renamed_parameters, **(kwargs.pop("key_mapping", None) or {})}:
            kwargs["key_mapping"] = renamed
        return super().from_pretrained(source, *args, **kwargs)

    @classmethod
    def _load_ticket(cls, ticket: Ticket, config: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        header = ticket.header
        options = {**header.options, "mask_digest": header.mask_digest, "digest": header.digest}
        for key in MASK_OPTIONS:
            config.supermask[key] = copy.deepcopy(options[key])
        config.supermask["state"] = "ticket"
        resized = kwargs.get("ignore_mismatched_sizes")
        try:  # the caller may have given another configuration than the ticket's own
            check_tensors(header, config, sizes=not resized)
        except ValueError as error:
            raise MismatchError(f"{ticket.path}: {error}; load it with its own configuration") from None
        if config.backbone and header.config.get("architectures") != [cls.__name__]:
            config.supermask["new_parameters"] = None  # another head: the backbone may have it or not
        with torch.device("meta"), no_init_weights():
            skeleton: Any = cls(config)
        arrays = _fitting_arrays(ticket, skeleton.stored_tensors())

        def compare(tensor: TensorSpec, found: str) -> None:
            entry = header.tensors.get(tensor.name)
            if entry is not None and entry.shape == tensor.shape:  # otherwise a new head, or another size
                check_weights(ticket.path, tensor.name, entry, found)

        state = skeleton._dense_state(arrays, compare)
        if kwargs.get("device_map") is not None:  # offloaded weights are looked up under each of their names
            tied = skeleton.all_tied_weights_keys.items()
            state |= {name: state[source] for name, source in tied if source in state}
        for key, shape in _new_parameters(skeleton, arrays, header).items():
            del state[key]  # transformers then fills this parameter, and names it in its report
            if shape is not None:
                state[key] = torch.zeros(shape)  # the ticket has another size than the model
        # An Auto class that was given an adapter's folder loads its base model and names the adapter here.
        adapter, adapter_name = (
            dict(kwargs.pop("adapter_kwargs", None) or {}),
            kwargs.pop("adapter_name", None),
        )
        adapter_path = adapter.pop("_adapter_model_path", None)
        loaded = super().from_pretrained(None, *args, config=config, state_dict=state, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model._share_arrays(arrays)
        model.config.name_or_path = model.name_or_path = name
        model.requires_grad_(False)  # transformers loads every float as trainable
        if adapter_path is not None:
            model.load_adapter(adapter_path, adapter_name=adapter_name, adapter_kwargs=adapter)
        return loaded

    # -- saving

    def describe(self, encoding: str = "packed") -> tuple[Header, dict[str, np.ndarray]]:
        """Return the header of a ticket of this model, and the arrays to store by tensor name.

        Args:
            encoding (`str`, defaults to `"packed"`):
                How masks are stored: `"packed"` or `"entropy"`.

        Returns:
            `tuple[Header, dict[str, np.ndarray]]`: the header, and packed codes and trained values by tensor name.

        Raises:
            [`SLTError`]: if the weights of a ticket are not those of its masks, because an adapter was merged into
                them, for example.
        """
        arrays = self.stored_arrays()
        weights = self._weight_digests(arrays)
        digests = {name: digest(array) for name, array in arrays.items()}
        entries = {}
        for name, one in self.stored_tensors().items():
            tensor, entry = one.tensor, Entry(one.tensor.shape)
            if one.kind != "trained":
                entry = replace(
                    entry, law=tensor.law, scale=float(tensor.scale), weight_sha256=weights[name][:DIGITS]
                )
            if one.kind != "frozen":
                bits = one.bits if one.kind == "trained" else planes(len(tensor.factors))
                entry = replace(entry, key=name, data_sha256=digests[name][:DIGITS], bits=bits)
            if one.kind == "masked":
                counts = count_codes(arrays[name], tensor.searched, len(tensor.factors))
                axes = tensor.input_axes if tensor.state_bits is not None else None
                entry = replace(entry, counts=tuple(counts), input_axes=axes)
            entries[name] = entry
        config = _ticket_config(self.config)
        config.auto_map, config.architectures = auto_map(config), [type(self).__name__]
        config.dtype = str(self.dtype).removeprefix("torch.")
        facts = json.loads(config.to_json_string())
        for key in ("transformers_version", VERSION_KEY):  # the bytes of a ticket must not depend on versions
            facts.pop(key, None)
        return sealed(Header(facts, entries, encoding), mask_digest(digests)), arrays

    @torch.no_grad()
    def _weight_digests(self, arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
        """Return the digest of every drawn tensor. In a ticket, also compare the weights with seed and masks."""
        found: dict[str, str] = {}

        def observe(tensor: TensorSpec, digest: str) -> None:
            found[tensor.name] = digest

        def draw(one: tuple[str, nn.Module, str, ParameterPlan]) -> None:
            path, module, name, plan = one
            dense = plan.dense(arrays, observe)
            if self.is_ticket and dense is not None:
                _compare(path, name, getattr(module, name), dense)

        map_in_threads(draw, parameter_plans(self))
        return found

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save as in transformers, but atomically: the scores to continue from, or the ticket if this is one.

        Args:
            save_directory (`str` or `os.PathLike`):
                Folder to write to.
            is_main_process (`bool`, defaults to `True`):
                Whether this process writes.
            push_to_hub (`bool`, defaults to `False`):
                Whether to push the model afterwards.
            kwargs:
                As in transformers.
        """
        hub = {name: kwargs.pop(name) for name in _HUB_OPTIONS if name in kwargs}
        if getattr(
            self, "_hf_peft_config_loaded", False
        ):  # an adapter was added by add_adapter: transformers saves it
            with staged(save_directory, keep=is_main_process) as stage:
                super().save_pretrained(stage, is_main_process=is_main_process, **kwargs)
        elif self.is_ticket:
            if is_main_process:
                self.save_ticket(save_directory, file_name=MODEL_FILE)
        else:
            self._refuse_replaced_modules()
            kwargs["save_original_format"] = False  # the present names, also for a model with older ones
            with staged(save_directory, keep=is_main_process) as stage:
                self.config.auto_map = auto_map(self.config)
                super().save_pretrained(stage, is_main_process=is_main_process, **kwargs)
                add_remote_code(stage, self.config)
        if push_to_hub and is_main_process:
            self.push_to_hub(hub.pop("repo_id", Path(save_directory).name), **hub)

    def save_ticket(
        self, save_directory: str | os.PathLike, *, encoding: str = "packed", file_name: str = MASK_FILE
    ) -> Header:
        """Write the ticket: the configuration and the masks, but no weights.

        Args:
            save_directory (`str` or `os.PathLike`):
                Folder to write to. Readers find a complete ticket at every moment, also if the process is killed.
            encoding (`str`, defaults to `"packed"`):
                How masks are stored: `"packed"`, or `"entropy"`, which is shorter.
            file_name (`str`, defaults to `"mask.safetensors"`):
                Name of the mask file.

        Returns:
            [`Header`]: the header that was written, with digests of every tensor.

        Raises:
            `ValueError`: for an unknown encoding.
            [`SLTError`]: if the weights of a ticket are not those of its masks, because an adapter was merged into
                them, for example; or if a module was replaced by one whose weights follow from no seed.

        Example:

        ```python
        header = model.save_ticket("ticket", encoding="entropy")
        header.is_strict, header.digest
        ```
        """
        check_encoding(encoding)
        header, arrays = self.describe(encoding)
        with staged(save_directory) as stage:
            write_masks(stage, header, arrays, file_name)
            config = self.config_class.from_dict(dict(header.config))
            config.save_pretrained(stage)
            if self.can_generate():
                self.generation_config.save_pretrained(stage)
            add_remote_code(stage, config)
        return header

    def push_to_hub(self, repo_id: str, *, encoding: str | None = None, **kwargs: Any) -> str:
        """Push as in transformers: a ticket with the tokenizer of the folder it was loaded from.

        The card and figures of that folder are pushed too, if they belong to this mask.

        Args:
            repo_id (`str`):
                Name of the repository on the Hub.
            encoding (`str`, *optional*):
                How the uploaded file stores its masks: `"packed"` or `"entropy"`. Default: as in the folder that this
                mask was loaded from, or packed.
            kwargs:
                As in transformers.

        Returns:
            `str`: the address of the commit.

        Raises:
            [`TicketError`]: if the ticket does not verify.

        Example:

        ```python
        AutoModelForCausalLM.from_pretrained("ticket").push_to_hub("me/ticket")
        ```
        """
        if not self.is_ticket:
            model: Any = super()
            return model.push_to_hub(repo_id, **kwargs)
        with tempfile.TemporaryDirectory() as folder:
            header, origin = self.save_ticket(folder), Path(self.name_or_path or "")
            if self.name_or_path and mask_path(origin).is_file():
                before = read_header(mask_path(origin))
                same = before.mask_digest == header.mask_digest
                encoding = encoding or (before.encoding if same else None)
                for name in [*TOKENIZER_FILES, *([CARD_FILE, *FIGURES] if same else [])]:
                    copy_own_file(origin / name, Path(folder))
            return push_ticket(folder, repo_id, encoding=encoding, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: no code is copied to a model's folder, except one file that imports hf_slt (`remote_code.py`).

        Args:
            auto_class (`str`, defaults to `"AutoModel"`):
                Not used.
        """


class SupermaskGenerationMixin:
    """Goes before a stock class that generates text, together with `SupermaskMixin`."""

    kept_weights: KeptWeights | None = None

    def train(self, mode: bool = True) -> Any:
        """Set the mode as in torch. Training gives back the memory of the weights that `generate` has kept.

        Args:
            mode (`bool`, defaults to `True`):
                Whether the model is to be trained.

        Returns:
            `PreTrainedModel`: the model itself.
        """
        if mode:
            self.kept_weights = None
        stock: Any = super()
        return stock.train(mode)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate text as in transformers. A model that learns selects its masks once, not once per token.

        In evaluation mode on a CPU, the next call uses the same weights if no score has changed.

        Args:
            args:
                Arguments of `generate` of the stock class.
            kwargs:
                Keyword arguments of `generate` of the stock class.

        Returns:
            What `generate` of the stock class returns.
        """
        if self.kept_weights is None:
            self.kept_weights = KeptWeights()
        stock: Any = super()
        with fixed_masks(self.kept_weights):
            return stock.generate(*args, **kwargs)


def _from_state(model_class: Any, config: Any, state: dict[str, Tensor], dtype: Any = torch.float32) -> Any:
    """Build a model from its weights by transformers' own loading, which also fills all buffers. No bar is shown."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return model_class.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    finally:
        if shown:
            logging.enable_progress_bar()


def _refuse_quantisation(source: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise `SLTError` for options that would round the weights of a supermask model while it is loaded."""
    for name in ("load_in_8bit", "load_in_4bit", "quantization_config"):
        if kwargs.get(name):
            raise SLTError(
                f"{name}: the weights of a ticket are compared with their digests, and are not rounded on loading; "
                f"write a stock checkpoint (slt merge {source} OUT) and load that with {name}"
            )


def _ticket_config(config: Any) -> Any:
    config = copy.deepcopy(config)
    config.state, config.mask_digest, config.digest = "ticket", None, None
    return config


def _first_array(one: StoredTensor) -> np.ndarray:
    """Return what a ticket stores for a tensor that was never trained: every weight is kept."""
    return full_codes(one.tensor) if one.kind == "masked" else as_stored(one.tensor.draw(), one.bits)


def _fitting_arrays(ticket: Ticket, tensors: Mapping[str, StoredTensor]) -> dict[str, np.ndarray]:
    """Return the arrays of a ticket whose tensors this model has in the same shape."""
    return {
        name: array
        for name, array in ticket.arrays.items()
        if name in tensors and tensors[name].tensor.shape == ticket.header.tensors[name].shape
    }


def _new_parameters(
    model: Any, arrays: Mapping[str, np.ndarray], header: Header
) -> dict[str, tuple[int, ...] | None]:
    """Return the parameters that the ticket does not have: a new head, or one of another size.

    The value is the shape that the ticket has, or None.
    """
    found: dict[str, tuple[int, ...] | None] = {}
    for path, _, name, plan in parameter_plans(model):
        stored = [one for one in plan.stored_tensors() if one.kind != "frozen"]
        if any(one.tensor.name not in arrays for one in stored):
            entry = header.tensors.get(stored[0].tensor.name)
            found[f"{path}.{name}"] = None if entry is None else entry.shape
    return found


def _compare(path: str, name: str, parameter: Tensor, dense: Tensor) -> None:
    """Raise `SLTError` unless a weight of a ticket is what seed and masks give, in the dtype it was loaded in."""
    if parameter.is_meta:
        raise SLTError(f"{path}.{name} is offloaded; load the ticket without a device_map to save it")
    found, wanted = parameter.detach().cpu(), dense.to(parameter.dtype)
    if found.shape != wanted.shape or not torch.equal(found, wanted):
        raise SLTError(
            f"the weights of {path} are not those of its mask: an adapter was merged into them, a table was "
            "resized, or they were rounded by a cast to 16 bits and back; save the adapter separately, "
            "merge it into the stock model that merge_and_unload() of the ticket returns, or load the ticket again"
        )


def _with_dtype(config: Any) -> Any:
    """Return a copy that has a dtype. Without it, transformers would use the dtype of the masks."""
    config = copy.deepcopy(config)
    config.dtype = config.dtype or torch.get_default_dtype()
    return config


def _holds_scores(source: str | os.PathLike, mask_file: Path, download_kwargs: dict[str, Any]) -> bool:
    """Return whether this folder holds scores, and its mask file is only left over from an older ticket."""
    if mask_file.name != MASK_FILE or os.path.isfile(source):
        return False
    return _state_of(source, download_kwargs) == "scores" and bool(
        find_file(source, MODEL_FILE, **download_kwargs)
    )


def _config_facts(source: str | os.PathLike, download_kwargs: dict[str, Any]) -> dict[str, Any]:
    path = find_file(source, CONFIG_FILE, **download_kwargs)
    return read_json(path) if path else {}


def _state_of(source: str | os.PathLike, download_kwargs: dict[str, Any]) -> Any:
    facts = _config_facts(source, download_kwargs)
    options = nested_config(facts)[NESTED] if facts else {}
    return options.get("state") if isinstance(options, dict) else None
