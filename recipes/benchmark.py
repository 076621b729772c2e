"""Compare the library with named baselines in one run: interleaved repeats, medians, ratios.

    python recipes/benchmark.py [--preset quick|full] [--only draw load ...] [--data FOLDER] [--json out.json]
    python recipes/benchmark.py --show recipes/results/benchmark.json

`full` uses GPT-2 mini and small (about ten minutes on two cores without other work, 12 GB of memory); `quick` uses
models that take seconds. A ratio is ours / theirs: below 1 means less time, memory or bytes than the baseline. An
existing JSON file is updated: rows that were measured replace the old ones, the others stay.

These are not part of the table:

    --only tricks          what each optimisation of the training step saves: it is switched off alone, and a ratio
                           above 1 is the saving
    --only rules           a training step of every rule
    --only ternary         ways to run a ticket of weights {-c, 0, +c} below the cost of dense float32
    --only llama           a ticket in llama.cpp, of GPT-2's shape and of a Llama's; needs
                           pip install 'hf_slt[llama]' xllamacpp
    --only architectures   a Llama of the sizes of the training step
"""

import argparse
import copy
import ctypes
import gc
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from tables import markdown_table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, GPT2LMHeadModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import logging

from hf_slt import SupermaskGPT2Config, SupermaskGPT2LMHeadModel, supermask_config
from hf_slt.masks import gradients, modules
from hf_slt.masks.modules import masked_parameters
from hf_slt.masks.plans import MaskedPlan, ParameterPlan
from hf_slt.masks.selection import keep_by_digits, keep_largest
from hf_slt.models import gpt2
from hf_slt.text.blocks import DataArguments, load_blocks
from hf_slt.text.corpus import embedded_corpus
from hf_slt.text.evaluation import evaluate_blocks
from hf_slt.tickets.files import replacing
from hf_slt.training.memory import keep_freed_memory
from hf_slt.training.run import dense_twin
from hf_slt.weights.random_weights import draw

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
TINY = {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 2048}
SIZES = {
    "quick": {
        "draw": 4_000_000,
        "scores": 1_000_000,
        "step": TINY,
        "tokens": 128,
        "ticket": TINY,
        "llama": {**TINY, "n_embd": 256},  # TQ2_0 has blocks of 256 weights
        "generated": 8,
        "streamed": 20_000,
        "grown": [(1, 64, 256), (2, 128, 512), (4, 192, 1024)],
    },
    "full": {
        "draw": 124_000_000,
        "scores": 40_000_000,
        "step": {"n_layer": 4, "n_embd": 512, "n_head": 8},
        "tokens": 1024,
        "ticket": {},  # GPT-2 small
        "llama": {},
        "generated": 32,
        "streamed": 10_000_000,
        # layers, width, vocabulary: 1, 7, 50 and 355 million weights
        "grown": [(4, 128, 2048), (6, 320, 2048), (12, 576, 4096), (24, 1024, 50257)],
    },
}
BANDWIDTH = 100e6 / 8  # bytes per second of the download in the first_token row
GENERATE = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def interleaved(functions: list[Callable], repeats: int) -> list[float]:
    """Return the median seconds of each function. They take turns, because the machine's speed changes over time."""
    times: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats + 1):
        for function, seconds in zip(functions, times, strict=True):
            started = time.perf_counter()
            function()
            if repeat:  # the first call of each is a warm-up
                seconds.append(time.perf_counter() - started)
    return [statistics.median(seconds) for seconds in times]


@contextmanager
def busy_core() -> Iterator[None]:
    """Keep one core busy with another process inside a `with` block."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


class Launches(TorchDispatchMode):
    """Counts operators that compute, and those of them that read or write a tensor of a given size."""

    views = set("view expand split slice select detach alias empty split_with_sizes".split())

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.all, self.full = size, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in self.views:
            touched = [one for one in (*args, *(kwargs or {}).values(), found) if isinstance(one, Tensor)]
            self.all += 1
            self.full += any(one.numel() >= self.size for one in touched)
        return found


# -- what is compared -----------------------------------------------------------------------------------


def launches_of_kernels(scores: Tensor, count: int) -> dict[str, int]:
    """Count what Triton's path queues to select in one tensor: operators of torch and launches of kernels.

    Without a GPU the kernels run in Triton's interpreter, whose own operators are not counted. For that, the variable
    TRITON_INTERPRET must be 1 before Triton is imported.
    """
    from hf_slt.masks import digit_kernels

    kernels = []  # whether each touches all scores

    def counting(kernel: Any, programs: int, *arguments: Any) -> None:
        kernels.append(any(isinstance(one, Tensor) and one.numel() >= len(scores) for one in arguments))
        with _disable_current_modes():
            launch(kernel, programs, *arguments)

    launch = digit_kernels.launch
    with mock.patch.object(digit_kernels, "launch", counting), Launches(len(scores)) as counted:
        mask = digit_kernels.keep_by_kernels([scores], count, True)
    with _disable_current_modes():
        assert torch.equal(mask, keep_by_digits([scores], count, True))
    return {"all": counted.all + len(kernels), "of full size": counted.full + sum(kernels)}


def training_step(model: nn.Module, tokens: int, accumulation: int = 1, rows: int = 1) -> Callable[[], None]:
    """Return a function that takes one optimizer step, always on the same tokens."""
    optimizer = torch.optim.AdamW(model.train().parameters(), weight_decay=0.0)
    ids = torch.arange(rows * tokens).remainder(model.config.vocab_size).view(rows, -1)

    def step() -> None:
        for _ in range(accumulation):
            model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def generation(model: nn.Module, batch: int, new: int) -> Callable[[], Tensor]:
    """Return a function that generates tokens greedily."""
    ids = torch.arange(8).expand(batch, -1) + 1
    options = {**GENERATE, "attention_mask": torch.ones_like(ids), "max_new_tokens": new}
    return lambda: model.generate(ids, **options)


class Popup(torch.autograd.Function):
    """Edge-popup's mask as its authors describe it: sort all scores, straight-through gradient."""

    @staticmethod
    def forward(ctx, scores: Tensor, density: float) -> Tensor:
        mask = torch.zeros_like(scores)
        order = scores.flatten().argsort()
        mask.view(-1)[order[round((1 - density) * len(order)) :]] = 1
        return mask

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


