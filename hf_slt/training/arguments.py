"""The options of a run: dataclass fields are the only source of names, defaults and help.

    defaults < YAML preset (--config) < command line

Options of the model are fields of its configuration. Options of the run have the names of transformers'
`TrainingArguments` if they mean the same. A preset is checked like a command line: an unknown name or a value
of the wrong type is an error.
"""

import argparse
import copy
import math
import sys
from collections.abc import Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import yaml
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from transformers import AutoConfig
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from ..errors import SLTError
from ..masks.rules import RAMPED, RULES, rule_option_names
from ..models.architectures import stock_models, supermask_config, supermask_config_class
from ..models.gpt2 import GPT2Options, SupermaskGPT2Config
from ..options import OptionParser, did_you_mean
from ..text.blocks import DataArguments
from ..text.corpus import option
from ..tickets.format import read_json
from .own_rule import add_own_rule

DEVICE_HINT = (
    "training uses a GPU if there is one, otherwise the processor; write ACCELERATE_USE_CPU=true before the command "
    "to use the processor"
)
CONTROLS = ("dense", "random_mask", "frozen_embeddings")

# Help for GPT-2's own fields, which have none. Our fields have help, except those that the library sets.
GPT2_HELP = {
    "n_layer": "Number of blocks.",
    "n_head": "Attention heads in a block.",
    "n_embd": "Width of the model.",
    "n_inner": "Width of the MLPs; four times n_embd by default.",
    "activation_function": "Activation function of the MLPs.",
    "initializer_range": "Standard deviation of the frozen weights.",
    "tie_word_embeddings": "Use the token embedding as the output head too.",
}


# GPT-2's options of size, and their names in most other architectures.
SIZES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "initializer_range": "initializer_range",
    "tie_word_embeddings": "tie_word_embeddings",
}
_DROPOUTS = (
    "resid_pdrop embd_pdrop attn_pdrop dropout attention_dropout hidden_dropout activation_dropout "
    "hidden_dropout_prob attention_probs_dropout_prob embedding_dropout"
).split()


@dataclass
class BaseArguments:
    """The architecture."""

    architecture: str = option(
        "A model_type of transformers that has a causal language model, such as llama or qwen3. Its sizes are"
        " n_layer, n_head, n_embd and n_inner, unless base_config is given.",
        "gpt2",
    )
    base_config: str | None = option(
        "JSON file with a stock configuration of the architecture: all sizes then come from there."
    )


def model_fields() -> list[Field]:
    """Return the options of a model: those of GPT-2, of hf_slt, and of all rules that are known so far.

    Returns:
        `list[Field]`: fields with a help text.
    """
    own = [item for item in fields(SupermaskGPT2Config) if item.name in GPT2_HELP]
    ours = [item for item in fields(GPT2Options) if item.metadata.get("help")]
    place = [item.name for item in ours].index("rule") + 1
    return [*own, *ours[:place], *_rule_fields(), *ours[place:]]


def _names_taken() -> set[str]:
    """Return the names of all options that are not those of a rule."""
    groups = (BaseArguments, GPT2Options, DataArguments, RunArguments)
    return {"config", *GPT2_HELP, *(one.name for group in groups for one in fields(group))}


