"""Runs at equal bytes: tickets, and dense models that are rounded while they train.

    code   = round(weight / step + (levels - 1) / 2), kept within 0 .. levels - 1
    weight = step * (code - (levels - 1) / 2)                  # what every forward computes with

    int4 15 levels, int3 7, int2 4, ternary 3, binary 2

    step "learned"   one per output unit, trained with the weights as in LSQ (arXiv 1902.08153), in 8 bits
    step "largest"   float16, for every 64 weights: the largest of them has the outermost level
    step "mean"      float16, for every row: its mean magnitude, as in BitNet b1.58

Dense models are stock GPT-2 with the same text, tokenizer, tokens and loop as the tickets. The gradient passes
through the rounding, for weights within half a level of the outermost ones. Where `relaxed_steps` lets tickets train
without a mask at first, dense models train without rounding.

Bytes are those of a whole file on both sides: a deflated description, steps or scales, vectors, and codes
as hf_slt.tickets.entropy codes them. The tokenizer is in neither file.
"""

import json
import math
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import studies
import torch
from safetensors.numpy import save
from studies import Record, Records, TimedRun
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from hf_slt.errors import SLTError
from hf_slt.masks.gradients import rounded
from hf_slt.masks.rules import RULES, make_rule
from hf_slt.text.blocks import Corpus, DataArguments, load_blocks
from hf_slt.text.evaluation import evaluate_blocks
from hf_slt.tickets.coded_files import deflate
from hf_slt.tickets.entropy import encode_codes
from hf_slt.tickets.format import MASK_FILE
from hf_slt.training.arguments import Arguments, RunArguments
from hf_slt.training.batches import validation_batches
from hf_slt.weights.codes import only_chooses, pack_codes
from hf_slt.weights.quantisation import quantise

LEVELS = {"int4": 15, "int3": 7, "int2": 4, "ternary": 3, "binary": 2}
GROUP = 64  # weights that share a step of kind "largest"
SMALLEST_STEP = 2.0**-24

# -- one quantiser ----------------------------------------------------------------------------------


def nearest_codes(weight: Tensor, step: Tensor, levels: int) -> Tensor:
    """Return the code of every weight, as floating-point integers 0 .. levels - 1."""
    centre = (levels - 1) / 2
    return ((weight / step + centre % 1).round() + int(centre)).clamp(0, levels - 1)


