"""The configuration of a supermask model: a stock configuration, and one nested object with all options of hf_slt.

    {"model_type": "supermask_gpt2", "n_embd": 512, ...,
     "supermask": {"seed": 7, "law": "normal", "rule": "edge_popup", "rule_options": {"density": 0.3}, ...}}

In Python the options are keywords and attributes like any other:
`SupermaskGPT2Config(n_embd=512, density=0.3).density`. Files of version 0.1 have no nested object; they can still be
read.
"""

import copy
import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import torch
from huggingface_hub.dataclasses import strict
from transformers.utils import logging

from ..about import __version__
from ..errors import TicketError, require
from ..masks.mixing import Mix, learned_scales, read_patterns
from ..masks.plans import MaskedPlan, ParameterPlan, StoredTensor, TiedPlan
from ..masks.rules import RULES, Rule, make_rule, rule_option_names, rule_options
from ..tickets.format import VERSION_KEY
from ..weights.quantisation import BITS
from ..weights.random_weights import GENERATOR, LAWS, TensorSpec
from ..weights.trellis import check_path
from .backbone import Backbone, over_backbone

logger = logging.get_logger(__name__)

# Options that belong to a mask. One backbone may have several masks.
MASK_OPTIONS = ("rule", "rule_options", "factors", "search", "frozen_density", "mask_digest", "digest")
_RULE_OPTIONS = frozenset(rule_option_names())
# Options that a file has only if they differ from these values.
_LEFT_OUT = {
    "parameters": None,
    "trained_bits": 32,
    "backbone": None,
    "backbone_revision": None,
    "new_parameters": None,
}
_FROM_FILE = "_hf_slt_from_file"  # marks keywords of a file: unknown ones are kept, with a warning


def option(default: Any, text: str) -> Any:
    """Declare an option with the help that command lines and pages show.

    Args:
        default:
            Value of the option if it is left out.
        text (`str`):
            Help text.

    Returns:
        A field of a dataclass.
    """
    return dataclasses.field(default=default, metadata={"help": text})