def _rule_fields() -> list[Field]:
    """Return one field for each option of any rule. Its help names the rules and their defaults."""
    found: dict[str, dict[str, Field]] = {}
    for rule, kind in RULES.items():
        for item in fields(kind):
            found.setdefault(item.name, {})[rule] = item
    result = []
    for name, items in found.items():
        first = next(iter(items.values()))
        defaults = ", ".join(f"{rule} {_shown(item.default)}" for rule, item in items.items())
        text = f"{first.metadata.get('help', '')} Rules and defaults: {defaults}."
        made: Any = field(default=None, metadata={"help": text.strip()})
        lazy = isinstance(first.type, str)  # the annotation is only a text
        made.name, made.type = name, type(first.default) if lazy else first.type
        if isinstance(first.default, tuple):
            made.type = list
        result.append(made)
    return result


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass
class RunArguments:
    """Options of the run: its length, its speed, and what is written where."""

    output_dir: str = option("Folder for the ticket, checkpoints, log and figures.", "runs/ticket")
    encoding: Literal["packed", "entropy"] = option(
        "How the masks are stored: packed in whole bits per weight, or entropy-coded, which is a shorter file.",
        "packed",
    )
    control: str | None = option(
        "Train a control instead of a ticket, with the same text and number of steps: dense (stock GPT-2, all weights"
        " trained), random_mask (the first mask, never trained) or frozen_embeddings."
    )
    compare: list[str] | None = option(  # noqa: RUF009 (the default is None)
        "Controls to run after the ticket; one table and one figure then show them all."
    )
    prompt: str | None = option("At the end, let the trained models continue this text.")
    max_steps: int = option("Optimizer steps. A positive number overrides num_train_epochs.", -1)
    num_train_epochs: float = option("Passes over the training text.", 3.0)
    per_device_train_batch_size: int = option("Sequences in a batch of one process.", 16)
    gradient_accumulation_steps: int = option("Batches whose gradients make one optimizer step.", 1)
    dataloader_num_workers: int | None = option(
        "Processes that read ahead; by default none for stored text and one for a stream, which is tokenised"
        " while training."
    )
    optim: Literal["adamw_torch", "sgd"] = option("Optimizer: torch's AdamW or SGD.", "adamw_torch")
    learning_rate: float = option("Highest learning rate of the scores.", 1e-2)
    weight_learning_rate: float = option(
        "Highest learning rate of trained weights: embeddings, scales and gains that are trained.", 1e-3
    )
    dense_learning_rate: float | None = option(
        "Highest learning rate of the dense control; weight_learning_rate by default."
    )
    dense_std: float = option(
        "Standard deviation of the dense control's first weights; GPT-2's is 0.02.", 0.02
    )
    adam_beta1: float = option("AdamW: decay of the mean of gradients.", 0.9)
    adam_beta2: float = option("AdamW: decay of the mean of squared gradients.", 0.999)
    momentum: float = option("SGD: momentum.", 0.9)
    weight_decay: float = option("Weight decay of trained weights; for scores see score_decay.", 0.0)
    score_decay: float = option(
        "Weight decay of scores. It does not change their order, but keeps them small, so masks keep changing in a"
        " long run; 0.5 works well.",
        0.0,
    )
    warmup_steps: float = option(
        "Steps in which the learning rate rises to its highest; below 1, this share of all steps.", 0
    )
    min_lr_rate: float = option(
        "After warm-up the learning rate falls on a cosine to this share of its highest; 1 keeps it constant.",
        0.1,
    )
    max_grad_norm: float = option(
        "Gradients with a larger norm are scaled down to it; 0 leaves them as they are.", 1.0
    )
    dropout: float = option("Dropout wherever GPT-2 has it: residual stream, embeddings, attention.", 0.0)
    ramp_start: float | None = option(
        "Start with this density, or threshold, and change it linearly to the value of the model's rule."
    )
    ramp_steps: int = option("Steps in which the value changes from ramp_start to that of the rule.", 0)
    relaxed_steps: float = option(
        "Train the first steps without a mask: each factor follows its score freely, and only evaluations use the"
        " mask. Below 1, this share of all steps; 0.5 does well in long runs.",
        0,
    )
    weight_restart: float = option(
        "Learning rate of trained weights (scales, gains) when relaxed steps are over: it starts again from this value"
        " and falls until the last step. 0 makes no new start. With rules trellis and signed 0.01 does well.",
        0.0,
    )
    mask_steps: int = option(
        "Steps for which a mask is used before the scores make a new one; evaluations and the ticket always use the"
        " present scores. More than 1 saves time with rule trellis, whose search takes long.",
        1,
    )
    bf16: bool = option("Compute in bfloat16; without this, as accelerate is configured.", False)
    gradient_checkpointing: bool = option("Save memory: compute activations again for the backward.", False)
    torch_compile: bool = option("Compile the model with torch.compile.", False)
    eval_steps: float = option(
        "Steps between evaluations; below 1, this share of all steps. 0 evaluates at the end only.", 200
    )
    moments: bool = option(
        "At each evaluation, log how spread the attention of every head is (tr M2 over 8 blocks): a head near"
        " 0 attends to one position, and its query and key scores get no gradient.",
        False,
    )
    logging_steps: float = option("Steps between lines of the log; below 1, this share of all steps.", 10)
    save_steps: float = option(
        "Steps between checkpoints; below 1, this share of all steps. 0 saves only when interrupted.", 500
    )
    save_total_limit: int = option("How many of the last checkpoints to keep, besides the best one.", 2)
    resume_from_checkpoint: str | None = option(
        "Resume from this checkpoint; without a value, from the last one in output_dir, if there is one.",
        nargs="?",
        const="true",
    )
    overwrite: bool = option("Delete the checkpoints of an earlier run in output_dir.", False)
    dry_run: int | None = option(
        "Print the sizes of the run and stop: weights, bytes of the ticket, memory per process. The value is the"
        " number of processes, 1 if it is left out.",
        nargs="?",
        const=1,
    )
    report_to: str = option(
        "A tracker in addition to log.jsonl: tensorboard, trackio, wandb or none.", "none"
    )

    def __post_init__(self) -> None:
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "save_total_limit"):
            if getattr(self, name) < 1:
                raise SLTError(f"{name} {getattr(self, name)} is not positive")
        if self.dataloader_num_workers is not None and self.dataloader_num_workers < 0:
            raise SLTError(f"dataloader_num_workers {self.dataloader_num_workers} is negative")
        if self.max_steps != -1 and self.max_steps < 1:
            raise SLTError(f"max_steps {self.max_steps} is not positive; -1 counts by num_train_epochs")
        if not self.num_train_epochs > 0:
            raise SLTError(f"num_train_epochs {self.num_train_epochs} is not positive")
        for name in ("warmup_steps", "relaxed_steps", "eval_steps", "logging_steps", "save_steps"):
            value = getattr(self, name)
            if value < 0 or (value > 1 and value != int(value)) or (value == 0 and name == "logging_steps"):
                raise SLTError(f"{name} {value} is neither a number of steps nor a share below 1")
            setattr(self, name, int(value) if value == int(value) else value)
        if self.mask_steps < 1:
            raise SLTError(f"mask_steps {self.mask_steps} is below 1; 1 makes a new mask at every step")
        rates = "learning_rate weight_learning_rate weight_restart weight_decay score_decay momentum max_grad_norm"
        for name in rates.split():
            if not getattr(self, name) >= 0:
                raise SLTError(f"{name} {getattr(self, name)} is negative")
        if self.weight_restart and not self.relaxed_steps:
            raise SLTError(
                f"weight_restart {self.weight_restart} is for the steps that follow relaxed steps, and there are "
                "none; give relaxed_steps too"
            )
        if self.dense_learning_rate is not None and not self.dense_learning_rate >= 0:
            raise SLTError(f"dense_learning_rate {self.dense_learning_rate} is negative")
        if not self.dense_std > 0:
            raise SLTError(f"dense_std {self.dense_std} is not positive")
        for name in ("dropout", "adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise SLTError(f"{name} {getattr(self, name)} is not in [0, 1)")
        if not 0 <= self.min_lr_rate <= 1:
            raise SLTError(
                f"min_lr_rate {self.min_lr_rate} is not in [0, 1]: it is a share of the highest rate"
            )
        if self.report_to != "none" and self.report_to not in map(str, get_available_trackers()):
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            if self.report_to in LOGGER_TYPE_TO_CLASS:
                raise SLTError(f"report_to {self.report_to}: not installed; pip install {self.report_to}")
            raise SLTError(f"report_to {self.report_to!r} is not one of none, {known}")
        for name in (*(self.compare or ()), *([self.control] if self.control else ())):
            if name not in CONTROLS:
                raise SLTError(f"control {name!r} is not one of {', '.join(CONTROLS)}")
        if self.ramp_start is not None and not (0 < self.ramp_start <= 1 and self.ramp_steps > 0):
            raise SLTError(
                f"ramp_start {self.ramp_start} over ramp_steps {self.ramp_steps}: give a density or "
                "threshold in (0, 1], and a positive number of steps"
            )
        if (resume := (self.resume_from_checkpoint or "false").lower()) in ("true", "false"):
            self.resume_from_checkpoint = "true" if resume == "true" else None


# Options that do not change what a run computes. They may differ when a run is resumed.
FREE_TO_CHANGE = frozenset(
    "output_dir encoding prompt resume_from_checkpoint overwrite report_to logging_steps save_steps "
    "save_total_limit compare cache_dir torch_compile moments dry_run "
    "dataloader_num_workers preprocessing_num_workers "
    "max_steps num_train_epochs".split()  # steps are compared instead
)


def steps_of(value: float, steps: int) -> int:
    """Return a number of steps that may be given as a share of all steps, as in transformers.

    Args:
        value (`float`):
            A number of steps, or a share below 1.
        steps (`int`):
            Number of all steps.

    Returns:
        `int`: number of steps.

    Example:

    >>> steps_of(30, 500), steps_of(0.25, 500), steps_of(0, 500)
    (30, 125, 0)
    """
    return int(value) if value >= 1 else math.ceil(value * steps)


@dataclass
class Arguments:
    """All of a run's arguments; names differ across the three groups.

    Args:
        model (*optional*):
            The configuration of the model: GPT-2's, or that of another architecture.
        data ([`DataArguments`], *optional*):
            Options of the text.
        run ([`RunArguments`], *optional*):
            Options of the run.
        base ([`BaseArguments`], *optional*):
            Options that choose the architecture.
        default_preset (`Path`, *optional*):
            Path of the preset that is applied because the command line names none.
    """

    model: Any = field(default_factory=SupermaskGPT2Config)  # or the configuration of another architecture
    data: DataArguments = field(default_factory=DataArguments)
    run: RunArguments = field(default_factory=RunArguments)
    base: BaseArguments = field(default_factory=BaseArguments)
    default_preset: Path | None = None  # the preset that applies because the command line names none

    def __post_init__(self) -> None:
        if self.run.ramp_start is not None and not {*RAMPED} & self.model.rule_options.keys():
            has = " or ".join(RAMPED)
            raise SLTError(f"ramp_start: rule {self.model.rule!r} has no {has} to ramp; leave it out")

    @classmethod
    def of(cls, **options: Any) -> "Arguments":
        """Build arguments from options of all groups, by name.

        Args:
            options:
                Values by name.

        Returns:
            [`Arguments`]: the arguments.

        Raises:
            [`SLTError`]: for an unknown option or an impossible value.
        """
        if (word := options.get("activation_function", "relu")) not in ACT2FN:
            raise SLTError(f"activation_function {word!r} is unknown{did_you_mean(word, ACT2FN)}")
        groups: list[Any] = []
        known: list[str] = []
        base = BaseArguments(
            **{one.name: options.pop(one.name, one.default) for one in fields(BaseArguments)}
        )
        for group, items in (
            (partial(_model_config, base), model_fields()),
            (DataArguments, fields(DataArguments)),
            (RunArguments, fields(RunArguments)),
        ):
            names = [item.name for item in items]
            groups.append(group(**{name: options.pop(name) for name in names if name in options}))
            known += names
        for name in options:
            raise SLTError(f"unknown option {name}{did_you_mean(name, known)}")
        return cls(*groups, base=base)

    def flat(self) -> dict[str, Any]:
        """Return every argument by name.

        Returns:
            `dict[str, Any]`: values by name.
        """
        model = {item.name: getattr(self.model, item.name, None) for item in model_fields()}
        return {**asdict(self.base), **model, **asdict(self.data), **asdict(self.run)}

    def config(self, tokenizer: Any) -> Any:
        """Return the model's configuration, with the values that text and run determine: vocabulary, length, dropout.

        Args:
            tokenizer:
                The tokenizer of the run.

        Returns:
            A supermask configuration.

        Raises:
            [`SLTError`]: if the tokenizer has more tokens than the backbone.
        """
        config = copy.deepcopy(self.model)
        for name in _DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, self.run.dropout)
        if config.backbone:
            if len(tokenizer) > config.vocab_size:
                raise SLTError(
                    f"the tokenizer has {len(tokenizer)} tokens, the backbone {config.backbone} only "
                    f"{config.vocab_size}; give --tokenizer {config.backbone}"
                )
            return config
        config.vocab_size, config.max_position_embeddings = len(tokenizer), self.data.block_size
        # Blocks are full: nothing is padded, so there is no pad token.
        config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
        return config