@dataclass
class PopupPlan(ParameterPlan):
    """A masked parameter that is computed by `Popup` whenever it is read."""

    plan: MaskedPlan

    def install(self, module: nn.Module, name: str) -> None:
        """Do nothing: the module has the scores already."""

    def value(self, module: nn.Module, name: str) -> Tensor:
        scores = self.plan.scores(module, name)
        masks = [Popup.apply(one.abs(), self.plan.rule.density) for one in scores]
        return getattr(module, self.plan.drawn_name(name)) * torch.cat(masks, self.plan.axis)


def edge_popup_twin(config: SupermaskGPT2Config) -> SupermaskGPT2LMHeadModel:
    """Return the same model with masks computed as in the original edge-popup."""
    model = SupermaskGPT2LMHeadModel(config)
    for _, module, name, plan in list(masked_parameters(model)):
        module.parameter_plans[name] = PopupPlan(plan)
    return model


@contextmanager
def saved(config: Any) -> Iterator[tuple[Path, Path]]:
    """Yield the folders of a ticket and of the stock model that it merges to."""
    with tempfile.TemporaryDirectory() as folder:
        ticket, stock = Path(folder, "ticket"), Path(folder, "stock")
        model = AutoModelForCausalLM.from_config(config)
        model.save_ticket(ticket)
        model.to_ticket().merge_and_unload().save_pretrained(stock)
        yield ticket, stock


def seconds_of_steps(
    config: SupermaskGPT2Config, make_other: Callable, tokens: int, accumulation: int, repeats: int
) -> list[float]:
    """Return the seconds of our training step and of the other model's, in a process like that of a training run."""
    keep_freed_memory()
    models = [SupermaskGPT2LMHeadModel(config), make_other(config)]
    return interleaved([training_step(model, tokens, accumulation) for model in models], repeats)


# -- memory, each side in a separate process ------------------------------------------------------------


