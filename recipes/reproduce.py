"""Reproduce figures 7 and 8 of arXiv 2511.04217 at the paper's own sizes: run, record and draw.

    bash recipes/reproduce.sh                                # everything, on all GPUs of this machine
    bash recipes/reproduce.sh --models mini --seeds 1        # a part of it
    bash recipes/reproduce.sh --cost                         # only print the cost
    bash recipes/reproduce.sh --print --gpus 8               # only print the commands
    bash recipes/reproduce.sh --dry_run                      # the same at tiny sizes, on the processor

The runs are started one after another by `accelerate launch`, each on all GPUs. A run that ended has a record and
is not repeated; a run that was stopped resumes from its last checkpoint. After a stop, give the same command again,
with the same number of GPUs. The cost is computed from a few steps that are measured first:

    hours of one GPU = tokens of all runs / (tokens per second here * factor) / 3600

The factor is 1 if the runs are made on this hardware. Without a GPU, the factor is the speed that one GPU is assumed
to reach in matrix products, divided by the speed measured here. It is only an estimate.
"""

import argparse
import copy
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from figures_gpt2 import (
    KINDS,
    PAPER_FACTORS,
    PRESETS,
    TASKS,
    Point,
    Task,
    draw_fig7,
    draw_fig8,
    found_of,
    outcome,
    points_of,
)
from studies import HERE, Records, Study

from hf_slt.errors import SLTError
from hf_slt.models.gpt2 import SupermaskGPT2LMHeadModel
from hf_slt.training.arguments import Arguments, parse_arguments
from hf_slt.training.run import build_optimizer

# -- what is run ------------------------------------------------------------------------------------

