"""Supermask versions of any transformers model, made on demand from its stock classes.

    config = supermask_config(LlamaConfig(hidden_size=256, ...), density=0.3, seed=7)    # SupermaskLlamaConfig
    model  = AutoModelForCausalLM.from_config(config)                                    # SupermaskLlamaForCausalLM

A configuration class is the stock one with `SupermaskConfigMixin` before it, a model class the stock one with
`SupermaskMixin`. No forward is written here. The shape and the module of a parameter decide how it is made: matrices,
tables, kernels and the weights of experts are masked, each tensor by itself; norms keep their initial gains and
biases are zero, unless the options train them. `TRAITS` has the few facts that cannot be seen from shapes.

Classes have ordinary names and are attributes of this module (and of `hf_slt`), so they can be imported and pickled:
`from hf_slt import SupermaskLlamaForCausalLM`.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import transformers
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D

from ..errors import SLTError
from ..masks.any_module import input_axes
from ..masks.plans import FixedPlan, ParameterPlan, TiedPlan, TrainedPlan
from ..masks.rules import RULES, rule_option_names
from ..weights.random_weights import LAWS_WITH_STD, TensorSpec
from .auto import register_architecture
from .configuration import SupermaskConfigMixin, SupermaskOptions, option
from .loss import causal_lm_loss
from .modeling import SupermaskGenerationMixin, SupermaskMixin

_OWN_KEYS = ("model_type", "architectures", "transformers_version", "_name_or_path", "auto_map")
_GPT2_WIDTH = 768  # the width that an initializer_range of 0.02 was made for
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Fused:
    """A matrix that makes queries, keys and values at once. They become tensors of their own.

    Args:
        name (`str`):
            Pattern of its name.
        by_head (`bool`, defaults to `False`):
            Whether it has the rows of each head together (query, key, value of the first head, then of the second),
            instead of all queries, all keys, all values.
    """

    name: str
    by_head: bool = False


@dataclass(frozen=True)
class Traits:
    """Facts about an architecture that cannot be seen from shapes.

    Args:
        query_key (`str`):
            Pattern of the names of tensors that make queries and keys: `qk_scale` applies to them.
        norm_gain (`float`, defaults to 1.0):
            The gain that a norm starts with. Norms that compute (1 + weight) start with 0.
        fused ([`Fused`], *optional*):
            A matrix that makes queries, keys and values at once.
    """

    query_key: str = r"(^|\.)(q_proj|k_proj|query|key|q_lin|k_lin|q|k)$"
    norm_gain: float = 1.0
    fused: Fused | None = None


# Keys are beginnings of stock model types; the longest that fits is used.
TRAITS: dict[str, Traits] = {
    "": Traits(),
    "gemma": Traits(norm_gain=0.0),
    "gpt_neox": Traits(fused=Fused(r"\.query_key_value$", by_head=True)),
    "phi3": Traits(fused=Fused(r"\.qkv_proj$")),
    "qwen3_next": Traits(norm_gain=0.0),
}


def traits_of(model_type: str) -> Traits:
    """Return the traits of a stock model type.

    Args:
        model_type (`str`):
            The `model_type` of a stock configuration, such as `"llama"`.

    Returns:
        [`Traits`]: the entry of `TRAITS` whose name is the longest beginning of it.
    """
    return TRAITS[max((name for name in TRAITS if model_type.startswith(name)), key=len)]


@strict
@dataclasses.dataclass(kw_only=True)
class ArchitectureOptions(SupermaskOptions):
    """The options of a supermask model of any architecture."""

    biases: Literal["zero", "trained"] = option("zero", "Biases: zero and frozen, or trained and stored.")


class ArchitectureConfigMixin(SupermaskConfigMixin):
    """What every supermask configuration made here adds to its stock class."""

    options_class = ArchitectureOptions
    warns_of_unknown = False  # stock configurations have attributes that are not fields
    stock_config_class: type[PreTrainedConfig]

    def check_model(self) -> None:
        """Raise `ValueError` for an impossible option."""
        if self.head_bias:
            raise ValueError("head_bias is an option of SupermaskGPT2Config only; leave it out")

    @classmethod
    def auto_classes(cls) -> dict[str, str]:
        """Return the name of our class for each Auto class.

        Returns:
            `dict[str, str]`: names of our classes, such as `"SupermaskLlamaForCausalLM"`, by Auto class.
        """
        found = {"AutoConfig": cls.__name__}
        return found | {
            auto: f"Supermask{stock.__name__}" for auto, stock in stock_models(cls.stock_config_class)
        }

    def stock_config(self) -> PreTrainedConfig:
        """Return the configuration of the stock model that computes the same.

        Returns:
            `PreTrainedConfig`: a configuration of the stock class.

        Raises:
            `ValueError`: if the stock class cannot have this structure.
        """
        if not self.layer_norm:
            raise ValueError("the stock model has norms; a model with layer_norm=False cannot be merged")
        facts = {
            name: value for name, value in self.to_dict().items() if name not in (*_OWN_KEYS, "supermask")
        }
        return self.stock_config_class.from_dict(facts)

    def model_class(self, name: str) -> Any:
        """Return one of our model classes by its name.

        Args:
            name (`str`):
                Name of the class, such as `"SupermaskLlamaForCausalLM"`.

        Returns:
            The class.
        """
        return getattr_class(name)

    # -- plans

    def make_plans(self, model: Any) -> dict[str, ParameterPlan]:
        """Return how each parameter of a stock model is made, by its path in the model.

        Args:
            model ([`PreTrainedModel`]):
                The stock model that was just built.

        Returns:
            `dict[str, ParameterPlan]`: plans by the path of the parameter.
        """
        tied = model.get_expanded_tied_weights_keys(all_submodels=True)
        # Parameters that the stock class does not train are not random: sinusoids, for example.
        untrained = [path for path, one in model.named_parameters() if not one.requires_grad]
        kept = model.__dict__.setdefault("stock_parameters", frozenset(untrained))
        plans: dict[str, ParameterPlan] = {}
        for path, parameter in model.named_parameters(remove_duplicate=False):
            owner, _, leaf = path.rpartition(".")
            module = model.get_submodule(owner)
            if path in tied:
                source, _, name = tied[path].rpartition(".")
                plans[path] = TiedPlan(model.get_submodule(source), name)
            elif path not in kept:
                plans[path] = self._plan(model, path, module, leaf, parameter)
        return plans

    def _plan(
        self, model: Any, path: str, module: nn.Module, leaf: str, parameter: torch.Tensor
    ) -> ParameterPlan:
        prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
        name, shape = path.removeprefix(prefix).removesuffix(".weight"), tuple(parameter.shape)
        if _is_norm(module) or leaf.endswith("bias") or len(shape) < 2:
            gain = traits_of(self.stock_config_class.model_type).norm_gain
            start = gain if _is_norm(module) and leaf == "weight" else 0.0
            trains = self.layer_norm == "trained" if _is_norm(module) else self.biases == "trained"
            if trains and (leaf == "weight" or not _is_norm(module)):
                row = TensorSpec(name, (1, math.prod(shape)), self.seed, "constant", start)
                return TrainedPlan(row, shape, self.scale_bits)
            return FixedPlan(TensorSpec(name, shape, law="constant", scale=start), shape)
        is_table = isinstance(module, nn.Embedding) or not isinstance(
            module, (nn.Linear, Conv1D, *_CONVOLUTIONS)
        )
        is_table = is_table and (isinstance(module, nn.Embedding) or shape[0] == 1)
        tensor = self._tensor(name, shape, module, is_table)
        if is_table and self.embedding == "frozen":
            return FixedPlan(tensor, shape)
        if is_table and self.embedding == "trained":
            flat = (math.prod(shape[:-1]), shape[-1])
            return TrainedPlan(dataclasses.replace(tensor, shape=flat), shape, self.embedding_bits)
        if (fused := traits_of(self.stock_config_class.model_type).fused) and re.search(fused.name, name):
            parts = [
                self._tensor(f"{name}.{part}", (rows, *shape[1:]), module, is_table)
                for part, rows in self._fused_rows(shape[0]).items()
            ]
            return self.masked_plan(*parts, heads=self.num_attention_heads if fused.by_head else None)
        return self.masked_plan(tensor)

    def _fused_rows(self, rows: int) -> dict[str, int]:
        """Return how many rows of a fused matrix make queries, keys and values."""
        heads = self.num_attention_heads
        grouped = getattr(self, "num_key_value_heads", None) or heads
        width = rows // (heads + 2 * grouped)
        return {"query": heads * width, "key": grouped * width, "value": grouped * width}

    def _tensor(self, name: str, shape: tuple[int, ...], module: nn.Module, is_table: bool) -> TensorSpec:
        law = self.embedding_law or self.law if is_table else self.law
        scale = 1.0
        if law in LAWS_WITH_STD:
            scale = getattr(self, "initializer_range", None) or 0.02
            if is_table and self.embedding_range is not None:
                scale = self.embedding_range
            width = getattr(self, "hidden_size", None)
            if self.scale_with_width and width:
                scale *= _GPT2_WIDTH / width if is_table else math.sqrt(_GPT2_WIDTH / width)
        elif law == "xavier_uniform" and len(shape) != 2:
            raise SLTError(
                f"{name} has shape {shape}; the law xavier_uniform is for matrices, take another law"
            )
        if re.search(traits_of(self.stock_config_class.model_type).query_key, name):
            paper = math.sqrt(math.sqrt(self._head_width()))
            scale *= paper if isinstance(self.qk_scale, str) else self.qk_scale
        density = 1.0 if self.frozen_density is None else self.frozen_density
        axes = input_axes(module, shape)
        return TensorSpec(name, shape, self.seed, law, scale, tuple(self.factors), self.search, density, axes)

    def _head_width(self) -> int:
        """Width of a query and of a key, per head."""
        for name in ("head_dim", "d_kv"):
            if getattr(self, name, None):
                return getattr(self, name)
        heads = getattr(self, "num_attention_heads", None)
        return self.hidden_size // heads if heads else 1


class ArchitectureMixin(SupermaskMixin):
    """What every supermask model made here adds to its stock class."""

    @classmethod
    def supermask_class_of(cls, stock_class: type) -> Any:
        """Return the supermask class of a model within this one, or None if the class is not from transformers."""
        is_stock = issubclass(stock_class, PreTrainedModel) and not issubclass(stock_class, SupermaskMixin)
        return supermask_class(stock_class) if is_stock else None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time; this tells pickle how to make it again.
        return _rebuild, (self.stock_class,), self.__dict__

    def post_init(self) -> None:
        """Turn the stock model into one that learns, or into a ticket. Keys that only it fills may be missing."""
        super().post_init()
        kept = self.__dict__.get("stock_parameters", ())
        model: Any = self
        model._keys_to_ignore_on_load_missing |= {re.escape(path) for path in kept}
        if model.loss_type == "ForCausalLM":
            model.loss_function = causal_lm_loss

    def adapt_structure(self) -> None:
        """Take the norms out if the options say so."""
        model: Any = self
        if not self.config.layer_norm:
            for path, module in list(model.named_modules()):
                if _is_norm(module):
                    model.set_submodule(path, nn.Identity())


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module normalises. The norms of transformers have no common class, but similar names."""
    name = type(module).__name__
    return isinstance(module, nn.LayerNorm | nn.GroupNorm) or name.endswith(("LayerNorm", "RMSNorm"))