def in_fresh_process(function: Callable, *arguments):
    """Call a function in a new process, whose memory nothing else has used, and return its result."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def give_back() -> None:
    """Return free memory that the allocator keeps to the system: otherwise it would count as resident."""
    gc.collect()
    with suppress(AttributeError, TypeError, OSError):  # another allocator
        ctypes.CDLL(None).malloc_trim(0)


def peak_bytes(function: Callable) -> float:
    """Return the peak resident memory while the function runs (Linux; elsewhere since the start of the process)."""
    function()  # creates what is made only once (optimizer moments, scratch)
    give_back()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        function()
        status = Path("/proc/self/status").read_text()
        return 1024.0 * int(status.split("VmHWM:")[1].split()[0])
    except OSError:
        import resource

        function()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(peak if sys.platform == "darwin" else 1024 * peak)


def memory_of_step(config: SupermaskGPT2Config, dense: bool, tokens: int) -> float:
    """Return the memory that training steps take, in bytes."""
    model = dense_twin(config) if dense else SupermaskGPT2LMHeadModel(config)
    return peak_bytes(training_step(model, tokens))


def memory_of_generation(folder: Path, kind: str, new: int) -> tuple[float, list[int]]:
    """Return the memory that generating takes, and the tokens."""
    quiet()
    step = generation(LOADERS[kind](folder), 1, new)
    return peak_bytes(step), step()[0].tolist()


# -- text ------------------------------------------------------------------------------------------------


@contextmanager
def parquet_text(folder: Path | None, streaming: bool) -> Iterator[DataArguments]:
    """Yield arguments that read the parquet files of a folder, or by default the embedded corpus as a parquet file."""
    with tempfile.TemporaryDirectory() as own:
        if folder is None:
            import pyarrow.parquet

            table = pyarrow.table({"text": list(embedded_corpus())})
            pyarrow.parquet.write_table(table, Path(own, "text.parquet"), row_group_size=50)
        files = [str(Path(folder or own, "*.parquet"))]
        cache = str(Path(own, "cache"))
        yield DataArguments(train_files=files, streaming=streaming, vocab_size=2048, cache_dir=cache)


def memory_of_text(arguments: DataArguments) -> tuple[float, float]:
    """Return the memory that a process takes to read all blocks of a stored text, and the bytes of that text."""
    import datasets  # noqa: F401  imported first, so its own memory is not counted

    before = peak_bytes(lambda: None)
    blocks = load_blocks(arguments).train

    def read() -> None:
        for place in range(0, len(blocks), 64):
            blocks[place : place + 64]

    return max(1.0, peak_bytes(read) - before), float(blocks.bytes)


# -- what each trick of the training step saves -----------------------------------------------------------

TRICK_SIZES = {
    "nano": ({"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 2048, "n_positions": 128}, 16),
    "mini": ({"n_layer": 4, "n_embd": 512, "n_head": 8}, 1),
}
TRICKS: dict[str, list[tuple]] = {  # by trick: owner, name, and what replaces it when the trick is off
    "the loss in pieces": [(gpt2, "causal_lm_loss", ForCausalLMLoss)],
    "the gradient of scores in pieces": [(gradients, "_gradients_in_pieces", gradients._gradients)],
    "rows of a lookup added to the gradient of the logits": [
        (modules._SparseEmbedding, "forward", nn.Embedding.forward)
    ],
    "a tied table masked once": [(modules, "forward_cache", lambda: None)],
}


@contextmanager
def without(trick: str | None) -> Iterator[None]:
    """Switch one trick off inside a `with` block."""
    with ExitStack() as stack:
        for owner, name, other in TRICKS.get(trick or "", ()):
            stack.enter_context(mock.patch.object(owner, name, other))
        yield


def trick_step(size: str, trick: str | None) -> Callable[[], None]:
    """Return a training step without one trick."""
    shape, rows = TRICK_SIZES[size]
    config = SupermaskGPT2Config(**NO_DROPOUT, **shape, bos_token_id=0, eos_token_id=0)
    with without(trick):
        model = SupermaskGPT2LMHeadModel(config)
    step = training_step(model, min(1024, config.n_positions), rows=rows)

    def patched() -> None:
        with without(trick):
            step()

    return patched


def memory_of_trick(size: str, trick: str | None) -> float:
    """Return the memory of a training step without one trick."""
    return peak_bytes(trick_step(size, trick))


RULE_STEPS: dict[str, tuple[dict, float]] = {  # options, and the goal for the ratio
    "sign": ({"rule": "sign"}, 1.0),
    "threshold": ({"rule": "threshold"}, 1.0),
    "signed": ({"rule": "signed"}, 1.1),
    "multicoat": ({"rule": "multicoat"}, 1.1),
    "multibit": ({"rule": "multibit"}, 1.1),
    "bernoulli": ({"rule": "bernoulli"}, 1.1),
    "global": ({"rule": "global"}, 1.1),
    "n_m": ({"rule": "n_m"}, 1.1),
    "edge_popup with scales of rows": ({"scales": "row"}, 1.1),
    "edge_popup, search 0.3": ({"search": 0.3}, 1.1),
}


# -- ways to run a ternary ticket -----------------------------------------------------------------------


def with_linears(folder: Path) -> nn.Module:
    """Load a stock GPT-2 with nn.Linear in place of Conv1D, which quantization tools do not support."""
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())  # untied: it is packed separately
    for block in model.transformer.h:
        for owner in (block.attn, block.mlp):
            for name, layer in list(owner.named_children()):
                if hasattr(layer, "nf"):  # a Conv1D
                    linear = nn.Linear(*layer.weight.shape)
                    linear.weight, linear.bias = nn.Parameter(layer.weight.T.contiguous()), layer.bias
                    setattr(owner, name, linear)
    return model


def dynamic_int8(folder: Path) -> nn.Module:
    """Load with torch.ao's dynamic quantization: weights are exact in 8 bits, but inputs are rounded to 8 bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is moving to torchao
        return torch.ao.quantization.quantize_dynamic(with_linears(folder), {nn.Linear}, torch.qint8)


def torchao_int8(folder: Path) -> nn.Module:
    """Load with torchao's 8-bit weights: exact, with a scale for each output."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = with_linears(folder)
    quantize_(model, Int8WeightOnlyConfig())
    return model


class Int8Packed(nn.Module):
    """Layer with `torch._weight_int8pack_mm`: signs in 8 bits, a scale for each output."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:  # weight: outputs, inputs
        super().__init__()
        self.scale = weight.abs().amax(1)
        self.signs = weight.sign().to(torch.int8)
        self.bias = bias

    def forward(self, hidden: Tensor) -> Tensor:
        flat = torch._weight_int8pack_mm(hidden.flatten(0, -2), self.signs, self.scale)
        flat = flat if self.bias is None else flat + self.bias
        return flat.view(*hidden.shape[:-1], -1)


class Int4Packed(Int8Packed):
    """Layer with `torch._weight_int4pack_mm_for_cpu`: signs in 4 bits, in groups of 32 inputs."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        outputs, inputs = weight.shape
        padded = F.pad(self.signs.int() + 8, (0, 0, 0, -outputs % 16), value=8)
        self.outputs, self.signs = outputs, torch._convert_weight_to_int4pack_for_cpu(padded, 1)
        scale = F.pad(self.scale, (0, -outputs % 16)).expand(inputs // 32, -1)
        self.scale = torch.stack([scale, torch.zeros_like(scale)], -1).contiguous()

    def forward(self, hidden: Tensor) -> Tensor:
        flat = torch._weight_int4pack_mm_for_cpu(hidden.flatten(0, -2), self.signs, 32, self.scale)
        flat = flat[:, : self.outputs]
        flat = flat if self.bias is None else flat + self.bias
        return flat.view(*hidden.shape[:-1], -1)


class SparseRows(nn.Module):
    """Layer with a CSR matrix of the kept weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CSR is in beta
            self.weight = weight.detach().to_sparse_csr()
        self.bias = 0 if bias is None else bias

    def forward(self, hidden: Tensor) -> Tensor:
        return (self.weight @ hidden.flatten(0, -2).T).T.view(*hidden.shape[:-1], -1) + self.bias


