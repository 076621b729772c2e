"""What a run can be told: dataclass fields are the only source of names, defaults and help.

    defaults < YAML preset (--config) < command line

An unknown or ill-typed value is an error in either place: a preset is read as if it were typed.
"""

import difflib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from transformers import HfArgumentParser

from ..model.configuration_supermask_gpt2 import SupermaskGPT2Config
from ..text.blocks import Corpus, DataArguments

CONTROLS = ("dense", "random_mask", "frozen_embeddings")


def _help(text: str, default: Any) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class ModelArguments:
    """The model: GPT-2's sizes and how its frozen weights are drawn."""

    n_layer: int = _help("Blocks.", 4)
    n_head: int = _help("Attention heads.", 4)
    n_embd: int = _help("Width.", 128)
    n_inner: int | None = _help("Width of the MLPs; four times n_embd by default.", None)
    n_qk: int | None = _help("Width of a query and key per head; n_embd / n_head by default.", None)
    n_v: int | None = _help("Width of a value per head; n_embd / n_head by default.", None)
    seed: int = _help("Seed of the frozen weights, the first scores, the order of the data and dropout.", 0)
    density: float = _help("Fraction of the weights that is kept.", 0.3)
    law: str = _help(
        "Law of the frozen weights: normal, signed_constant, uniform or xavier_uniform.", "normal"
    )
    embedding_law: str | None = _help("Law of the embeddings, if another.", None)
    embedding_range: float | None = _help("Standard deviation of the embeddings, if another.", None)
    initializer_range: float = _help("Standard deviation of the weights.", 0.02)
    scale_with_width: bool = _help("Fit initializer_range, made for width 768, to this width.", False)
    qk_scale: str = _help("Factor on query and key weights: a number, or paper for n_qk ** (1/4).", "paper")
    layer_norm: bool = _help("Keep LayerNorm.", True)
    embedding: str = _help("Embeddings: masked, frozen or trained.", "masked")
    embedding_bits: int = _help("Bits of a trained embedding value in the ticket: 32, 8 or 4.", 32)
    tie_word_embeddings: bool = _help("Use the token embedding as output head.", True)
    activation_function: str = _help("Activation of the MLPs.", "gelu_new")
    dropout: float = _help("Dropout in the residual stream, attention and embeddings.", 0.0)

    def config(self, corpus: Corpus, block_size: int) -> SupermaskGPT2Config:
        """The configuration of this model for a tokenizer and a block size."""
        options = asdict(self)
        dropout, qk_scale = options.pop("dropout"), options.pop("qk_scale")
        end = corpus.tokenizer.eos_token_id  # blocks are full: nothing is padded, so no pad token is named
        return SupermaskGPT2Config(
            **options,
            qk_scale=qk_scale if qk_scale == "paper" else float(qk_scale),
            vocab_size=len(corpus.tokenizer),
            n_positions=block_size,
            bos_token_id=end,
            eos_token_id=end,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
        )


