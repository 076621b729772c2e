"""What each speed trick of training is worth: switched off alone, time and memory of a step in one run.

    python recipes/speed_tricks.py [--repeats 9]

Ratios are of the step with all tricks: above 1 means that the trick saves so much.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

sys.path.insert(0, str(Path(__file__).parent))
from benchmark import NO_DROPOUT, in_fresh_process, peak_bytes, quiet

from hf_slt import SupermaskGPT2Config, SupermaskGPT2LMHeadModel, layers, masking, modeling_supermask_gpt2
from hf_slt.training import dense_twin

SHAPES = {
    "nano": ({"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 2048, "n_positions": 128}, 16, 128),
    "mini": ({"n_layer": 4, "n_embd": 512, "n_head": 8}, 1, 1024),
}


def plain_logits(layer, hidden):
    return F.linear(hidden, layer.masked_weight())


def plain_rows(self, input, unembed=False):
    if unembed:
        return layers._logits(self, input)
    return F.embedding(input, self.masked_weight())


def fresh_select(self, values, count, rank=masking.as_they_are):
    masking.Selector.__init__(self)
    return _select(self, values, count, rank)


_select = masking.Selector.select
TRICKS = {
    "all": [],
    "piecewise loss": [(modeling_supermask_gpt2, "causal_lm_loss", ForCausalLMLoss)],
    "MaskedLogits": [(layers, "_logits", plain_logits)],
    "MaskedRows": [(layers.SupermaskEmbedding, "forward", plain_rows)],
    "in-place gradients": [
        (masking, "_times_slope", lambda gradient, scores, slope: gradient * slope(scores)),
    ],
    "remembered threshold": [(masking.Selector, "select", fresh_select)],
    "eight at a time": [(masking, "_eights", lambda flags: flags.view(torch.int8))],
    "memory used again": [(layers, "_is_shared", lambda tensor: True)],
    "MaskedLogits, MaskedRows, in-place gradients": [
        (layers, "_logits", plain_logits),
        (layers.SupermaskEmbedding, "forward", plain_rows),
        (masking, "_times_slope", lambda gradient, scores, slope: gradient * slope(scores)),
    ],
    "dense GPT-2": [],
}


@contextmanager
def without(trick: str) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in TRICKS[trick]]
    for owner, name, value in TRICKS[trick]:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def make_step(shape: str, trick: str):
    sizes, batch, length = SHAPES[shape]
    config = SupermaskGPT2Config(**NO_DROPOUT, **sizes)
    with without(trick):
        model = dense_twin(config) if trick == "dense GPT-2" else SupermaskGPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.train().parameters(), weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (batch, length), generator=generator)

    def step() -> None:
        with without(trick):
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def memory(shape: str, trick: str) -> float:
    return peak_bytes(make_step(shape, trick))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    quiet()
    found = {}
    for shape in SHAPES:
        ours = make_step(shape, "all")
        for trick in TRICKS:
            if trick == "all":
                continue
            other, times = make_step(shape, trick), ([], [])
            for repeat in range(repeats + 1):
                for step, seconds in zip((ours, other), times):
                    started = time.perf_counter()
                    for _ in range(5 if shape == "nano" else 1):
                        step()
                    if repeat:
                        seconds.append(time.perf_counter() - started)
            both = [in_fresh_process(memory, shape, one) for one in (trick, "all")]
            row = {
                "time": statistics.median(times[1]) / statistics.median(times[0]),
                "memory": both[0] / both[1],
            }
            found[f"{shape}: {trick}"] = row
            print(f"{shape:6}{trick:48}{row['time']:8.3f}{row['memory']:8.3f}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