def with_layers(kind: type[nn.Module]) -> Callable[[Path], nn.Module]:
    """Return a loader of stock GPT-2 that replaces its matrices with this kind of layer."""

    def load(folder: Path) -> nn.Module:
        model = GPT2LMHeadModel.from_pretrained(folder).requires_grad_(False).eval()
        for module in list(model.modules()):
            for name, layer in list(module.named_children()):
                if hasattr(layer, "nf"):
                    setattr(module, name, kind(layer.weight.T.contiguous(), layer.bias))
        model.lm_head = kind(model.transformer.wte.weight, None)
        return model

    return load


LOADERS: dict[str, Callable[[Path], nn.Module]] = {
    "stock float32": AutoModelForCausalLM.from_pretrained,
    "ticket": SupermaskGPT2LMHeadModel.from_pretrained,
    "to_ternary": lambda folder: SupermaskGPT2LMHeadModel.from_pretrained(folder).to_ternary(),
    "bfloat16": lambda folder: GPT2LMHeadModel.from_pretrained(folder, dtype=torch.bfloat16),
    "torch.ao dynamic int8": dynamic_int8,
    "_weight_int8pack_mm": with_layers(Int8Packed),
    "_weight_int4pack_mm_for_cpu": with_layers(Int4Packed),
    "sparse CSR": with_layers(SparseRows),
}
if find_spec("torchao"):  # pip install torchao
    LOADERS["torchao int8"] = torchao_int8
FROM_TICKET = ("ticket", "to_ternary")


# -- the same in llama.cpp --------------------------------------------------------------------------------


def llama_config(config: SupermaskGPT2Config, block: int = 1) -> transformers.LlamaConfig:
    """Return a Llama with the layers, heads and about the weights of a GPT-2. MLP widths are multiples of `block`."""
    # Three matrices of 8/3 of the width have as many weights as GPT-2's two of 4 times the width.
    return transformers.LlamaConfig(
        hidden_size=config.n_embd,
        num_hidden_layers=config.n_layer,
        vocab_size=config.vocab_size,
        intermediate_size=8 * config.n_embd // 3 // block * block,
        num_attention_heads=config.n_head,
        tie_word_embeddings=True,
    )


def gguf_files(config: Any, ticket: Path, folder: Path) -> dict[str, Path]:
    """Write GGUF files of the ticket in two types, and of a dense model of its shape in Q4_0."""
    from hf_slt.runtimes.llama_cpp import export_gguf, read_vocabulary, write_gguf
    from hf_slt.text.blocks import train_tokenizer

    words = train_tokenizer(["a a"], 258, 64)  # the rest of the vocabulary is filled up
    words.save_pretrained(ticket)
    files = {name: folder / f"{name}.gguf" for name in ("tq2_0", "f16", "dense", "q4_0")}
    for name in ("tq2_0", "f16"):
        export_gguf(ticket, files[name], name)
    write_gguf(dense_twin(config), read_vocabulary(words, config.vocab_size), files["dense"], "f32")
    in_4_bits(files.pop("dense"), files["q4_0"])
    return files