def _model_config(base: BaseArguments, **options: Any) -> Any:
    """Return the configuration of the model, as far as the options of the model determine it."""
    if base.architecture == "gpt2" and not base.base_config and not options.get("backbone"):
        return SupermaskGPT2Config(**options)
    stock = _stock_config(base, options)
    kind: Any = type(stock)
    own = {*supermask_config_class(kind).options_class.names(), *rule_option_names()}
    for one in fields(GPT2Options):
        if one.name not in own and options.get(one.name, one.default) != one.default:
            raise SLTError(f"{one.name} is an option of GPT-2 only; leave it out for {stock.model_type}")
    return supermask_config(stock, **{name: options[name] for name in options if name in own})


def _stock_config(base: BaseArguments, options: dict[str, Any]) -> Any:
    """Return the stock configuration of a run: that of the backbone, that in a file, or one with the given sizes."""
    if backbone := options.get("backbone"):
        return AutoConfig.from_pretrained(backbone, revision=options.get("backbone_revision"))
    facts: dict[str, Any] = {}
    if base.base_config:
        facts = read_json(Path(base.base_config))
        said = facts.pop("model_type", base.architecture)
        if said != base.architecture:
            raise SLTError(
                f"{base.base_config}: model_type {said!r}, not the architecture {base.architecture!r}"
            )
    try:
        stock = AutoConfig.for_model(base.architecture, **facts)
    except (ValueError, TypeError, KeyError) as error:
        hint = did_you_mean(base.architecture, CONFIG_MAPPING_NAMES)
        raise SLTError(
            f"architecture {base.architecture!r} cannot be made{hint} ({str(error)[:200]})"
        ) from None
    if not any(auto == "AutoModelForCausalLM" for auto, _ in stock_models(type(stock))):
        raise SLTError(f"architecture {base.architecture!r} has no causal language model")
    if not base.base_config:
        plain = SupermaskGPT2Config()
        sizes = {name: options.get(name, getattr(plain, name)) for name in SIZES}
        sizes["n_inner"] = sizes["n_inner"] or 4 * sizes["n_embd"]
        own = {SIZES[name]: value for name, value in sizes.items() if hasattr(stock, SIZES[name])}
        if hasattr(stock, "num_key_value_heads"):
            own["num_key_value_heads"] = sizes["n_head"]
        stock = AutoConfig.for_model(base.architecture, **own)
    return stock