def _rebuild(stock_class: Any) -> Any:
    made = supermask_class(stock_class)
    return made.__new__(made)


# -- classes on demand ----------------------------------------------------------------------------------------


def supermask_config(config: PreTrainedConfig | None = None, **options: Any) -> Any:
    """Return the supermask configuration of a stock one.

    Args:
        config ([`PreTrainedConfig`], *optional*):
            The stock configuration of any architecture of transformers. If the option `backbone` names a pretrained
            checkpoint to mask, the default is the configuration of that checkpoint.
        options:
            The options of hf_slt: `seed`, `density`, `law`, `rule` and others, see [`SupermaskOptions`].

    Returns:
        The configuration, of a class named after the stock one (`SupermaskLlamaConfig` for `LlamaConfig`).

    Raises:
        `ValueError`: for an unknown option, an impossible value, or if neither a configuration nor a backbone is
            given.

    Example:

    >>> from transformers import LlamaConfig
    >>> config = supermask_config(LlamaConfig(hidden_size=256, intermediate_size=512), density=0.3, seed=7)
    >>> type(config).__name__, config.model_type, config.density
    ('SupermaskLlamaConfig', 'supermask_llama', 0.3)
    """
    if config is None:
        if not options.get("backbone"):
            raise ValueError("give a stock configuration, or a backbone that has one")
        config = AutoConfig.from_pretrained(options["backbone"], revision=options.get("backbone_revision"))
    stock: Any = type(config)
    made = supermask_config_class(stock)
    known = [*made.options_class.names(), *rule_option_names()]
    rule = RULES.get(options.get("rule", "edge_popup"))
    known += [one.name for one in dataclasses.fields(rule)] if rule else []
    for name in options.keys() - set(known):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"options of {type(config).__name__} go there"
        raise ValueError(f"unknown option {name!r}; {hint}")
    facts = {name: value for name, value in config.to_dict().items() if name not in _OWN_KEYS}
    result = made.from_dict({**facts, **options})
    result.drop_foreign_tokens()
    return result