def in_4_bits(source: Path, target: Path) -> None:
    """Copy a GGUF file with its matrices in Q4_0."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], kind)
    for one in reader.tensors:
        if one.data.ndim == 2 and one.name != "position_embd.weight":
            kind = gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(one.name, gguf.quantize(one.data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(one.name, one.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def memory_in_llama(path: Path, new: int, threads: int) -> float:
    """Return the memory that llama.cpp takes to generate."""
    program = [sys.executable, Path(__file__).with_name("llama_generate.py"), path, "--repeats", "1"]
    words = [*program, "--new", new, "--threads", threads]
    return json.loads(subprocess.check_output(list(map(str, words))))["peak_bytes"]


# -- rows -----------------------------------------------------------------------------------------------


class Benchmarks:
    """Each method measures a row: what is measured, the baseline, the goal (reach), and the two numbers."""

    def __init__(self, preset: str, repeats: int, data: Path | None = None) -> None:
        self.size, self.repeats, self.data = SIZES[preset], repeats, data
        self.step_config = SupermaskGPT2Config(**NO_DROPOUT, **self.size["step"])
        self.ticket_config = SupermaskGPT2Config(**NO_DROPOUT, **self.size["ticket"])

    def _steps(self, make_other: Callable, accumulation: int = 1) -> list[float]:
        arguments = make_other, self.size["tokens"], accumulation, self.repeats
        return in_fresh_process(seconds_of_steps, self.step_config, *arguments)

    def step(self):
        what = f"training step, {self.size['tokens']} tokens, AdamW"
        return what, "stock GPT-2, all weights trained", 1.0, self._steps(dense_twin)

    def step_busy(self):
        what = f"training step, {self.size['tokens']} tokens, AdamW, another process on one core"
        with busy_core():
            return what, "stock GPT-2, all weights trained, likewise", 1.05, self._steps(dense_twin)

    def step_accum(self):
        what = f"the same, 4 accumulation steps of {self.size['tokens']} tokens"
        return what, "stock GPT-2, all weights trained", 1.02, self._steps(dense_twin, 4)

    def edge_popup(self):
        return (
            "the same training step",
            "edge-popup, sorting at each forward",
            1 / 3,
            self._steps(edge_popup_twin),
        )

    def step_memory(self):
        pair = [
            in_fresh_process(memory_of_step, self.step_config, dense, self.size["tokens"])
            for dense in (False, True)
        ]
        return "peak resident memory of a training step", "stock GPT-2, all weights trained", 1.08, pair

    def architectures(self):
        """Compare a Llama's step with stock Llama's, and loading its ticket with a GPT-2 ticket of that size."""
        config = self.step_config
        stock = llama_config(config)
        masked = supermask_config(stock)
        models = [AutoModelForCausalLM.from_config(one) for one in (masked, stock)]
        pair = interleaved([training_step(one, self.size["tokens"]) for one in models], self.repeats)
        what = f"training step of a Llama, {self.size['tokens']} tokens, AdamW"
        yield "step", (what, "stock Llama, all weights trained", 1.05, pair)
        with tempfile.TemporaryDirectory() as folder:
            kinds = {"llama": models[0], "gpt2": SupermaskGPT2LMHeadModel(config)}
            for name, model in kinds.items():
                model.save_ticket(Path(folder, name))
            ways = [
                lambda name=name: AutoModelForCausalLM.from_pretrained(Path(folder, name)) for name in kinds
            ]
            pair = interleaved(ways, self.repeats)
        weights = [model.to_ticket().num_parameters() for model in kinds.values()]
        what = "from_pretrained of a Llama's ticket, all digests checked"
        yield "load", (what, "a GPT-2 ticket of that size", 1.1, pair, {"weights": weights})

    def select(self):
        return self._select(0.13)

    def select_busy(self):
        with busy_core():
            what, *others = self._select(0.2)
        return f"{what}; another process on one core", *others

    def _select(self, reach: float):
        scores = torch.from_numpy(draw(0, "scores", (self.size["scores"],))).abs()
        count = round(0.3 * len(scores))

        def by_sort() -> Tensor:
            mask = torch.zeros_like(scores, dtype=torch.bool)
            mask[torch.sort(scores, descending=True, stable=True).indices[:count]] = True
            return mask

        def by_kthvalue() -> Tensor:
            return scores >= torch.kthvalue(scores, len(scores) - count + 1).values

        def by_partition() -> Tensor:
            values = scores.numpy()
            return torch.from_numpy(values >= np.partition(values, -count)[-count])

        rivals = {"torch.sort": by_sort, "kthvalue": by_kthvalue, "numpy.partition": by_partition}
        ways = [lambda: keep_largest(scores, count), *rivals.values()]
        masks = [way() for way in ways]  # the last two keep all ties
        assert torch.equal(masks[0], masks[1])
        ours, *theirs = interleaved(ways, min(3, self.repeats))
        millions = f"{len(scores) / 1e6:.0f}M"
        what = f"mask of the top 30 % of {millions} scores, exact: one read of them, one write of the mask"
        fastest = min(theirs)
        baseline = f"the fastest of {', '.join(rivals)}: {list(rivals)[theirs.index(fastest)]}"
        return what, baseline, reach, [ours, fastest], dict(zip(rivals, theirs, strict=True))

    def launches(self):
        scores = torch.randn(1 << 18)
        with Launches(len(scores)) as counted:
            keep_by_digits([scores], len(scores) // 3, True)
        details: dict[str, Any] = {"of full size": counted.full}
        ours = counted.all
        if find_spec("triton"):
            code = "import json, torch, benchmark; scores = torch.randn(1 << 18); "
            code += "print(json.dumps(benchmark.launches_of_kernels(scores, len(scores) // 3)))"
            done = subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, "TRITON_INTERPRET": "1"},
                cwd=Path(__file__).parent,
                stdout=subprocess.PIPE,
                check=True,
            )
            kernels = json.loads(done.stdout)
            details = {"of full size": kernels["of full size"], "without Triton": [ours, counted.full]}
            ours = kernels["all"]
        what = "operators and kernels queued to select in one tensor on another device than a CPU (counted, not timed)"
        return what, "one operator", 12, [float(ours), 1.0], details

    def imports(self):
        def load(name: str) -> Callable[[], None]:
            return lambda: subprocess.run([sys.executable, "-c", f"import {name}"], check=True)

        pair = interleaved([load("hf_slt"), load("transformers")], self.repeats)
        return "import hf_slt, in a new process", "import transformers", 1.2, pair

    def draw(self):
        size = self.size["draw"]
        pair = interleaved([lambda: draw(0, "w", (size,)), lambda: torch.randn(size)], self.repeats)
        return f"drawing {size / 1e6:.0f}M normals, the same on any machine", "torch.randn", 1.0, pair

    def load(self):
        with saved(self.ticket_config) as (ticket, stock):
            pair = interleaved(
                [
                    lambda: SupermaskGPT2LMHeadModel.from_pretrained(ticket),
                    lambda: GPT2LMHeadModel.from_pretrained(stock),
                ],
                self.repeats,
            )
        return "from_pretrained, all digests checked", "dense GPT-2, from a warm disk", 15, pair

    def first_token(self):
        with saved(self.ticket_config) as (ticket, stock):
            download = [
                sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / BANDWIDTH
                for folder in (ticket, stock)
            ]
            local = interleaved(
                [
                    lambda: generation(SupermaskGPT2LMHeadModel.from_pretrained(ticket), 1, 1)(),
                    lambda: generation(GPT2LMHeadModel.from_pretrained(stock), 1, 1)(),
                ],
                min(3, self.repeats),
            )
        pair = [sum(both) for both in zip(download, local, strict=True)]
        what = "download at 100 Mbit/s (computed from bytes), from_pretrained, first token"
        return what, "dense GPT-2, float32", 0.1, pair

    def bytes(self):
        with saved(self.ticket_config) as folders:
            pair = [
                float(sum(file.stat().st_size for file in path.glob("*.safetensors"))) for path in folders
            ]
        return "bytes on disk, packed", "dense float32 safetensors", 1 / 31, pair

    def _generate(self, batch: int):
        model = SupermaskGPT2LMHeadModel(self.ticket_config).to_ticket().eval()
        stock, new = model.merge_and_unload().eval(), self.size["generated"]
        pair = interleaved([generation(model, batch, new), generation(stock, batch, new)], self.repeats)
        return (
            f"generating {new} tokens, batch {batch}, ticket",
            "stock GPT-2, merged weights",
            1 / 0.98,
            pair,
        )

    def generate_b1(self):
        return self._generate(1)

    def generate_b8(self):
        return self._generate(8)

    def _learning(self, make: Callable[[nn.Module], Callable]) -> list[float]:
        model = SupermaskGPT2LMHeadModel(self.step_config).eval()
        return interleaved([make(model), make(model.to_ticket().eval())], self.repeats)

    def evaluate_learning(self):
        length = min(self.size["tokens"], 128)
        ids = torch.arange(64 * length).remainder(self.step_config.vocab_size).view(64, -1)
        batches = [{"input_ids": some, "labels": some} for some in ids.split(8)]
        pair = self._learning(lambda model: lambda: evaluate_blocks(model, batches))
        return f"evaluation of a model that learns, {ids.numel()} tokens", "its ticket", 1.05, pair

    def generate_learning(self):
        new = self.size["generated"]
        pair = self._learning(lambda model: generation(model, 1, new))
        what = f"generating {new} tokens with a model that learns, batch 1, its scores as in the call before"
        return what, "its ticket", 1.05, pair

    def input_speed(self):
        """Compare seconds per token of reading and tokenising a stream with those of the training step."""
        count, step = self.size["tokens"], SupermaskGPT2LMHeadModel(self.step_config)
        with parquet_text(self.data, streaming=True) as arguments:
            stream = load_blocks(arguments).train
            blocks = max(1, min(self.size["streamed"], 1_000_000) // arguments.block_size)
            reading = statistics.median(interleaved([lambda: list(islice(stream.read(), blocks))], 2))
        training = statistics.median(interleaved([training_step(step, count)], self.repeats))
        pair = [reading / (blocks * arguments.block_size), training / count]
        what = "seconds per token to read and tokenise a stream, in one process"
        details = {"tokens_per_second": [1 / one for one in pair]}
        return what, "seconds per token of the training step", 1.0, pair, details

    def input_memory(self):
        with parquet_text(self.data, streaming=False) as arguments:
            load_blocks(arguments)  # tokenises once; every process then maps the same files
            pair = in_fresh_process(memory_of_text, arguments)
        return (
            "memory of a process that reads all blocks of a stored text",
            "the bytes of the text",
            1.0,
            pair,
        )

    def resume(self):
        with parquet_text(self.data, streaming=True) as arguments:
            stream = load_blocks(arguments).train
            blocks = max(2, self.size["streamed"] // arguments.block_size)
            started = time.perf_counter()
            places = [place for _, place in islice(stream.read(), blocks)][-2:]
            whole = time.perf_counter() - started
            started = time.perf_counter()
            next(stream.read(places[0]))
            pair = [time.perf_counter() - started, whole]
        what = f"seconds to find the place in a stream again after {blocks * arguments.block_size} tokens"
        return what, "reading it from the beginning", None, pair

    def generate_memory(self):
        with saved(self.ticket_config) as (ticket, stock):
            (ours, _), (theirs, _) = (
                in_fresh_process(memory_of_generation, folder, kind, self.size["generated"])
                for folder, kind in ((ticket, "ticket"), (stock, "stock float32"))
            )
        return (
            "resident memory while generating, batch 1",
            "stock GPT-2, merged weights",
            1.05,
            [ours, theirs],
        )

    def growth(self):
        weights, seconds = [], {"step": [], "select": [], "load": []}
        for layers, width, vocabulary in tqdm(self.size["grown"], "growth", leave=False):
            shape = {"n_layer": layers, "n_embd": width, "n_head": width // 64, "vocab_size": vocabulary}
            config = SupermaskGPT2Config(**NO_DROPOUT, **shape, n_positions=128)
            model = SupermaskGPT2LMHeadModel(config)
            weights.append(sum(parameter.numel() for parameter in model.parameters()))
            with tempfile.TemporaryDirectory() as folder:
                model.save_ticket(folder)
                step, scores = training_step(model, 128), torch.cat([p.flatten() for p in model.parameters()])
                times = [
                    statistics.median(interleaved([function], 2))
                    for function in (
                        step,
                        lambda scores=scores: keep_largest(scores, len(scores) // 3, magnitude=True),
                        lambda folder=folder: SupermaskGPT2LMHeadModel.from_pretrained(folder),
                    )
                ]
            for name, one in zip(seconds, times, strict=True):
                seconds[name].append(one)
        logs = np.log(weights)
        exponents = {name: float(np.polyfit(logs, np.log(times), 1)[0]) for name, times in seconds.items()}
        what = (
            f"exponent of growth from {weights[0] / 1e6:.1f}M to {weights[-1] / 1e6:.0f}M weights: "
            + ", ".join(f"{name} {exponent:.2f}" for name, exponent in exponents.items())
        )
        details = {"weights": weights, "seconds": seconds, "exponents": exponents}
        return what, "linear growth", 1.05, [max(exponents.values()), 1.0], details

    def tricks(self):
        """Compare time and memory of a step without one trick with those of the step with all tricks."""
        for size in TRICK_SIZES:
            whole = in_fresh_process(memory_of_trick, size, None)
            for trick in tqdm(TRICKS, f"tricks, {size}", leave=False):
                pair = interleaved([trick_step(size, trick), trick_step(size, None)], self.repeats)
                details = {"memory_ratio": in_fresh_process(memory_of_trick, size, trick) / whole}
                yield f"{size}, {trick}", (f"{size}: without {trick}", "with it", None, pair, details)

    def rules(self):
        """Compare a step of every rule, of row scales and of `search` with a step of edge-popup."""
        shape = {**NO_DROPOUT, **self.size["step"]}
        for name, (options, reach) in RULE_STEPS.items():
            configs = [SupermaskGPT2Config(**shape, **options), self.step_config]
            models = [SupermaskGPT2LMHeadModel(config) for config in configs]
            moments = [sum(one.numel() for one in model.parameters()) for model in models]
            pair = interleaved([training_step(model, self.size["tokens"]) for model in models], self.repeats)
            details = {"optimizer_ratio": moments[0] / moments[1]}
            yield name, (f"{name}: a training step", "edge_popup", reach, pair, details)

    def ternary(self):
        """Compare ways to run a signed_constant ticket: time, memory, and whether greedy tokens are the same."""
        new = self.size["generated"]
        config = copy.deepcopy(self.ticket_config)
        config.law = "signed_constant"
        baseline = "stock float32"
        with saved(config) as (ticket, stock), torch.inference_mode():
            dense = generation(LOADERS[baseline](stock).eval(), 1, new)
            dense_memory, dense_tokens = in_fresh_process(memory_of_generation, stock, baseline, new)
            for kind in tqdm([kind for kind in LOADERS if kind != baseline], "ternary", leave=False):
                folder = ticket if kind in FROM_TICKET else stock
                memory, tokens = in_fresh_process(memory_of_generation, folder, kind, new)
                pair = interleaved([generation(LOADERS[kind](folder).eval(), 1, new), dense], self.repeats)
                same = "the same" if tokens == dense_tokens else "other"
                details = {"memory_ratio": memory / dense_memory, "tokens": same}
                yield kind, (f"{kind}: {new} tokens, batch 1", "stock GPT-2, float32", None, pair, details)

    def llama(self):
        """Compare tickets in llama.cpp with the stock model in transformers and a dense model in llama.cpp."""
        config = SupermaskGPT2Config(**NO_DROPOUT, **self.size["llama"], law="signed_constant")
        for name, row in self._in_llama(config, "GPT-2"):
            yield name, row
        config = supermask_config(llama_config(config, block=256), law="signed_constant")
        for name, row in self._in_llama(config, "Llama"):
            yield f"Llama {name}", row

    def _in_llama(self, config: Any, family: str):
        from llama_generate import Generation

        new, threads = self.size["generated"], torch.get_num_threads()
        with saved(config) as (ticket, stock), ExitStack() as servers, torch.inference_mode():
            files = gguf_files(config, ticket, stock)
            runs: dict[str, Callable] = {
                name: servers.enter_context(Generation(path, new, threads)) for name, path in files.items()
            }
            memory = {name: memory_in_llama(path, new, threads) for name, path in files.items()}
            bytes = {name: path.stat().st_size for name, path in files.items()}
            memory["stock"] = in_fresh_process(memory_of_generation, stock, "stock float32", new)[0]
            bytes["stock"] = (stock / "model.safetensors").stat().st_size
            runs["stock"] = generation(AutoModelForCausalLM.from_pretrained(stock).eval(), 1, new)
            seconds = dict(zip(runs, interleaved(list(runs.values()), self.repeats), strict=True))
        named = {"stock": f"stock {family} in transformers, float32", "q4_0": "dense Q4_0 in llama.cpp"}
        reach = {"tq2_0 against stock": 1 / 4, "f16 against stock": None, "q4_0 against stock": None}
        for name, goal in {**reach, "tq2_0 against q4_0": 1.0}.items():
            ours, theirs = name.split(" against ")
            pair = [seconds[ours], seconds[theirs]]
            details = {
                "tokens_per_second": [new / one for one in pair],
                "memory": [memory[ours], memory[theirs]],
                "memory_ratio": memory[ours] / memory[theirs],
                "bytes": [bytes[ours], bytes[theirs]],
            }
            what = named.get(ours, f"ticket {ours.upper()} in llama.cpp")
            yield name, (f"{what}: {new} tokens, batch 1", named[theirs], goal, pair, details)


ROWS = (
    "step step_busy step_accum edge_popup step_memory select select_busy launches draw load first_token imports "
    "bytes generate_b1 generate_b8 evaluate_learning generate_learning generate_memory input_speed input_memory "
    "resume growth"
).split()
APART = ("tricks", "rules", "ternary", "llama", "architectures")


def machine() -> str:
    """Return what the numbers depend on: threads, cores, instruction set and versions."""
    threads, cores = torch.get_num_threads(), os.cpu_count()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, numpy {np.__version__}"
    return f"{threads} threads, {cores} cores, {torch.backends.cpu.get_cpu_capability()}; {versions}"


def as_row(name: str, result: tuple, preset: str, repeats: int) -> dict:
    """Return a result as one row of the JSON file."""
    what, baseline, reach, (ours, theirs), *details = result
    row = {"id": name, "what": what, "baseline": baseline, "ours": ours, "theirs": theirs}
    row |= {
        "ratio": ours / theirs,
        "reach": reach,
        "preset": preset,
        "repeats": repeats,
        "machine": machine(),
    }
    return {**row, "details": details[0]} if details else row


def measure(names: list[str], preset: str, repeats: int, data: Path | None = None) -> Iterator[dict]:
    """Measure the benchmarks with these names and yield their rows."""
    benchmarks = Benchmarks(preset, repeats, data)
    for name in tqdm(names, "benchmarks"):
        result = getattr(benchmarks, name)()
        if name in APART:
            yield from (as_row(f"{name}: {kind}", one, preset, repeats) for kind, one in result)
        else:
            yield as_row(name, result, preset, repeats)


def table(rows: list[dict]) -> str:
    """Return the ratios as a Markdown table."""
    cells = []
    for row in rows:
        what, details = row["what"], row.get("details", {})
        if "memory_ratio" in details:
            what += f"; memory {details['memory_ratio']:.2f}"
        if details.get("optimizer_ratio", 1) < 1:
            what += f"; optimizer memory {details['optimizer_ratio']:.2f}"
        if "tokens_per_second" in details:
            what += "; {:.0f} tokens a second against {:.0f}".format(*details["tokens_per_second"])
        if "tokens" in details:
            what += f", greedy tokens {details['tokens']}"
        reach = None if row["reach"] is None else f"{row['reach']:.3g}"
        ratio = f"{row['ratio']:.3f}"
        cells.append({"": what, "baseline": row["baseline"], "ours / theirs": ratio, "reach": reach})
    return markdown_table(cells, ("ours / theirs", "reach"))


def read_rows(path: Path, preset: str | None = None) -> list[dict]:
    """Return the rows of a file, or an empty list if there is no such file."""
    if not path.is_file():
        return []
    try:
        rows = list(json.loads(path.read_text()))
        presets = {row["id"]: row["preset"] for row in rows}
        if not rows:
            raise ValueError("no row")
    except (ValueError, TypeError, KeyError) as error:
        raise SystemExit(
            f"{path} holds no rows of this benchmark ({error!r}); remove it or name another"
        ) from None
    other = next((name for name, one in presets.items() if preset not in (None, one)), None)
    if other is not None:
        raise SystemExit(
            f"{path}: row {other} is of preset {presets[other]}, not {preset}; name another file"
        )
    return rows


def merge(old: list[dict], new: list[dict]) -> list[dict]:
    """Return the rows in the order of the table. New rows replace old rows with the same id."""
    rows = {row["id"]: row for row in [*old, *new]}
    return sorted(rows.values(), key=lambda row: ROWS.index(row["id"]) if row["id"] in ROWS else len(ROWS))


def quiet() -> None:
    """Switch the progress bars and warnings of transformers off."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def main() -> None:
    """Measure or show the rows that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=SIZES, default="quick", help="sizes (default: quick)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*ROWS, *APART],
        default=ROWS,
        metavar="ROW",
        help=f"rows to measure, out of {', '.join(ROWS)}; or {' or '.join(APART)}",
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats of each side (default: 5)")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="parquet files of text for input_speed, input_memory and resume (default: the embedded corpus)",
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file, or update it")
    parser.add_argument(
        "--show", type=Path, metavar="JSON", help="print the table of a file; measure nothing"
    )
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: at least one is needed")
    if options.show:
        if not options.show.is_file():
            parser.error(f"--show {options.show}: there is no such file")
        print(table(read_rows(options.show)))
        return
    quiet()
    old = read_rows(options.json, options.preset) if options.json else []
    new: list[dict] = []
    for row in measure(options.only, options.preset, options.repeats, options.data):
        new.append(row)
        if options.json:  # written after each row, so a stop loses nothing
            with replacing(options.json) as path:
                Path(path).write_text(json.dumps(merge(old, new), indent=1) + "\n")
    print(f"{options.preset}: {machine()}")
    print(table(merge([], new)))


if __name__ == "__main__":
    main()