HEAD = 64  # the width of a head, in all models
WIDTHS = {"tiny": 64, "mini": 512, "small": 768, "medium": 1024}  # width of each preset
TASKS |= {name: Task({"n_embd": width, "n_head": width // HEAD}) for name, width in WIDTHS.items()}


@dataclass(frozen=True)
class Plan:
    """The runs, where they are made, and where their files go."""

    models: tuple[str, ...] = ("mini", "small", "medium")
    seeds: int = 3
    factors: tuple[Any, ...] = PAPER_FACTORS  # figure 8
    widths: tuple[float, ...] = (0.5, 1, 2)  # figure 7, relative to the width of the model
    gpus: int = 4
    at_once: int | None = None  # sequences in a GPU at a time; None: the value of the preset
    on_cpu: bool = False
    runs: Path = Path("runs/paper")
    out: Path = HERE  # the folder of results/ and figures/

    def points(self) -> list[Point]:
        """Return every run: small models first, and for each model all settings of a seed before the next seed."""
        return points_of(
            (figure, seed, model, changes)
            for model, seed in product(self.models, range(self.seeds))
            for figure, changes in self.changes(WIDTHS[model])
        )

    def changes(self, width: int) -> Iterable[tuple[str, dict[str, Any]]]:
        """Yield a figure and the options that its run changes, for a model of this width."""
        for factor in self.factors:
            yield "fig8", {"qk_scale": factor}
        for share, kind in product(self.widths, KINDS):
            wide = round(share * width)
            yield "fig7", {"n_embd": wide, "n_head": wide // HEAD, **kind}

    def options(self, point: Point) -> list[str]:
        """Return the arguments of `train_gpt2_slt.py` for a run. The sequences per step do not depend on the GPUs."""
        preset = parse_arguments(["--config", str(HERE / f"{point.task}.yaml")]).run
        sequences = 4 * preset.per_device_train_batch_size * preset.gradient_accumulation_steps  # on 4 GPUs
        at_once = self.at_once or preset.per_device_train_batch_size
        accumulation, rest = divmod(sequences, self.gpus * at_once)
        if rest or not accumulation:
            fit = [n for n in range(1, sequences + 1) if sequences % (n * at_once) == 0]
            raise SLTError(
                f"{point.task}: {sequences} sequences a step cannot be dealt to {self.gpus} GPUs, {at_once} "
                f"at once; use {', '.join(map(str, fit))} GPUs, or another --at_once"
            )
        options = {
            "config": f"recipes/{point.task}.yaml",
            **dict(point.changes),
            "seed": point.seed,
            "per_device_train_batch_size": at_once,
            "gradient_accumulation_steps": accumulation,
            "output_dir": self.folder(point),
            "resume_from_checkpoint": "true",
        }
        return [str(word) for name, value in options.items() for word in (f"--{name}", value)]

    def command(self, point: Point) -> list[str]:
        """Return the command of a run, to be typed in the folder of the project."""
        # The configuration for several processes needs at least two.
        name = "cpu_ddp" if self.on_cpu else "bf16" if self.gpus == 1 else "ddp"
        launch = f"accelerate launch --config_file recipes/accelerate/{name}.yaml --num_processes {self.gpus}"
        port = "--main_process_port 0"  # 0: any free port
        return [*f"{launch} {port} recipes/train_gpt2_slt.py".split(), *self.options(point)]

    def folder(self, point: Point) -> Path:
        """Return the output folder of a run."""
        return self.runs / point.id.replace(" ", "-")


# The fewest runs that draw both figures: a ticket with factor 1, one with n^(1/4), and their dense twin.
DRY_RUN = Plan(
    ("tiny",), 1, (1, "paper"), (1,), gpus=2, on_cpu=True, runs=Path("runs/dry_run"), out=Path("runs/dry_run")
)


# -- running it -------------------------------------------------------------------------------------


class Launcher:
    """Run commands one after another, and pass Ctrl-C and SIGTERM on to all processes of the current command.

    After a signal the run writes a checkpoint and ends. The launcher waits for that, and starts no further run.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment, self.stopped = {**os.environ, **environment}, False
        self.process: subprocess.Popen | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def run(self, command: list[str]) -> int:
        """Run a command to its end. Return its exit code, or 130 after a signal."""
        if not self.stopped:
            self.process = subprocess.Popen(command, env=self.environment, start_new_session=True)
            code = self.process.wait()
        return 130 if self.stopped else code


def records_of(plan: Plan) -> Records:
    """Return the records of a plan. Records of other parts of the study stay in the file."""
    path = plan.out / "results" / "gpt2_paper.json"
    return Records(path, (point.settings for point in plan.points()), keep=True)


def execute(plan: Plan, records: Records, launch: Callable[[list[str]], int]) -> int:
    """Run every point that has no record yet, and add its record. Return 0, or the exit code of a failed run."""
    points = plan.points()
    for number, point in enumerate(points, 1):
        if records.get(point.settings):
            continue
        folder, command = plan.folder(point), plan.command(point)
        if not (folder / "report.json").exists():
            print(f"run {number} of {len(points)}: {shlex.join(command)}", flush=True)
            if code := launch(command):
                print(f"{point.id} ended with code {code}", file=sys.stderr)
                return code
        # The checkpoints are no longer needed, and those of all runs would fill a terabyte.
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        log = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
        records.add(point.settings, outcome(json.loads((folder / "report.json").read_text()), log))
    return 0


def draw(plan: Plan, records: Records) -> None:
    """Draw both figures from all records, including those of other parts of the study that were run before."""
    whole = plan if plan.on_cpu else replace(plan, models=Plan.models, seeds=max(plan.seeds, Plan.seeds))
    study = Study("gpt2", "cpu", Namespace(preset="paper", out=plan.out))
    for draw_figure in (draw_fig7, draw_fig8):
        draw_figure(PRESETS["cpu"], found_of(whole.points(), records), study)


# -- what it costs ----------------------------------------------------------------------------------

EPOCH = 227  # steps of a pass over WikiText-103: 119M tokens of GPT-2, 512 sequences of 1024 per step
VOCABULARY = 50257  # tokens of GPT-2
A100 = 312e12  # operations per second of the bfloat16 matrix units of an A100, from its data sheet
SUSTAINED = 0.4  # assumed share of A100 that large matrix products of a training step reach
FEW = 60e6  # on a processor, models with more weights are not measured


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that determine the time of a step."""

    layers: int
    width: int
    vocabulary: int
    length: int

    @property
    def weights(self) -> int:
        """Number of weights in matrix products: the blocks, and the tied token table as the head."""
        return 12 * self.layers * self.width**2 + self.vocabulary * self.width

    @property
    def operations(self) -> float:
        """Operations of forward and backward per token: 6 per weight, and 12 T d for the attention of each layer."""
        return 6 * self.weights + 12 * self.layers * self.width * self.length


@dataclass(frozen=True)
class Job:
    """One run: its shape, its tokens, and how a step is split into batches."""

    shape: Shape
    tokens: int
    at_once: int
    accumulation: int
    arguments: Arguments


def job_of(plan: Plan, point: Point) -> Job:
    """Return the job of a run, from its own command line."""
    words = plan.options(point)
    arguments = parse_arguments(["--config", str(HERE / f"{point.task}.yaml"), *words[2:]])
    run, model, data = arguments.run, arguments.model, arguments.data
    vocabulary = VOCABULARY if data.tokenizer else data.vocab_size
    steps = run.max_steps if run.max_steps > 0 else run.num_train_epochs * EPOCH
    at_once, accumulation = run.per_device_train_batch_size, run.gradient_accumulation_steps
    tokens = round(steps * plan.gpus * at_once * accumulation * data.block_size)
    shape = Shape(model.n_layer, model.n_embd, vocabulary, data.block_size)
    return Job(shape, tokens, at_once, accumulation, arguments)


def seconds_of(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the shortest of several times, measured after one run that is not counted."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def speed_of(job: Job, device: torch.device) -> float:
    """Return the tokens per second of training a ticket on one device: batches and their optimizer step."""
    config = copy.deepcopy(job.arguments.model)
    config.vocab_size, config.n_positions = job.shape.vocabulary, job.shape.length
    model = SupermaskGPT2LMHeadModel(config).to(device).train()
    optimizer = build_optimizer(model, job.arguments.run)
    # A processor is just as fast with one sequence at a time; a GPU needs a full batch.
    at_once = job.at_once if device.type == "cuda" else 1
    ids = torch.randint(job.shape.vocabulary, (at_once, job.shape.length), device=device)

    def batch() -> None:
        mixed = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
        with mixed:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()

    repeats = 5 if device.type == "cuda" else 2
    of_batch, of_step = seconds_of(batch, device, repeats), seconds_of(optimizer.step, device, repeats)
    return ids.numel() / (of_batch + of_step * at_once / (job.at_once * job.accumulation))


def product_rate(device: torch.device, size: int = 2048) -> float:
    """Return the operations per second of a large matrix product in float32."""
    one = torch.randn(size, size, device=device)
    return 2 * size**3 / seconds_of(lambda: one @ one, device, 5)


def cost_of(jobs: list[Job], device: torch.device) -> dict[Shape, tuple[float, bool]]:
    """Return the tokens per second of every shape, and whether they were measured or derived from its operations."""
    speeds: dict[Shape, float] = {}
    shapes = {job.shape: job for job in jobs}
    for shape, job in sorted(shapes.items(), key=lambda one: one[0].weights):
        if speeds and device.type == "cpu" and shape.weights > FEW:
            continue
        print(f"measuring some steps of {shape.layers} x {shape.width}", file=sys.stderr)
        try:
            speeds[shape] = speed_of(job, device)
        except torch.OutOfMemoryError:
            if not speeds:
                raise
    *_, (largest, speed) = speeds.items()
    rate = speed * largest.operations
    return {shape: (speeds.get(shape, rate / shape.operations), shape in speeds) for shape in shapes}


def digits(value: float) -> str:
    """Return a number with three significant digits.

    >>> digits(5553.2), digits(0.000344)
    ('5,550', '0.000344')
    """
    return f"{float(f'{value:.3g}'):,g}"


def tell_cost(plan: Plan, points: list[Point]) -> float:
    """Print the cost of these runs for each shape. Return the total hours of one GPU (or processor)."""
    jobs = [job_of(plan, point) for point in points]
    here = torch.device("cpu" if plan.on_cpu or not torch.cuda.is_available() else "cuda")
    speeds = cost_of(jobs, here)
    factor, what = 1.0, "GPU" if here.type == "cuda" else "processor"
    if here.type == "cpu" and not plan.on_cpu:
        rate, what = product_rate(here), "GPU"
        factor = SUSTAINED * A100 / rate
    print(f"{'layers x width':>16}{'runs':>6}{'tokens a run':>14}{'tokens/s here':>15}{f'{what} hours':>18}")
    total = 0.0
    for shape, (speed, measured) in sorted(speeds.items(), key=lambda one: one[0].weights):
        same = [job for job in jobs if job.shape == shape]
        hours = sum(job.tokens for job in same) / (speed * factor) / 3600
        total += hours
        sizes = f"{shape.layers} x {shape.width}"
        shown = f"{digits(speed)}{' ' if measured else '*'}"
        print(f"{sizes:>16}{len(same):>6}{same[0].tokens:>14.3g}{shown:>15}{digits(hours):>18}")
    if not all(measured for _, measured in speeds.values()):
        print("* not measured: assumes the operations per second of the largest measured shape")
    if factor != 1:
        print(
            f"Factor {factor:,.0f}, an estimate: one A100 is assumed to reach {SUSTAINED:.0%} of its"
            f" {A100 / 1e12:.0f} TFLOP/s in matrix products; {rate / 1e12:.3g} TFLOP/s were measured here."
        )
    each = "" if plan.on_cpu else f", {digits(total / plan.gpus / 24)} days on {plan.gpus}"
    tokens = sum(job.tokens for job in jobs)
    print(f"{len(jobs)} runs, {tokens:.3g} tokens: about {digits(total)} hours of one {what}{each}.")
    print("Not included: start-up, evaluation, and waiting for text, for other processes and for the disk.")
    return total


# -- command line -----------------------------------------------------------------------------------


def parse(words: list[str] | None = None) -> tuple[Namespace, Plan]:
    """Parse the command line. Return its options and the plan."""
    parser = argparse.ArgumentParser(
        prog="bash recipes/reproduce.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=Plan.models, default=Plan.models, help="which presets")
    parser.add_argument("--seeds", type=int, default=Plan.seeds, help="seeds per setting (default: 3)")
    there = torch.cuda.device_count()
    parser.add_argument("--gpus", type=int, default=there or Plan.gpus, help="GPUs to use (default: all)")
    parser.add_argument("--at_once", type=int, help="sequences in a GPU at a time: fewer need less memory")
    parser.add_argument("--cost", action="store_true", help="print the cost and run nothing")
    parser.add_argument("--print", action="store_true", help="print the commands and run nothing")
    parser.add_argument("--dry_run", action="store_true", help="make three tiny runs in two processes")
    options = parser.parse_args(words)
    for name in ("seeds", "gpus", "at_once"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name} {value} is not positive")
    if options.dry_run:
        return options, DRY_RUN
    plan = Plan(tuple(options.models), options.seeds, gpus=options.gpus, at_once=options.at_once)
    if not (options.cost or options.print) and there < plan.gpus:
        parser.error(f"there are {there} GPUs here, not {plan.gpus}; --dry_run, --cost and --print need none")
    return options, plan


def main() -> int:
    """Run the plan of the command line, or print its commands or its cost."""
    options, plan = parse()
    try:
        points, records = plan.points(), records_of(plan)
        if options.print:
            print("\n".join(shlex.join(plan.command(point)) for point in points))
            return 0
        if left := [point for point in points if not records.get(point.settings)]:
            tell_cost(plan, left)
        if options.cost:
            return 0
        # The launcher starts several processes for GPUs only; this keeps them on the processor.
        environment = {"ACCELERATE_USE_CPU": "true"} if plan.on_cpu else {}
        code = execute(plan, records, Launcher(environment).run)
        if known := len(list(records)):
            draw(plan, records)  # also if the study was stopped early
        print(f"{known} of {len(points)} runs have a record in {records.path}; files are in {plan.runs}")
        if code:
            print("the same command resumes from here", file=sys.stderr)
        return code
    except SLTError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
