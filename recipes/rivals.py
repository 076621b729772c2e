"""Contestants at equal bytes: tickets as they are, and dense models trained with rounding in the loop.

    ticket         entropy-coded file, all of it: codes, scales, description
    dense int4     integers -7 .. 7, and a float16 scale for every 64 of them; vectors in float16
    dense ternary  -1, 0, 1 at their entropy, and a float16 scale for every row; vectors in float16

Of dense models the codes and scales count, without any description. They are stock GPT-2 with the same text,
tokenizer, tokens and loop; every forward computes with the rounded weights, and the gradient passes through.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import studies
import torch
from studies import Point, Record, Records
from torch import Tensor, nn
from torch.nn.utils import parametrize
from train_gpt2_slt import train

from hf_slt.model.ticket import MASK_FILE
from hf_slt.training.run import Run

Rows = dict[tuple[int, int, str], list[Point]]  # by bytes, steps and contestant: a run for each seed
STOCK_STD = 0.02  # of GPT-2's first weights


def int4(weight: Tensor) -> tuple[Tensor, int]:
    """Integers -7 .. 7 and a float16 scale for every 64 of them; with the bytes they take."""
    flat = nn.functional.pad(weight.reshape(-1), (0, -weight.numel() % 64)).view(-1, 64)
    scale = (flat.abs().amax(1, keepdim=True) / 7).half().float().clamp(min=2.0**-24)
    back = ((flat / scale).round().clamp(-7, 7) * scale).view(-1)[: weight.numel()].view_as(weight)
    return back, math.ceil(weight.numel() / 2) + 2 * len(flat)


def ternary(weight: Tensor) -> tuple[Tensor, int]:
    """-1, 0, 1 times a float16 scale for every row: the mean magnitude, as in BitNet b1.58."""
    scale = weight.abs().mean(1, keepdim=True).half().float().clamp(min=2.0**-24)
    codes = (weight / scale).round().clamp(-1, 1)
    shares = [float((codes == one).float().mean()) for one in (-1, 0, 1)]
    bits = -sum(share * math.log2(share) for share in shares if share)
    return codes * scale, math.ceil(weight.numel() * bits / 8) + 2 * len(weight)


ROUNDINGS = {"int4": int4, "ternary": ternary}


class Rounded(nn.Module):
    """A weight as it will be stored: in the forward rounded, in the backward passed through."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (ROUNDINGS[self.kind](weight.detach())[0] - weight).detach()


class TiedHead(nn.Module):
    """The head of a table that is rounded: the same rounded table."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self._table = (table,)  # a tuple hides it: it is the model's

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self._table[0].weight)


class RoundedRun(Run):
    """A run of stock GPT-2 whose matrices are rounded in every forward."""

    rounding, initial_std = "int4", STOCK_STD

    def _prepare(self, model: nn.Module) -> tuple[Any, Any]:
        for module in list(model.modules()):
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.dim() == 2 and module is not model.lm_head:
                with torch.no_grad():
                    weight *= self.initial_std / STOCK_STD
                parametrize.register_parametrization(module, "weight", Rounded(self.rounding))
        model.lm_head = TiedHead(model.transformer.wte)
        return super()._prepare(model)

    def bytes(self) -> int:
        """Of codes and scales; vectors are float16."""
        stored = ROUNDINGS[self.rounding]
        weights = [weight.detach() for weight in self.accelerator.unwrap_model(self.model).parameters()]
        return sum(stored(one)[1] if one.dim() == 2 else 2 * one.numel() for one in weights)


def measure(rounding: str | None = None, initial_std: float = STOCK_STD, **settings: Any) -> Record:
    """Run a point: settings of the loop by name, for dense models those of RoundedRun. What is kept of it."""
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        files = settings.pop("train_files", None)
        arguments = studies.loop_arguments(**settings, output_dir=folder)
        arguments.data.train_files = files or arguments.data.train_files
        kind = type("OfKind", (RoundedRun,), {"rounding": rounding, "initial_std": initial_std})
        run: Any = (kind if rounding else Run)(arguments)
        if not train(run):
            raise KeyboardInterrupt
        seen = [one for one in run.log.records if one["kind"] == "evaluation"]
        if rounding:
            size = run.bytes()
        else:
            model = run.accelerator.unwrap_model(run.model)
            model.save_ticket(Path(folder, "coded"), encoding="entropy")
            size = Path(folder, "coded", MASK_FILE).stat().st_size
        return {
            "loss": seen[-1]["loss"],
            "best_loss": min(one["loss"] for one in seen),
            "curve": [(one["step"], one["loss"]) for one in seen],
            "bytes": size,
            "tokens": run.steps * run.tokens_a_step,
            "text": run.corpus.digest,
            "seconds": round(time.process_time() - started, 1),  # of the processor
        }


# -- shares, records and rows ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """Some of what a preset runs: each of these contestants with each of the seeds."""

    contestants: tuple[str, ...]
    bytes: int
    steps: int
    seeds: int


def with_text(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Point]:
    """The options of a study that can use another text, and the setting that names it.

    Records name a text, not where it lies: workers find it in their folder.
    """
    parser.add_argument("--train_files", nargs="+", help="text to train on, all in one folder")
    options = parser.parse_args()
    options.out = options.out.resolve()
    files = [Path(one).resolve() for one in options.train_files or ()]
    if not files:
        return options, {}
    if lost := [str(one) for one in files if not one.is_file() or one.parent != files[0].parent]:
        parser.error(f"--train_files: {', '.join(lost)}: not a file, or not in the folder of the first")
    os.chdir(files[0].parent)
    return options, {"train_files": [one.name for one in files]}


class FlatRecords(Records):
    """Records in a plain list, for readers who know nothing of studies; of all texts."""

    def read(self) -> dict[str, Any]:
        """The facts of the file: here, its records."""
        known = json.loads(self.path.read_text())
        return {"records": [{"of": one.pop("settings"), **one} for one in known]}

    def text(self) -> str:
        """The file as it should be."""
        return "[\n" + ",\n".join(json.dumps(flat(self.found[key])) for key in sorted(self.found)) + "\n]\n"


def flat(record: Record) -> Record:
    """A record as the file has it."""
    settings = record["of"]
    side = "dense" if settings.get("control") == "dense" else "ticket"
    return {
        "side": side, "bytes": record["bytes"], "steps": settings["max_steps"], "seed": settings["seed"],
        "loss": record["loss"], **{name: one for name, one in record.items() if name not in ("of", "side")},
        "settings": settings,
    }  # fmt: skip


def records_of(name: str, options: argparse.Namespace, points: Iterable[Point]) -> FlatRecords:
    """All records of a study, whatever its preset; those of the smoke test apart."""
    stem = f"{name}_quick" if options.preset == "quick" else name
    return FlatRecords(options.out / "results" / f"{stem}.json", points, options.fresh, keep=True)


def table(rows: Rows, records: Records) -> list[dict[str, Any]]:
    """A line for each contestant, size and number of steps that was run."""
    lines = []
    for (size, steps, name), points in rows.items():
        found = [one for one in map(records.get, points) if one is not None]
        if found:
            losses = [record["loss"] for record in found]
            lines.append({
                "contestant": name, "size": size, "steps": steps, "seeds": len(losses),
                "shape": f"{points[0]['n_layer']} x {points[0]['n_embd']}",
                "bytes": round(statistics.mean(record["bytes"] for record in found)),
                "loss": round(statistics.mean(losses), 3),
                "lowest": round(min(losses), 3), "highest": round(max(losses), 3),
                "seconds": round(statistics.mean(record["seconds"] for record in found)),
            })  # fmt: skip
    return lines
