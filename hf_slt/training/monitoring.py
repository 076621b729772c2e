"""Watches a run and stops it: the log, the measures of masks, the clock, signals."""

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

from ..masks.modules import masked_parameters
from ..masks.rules import ScoreContext
from ..tickets.files import replacing
from ..weights.random_weights import TensorSpec

logger = logging.get_logger(__name__)

PATIENCE = 10.0  # seconds in which repeated signals are ignored: launchers forward Ctrl-C
AGREE_EVERY = 10  # several processes agree every so many steps whether to stop
COLLAPSED = 0.9  # warn if this share of a layer's outputs has no weight


def scored_tensors(model: nn.Module) -> dict[str, TensorSpec]:
    """Return the tensor that each scores parameter of a model belongs to, by the parameter's name.

    Args:
        model (`nn.Module`):
            A model that learns.

    Returns:
        `dict[str, TensorSpec]`: tensors by the name of their scores.
    """
    return {
        f"{path}.{plan.attribute(name, tensor, 'scores')}": tensor
        for path, _, name, plan in masked_parameters(model)
        for tensor in plan.tensors
    }


def codes_of(
    tensors: Mapping[str, TensorSpec], rule: Any, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the codes of whole (not sharded) parameters, by the name of their scores.

    Args:
        tensors (`Mapping[str, TensorSpec]`):
            What `scored_tensors` returns.
        rule:
            The rule.
        parameters (`Mapping[str, Tensor]`):
            Parameters of the model by name.

    Returns:
        `dict[str, Tensor]`: codes by the name of their scores.
    """
    scores = {name: parameters[name].detach() for name in tensors}
    codes = rule.codes_of_all(list(scores.values()), [ScoreContext(one) for one in tensors.values()])
    return dict(zip(scores, codes, strict=True))


def mask_measures(
    tensors: Mapping[str, TensorSpec],
    codes: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    factors: Sequence[float],
) -> dict[str, Any]:
    """Return density and empty outputs of every mask, and the share of codes that changed since `before`.

    Args:
        tensors (`Mapping[str, TensorSpec]`):
            What `scored_tensors` returns.
        codes (`Mapping[str, Tensor]`):
            What `codes_of` returns.
        before (`Mapping[str, Tensor]`):
            The codes at the last evaluation; empty at the first.
        factors (`Sequence[float]`):
            The factor of each code.

    Returns:
        `dict[str, Any]`: the measures by name, for the log.
    """
    flipped = sum(int((one != before[name]).sum()) for name, one in codes.items()) if before else 0
    empty, density = {}, {}
    for name, one in codes.items():
        kept = one != factors.index(0.0) if 0.0 in factors else torch.ones_like(one, dtype=torch.bool)
        density[name] = float(kept.float().mean())
        if kept.dim() == 1:
            continue  # only a part of the tensor is searched: its scores are a row without outputs
        axes = tensors[name].input_axes
        empty[name] = share = float((~kept.flatten(axes[0], axes[-1]).any(axes[0])).float().mean())
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
    """Measure how spread the attention of each head is: the mean over positions of tr M2. No backward is needed.

        tr M2_i = sum_j A_ij |x_j|^2 - |sum_j A_ij x_j|^2,     x = the input of the attention

    A head near zero attends to one position (or to similar positions). M2 is a factor of every derivative of the
    loss by its query and key, so its query and key scores get no gradient.

    Args:
        model (`PreTrainedModel`):
            A GPT-2, a supermask model or a stock one.
        batch (`Tensor` or `Mapping[str, Tensor]`):
            Token ids (batch, length), or a mapping with `input_ids`.
        relative (`bool`, defaults to `False`):
            Whether to divide by the trace that uniform attention would have: 1 is uniform, 0 one-hot.

    Returns:
        `Tensor`: one number per head, (layers, heads).
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
        """Return (batch, heads) from attention (batch, heads, i, j) and inputs (batch, j, width)."""
        x = x - x.mean(1, keepdim=True)  # tr M2 does not depend on the mean; without it, it is more accurate
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
        # The whole model, because sharded weights are gathered there; but not its compiled form, which would not
        # call the hooks.
        with torch.compiler.set_stance("force_eager"):
            model(**inputs, use_cache=False)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return torch.stack(traces)


class Log:
    """log.jsonl with one record per line, and the trackers. Only the first process writes.

    Args:
        path (`Path`):
            Where to write.
        accelerator (`Accelerator`):
            The processes and their trackers.
        resumed (`Path` or `None`):
            Log of the run that is resumed. Its records up to `step` are kept.
        step (`int`):
            Step after which the run is resumed.
    """

    def __init__(self, path: Path, accelerator: Accelerator, resumed: Path | None, step: int) -> None:
        self.path, self.accelerator = path, accelerator
        self.records: list[dict[str, Any]] = []
        if not accelerator.is_main_process:
            return
        if resumed and resumed.exists():  # lines after the checkpoint will be written again
            self.records = [record for record in read_log(resumed) if record["step"] <= step]
        with replacing(path) as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in self.records))

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Add a record.

        Args:
            kind (`str`):
                Kind of the record: `"train"`, `"evaluation"`, `"masks"` or another.
            step (`int`):
                Number of optimizer steps done.
            values:
                What to record, by name.
        """
        if not self.accelerator.is_main_process:
            return
        self.records.append({"kind": kind, "step": step, **values})
        with open(self.path, "a") as file:
            file.write(json.dumps(self.records[-1]) + "\n")
        numbers = {f"{kind}/{name}": one for name, one in values.items() if isinstance(one, int | float)}
        self.accelerator.log(numbers, step=step)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log, up to the first line that is not a record: a kill or a full disk has cut it.

    Args:
        path (`Path`):
            A log.jsonl.

    Returns:
        `list[dict[str, Any]]`: the records.
    """
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # not JSON, or not text
            break
        if not isinstance(record, dict) or not {"kind", "step"} <= record.keys():
            break
        records.append(record)
    return records


class Interruption:
    """Asks the loop to stop after the current step on SIGINT or SIGTERM. Another signal, seconds later, stops at once.

    Only the main thread receives signals: a loop in another thread is never asked to stop.
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
        if self.asked and time.monotonic() - self.since > PATIENCE:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self.since = True, time.monotonic()

    def agreed(self, accelerator: Accelerator, step: int) -> bool:
        """Return whether to stop after this step. If any process was asked to stop, all processes stop.

        Several processes exchange this only every `AGREE_EVERY` steps, because the exchange makes devices wait for
        each other.

        Args:
            accelerator (`Accelerator`):
                The accelerator of the run.
            step (`int`):
                Number of optimizer steps done.

        Returns:
            `bool`: whether to stop, the same in all processes.
        """
        if accelerator.num_processes == 1:
            return self.asked
        if step % AGREE_EVERY:
            return False
        return bool(accelerator.reduce(torch.tensor(int(self.asked), device=accelerator.device)).item())


class Clock:
    """Measures the tokens per second of training, without the time for evaluation and saving.

    Args:
        tokens_per_step (`int`):
            Tokens of all processes in one optimizer step.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step, self.steps, self.since = tokens_per_step, 0, time.monotonic()

    def count(self) -> None:
        """Count one more step."""
        self.steps += 1

    def speed(self) -> float:
        """Return the tokens per second since the last call.

        Returns:
            `float`: tokens per second.
        """
        seconds, tokens = time.monotonic() - self.since, self.steps * self.tokens_per_step
        self.steps, self.since = 0, time.monotonic()
        return tokens / seconds

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Do not count the time inside."""
        started = time.monotonic()
        yield
        self.since += time.monotonic() - started