@dataclass
class RunArguments:
    """The run: how long, how fast, what is written where."""

    output_dir: str = _help("Folder for the ticket, checkpoints, log and figures.", "runs/ticket")
    control: str | None = _help(
        "Run a control instead, on the same data and steps: dense (stock GPT-2, all weights trained), "
        "random_mask (the first mask, never trained) or frozen_embeddings.",
        None,
    )
    compare: list[str] | None = _help(  # noqa: RUF009 (the default is None)
        "Controls to run after the ticket, for one table and figure.", None
    )
    prompt: str | None = _help("At the end, show how the models go on after these words.", None)
    steps: int = _help("Optimizer steps.", 1000)
    epochs: float | None = _help("Passes over the data, instead of steps.", None)
    batch_size: int = _help("Sequences a process takes at once.", 16)
    accumulation: int = _help("Batches that make one optimizer step.", 1)
    optimizer: Literal["adamw", "sgd"] = _help("Optimizer.", "adamw")
    learning_rate: float = _help("Highest learning rate of scores.", 1e-2)
    weight_learning_rate: float = _help("The same of trained weights: embeddings, or a dense control.", 1e-3)
    query_rate: float = _help("Factor on the rate of query scores.", 1.0)
    key_rate: float = _help("Factor on the rate of key scores.", 1.0)
    value_rate: float = _help("Factor on the rate of value scores.", 1.0)
    output_rate: float = _help("Factor on the rate of attention output scores.", 1.0)
    mlp_rate: float = _help("Factor on the rate of MLP scores.", 1.0)
    embedding_rate: float = _help("Factor on the rate of embedding scores.", 1.0)
    beta1: float = _help("AdamW's first decay.", 0.9)
    beta2: float = _help("AdamW's second decay.", 0.999)
    momentum: float = _help("Momentum of SGD.", 0.9)
    weight_decay: float = _help("Weight decay of trained weights; scores have none.", 0.0)
    warmup_steps: int = _help("Steps of linear warm-up.", 0)
    warmup_epochs: float | None = _help("Passes of linear warm-up, instead of warmup_steps.", None)
    rate_floor: float = _help("Share of the rate left at the end of its cosine.", 0.1)
    clip: float = _help("Longest gradient; 0 does not clip.", 1.0)
    density_start: float | None = _help("Density to begin with; it goes linearly to the model's.", None)
    density_steps: int = _help("Steps of that way.", 0)
    mixed_precision: str | None = _help("no or bf16; by default as accelerate is configured.", None)
    gradient_checkpointing: bool = _help("Compute activations twice to save memory.", False)
    compile: bool = _help("torch.compile the model.", False)
    evaluate_every: int = _help("Steps between evaluations and looks at the masks; 0: at the end.", 200)
    moments: bool = _help(
        "At each evaluation, log how spread the attention of every head is (tr M2 over 8 blocks): a head near"
        " 0 attends to one position, and its query and key scores get no gradient.",
        False,
    )
    log_every: int = _help("Steps between lines of the log.", 10)
    save_every: int = _help("Steps between checkpoints; 0: only when interrupted.", 500)
    keep_checkpoints: int = _help("How many of the last checkpoints stay, beside the best.", 2)
    resume: bool = _help("Go on from the last checkpoint in output_dir, if there is one.", False)
    overwrite: bool = _help("Throw away the checkpoints of an earlier run in output_dir.", False)
    log_with: str | None = _help("A tracker beside log.jsonl: tensorboard, trackio or wandb.", None)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulation", "log_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive")
        for name in (*(self.compare or ()), *([self.control] if self.control else ())):
            if name not in CONTROLS:
                raise ValueError(f"control {name!r} is not one of {', '.join(CONTROLS)}")
        if self.density_start is not None and not (0 < self.density_start <= 1 and self.density_steps > 0):
            raise ValueError(
                f"density_start {self.density_start} over density_steps {self.density_steps}: give a density "
                "in (0, 1] and how many steps the way from it takes"
            )


# How a run goes, not what it computes: these may differ when a run is resumed.
FREE_TO_CHANGE = frozenset(
    "output_dir prompt resume overwrite log_with log_every save_every keep_checkpoints compare cache_dir "
    "compile moments".split()
)


@dataclass
class Arguments:
    """All of a run's arguments."""

    model: ModelArguments = field(default_factory=ModelArguments)
    data: DataArguments = field(default_factory=DataArguments)
    run: RunArguments = field(default_factory=RunArguments)

    def flat(self) -> dict[str, Any]:
        """Every argument by name; names differ across the three groups."""
        return {**asdict(self.model), **asdict(self.data), **asdict(self.run)}


def parse_arguments(words: Sequence[str] | None = None, description: str | None = None) -> Arguments:
    """Arguments from a command line, which may name a preset with --config."""
    words = list(sys.argv[1:] if words is None else words)
    groups: Any = (ModelArguments, DataArguments, RunArguments)
    parser = HfArgumentParser(groups, description=description, allow_abbrev=False)
    parser.add_argument("--config", help="YAML preset; the command line overrides it")
    preset = [word for word in _preset_path(words) for word in _preset_words(parser, word)]
    try:
        model, data, run, _ = parser.parse_args_into_dataclasses(preset + words)
    except ValueError as error:
        parser.error(str(error))
    return Arguments(model, data, run)


def _preset_path(words: list[str]) -> list[str]:
    found = []
    for place, word in enumerate(words):
        if word == "--config":
            found = words[place + 1 : place + 2]
        elif word.startswith("--config="):
            found = [word.removeprefix("--config=")]
    return found


def _preset_words(parser: HfArgumentParser, path: str) -> list[str]:
    """A preset as a command line, so that argparse checks names and types alike."""
    import yaml  # an extra: only presets need it

    try:
        preset = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        parser.error(f"cannot read {path}: {error.strerror}")
    except yaml.YAMLError as error:
        parser.error(f"{path} is not YAML: {' '.join(str(error).split())}")
    if not isinstance(preset, dict):
        parser.error(f"{path} is not a list of 'name: value' lines")
    known = {item.name for group in (ModelArguments, DataArguments, RunArguments) for item in fields(group)}
    words = []
    for name, value in preset.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            parser.error(
                f"{path}: unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words