def round_groups(weight: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round to uniform levels with one float16 step for every 64 weights, of which the largest fits.

    Args:
        weight (`Tensor`):
            Weights of any shape.
        levels (`int`):
            Number of levels.

    Returns:
        `tuple[Tensor, Tensor, Tensor]`: the rounded weights, their codes, and the steps.
    """
    flat = nn.functional.pad(weight.reshape(-1), (0, -weight.numel() % GROUP)).view(-1, GROUP)
    outermost = (levels - 1) / 2
    steps = (flat.abs().amax(1, keepdim=True) / outermost).half().float().clamp(min=SMALLEST_STEP)
    codes = nearest_codes(flat, steps, levels)
    values, codes = (
        (one.view(-1)[: weight.numel()]).view_as(weight) for one in ((codes - outermost) * steps, codes)
    )
    return values, codes, steps


class Rounded(nn.Module):
    """Parametrization of a weight matrix: rounded in the forward, straight through in the backward.

    Args:
        weight (`Tensor`):
            The matrix before training; a learned step starts from its magnitudes.
        levels (`int`):
            Number of levels.
        step (`str`):
            "learned", "largest" or "mean".
        axis (`int`):
            The axis over which a learned step is shared: the inputs.
    """

    def __init__(self, weight: Tensor, levels: int, step: str, axis: int) -> None:
        super().__init__()
        self.levels, self.step, self.axis = levels, step, axis
        self.relaxed = False  # whether training steps use the weights as they are
        if step == "learned":
            self.register_buffer("first_step", self.usual_step(weight))
            self.gain = nn.Parameter(
                torch.ones_like(self.first_step)
            )  # near 1, as AdamW's steps have one length for all

    def usual_step(self, weight: Tensor) -> Tensor:
        """Return the steps that LSQ starts from: by the mean magnitude of what shares a step."""
        return 2 * weight.detach().abs().mean(self.axis) / ((self.levels - 1) / 2) ** 0.5

    def steps(self, weight: Tensor) -> Tensor:
        """Return the step of every row or column, as it is stored."""
        if self.step == "mean":
            share = 1 if self.levels == 3 else 2  # two levels are half a step from zero
            return (
                (share * weight.detach().abs().mean(1, keepdim=True)).half().float().clamp(min=SMALLEST_STEP)
            )
        steps = rounded((self.first_step * self.gain).abs(), 8).clamp(min=SMALLEST_STEP)
        return steps.unsqueeze(self.axis)

    def forward(self, weight: Tensor) -> Tensor:
        if self.relaxed and self.training:
            return weight
        if self.step == "largest":
            return weight + (round_groups(weight.detach(), self.levels)[0] - weight).detach()
        steps, centre = self.steps(weight), (self.levels - 1) / 2
        place = weight / steps + centre
        inside = place.clamp(-0.5, self.levels - 0.5)
        codes = nearest_codes(weight.detach(), steps.detach(), self.levels)
        return (inside + (codes - inside).detach() - centre) * steps

    @torch.no_grad()
    def stored(self, weight: Tensor) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the codes of a weight, and the arrays that hold its steps in a file."""
        if self.step == "largest":
            _, codes, steps = round_groups(weight, self.levels)
        else:
            steps = self.steps(weight)
            codes = nearest_codes(weight, steps, self.levels)
        whole = codes.to(torch.uint8).numpy()
        if self.step == "learned":
            return whole, list(quantise(steps.reshape(1, -1).numpy(), 8))
        return whole, [steps.half().numpy()]


class RoundedVector(nn.Module):
    """Parametrization of gains and biases: 8 bits each, as a ticket stores them."""

    def forward(self, vector: Tensor) -> Tensor:
        return rounded(vector, 8)


class TiedHead(nn.Module):
    """The output head of a rounded token table: the same rounded table."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self._table = (table,)  # a tuple hides it from the model, which has it already

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self._table[0].weight)


def dense_file(model: nn.Module, vector_bits: int) -> bytes:
    """Return a file of a rounded model, laid out as the entropy-coded file of a ticket.

    Args:
        model (`nn.Module`):
            Stock GPT-2 with `Rounded` parametrizations.
        vector_bits (`int`):
            Bits of gains and biases: 8 or 16.

    Returns:
        `bytes`: a safetensors file with one array, and a deflated description as its metadata.
    """
    packed, counts, arrays, described = {}, {}, [], {}
    for name, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 1 and leaf != "gain":
                values = parameter.detach().numpy()
                arrays += list(quantise(values[None], 8)) if vector_bits == 8 else [values.astype(np.float16)]
                described[f"{name}.{leaf}"] = list(values.shape)
        if isinstance(module, parametrize.ParametrizationList) and isinstance(module[0], Rounded):
            codes, steps = module[0].stored(module.original)
            levels = module[0].levels
            arrays += steps
            name = name.replace(".parametrizations.weight", "")
            packed[name] = pack_codes(codes, levels)
            counts[name] = np.bincount(codes.ravel(), minlength=levels).tolist()
            described[name] = [list(codes.shape), counts[name]]
    data = b"".join([*(one.tobytes() for one in arrays), encode_codes(packed, counts).tobytes()])
    sizes = ("n_layer", "n_head", "n_embd", "vocab_size", "n_positions")
    config = {name: getattr(model.config, name) for name in sizes}
    metadata = {"rounded": deflate(json.dumps({"config": config, "tensors": described}))}
    return save({"coded": np.frombuffer(data, np.uint8)}, metadata)


# -- one run ----------------------------------------------------------------------------------------


class RoundedRun(TimedRun):
    """A run of stock GPT-2 whose matrices are rounded in every forward."""

    def __init__(self, *args: Any, rounding: str, step: str, vector_bits: int, **keywords: Any) -> None:
        self.levels, self.step, self.vector_bits = LEVELS[rounding], step, vector_bits
        super().__init__(*args, **keywords)

    def _prepare(self, model: nn.Module) -> tuple[Any, Any]:
        for module in list(model.modules()):
            if module is model.lm_head:
                continue
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.dim() == 2:
                    axis = 0 if isinstance(module, Conv1D) else 1
                    way: nn.Module = Rounded(parameter, self.levels, self.step, axis)
                elif self.vector_bits == 8:
                    way = RoundedVector()
                else:
                    continue
                parametrize.register_parametrization(module, name, way)
        model.lm_head = TiedHead(model.transformer.wte)
        return super()._prepare(model)

    def begin_step(self) -> None:
        """Round from the step on at which tickets begin to use a mask; learned steps then start from the weights."""
        for module in self.accelerator.unwrap_model(self.model).modules():
            if isinstance(module, parametrize.ParametrizationList) and isinstance(module[0], Rounded):
                module[0].relaxed = self.is_relaxed
                if 0 < self.done == self.relaxed_steps and module[0].step == "learned":
                    module[0].first_step.copy_(module[0].usual_step(module.original))
        super().begin_step()


def rounded_optimizer(
    step_rate: float | None, model: nn.Module, options: RunArguments
) -> torch.optim.Optimizer:
    """Return AdamW in which only matrices decay, and learned steps may have a rate of their own."""
    rate = options.weight_learning_rate
    named = list(model.named_parameters())
    steps = [one for name, one in named if name.endswith("gain")]
    vectors = [one for name, one in named if one.dim() == 1 and not name.endswith("gain")]
    matrices = [one for _, one in named if one.dim() == 2]
    groups = [
        {"params": matrices, "lr": rate, "weight_decay": options.weight_decay},
        {"params": vectors, "lr": rate, "weight_decay": 0.0, "restarts": True},
        {
            "params": steps,
            "lr": rate if step_rate is None else step_rate,
            "weight_decay": 0.0,
            "restarts": True,
        },
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, betas=(options.adam_beta1, options.adam_beta2))


@cache
def corpus_of(data: str, test_part: bool) -> Corpus:
    """Read a text once per process. `data` is the JSON of DataArguments."""
    return load_blocks(DataArguments(**json.loads(data)), test_part)


def measure(
    runs: Path | None = None,
    rounding: str | None = None,
    step: str | None = None,
    vector_bits: int = 16,
    step_learning_rate: float | None = None,
    test_part: bool = False,
    **settings: Any,
) -> Record:
    """Train one model and return its losses, bytes and seconds.

    Args:
        runs (`Path`, *optional*):
            Folder for checkpoints. A run that was killed is resumed from its last one.
        rounding (`str`, *optional*):
            A key of `LEVELS` for a dense model. Without it, a ticket is trained.
        step (`str`, *optional*):
            Kind of step of a dense model. Default: "mean" for ternary and binary, else "largest".
        vector_bits (`int`, *optional*, defaults to 16):
            Bits of a dense model's gains and biases.
        step_learning_rate (`float`, *optional*):
            Rate of learned steps. Default: that of the weights.
        test_part (`bool`, *optional*, defaults to `False`):
            Whether half of the held-out text is kept for `loss`. Without it, `loss` is that of validation.
        settings (`Any`):
            Options of the training loop by name.

    Returns:
        `dict`: losses, `curve`, `bytes`, `tokens`, `text_sha256` and `seconds`.
    """
    own = {"rounding": rounding, "step": step, "vector_bits": vector_bits, "test_part": test_part}
    folder = runs and runs / studies.digest_of({**own, "step_rate": step_learning_rate, **settings})

    def make_run(arguments: Arguments) -> TimedRun:
        corpus = corpus_of(json.dumps(vars(arguments.data)), test_part)
        if rounding is None:
            return TimedRun(arguments, corpus)
        usual = "mean" if rounding in ("ternary", "binary") else "largest"
        kind = {"rounding": rounding, "step": step or usual, "vector_bits": vector_bits}
        return RoundedRun(arguments, corpus, partial(rounded_optimizer, step_learning_rate), **kind)

    try:
        with studies.trained_run(settings, make_run, folder) as run:
            found = studies.summary_of(run)
            found["text_sha256"] = found.pop("text")
            found["validation_loss"] = found["loss"]
            if test_part:
                found |= test_measures(run)
            return {**found, "bytes": file_bytes(run)}
    except SLTError as error:
        if "diverged" not in str(error):
            raise
        nothing = math.log(
            settings["vocab_size"]
        )  # the loss of a model that knows only the vocabulary's size
        return {
            "loss": nothing,
            "validation_loss": nothing,
            "bytes": 0,
            "seconds": 0.0,
            "diverged": str(error),
        }


def test_measures(run: TimedRun) -> Record:
    """Return loss and bits per byte on the test part."""
    blocks: Any = run.corpus.test
    batches = validation_batches(blocks, run.batches.batch_size, run.accelerator)
    measures = evaluate_blocks(run.model, batches, bytes_per_token=blocks.bytes_per_token)
    return {name: measures[name] for name in ("loss", "bits_per_byte")}


def file_bytes(run: TimedRun) -> int:
    """Return the bytes of the entropy-coded file of a ticket or of a rounded model."""
    model = run.accelerator.unwrap_model(run.model)
    if isinstance(run, RoundedRun):
        return len(dense_file(model, run.vector_bits))
    model.save_ticket(run.folder / "coded", encoding="entropy")
    return (run.folder / "coded" / MASK_FILE).stat().st_size


# -- records ----------------------------------------------------------------------------------------


def kind_of(settings: studies.Point) -> str:
    """Return what a run trains: "strict", "ternary", "binary", "levels" or "dense".

    A ticket is strict if its mask only keeps, drops or chooses numbers that the seed drew. A mask that sets
    signs is not: over the law of two values +c and -c it reaches every ternary matrix, whatever the seed. Nor is
    one that multiplies drawn numbers by one of several levels, as multicoat and multibit do.
    """
    if (rounding := settings.get("rounding")) is not None:
        return rounding if rounding in ("ternary", "binary") else "dense"
    if settings.get("control") == "dense":
        return "dense"
    own = {item.name for item in fields(RULES[settings["rule"]])}
    rule = make_rule(settings["rule"], {name: settings[name] for name in own & settings.keys()})
    if only_chooses(rule.factors, rule.state_bits):
        return "strict"
    return {2: "binary", 3: "ternary"}.get(len(rule.factors), "levels")


class FlatRecords(Records):
    """Records in a plain JSON list, for readers who know nothing of studies."""

    def read(self) -> dict[str, Any]:
        """Return the records of the file."""
        known = json.loads(self.path.read_text())
        return {"records": [{"of": one.pop("settings"), **one} for one in known]}

    def text(self) -> str:
        """Return the file as a list with one record per line."""
        return "[\n" + ",\n".join(json.dumps(flat(self.found[key])) for key in sorted(self.found)) + "\n]\n"


def flat(record: Record) -> Record:
    """Return a record as the file has it: what the run is first, its settings last."""
    settings = record["of"]
    way = {name: settings[name] for name in ("rule", "rounding") if name in settings}
    first = {
        "kind": kind_of(settings), **way, "bytes": record["bytes"], "steps": settings["max_steps"],
        "seed": settings["seed"], "text": text_of(settings), "loss": record["loss"],
    }  # fmt: skip
    return {
        **first,
        **{name: one for name, one in record.items() if name not in ("of", *first)},
        "settings": settings,
    }


def text_of(settings: studies.Point) -> str:
    """Return the name of a text: the first file without its suffix, or "embedded"."""
    files = settings.get("train_files")
    return Path(files[0]).stem if files else "embedded"