def parse_arguments(
    words: Sequence[str] | None = None, description: str | None = None, preset: Path | None = None
) -> Arguments:
    """Read arguments from a command line. It overrides the preset that --config names, or else `preset`.

    Args:
        words (`Sequence[str]`, *optional*):
            The words of the command line. Default: those of this program.
        description (`str`, *optional*):
            What the program does, for its help.
        preset (`Path`, *optional*):
            Preset to apply if --config is not given.

    Returns:
        [`Arguments`]: the arguments.
    """
    words = list(sys.argv[1:] if words is None else words)
    usage = "%(prog)s [--config FILE] [options]"
    parser = OptionParser(description=description, usage=usage, hints={"--device": DEVICE_HINT})
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", default=preset)
    early.add_argument("--rule")
    first = early.parse_known_args(words)[0]
    own_rule = None
    if ":" in (first.rule or ""):  # before the options are declared: the rule has its own
        try:
            own_rule = add_own_rule(first.rule, _names_taken())
        except SLTError as error:
            parser.error(str(error))
    text = "YAML preset. The command line overrides it."
    if preset:
        text += f" Without --config, {preset.name} applies, and its values are the defaults shown here."
    parser.add_argument("--config", metavar="FILE", help=text)
    parser.add_fields("the architecture", fields(BaseArguments))
    parser.add_fields("the model", model_fields(), GPT2_HELP)
    parser.add_fields("the text", fields(DataArguments))
    parser.add_fields("the run", fields(RunArguments))
    if path := first.config:
        # Set as defaults: --help then shows the values of this preset.
        parser.set_defaults(**vars(parser.parse_args(_preset_words(parser, Path(path)))))
    options = vars(parser.parse_args(words))
    if (rule := own_rule or options["rule"]) in RULES and rule != parser.get_default("rule"):
        own = {one.name for one in fields(RULES[rule])}  # options of another rule in a preset do not apply
        parser.set_defaults(**{name: None for name in rule_option_names() if name not in own})
        options = vars(parser.parse_args(words))
    options["rule"] = rule
    named = options.pop("config")
    try:
        return replace(Arguments.of(**options), default_preset=None if named else preset)
    except ValueError as error:
        parser.error(str(error))


def _preset_words(parser: OptionParser, path: Path) -> list[str]:
    """Return a preset as a command line: argparse then checks its names and types too."""
    try:
        preset = yaml.safe_load(path.read_text())
    except OSError as error:
        parser.error(f"cannot read {path}: {error.strerror}")
    except yaml.YAMLError as error:
        parser.error(f"{path} is not YAML: {' '.join(str(error).split())}")
    if not isinstance(preset, dict):
        parser.error(f"{path} is not a list of 'name: value' lines")
    words, known = [], vars(parser.parse_args([]))
    for name, value in preset.items():
        if name not in known:
            parser.error(f"{path}: unknown option {name}{did_you_mean(str(name), known)}")
        if name == "rule" and ":" in str(value):  # a preset may come from another person
            parser.error(
                f"{path}: rule {value} names code to run; give it on the command line: --rule {value}"
            )
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words
