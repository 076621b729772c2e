"""Ours against a named baseline, side by side in one run: interleaved repeats, medians, ratios.

    python recipes/benchmark.py [--preset quick|full] [--only draw load ...] [--json out.json]

`full` takes GPT-2 small and mini (some minutes, 8 GB of memory), `quick` models of seconds. A ratio is ours
over theirs: below 1 is less time or fewer bytes than the baseline.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import GPT2LMHeadModel
from transformers.utils import logging

from hf_slt import SupermaskGPT2Config, SupermaskGPT2LMHeadModel
from hf_slt.masking import Selector
from hf_slt.random_weights import draw
from hf_slt.training import dense_twin

SIZES = {
    "quick": {"weights": 4_000_000, "config": {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 2048}},
    "full": {"weights": 124_000_000, "config": {}},
}
MINI = {"n_layer": 4, "n_embd": 512, "n_head": 8}  # of the training step, in `full`


def interleaved(ours: Callable, theirs: Callable, repeats: int) -> tuple[float, float]:
    """Median seconds of each; the two take turns, so that a change of the machine's mood meets both."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for function, seconds in zip((ours, theirs), times, strict=True):
            started = time.perf_counter()
            function()
            if repeat:  # the first of each is a warm-up
                seconds.append(time.perf_counter() - started)
    return statistics.median(times[0]), statistics.median(times[1])


class Benchmarks:
    """Each method is a row: what is measured, against what, how far it should reach, and the two numbers."""

    def __init__(self, preset: str, repeats: int) -> None:
        size, self.repeats, self.full = SIZES[preset], repeats, preset == "full"
        self.weights = size["weights"]
        sizes = {**size["config"], "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.config = SupermaskGPT2Config(**sizes)
        self.step_config = SupermaskGPT2Config(**{**sizes, **(MINI if self.full else {})})

    def draw(self):
        pair = interleaved(
            lambda: draw(0, "w", (self.weights,)), lambda: torch.randn(self.weights), self.repeats
        )
        return f"drawing {self.weights / 1e6:.0f}M normals", "torch.randn", 1.0, pair

    def select(self):
        scores, count = torch.randn(self.weights // 3).abs(), self.weights // 10
        pair = interleaved(lambda: Selector().select(scores, count), lambda: torch.sort(scores), self.repeats)
        return "exact top 30 % of the scores", "torch.sort", 1.0, pair

    def _saved(self, folder: str) -> tuple[Path, Path]:
        ticket, stock = Path(folder, "ticket"), Path(folder, "stock")
        model = SupermaskGPT2LMHeadModel(self.config)
        model.save_ticket(ticket)
        model.to_ticket().merge_and_unload().save_pretrained(stock)
        return ticket, stock

    def bytes(self):
        with tempfile.TemporaryDirectory() as folder:
            sizes = [
                sum(file.stat().st_size for file in path.glob("*.safetensors"))
                for path in self._saved(folder)
            ]
        return (
            "bytes on disk, packed",
            "dense float32 safetensors",
            1 / 31,
            (float(sizes[0]), float(sizes[1])),
        )

    def load(self):
        with tempfile.TemporaryDirectory() as folder:
            ticket, stock = self._saved(folder)
            pair = interleaved(
                lambda: SupermaskGPT2LMHeadModel.from_pretrained(ticket),
                lambda: GPT2LMHeadModel.from_pretrained(stock),
                self.repeats,
            )
        return "from_pretrained, all digests checked", "dense GPT-2, from a warm disk", None, pair

    def _generate(self, batch: int):
        model = SupermaskGPT2LMHeadModel(self.config).to_ticket().eval()
        stock, ids = model.merge_and_unload().eval(), torch.ones(batch, 8, dtype=torch.long)
        options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        mask = torch.ones_like(ids)
        pair = interleaved(
            lambda: model.generate(ids, attention_mask=mask, **options),
            lambda: stock.generate(ids, attention_mask=mask, **options),
            self.repeats,
        )
        return f"generating 32 tokens, batch {batch}, ticket", "stock GPT-2, merged weights", 1 / 0.98, pair

    def generate_b1(self):
        return self._generate(1)

    def generate_b8(self):
        return self._generate(8)

    def step(self):
        models = [SupermaskGPT2LMHeadModel(self.step_config).train(), dense_twin(self.step_config).train()]
        length = min(1024, self.step_config.n_positions) if self.full else 128
        ids = torch.arange(length).remainder(self.step_config.vocab_size).view(1, -1)

        def stepper(model):
            optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)

            def step():
                model(ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            return step

        pair = interleaved(*map(stepper, models), self.repeats)
        return f"training step, {length} tokens, AdamW", "stock GPT-2, all weights trained", 1.05, pair


ROWS = ("step", "select", "draw", "load", "bytes", "generate_b1", "generate_b8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=SIZES, default="quick", help="sizes (default: quick)")
    parser.add_argument(
        "--only", nargs="+", choices=ROWS, default=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)}"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats of each side (default: 5)")
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    benchmarks, rows = Benchmarks(options.preset, options.repeats), []
    for name in tqdm(options.only, "benchmarks"):
        what, baseline, reach, (ours, theirs) = getattr(benchmarks, name)()
        row = {"id": name, "what": what, "baseline": baseline, "ours": ours, "theirs": theirs}
        rows.append({**row, "ratio": ours / theirs, "reach": reach})
    machine = f"{torch.get_num_threads()} threads, {os.cpu_count()} cores, torch {torch.__version__}"
    print(f"{options.preset}: {machine}")
    print("| | baseline | ours / theirs | reach |\n|---|---|---:|---:|")
    for row in rows:
        reach = "" if row["reach"] is None else f"{row['reach']:.3g}"
        print(f"| {row['what']} | {row['baseline']} | {row['ratio']:.3f} | {reach} |")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
