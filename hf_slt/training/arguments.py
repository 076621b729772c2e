"""What a run can be told: dataclass fields are the only source of names, defaults and help.

    defaults < YAML preset (--config) < command line

Options of the model are fields of its configuration. Options of the run are called as in transformers'
`TrainingArguments` where the same is meant. An unknown or ill-typed value is an error in a preset as well:
it is read as if it were typed.
"""

import argparse
import copy
import math
import sys
from collections.abc import Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from transformers.activations import ACT2FN

from ..model.configuration_supermask_gpt2 import RULE_OPTIONS, SupermaskGPT2Config
from ..model.ticket import SLTError
from ..options import OptionParser, did_you_mean
from ..text.blocks import DataArguments
from ..text.corpus import option
from .rules import RAMPED, RULES

CONTROLS = ("dense", "random_mask", "frozen_embeddings")

# GPT-2's own fields bring no help; ours do, but for those that the library sets.
GPT2_HELP = {
    "n_layer": "Number of blocks.",
    "n_head": "Attention heads in a block.",
    "n_embd": "Width of the model.",
    "n_inner": "Width of the MLPs; four times n_embd by default.",
    "activation_function": "Activation function of the MLPs.",
    "initializer_range": "Standard deviation of the frozen weights.",
    "tie_word_embeddings": "Use the token embedding as the output head too.",
}
MODEL_FIELDS: list[Field] = [
    item for item in fields(SupermaskGPT2Config) if item.metadata.get("help") or item.name in GPT2_HELP
]


@dataclass
class RunArguments:
    """The run: how long, how fast, what is written where."""

    output_dir: str = option("Folder for the ticket, checkpoints, log and figures.", "runs/ticket")
    encoding: Literal["packed", "entropy"] = option(
        "How the ticket is stored: packed loads everywhere; entropy is shorter, and needs hf_slt installed.",
        "packed",
    )
    control: str | None = option(
        "Train a control instead of a ticket, on the same text and steps: dense (stock GPT-2, all weights"
        " trained), random_mask (the first mask, never trained) or frozen_embeddings."
    )
    compare: list[str] | None = option(  # noqa: RUF009 (the default is None)
        "Controls to run after the ticket; one table and one figure then show them all."
    )
    prompt: str | None = option("At the end, let the trained models go on after these words.")
    max_steps: int = option("Optimizer steps. A positive number overrides num_train_epochs.", -1)
    num_train_epochs: float = option("Passes over the training text.", 3.0)
    per_device_train_batch_size: int = option("Sequences that a process takes at once.", 16)
    gradient_accumulation_steps: int = option("Batches whose gradients make one optimizer step.", 1)
    optim: Literal["adamw_torch", "sgd"] = option("Optimizer: torch's AdamW or SGD.", "adamw_torch")
    learning_rate: float = option("Highest learning rate of the scores.", 1e-2)
    weight_learning_rate: float = option(
        "Highest learning rate of trained weights: embeddings that are trained, or the dense control.", 1e-3
    )
    adam_beta1: float = option("AdamW: decay of the mean of gradients.", 0.9)
    adam_beta2: float = option("AdamW: decay of the mean of squared gradients.", 0.999)
    momentum: float = option("SGD: momentum.", 0.9)
    weight_decay: float = option("Weight decay of trained weights; scores have one of their own.", 0.0)
    score_decay: float = option(
        "Weight decay of scores. They keep their order, but stay so small that masks go on changing in a long"
        " run; 0.5 does well.",
        0.0,
    )
    warmup_steps: float = option(
        "Steps in which the learning rate rises to its highest; below 1, this share of all steps.", 0
    )
    min_lr_rate: float = option(
        "After warm-up the learning rate falls on a cosine to this share of its highest; 1: stays level.",
        0.1,
    )
    max_grad_norm: float = option(
        "Gradients with a larger norm are scaled down to it; 0 leaves them as they are.", 1.0
    )
    dropout: float = option("Dropout wherever GPT-2 has it: residual stream, embeddings, attention.", 0.0)
    ramp_start: float | None = option(
        "Start with this density, or threshold, and go linearly to that of the model's rule."
    )
    ramp_steps: int = option("Steps that the way from ramp_start to the model's own value takes.", 0)
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
    save_total_limit: int = option("How many of the last checkpoints to keep, beside the best one.", 2)
    resume_from_checkpoint: str | None = option(
        "Go on from this checkpoint; without a value, from the last one in output_dir, if there is any.",
        nargs="?",
        const="true",
    )
    overwrite: bool = option("Throw away the checkpoints of an earlier run in output_dir.", False)
    report_to: str = option("A tracker beside log.jsonl: tensorboard, trackio, wandb or none.", "none")

    def __post_init__(self) -> None:
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "save_total_limit"):
            if getattr(self, name) < 1:
                raise SLTError(f"{name} {getattr(self, name)} is not positive")
        if self.max_steps != -1 and self.max_steps < 1:
            raise SLTError(f"max_steps {self.max_steps} is not positive; -1 counts by num_train_epochs")
        if not self.num_train_epochs > 0:
            raise SLTError(f"num_train_epochs {self.num_train_epochs} is not positive")
        for name in ("warmup_steps", "eval_steps", "logging_steps", "save_steps"):
            value = getattr(self, name)
            if value < 0 or (value > 1 and value != int(value)) or (value == 0 and name == "logging_steps"):
                raise SLTError(f"{name} {value} is neither a number of steps nor a share below 1")
            setattr(self, name, int(value) if value == int(value) else value)
        rates = "learning_rate weight_learning_rate weight_decay score_decay momentum max_grad_norm".split()
        for name in rates:
            if not getattr(self, name) >= 0:
                raise SLTError(f"{name} {getattr(self, name)} is negative")
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


