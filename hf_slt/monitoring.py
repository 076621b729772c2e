"""Seeing a run and stopping it: the log, the look at the masks, the clock, signals."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers.utils import logging

from .configuration_supermask_gpt2 import SupermaskGPT2Config
from .files import replacing
from .masking import RULES, keep_largest, kept_count

logger = logging.get_logger(__name__)

PATIENCE = 10.0  # seconds in which a second signal is taken for the first
COLLAPSED = 0.9  # share of a layer's outputs without a weight that is worth a warning


def masks_of(config: SupermaskGPT2Config, parameters: dict[str, Tensor], density: float) -> dict[str, Tensor]:
    """Boolean masks, by name of their scores, of whole parameters."""
    rank = RULES[config.rule].rank
    return {
        name: keep_largest(rank(scores), kept_count(density, scores.numel()))
        for name, scores in parameters.items()
        if name.endswith("scores")
    }


def look_at(masks: dict[str, Tensor], before: dict[str, Tensor]) -> dict[str, Any]:
    """What the masks are like, and which share of their bits changed since the last look."""
    flipped = sum(int((mask != before[name]).sum()) for name, mask in masks.items()) if before else 0
    empty = {name: float((~mask.any(_input_axis(name))).float().mean()) for name, mask in masks.items()}
    for name, share in empty.items():
        if share > COLLAPSED:
            logger.warning(f"{name}: {share:.0%} of its outputs have no weight left; the layer collapses")
    return {
        "flipped": flipped / max(1, sum(mask.numel() for mask in masks.values())),
        "density": {name: float(mask.float().mean()) for name, mask in masks.items()},
        "empty_columns": empty,
    }


def _input_axis(name: str) -> int:
    # Tables are stored (outputs, inputs), all else as Conv1D (inputs, outputs).
    return 1 if name.split(".")[-2] in ("wte", "wpe", "lm_head", "score") else 0


class Log:
    """log.jsonl, one record a line, and the trackers beside it; only the first process writes."""

    def __init__(self, path: Path, accelerator: Accelerator, resumed_at: int) -> None:
        self.path, self.accelerator = path, accelerator
        self.records: list[dict[str, Any]] = []
        if not accelerator.is_main_process:
            return
        if resumed_at and path.exists():  # lines after the checkpoint will be written again
            self.records = [record for record in read_log(path) if record["step"] <= resumed_at]
        with replacing(path) as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in self.records))

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Add a record."""
        if not self.accelerator.is_main_process:
            return
        self.records.append({"kind": kind, "step": step, **values})
        with open(self.path, "a") as file:
            file.write(json.dumps(self.records[-1]) + "\n")
        numbers = {
            f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)
        }
        self.accelerator.log(numbers, step=step)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log; a last line that was cut by a kill is left out."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class Interruption:
    """SIGINT and SIGTERM ask the loop to stop after the step; one more, some seconds later, stops at once."""

    def __init__(self) -> None:
        self.asked, self.since = False, 0.0

    def __enter__(self) -> "Interruption":
        self.before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: Any) -> None:
        # A launcher passes on the signal that the terminal already sent: that is one wish, not two.
        if self.asked and time.monotonic() - self.since > PATIENCE:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self.since = True, time.monotonic()

    def agreed(self, accelerator: Accelerator) -> bool:
        """Whether any process was asked: all of them then stop after the same step."""
        if accelerator.num_processes == 1:
            return self.asked
        return bool(accelerator.reduce(torch.tensor(int(self.asked), device=accelerator.device)).item())


class Clock:
    """Tokens per second of training, without the time that evaluation and saving take."""

    def __init__(self, tokens_a_step: int) -> None:
        self.tokens_a_step, self.steps, self.since = tokens_a_step, 0, time.monotonic()

    def count(self) -> None:
        """One more step was done."""
        self.steps += 1

    def speed(self) -> float:
        """Tokens per second since the last call."""
        seconds, tokens = time.monotonic() - self.since, self.steps * self.tokens_a_step
        self.steps, self.since = 0, time.monotonic()
        return tokens / seconds

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What is done inside does not count."""
        started = time.monotonic()
        yield
        self.since += time.monotonic() - started
