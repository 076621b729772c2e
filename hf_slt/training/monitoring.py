"""Seeing a run and stopping it: the log, the look at the masks, the clock, signals."""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..model.configuration_supermask_gpt2 import INPUTS_FIRST, SupermaskGPT2Config
from ..sharing.files import replacing
from .rules import Place

logger = logging.get_logger(__name__)

PATIENCE = 10.0  # seconds in which a second signal is taken for the first
COLLAPSED = 0.9  # share of a layer's outputs without a weight that is worth a warning


def codes_of(config: SupermaskGPT2Config, rule: Any, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Codes, by name of their scores, of whole parameters."""
    scores = {name: one.detach() for name, one in parameters.items() if name.endswith("scores")}
    codes = rule.codes_of_all(list(scores.values()), [_place(config, name) for name in scores])
    return dict(zip(scores, codes, strict=True))


def _place(config: SupermaskGPT2Config, name: str) -> Place:
    """The tensor that scores belong to: "transformer.h.0.attn.c_attn.query_scores" or "lm_head.scores"."""
    path = name.removeprefix("transformer.").removesuffix(".scores").removesuffix("_scores")
    tensor = config.tensor(path)
    return Place(tensor, 0 if path.startswith(INPUTS_FIRST) else 1)


def look_at(codes: dict[str, Tensor], before: dict[str, Tensor], factors: Sequence[float]) -> dict[str, Any]:
    """What the masks are like, and which share of their codes changed since the last look."""
    flipped = sum(int((one != before[name]).sum()) for name, one in codes.items()) if before else 0
    empty, density = {}, {}
    for name, one in codes.items():
        kept = one != factors.index(0.0) if 0.0 in factors else torch.ones_like(one, dtype=torch.bool)
        density[name] = float(kept.float().mean())
        if kept.dim() == 1:
            continue  # only a share of the tensor is searched: a row of scores has no outputs
        # Tables are stored (outputs, inputs), all else as Conv1D (inputs, outputs).
        inputs = 1 if name.split(".")[-2] in ("wte", "wpe", "lm_head", "score") else 0
        empty[name] = share = float((~kept.any(inputs)).float().mean())
        if share > COLLAPSED:
            logger.warning(f"{name}: {share:.0%} of its outputs have no weight left; the layer collapses")
    return {
        "flipped": flipped / max(1, sum(one.numel() for one in codes.values())),
        "density": density,
        "empty_columns": empty,
    }


@torch.no_grad()
def attention_moments(
    model: PreTrainedModel, batch: Tensor | Mapping[str, Tensor], *, relative: bool = False
) -> Tensor:
    """Mean over positions of tr M2, (layers, heads): how spread each head's attention is. Forward only.

        tr M2_i = sum_j A_ij |x_j|^2 - |sum_j A_ij x_j|^2,     x = the input of the attention

    A head near zero attends to one position (or to positions that are alike): every derivative of the
    loss by its query and key carries M2 as a factor, so its query and key scores get no gradient.
    `relative` divides by the trace that uniform attention would have: 1 is uniform, 0 one-hot.
    """
    mapping: Mapping[str, Tensor] = {"input_ids": batch} if isinstance(batch, Tensor) else batch
    inputs = {"input_ids": mapping["input_ids"].to(model.device)}
    length = inputs["input_ids"].shape[1]
    seen = torch.ones(length, length, dtype=torch.bool, device=model.device).tril()[None, None]
    counted = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    if mapping.get("attention_mask") is not None:
        inputs["attention_mask"] = mapping["attention_mask"].to(model.device)
        counted = inputs["attention_mask"].bool()
        seen = seen & counted[:, None, None, :] | torch.eye(length, dtype=torch.bool, device=model.device)
    heads = model.config.n_head
    traces = []

    def spread(shares: Tensor, x: Tensor) -> Tensor:
        """(batch, heads) from attention (batch, heads, i, j) and inputs (batch, j, width)."""
        x = x - x.mean(1, keepdim=True)  # tr M2 does not see the mean; subtracting it saves digits
        mean = torch.einsum("bhij,bjr->bhir", shares, x)
        trace = torch.einsum("bhij,bj->bhi", shares, x.square().sum(-1)) - mean.square().sum(-1)
        weights = counted[:, None].to(x)
        return (trace.clamp(min=0) * weights).sum((0, 2)) / weights.sum()

    def record(attention: nn.Module) -> Callable:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...], qkv: Tensor) -> None:
            x = arguments[0].float()
            width = getattr(model.config, "qk_width", model.config.n_embd // heads) * heads
            query, key = (
                part.float().unflatten(-1, (heads, -1)).transpose(1, 2)
                for part in (qkv[..., :width], qkv[..., width : 2 * width])
            )
            logits = (query @ key.transpose(-1, -2)) * attention.scaling
            trace = spread(logits.masked_fill(~seen, -math.inf).softmax(-1), x)
            if relative:
                uniform = seen.expand(len(x), 1, -1, -1).to(x)
                trace = trace / spread(uniform / uniform.sum(-1, keepdim=True), x)
            traces.append(trace)

        return hook

    base: Any = getattr(model, "transformer", model)
    hooks = [block.attn.c_attn.register_forward_hook(record(block.attn)) for block in base.h]
    training = model.training
    model.eval()
    try:
        # The whole model, because sharded weights are gathered from there; not its compiled form, which
        # would pass the hooks by.
        with torch.compiler.set_stance("force_eager"):
            model(**inputs, use_cache=False)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return torch.stack(traces)


class Log:
    """log.jsonl, one record a line, and the trackers beside it; only the first process writes."""

    def __init__(self, path: Path, accelerator: Accelerator, resumed: Path | None, step: int) -> None:
        """Of a run resumed after `step`, the log goes on from that one."""
        self.path, self.accelerator = path, accelerator
        self.records: list[dict[str, Any]] = []
        if not accelerator.is_main_process:
            return
        if resumed and resumed.exists():  # lines after the checkpoint will be written again
            self.records = [record for record in read_log(resumed) if record["step"] <= step]
        with replacing(path) as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in self.records))

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Add a record."""
        if not self.accelerator.is_main_process:
            return
        self.records.append({"kind": kind, "step": step, **values})
        with open(self.path, "a") as file:
            file.write(json.dumps(self.records[-1]) + "\n")
        numbers = {f"{kind}/{name}": one for name, one in values.items() if isinstance(one, int | float)}
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
    """SIGINT and SIGTERM ask the loop to stop after the step; one more, some seconds later, stops at once.

    Signals are the main thread's: a loop in another thread is not asked.
    """

    def __init__(self) -> None:
        self.asked, self.since = False, 0.0

    def __enter__(self) -> "Interruption":
        heard = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if heard else ()
        self.before = {number: signal.signal(number, self._ask) for number in numbers}
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