# How a run goes, not what it computes: these may differ when a run is resumed.
FREE_TO_CHANGE = frozenset(
    "output_dir encoding prompt resume_from_checkpoint overwrite report_to logging_steps save_steps "
    "save_total_limit compare cache_dir torch_compile moments "
    "max_steps num_train_epochs".split()  # steps are compared instead
)


def steps_of(value: float, steps: int) -> int:
    """A number of steps that may be given as a share of all steps, as in transformers.

    >>> steps_of(30, 500), steps_of(0.25, 500), steps_of(0, 500)
    (30, 125, 0)
    """
    return int(value) if value >= 1 else math.ceil(value * steps)


@dataclass
class Arguments:
    """All of a run's arguments; names differ across the three groups."""

    model: SupermaskGPT2Config = field(default_factory=SupermaskGPT2Config)
    data: DataArguments = field(default_factory=DataArguments)
    run: RunArguments = field(default_factory=RunArguments)

    def __post_init__(self) -> None:
        if self.run.ramp_start is not None and not {*RAMPED} & dict(self.model.rule_options).keys():
            has = " or ".join(RAMPED)
            raise SLTError(f"ramp_start: rule {self.model.rule!r} has no {has} to ramp; leave it out")

    @classmethod
    def of(cls, **options: Any) -> "Arguments":
        """Arguments from options by name, whichever group they are of."""
        if (word := options.get("activation_function", "relu")) not in ACT2FN:
            raise SLTError(f"activation_function {word!r} is unknown{did_you_mean(word, ACT2FN)}")
        groups: list[Any] = []
        known: list[str] = []
        for group, items in (
            (SupermaskGPT2Config, MODEL_FIELDS),
            (DataArguments, fields(DataArguments)),
            (RunArguments, fields(RunArguments)),
        ):
            names = [item.name for item in items]
            groups.append(group(**{name: options.pop(name) for name in names if name in options}))
            known += names
        for name in options:
            raise SLTError(f"unknown option {name}{did_you_mean(name, known)}")
        return cls(*groups)

    def flat(self) -> dict[str, Any]:
        """Every argument by name."""
        model = {item.name: getattr(self.model, item.name) for item in MODEL_FIELDS}
        return {**model, **asdict(self.data), **asdict(self.run)}

    def config(self, tokenizer: Any) -> SupermaskGPT2Config:
        """The model's configuration, with what follows from text and run: vocabulary, length, dropout."""
        config = copy.deepcopy(self.model)
        config.vocab_size, config.n_positions = len(tokenizer), self.data.block_size
        # Blocks are full: nothing is padded, so no pad token is named.
        config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = self.run.dropout
        return config


def parse_arguments(
    words: Sequence[str] | None = None, description: str | None = None, preset: Path | None = None
) -> Arguments:
    """Arguments from a command line, on top of the preset that --config names, or else of `preset`."""
    words = list(sys.argv[1:] if words is None else words)
    parser = OptionParser(description=description, usage="%(prog)s [--config FILE] [options]")
    told = f" (default: {preset.name})" if preset else ""
    parser.add_argument("--config", metavar="FILE", help=f"YAML preset; the command line overrides it{told}")
    parser.add_fields("the model", MODEL_FIELDS, GPT2_HELP)
    parser.add_fields("the text", fields(DataArguments))
    parser.add_fields("the run", fields(RunArguments))
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", default=preset)
    if path := early.parse_known_args(words)[0].config:
        # As defaults, so that --help shows what this preset would do.
        parser.set_defaults(**vars(parser.parse_args(_preset_words(parser, Path(path)))))
    options = vars(parser.parse_args(words))
    if (rule := options["rule"]) in RULES and rule != parser.get_default("rule"):
        own = {one.name for one in fields(RULES[rule])}  # a preset's options of another rule do not apply
        parser.set_defaults(**{name: None for name in RULE_OPTIONS if name not in own})
        options = vars(parser.parse_args(words))
    del options["config"]
    try:
        return Arguments.of(**options)
    except ValueError as error:
        parser.error(str(error))


def _preset_words(parser: OptionParser, path: Path) -> list[str]:
    """A preset as a command line, so that argparse checks names and types alike."""
    try:
        import yaml  # an extra: only presets need it
    except ImportError:
        parser.error('presets need PyYAML: pip install "hf_slt[train]"')
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
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words
