"""The sizes of a run, before its first step: weights, bytes of the ticket, and memory of each process.

Nothing is allocated: the model is built on torch's meta device. Memory is estimated by these sums, with N drawn
weights, L learned numbers, and P processes that share (FSDP) or copy (DDP) the learned numbers:

    drawn weights       4 N                 float32, and the places of searched weights; every process has all
    masked weights      4 N, 2 N in bf16    weight * mask, kept from the forward to the backward pass
    learned numbers     4 L                 scores, scales, gains: float32          / P with FSDP
    gradients           4 L                                                         / P with FSDP
    AdamW's moments     8 L                 (4 L with SGD)                          / P with FSDP
    activations         34 b tokens width layers / 2 + 8 tokens vocabulary          b bytes per number

The formula for activations is that of Korthikanti et al. (2022, arXiv 2205.05198) for a block whose attention is
computed by a fused kernel, plus logits with their gradient. With gradient checkpointing a block keeps only its input.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import SLTError
from ..text.tokenizer import load_tokenizer
from .arguments import Arguments
from .run import asks_for_fsdp, build_model


@dataclass(frozen=True)
class TokenizerSizes:
    """The part of a tokenizer that a configuration needs.

    Args:
        size (`int`):
            Number of tokens.
        eos_token_id (`int`, defaults to 0):
            The end-of-text token.
    """

    size: int
    eos_token_id: int = 0

    def __len__(self) -> int:
        return self.size


@dataclass(frozen=True)
class RunPlan:
    """Sizes of a run. All memory is in bytes per process.

    Args:
        name (`str`):
            Name of the model class.
        weights (`int`):
            Weights of the model, drawn or stored.
        searched (`int`):
            Weights that have a score.
        trained (`int`):
            Other numbers that are trained and stored.
        ticket_bytes (`int`):
            Size of the packed file without its header of a few kilobytes. Entropy coding makes it smaller.
        steps (`int`):
            Optimizer steps; 0 if the length of the text decides.
        tokens_per_step (`int`):
            Tokens that all processes read for a step.
        processes (`int`):
            Number of processes.
        memory (`dict[str, int]`):
            Bytes per process, by their purpose.
    """

    name: str
    weights: int
    searched: int
    trained: int
    ticket_bytes: int
    steps: int
    tokens_per_step: int
    processes: int
    memory: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes per process."""
        return sum(self.memory.values())

    def summary(self) -> str:
        """Return one line.

        Returns:
            `str`: the line.
        """
        return (
            f"{self.name}: {self.weights:,} weights, {self.searched:,} searched, {self.trained:,} numbers trained; "
            f"ticket of {_size(self.ticket_bytes)} (packed); {_size(self.total)} of memory per process by estimate"
        )

    def table(self) -> str:
        """Return the whole plan as a table in Markdown.

        Returns:
            `str`: the table.
        """
        steps = f"{self.steps:,}" if self.steps else "by the length of the text"
        rows = [
            ("model", self.name),
            ("weights", f"{self.weights:,}"),
            ("searched for a mask", f"{self.searched:,}"),
            ("other numbers trained", f"{self.trained:,}"),
            ("ticket, packed", _size(self.ticket_bytes)),
            ("processes", f"{self.processes}"),
            ("tokens per step", f"{self.tokens_per_step:,}"),
            ("steps", steps),
            *((f"memory per process: {name}", _size(size)) for name, size in self.memory.items()),
            ("memory per process: total", _size(self.total)),
        ]
        return "\n".join(["| | |", "|---|---:|", *(f"| {name} | {value} |" for name, value in rows)])


def plan_run(
    arguments: Arguments, processes: int, sharded: bool | None = None, tokenizer: Any = None
) -> RunPlan:
    """Plan a run without allocating its model.

    Args:
        arguments ([`Arguments`]):
            All options.
        processes (`int`):
            Number of processes.
        sharded (`bool`, *optional*):
            Whether processes share the learned numbers. Default: whether accelerate was launched with FSDP.
        tokenizer (`PreTrainedTokenizerFast`, *optional*):
            The tokenizer. Default: the one that the options name, or else one with `vocab_size` tokens.

    Returns:
        [`RunPlan`]: the sizes.

    Raises:
        [`SLTError`]: for an impossible number of processes.
    """
    if processes < 1:
        raise SLTError(f"dry_run {processes}: give the number of processes, 1 or more")
    if sharded is None:
        sharded = asks_for_fsdp()
    data, run = arguments.data, arguments.run
    if tokenizer is None:
        tokenizer = load_tokenizer(data.tokenizer) if data.tokenizer else TokenizerSizes(data.vocab_size)
    with torch.device("meta"):
        model: Any = build_model(arguments, tokenizer)
    learned = sum(one.numel() for one in model.parameters() if one.requires_grad)
    drawn = sum(one.nbytes for one in model.buffers())
    if run.control == "dense":
        weights, searched, trained, stored = learned, 0, learned, 32 * learned
    else:
        tensors = model.config.stored_tensors(type(model).__name__).values()
        weights = sum(one.tensor.size for one in tensors)
        masked = [one.tensor for one in tensors if one.kind == "masked"]
        searched = sum(one.searched for one in masked)
        values = [one for one in tensors if one.kind == "trained"]
        trained = sum(one.tensor.size for one in values)
        bits = math.ceil(math.log2(len(model.config.factors)))
        stored = bits * searched + sum(one.bits * one.tensor.size for one in values)
    number = 2 if run.bf16 else 4
    tokens = run.per_device_train_batch_size * data.block_size
    config = model.config
    kept = 2 if run.gradient_checkpointing else 34
    blocks = kept * number * tokens * config.hidden_size * config.num_hidden_layers // 2
    shares = processes if sharded else 1
    moments = 2 if run.optim == "adamw_torch" else 1
    memory = {
        "drawn weights": drawn,
        "masked weights": number * weights if run.control != "dense" else 0,
        "learned numbers": 4 * learned // shares,
        "gradients": 4 * learned // shares,
        "optimizer": 4 * moments * learned // shares,
        "activations": blocks + 8 * tokens * config.vocab_size,
    }
    per_step = tokens * run.gradient_accumulation_steps * processes
    sizes = (weights, searched, trained, math.ceil(stored / 8))
    return RunPlan(type(model).__name__, *sizes, max(0, run.max_steps), per_step, processes, memory)


def _size(count: float) -> str:
    """Return a number of bytes in words.

    >>> _size(115_000), _size(2.5e9)
    ('115.0 kB', '2.50 GB')
    """
    if count < 1e6:
        return f"{count / 1e3:.1f} kB"
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