@cache
def supermask_config_class(stock_class: Any) -> Any:
    """Return the supermask class of a stock configuration class, registered with the Auto classes.

    Args:
        stock_class:
            A configuration class of transformers.

    Returns:
        The class, such as `SupermaskLlamaConfig`.
    """
    if stock_class.model_type == "gpt2":
        from .gpt2 import SupermaskGPT2Config

        return SupermaskGPT2Config
    made: Any = type(
        f"Supermask{stock_class.__name__}",
        (ArchitectureConfigMixin, stock_class),
        {
            "__doc__": f"Configuration of a {stock_class.__name__.removesuffix('Config')} whose weights are drawn "
            "from a seed; a mask over them is learned. Args: those of the stock configuration, and the options of "
            "[`ArchitectureOptions`].",
            "__module__": __name__,
            "__annotations__": {"supermask": Any},
            "supermask": None,
            "model_type": f"supermask_{stock_class.model_type}",
            "stock_config_class": stock_class,
        },
    )
    AutoConfig.register(made.model_type, made, exist_ok=True)
    register_architecture(
        made, {auto: supermask_class(stock, made) for auto, stock in stock_models(stock_class)}
    )
    return made


def supermask_class(stock_class: Any, config_class: Any = None) -> Any:
    """Return the supermask class of a stock model class.

    Args:
        stock_class (`type`):
            A model class of transformers.
        config_class (`type`, *optional*):
            Its supermask configuration class.

    Returns:
        The class, such as `SupermaskLlamaForCausalLM`.
    """
    found = _MODELS.get(stock_class)
    if found is None:
        if stock_class.__name__ in _GPT2_CLASSES:
            from . import gpt2

            return getattr(gpt2, f"Supermask{stock_class.__name__}")
        generates = hasattr(stock_class, "generate")  # not all models generate text
        mixins = (SupermaskGenerationMixin, ArchitectureMixin) if generates else (ArchitectureMixin,)
        found = _MODELS[stock_class] = type(
            f"Supermask{stock_class.__name__}",
            (*mixins, stock_class),
            {
                "__doc__": f"{stock_class.__name__} whose weights follow from a seed and a mask.",
                "__module__": __name__,
                "stock_class": stock_class,
                "config_class": config_class or supermask_config_class(stock_class.config_class),
            },
        )
    return found