@strict
@dataclasses.dataclass(kw_only=True)
class SupermaskOptions:
    """The options that a supermask model adds to a stock configuration.

    Every field with a help text is an option; `docs/options.md` lists them. The others are set by the library.

    Args:
        rule_options (`dict[str, Any]`, *optional*):
            Options of the rule by name. Those that are left out get the rule's defaults.
        factors (`list[float]`, *optional*):
            The factor that each code stands for. A ticket needs nothing else from its rule.
        state_bits (`int`, *optional*):
            Bits of a state, if codes are a path through a trellis. Otherwise files do not have this key.
        state (`Literal['scores', 'ticket']`, defaults to `"scores"`):
            `"scores"` for a model that learns, `"ticket"` for one whose masks are fixed.
        weight_generator (`str`, defaults to `GENERATOR`):
            Name of the generator of the frozen weights.
        mask_digest (`str`, *optional*):
            Digest of the stored data of a ticket.
        digest (`str`, *optional*):
            Digest that names a ticket.
        new_parameters (`list[str]`, *optional*):
            Parameters that the backbone does not have, such as a new head.
    """

    seed: int = option(
        0, "Seed of the frozen weights and the first scores; in training also of text order and dropout."
    )
    rule: str = option(
        "edge_popup",
        "How scores become a mask: edge_popup (keep the largest magnitudes), global (of all tensors"
        " together), n_m (n of every m inputs), threshold, bernoulli, sign, signed, multicoat, multibit or"
        " trellis (a path through drawn numbers). The training script also takes a rule of your own, on its command"
        " line only: FILE.py:CLASS or package.module:CLASS.",
    )
    rule_options: dict[str, Any] | None = None
    search: float | int = option(
        1.0, "Fraction of each masked tensor that is searched. The seed decides which other weights are kept."
    )
    frozen_density: float | int | None = option(
        None,
        "With search below 1: fraction to keep of the weights that are not searched. Default: the rule's density;"
        " if it has none, 0.5 for rules that drop weights, else 1.",
    )
    law: str = option("normal", f"Distribution of the frozen weights: {', '.join(LAWS[:-1])} or {LAWS[-1]}.")
    embedding_law: str | None = option(None, "Distribution of the embeddings, if it is not that of law.")
    embedding_range: float | None = option(
        None, "Standard deviation of the embeddings, if it is not initializer_range."
    )
    qk_scale: float | int | str = option(
        "paper", "Factor on query and key weights: a number, or paper for n_qk ** (1/4)."
    )
    # The factor is sqrt(768 / n_embd) in the blocks, which keeps the size of the outputs of a layer. In the embeddings
    # it is 768 / n_embd, which keeps the largest logit that a mask can reach: if a mask chooses entries by sign, their
    # sum grows like n_embd, not like its root. Without these factors narrow models stay at chance.
    scale_with_width: bool = option(
        False, "Adapt initializer_range, which fits width 768, to this width. Narrow models need it."
    )
    layer_norm: bool | str = option(
        True, "Keep the LayerNorms; false removes them, as in the theory; trained learns their gains."
    )
    scales: Literal["none", "tensor", "row"] = option(
        "none", "Learn a factor for each masked tensor, or for each of its outputs (of a table: each row)."
    )
    scale_bits: int = option(16, "Bits of a learned scale, gain or bias in the ticket: 32, 16 or 8.")
    head_bias: bool = option(False, "Learn a bias for the logit of every token.")
    embedding: Literal["masked", "frozen", "trained"] = option(
        "masked", "Embeddings: masked like all weights, frozen (random, all kept) or trained and stored."
    )
    embedding_bits: int = option(32, "Bits of a trained embedding value in the ticket: 32, 8 or 4.")
    parameters: list[str] | None = option(  # noqa: RUF009 (the default is None)
        None,
        "Kind of single parameters, by patterns of their stock names: PATTERN=masked, PATTERN=frozen (random, all"
        " kept) or PATTERN=trained (and stored), such as *.mlp.*=frozen; the first pattern that fits counts.",
    )
    trained_bits: int = option(32, "Bits in the ticket of a value that parameters trains: 32, 16, 8 or 4.")
    backbone: str | None = option(
        None, "Pretrained checkpoint (folder or Hub name) whose weights are masked; none are drawn."
    )
    backbone_revision: str | None = option(None, "Branch, tag or commit of the backbone on the Hub.")
    # Set by the library.
    factors: list[float] | None = None  # what codes stand for; a ticket needs nothing else from its rule
    state_bits: int | None = None  # only if codes are a path through a trellis; otherwise not in files
    state: Literal["scores", "ticket"] = "scores"
    weight_generator: str = GENERATOR
    mask_digest: str | None = None
    digest: str | None = None
    new_parameters: list[str] | None = None  # those that the backbone does not have, such as a new head

    def __post_init__(self) -> None:
        self.rule_options = dict(self.rule_options or {})
        if self.state == "scores" or self.factors is None:
            self.apply_rule_defaults()
        self.check()

    def make_rule(self) -> Rule:
        """Return the rule with its options.

        Returns:
            [`Rule`]: the rule, its options checked.
        """
        return make_rule(self.rule, self.rule_options or {})

    def apply_rule_defaults(self) -> None:
        """Fill in the defaults of the rule's options, and raise `ValueError` for options of other rules."""
        rule = self.make_rule()
        self.rule_options, self.factors = rule_options(rule), [float(one) for one in rule.factors]
        self.state_bits = rule.state_bits
        if self.search < 1 and self.frozen_density is None:
            densities = self.rule_options.get("densities") or [0.5 if 0.0 in self.factors else 1.0]
            self.frozen_density = self.rule_options.get("density") or densities[0]

    def check(self) -> None:
        """Raise `ValueError` for an impossible option. The message names the value and says what to do."""
        choices: dict[str, tuple] = {
            "law": LAWS,
            "embedding_law": (None, *LAWS),
            "scale_bits": (32, 16, 8),
            "embedding_bits": (32, *BITS),
            "trained_bits": (32, 16, *BITS),
            "layer_norm": (True, False, "trained"),
        }
        for name, known in choices.items():
            shown = ", ".join(map(repr, known))
            require(getattr(self, name) in known, f"{name} {getattr(self, name)!r} is not one of {shown}")
        read_patterns(self.parameters)
        require(
            not self.backbone or self.layer_norm,
            "layer_norm False: a backbone has its norms; leave one of the two out",
        )
        bits, kept, search, qk = self.embedding_bits, self.frozen_density, self.search, self.qk_scale
        require(
            bits == 32 or self.embedding == "trained",
            f"embedding_bits {bits}: give embedding='trained' as well",
        )
        require(
            self.weight_generator == GENERATOR,
            f"weight_generator {self.weight_generator!r} is not {GENERATOR!r}; install the version of hf_slt "
            "that made the ticket",
        )
        require(0 < search <= 1, f"search {search} is not in (0, 1]: it is the fraction of weights searched")
        require(
            kept is None or (0 <= kept <= 1 and search < 1),
            f"frozen_density {kept}: it is the fraction to keep, 0 to 1, of the weights that are not searched; "
            "give a search below 1 as well",
        )
        factors = self.factors or []
        numbers = {one for one in factors if type(one) is float and math.isfinite(one)}
        require(
            2 <= len(numbers) == len(factors) <= 16,
            f"factors {str(self.factors)[:99]} are not 2 to 16 different numbers",
        )
        if self.state_bits is not None:
            require(
                self.backbone is None,
                f"a path through a trellis chooses among drawn numbers, and the weights of {self.backbone} are "
                "not drawn; take another rule",
            )
            check_path(len(factors), self.state_bits, self.search, (self.law, self.embedding_law))
        require(0 <= self.seed < 2**64, f"seed {self.seed} is not in 0 .. 2**64 - 1")
        positive = qk == "paper" if isinstance(qk, str) else qk > 0 and math.isfinite(qk)
        require(positive, f"qk_scale {qk!r} is neither 'paper' nor a positive number")

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all options.

        Returns:
            `list[str]`: the names, those that the library sets included.
        """
        return [one.name for one in dataclasses.fields(cls)]


class SupermaskConfigMixin:
    """What every supermask configuration adds to a stock one.

    A class of this mixin and of a stock configuration declares a field `supermask`, the nested object, and defines

        auto_classes()       the names of its model classes, by Auto class
        model_class(name)    one of these classes
        make_plans(model)    how the options make each parameter of a stock model, by its path
    """

    options_class: ClassVar[type[SupermaskOptions]] = SupermaskOptions
    warns_of_unknown: ClassVar[bool] = True  # whether to warn of keys in a file that are not options
    supermask: Any
    architectures: Any
    auto_classes: Callable[[], dict[str, str]]
    model_class: Callable[[str], Any]
    make_plans: Callable[[Any], dict[str, ParameterPlan]]

    def __post_init__(self, **kwargs: Any) -> None:
        from_file = kwargs.pop(_FROM_FILE, False)
        kwargs.pop(VERSION_KEY, None)  # the version that wrote the dictionary; not an option
        nested = self.__dict__.get("supermask")
        if nested is not None and not isinstance(nested, dict):
            raise ValueError(f"supermask {nested!r} is not an object of options")
        if (kwargs.get("num_labels") or 0) > 1 << 20:  # transformers makes a name for each
            raise ValueError(f"num_labels {kwargs['num_labels']} is more than a million")
        flat = _take_options(type(self), kwargs, (nested or {}).get("rule"))
        super().__post_init__(**kwargs)  # type: ignore[misc]
        given = _known_fields(type(self))
        unknown = sorted(name for name in kwargs if name in self.__dict__ and name not in given)
        for name in unknown:
            if name == "model_type":  # an attribute of the class, but every file has it
                continue
            if from_file and hasattr(type(self), name):
                raise ValueError(f"{name!r} is not an option; the name is used for something else")
            if not from_file:
                known = [*given, *_option_names(type(self))]
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"see help({type(self).__name__})"
                raise ValueError(f"unknown option {name!r} for {type(self).__name__}; {hint}")
            if name != "auto_map" and self.warns_of_unknown:  # the former is written by the Auto classes
                logger.warning(
                    f"the configuration holds {name!r}, which is not an option of {type(self).__name__}"
                )
        self._set_options(nested or {}, flat)
        if not from_file:
            self.drop_foreign_tokens()

    def drop_foreign_tokens(self) -> None:
        """Remove start and end tokens that are stock defaults and lie outside of a smaller vocabulary.

        GPT-2's is 50256. No such token exists, and transformers would warn of it.
        """
        stock = {one.name: one.default for one in dataclasses.fields(type(self))}  # type: ignore[arg-type]
        for name in ("bos_token_id", "eos_token_id"):
            value = getattr(self, name, None)
            if isinstance(value, int) and value == stock.get(name) and value >= self.vocab_size:
                setattr(self, name, None)

    def _set_options(self, nested: dict[str, Any], flat: dict[str, Any]) -> None:
        options, rule = dict(nested), dict(nested.get("rule_options") or {})
        names = self.options_class.names()
        for name in sorted(options.keys() - set(names)):
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown option {name!r} in supermask{hint}")
        for name, value in flat.items():
            if name == "parameters":
                options[name] = read_patterns(value)
            elif name in names:
                options[name] = value
            elif value is not None:  # an option of the rule; version 0.1 wrote null for those of other rules
                rule[name] = value
        self.supermask = dataclasses.asdict(self.options_class(**{**options, "rule_options": rule}))
        if self.supermask["state_bits"] is None:
            del self.supermask["state_bits"]
        self.check_model()

    def check_model(self) -> None:
        """Raise `ValueError` if the options do not fit the stock configuration."""

    @property
    def options(self) -> Any:
        """The nested object with its types, checked."""
        return self.options_class(**copy.deepcopy(self.supermask))

    def make_rule(self) -> Rule:
        """Return the rule of this configuration.

        Returns:
            [`Rule`]: the rule, its options checked.
        """
        return make_rule(self.supermask["rule"], self.supermask["rule_options"])

    # -- tensors and plans

    def plans_of(self, model: Any) -> dict[str, ParameterPlan]:
        """Return how each parameter of a stock model is made, from the options, its name, and the backbone.

        Args:
            model ([`PreTrainedModel`]):
                The stock model that was just built.

        Returns:
            `dict[str, ParameterPlan]`: plans by the path of the parameter.
        """
        plans = self.make_plans(model)
        if not self.parameters and not self.backbone:
            return plans
        own = {path: plan for path, plan in plans.items() if not isinstance(plan, TiedPlan)}
        names = {path: _stock_names(model, path) for path in own}
        if self.parameters:
            mix = Mix(self.parameters, self.masked_plan, self.trained_bits, self.scale_bits)
            if self.state == "scores" and type(model).__name__ in (
                self.architectures or [type(model).__name__]
            ):
                mix.check(names.values())
            for path, plan in own.items():
                if (pattern := mix.pattern_of(names[path])) is not None:
                    own[path] = mix.plan(plan, pattern.rpartition("=")[2])
        if self.backbone:
            backbone = self.find_backbone(model)
            for path, plan in own.items():
                if names[path][0] not in self.new_parameters:
                    own[path] = over_backbone(plan, path, backbone)
        return plans | own

    def find_backbone(self, model: Any) -> Backbone:
        """Return the backbone for a model. Its commit, and the parameters that it lacks, are added to the options.

        Args:
            model ([`SupermaskMixin`]):
                The model.

        Returns:
            [`Backbone`]: the backbone.
        """
        backbone, kind = Backbone.of(self, model.stock_class), type(model).__name__
        if self.new_parameters is None or (self.state == "scores" and kind not in (self.architectures or ())):
            there = backbone.weights()
            missing = [path for path, _ in model.named_parameters() if path not in there]
            self.supermask["new_parameters"] = [_stock_names(model, path)[0] for path in missing]
            self.supermask["backbone_revision"] = self.backbone_revision or backbone.commit
        return Backbone.of(self, model.stock_class)

    def masked_plan(self, *tensors: TensorSpec, axis: int = 0, heads: int | None = None) -> MaskedPlan:
        """Return the plan of a masked parameter.

        Args:
            tensors ([`TensorSpec`]):
                The tensors that it consists of.
            axis (`int`, defaults to 0):
                The axis along which they lie.
            heads (`int`, *optional*):
                See [`MaskedPlan`].

        Returns:
            [`MaskedPlan`]: the plan.
        """
        tensors = tuple(dataclasses.replace(one, state_bits=self.state_bits) for one in tensors)
        scales = [one for tensor in tensors for one in learned_scales(tensor, self.scales)]
        rule: Any = self.make_rule() if self.state == "scores" else None  # a ticket needs no rule
        # The forward of experts reads the parameter once for each of them.
        shared = len(tensors[0].shape) == 3
        return MaskedPlan(tensors, rule, axis, scales, self.scale_bits, heads, shared)

    def stored_tensors(self, saved: str | None = None) -> dict[str, StoredTensor]:
        """Return the tensors of a model by name, as a ticket describes them.

        Args:
            saved (`str`, *optional*):
                Name of the class that was saved, one of `auto_classes`. Default: that of `AutoModel`.

        Returns:
            `dict[str, StoredTensor]`: tensors by name.

        Raises:
            `ValueError`: if the configuration has no class of that name.
        """
        known = self.auto_classes()
        if saved is not None and saved not in known.values():
            raise ValueError(
                f"architectures {saved!r} is not one of {', '.join(sorted(set(known.values())))}"
            )
        with torch.device("meta"):
            return self.model_class(saved or known["AutoModel"])(self).stored_tensors()

    def head_tensors(self) -> dict[str, StoredTensor]:
        """Return no tensors: `stored_tensors` has those of the head, too.

        Returns:
            `dict[str, StoredTensor]`: an empty dictionary.
        """
        return {}

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for names that are not attributes of the configuration: those of our options.
        nested = self.__dict__.get("supermask")
        if nested is not None:
            if name in nested:
                return nested[name]
            if name in (nested.get("rule_options") or {}):
                return nested["rule_options"][name]
            if name in _RULE_OPTIONS or name == "state_bits":  # an option of another rule
                return None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        nested = self.__dict__.get("supermask")
        if nested is not None and name in nested:
            nested[name] = value
        elif nested is not None and (name in (nested.get("rule_options") or {}) or name in _RULE_OPTIONS):
            nested.setdefault("rule_options", {})[name] = value
        else:
            super().__setattr__(name, value)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as a dictionary, as in transformers, without options that few models use.

        Returns:
            `dict[str, Any]`: the configuration as JSON can hold it.
        """
        found = super().to_dict()  # type: ignore[misc]
        for name, default in _LEFT_OUT.items():
            if isinstance(found.get("supermask"), dict) and found["supermask"].get(name) == default:
                del found["supermask"][name]
        return found

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what config.json holds, as in transformers, and the version of hf_slt that writes it.

        Returns:
            `dict[str, Any]`: the values that differ from the defaults. `from_dict` reads them.
        """
        return {**super().to_diff_dict(), VERSION_KEY: __version__}  # type: ignore[misc]

    def _get_generation_parameters(self) -> dict[str, Any]:
        # transformers does not save generation parameters; an option of a rule may have such a name (temperature).
        found = super()._get_generation_parameters()  # type: ignore[misc]
        ours = {*self.supermask, *self.supermask["rule_options"]}
        return {name: value for name, value in found.items() if name not in ours}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a configuration from a dictionary, as in transformers.

        A key of a file that is not an option is kept, with a warning.

        Args:
            config_dict (`dict[str, Any]`):
                The JSON object of a config.json of any version.
            kwargs:
                Options that override it, as in transformers.

        Returns:
            The configuration.

        Raises:
            [`TicketError`]: if no model can have this configuration.
        """
        try:
            facts = {name: value for name, value in config_dict.items() if name != VERSION_KEY}
            return super().from_dict({**facts, _FROM_FILE: True}, **kwargs)  # type: ignore[misc]
        except Exception as error:  # a malformed file can raise any exception type
            raise TicketError(f"a configuration that no model can have: {error}") from error


def _stock_names(model: Any, path: str) -> list[str]:
    """Return the names of a parameter: that in the base model first, then that in a model with a head."""
    prefix = f"{model.base_model_prefix}."
    if not hasattr(model, model.base_model_prefix):  # a base model itself
        return [path, prefix + path]
    return [path] if not path.startswith(prefix) else [path.removeprefix(prefix), path]


def _take_options(cls: Any, kwargs: dict[str, Any], nested_rule: Any) -> dict[str, Any]:
    """Remove our options, given flat, from keywords and return them."""
    rule = kwargs.get("rule", nested_rule or "edge_popup")
    own = [one.name for one in dataclasses.fields(RULES[rule])] if rule in RULES else []
    names: Iterable[str] = {*_option_names(cls), *own}
    return {name: kwargs.pop(name) for name in list(kwargs) if name in names}


def _option_names(cls: Any) -> list[str]:
    return [*cls.options_class.names(), *rule_option_names()]


def _known_fields(cls: Any) -> set[str]:
    return {one.name for one in dataclasses.fields(cls)} | set(cls.attribute_map)