_MODELS: dict[Any, Any] = {}
_GPT2_CLASSES = ("GPT2Model", "GPT2LMHeadModel", "GPT2ForSequenceClassification")


def stock_models(stock_config_class: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name of the Auto class, stock model class) for all model classes of an architecture.

    Args:
        stock_config_class:
            A configuration class of transformers.

    Yields:
        Name of the Auto class, and the stock model class.
    """
    for name in dir(modeling_auto):
        mapping = getattr(getattr(modeling_auto, name), "_model_mapping", None)
        if name.startswith("AutoModel") and mapping is not None and stock_config_class in mapping:
            found = mapping[stock_config_class]
            yield name, found[0] if isinstance(found, tuple | list) else found


def getattr_class(name: str) -> Any:
    """Return the supermask class of this name.

    Args:
        name (`str`):
            Such as `"SupermaskLlamaForCausalLM"` or `"SupermaskLlamaConfig"`.

    Returns:
        The class.

    Raises:
        `AttributeError`: if transformers has no such stock class.
    """
    stock = (
        getattr(transformers, name.removeprefix("Supermask"), None) if name.startswith("Supermask") else None
    )
    found: Any = stock
    if isinstance(stock, type) and issubclass(stock, PreTrainedConfig):
        return supermask_config_class(found)
    if isinstance(stock, type) and issubclass(stock, PreTrainedModel):
        return supermask_class(stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __getattr__(name: str) -> Any:
    return getattr_class(name)
