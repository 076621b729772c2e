"""Compare masks over pretrained weights with LoRA at equal bytes, on one small task.

    python recipes/masks_and_lora.py            # about a quarter of an hour on one core; writes the record

A small GPT-2 is first trained as usual on prose (the embedded corpus). It is then adapted to another text, the
programs of Python's own library, in three ways with the same number of steps:

    masks    a mask over every matrix of the blocks (edge_popup), the rest as pretrained; bytes: the entropy-coded file
    lora     PEFT's LoRA on the same matrices; bytes: its numbers in 16 bits, without a description
    all      every weight is trained: the best loss that adaptation can reach at any size

The learning rate of each way is the best of a few on the first seed; the other seeds use it. The record has all runs.
"""

import argparse
import json
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import hf_slt
from hf_slt.text.blocks import DataArguments, load_blocks
from hf_slt.text.evaluation import evaluate_blocks
from hf_slt.tickets.files import replacing
from hf_slt.training.run import rate_at

RECORD = Path(__file__).parent / "results" / "masks_and_lora.json"
MATRICES = ["c_attn", "c_proj", "c_fc"]
RATES = {"masks": [1e-2, 3e-3], "lora": [1e-2, 3e-3], "all": [3e-4, 1e-3, 3e-3]}
# Density of the masks and rank of LoRA, in pairs that take about the same number of bytes.
PAIRS = [(0.98, 1), (0.9, 3)]
BATCH, LENGTH = 16, 64


def train(model: Any, blocks: Any, steps: int, rate: float, seed: int) -> None:
    """Train all parameters that require a gradient: AdamW, warm-up over a tenth of the steps, then a cosine to zero.

    Args:
        model ([`PreTrainedModel`]):
            The model.
        blocks ([`TokenBlocks`]):
            The text.
        steps (`int`):
            Optimizer steps.
        rate (`float`):
            Highest learning rate.
        seed (`int`):
            Seed of the order of the text.
    """
    learned = [one for one in model.parameters() if one.requires_grad]
    optimizer, dice = torch.optim.AdamW(learned, lr=rate, weight_decay=0.0), np.random.default_rng(seed)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * rate_at(step, steps, steps // 10, 0.0)
        ids = torch.as_tensor(blocks[dice.integers(len(blocks), size=BATCH)]["input_ids"]).long()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def loss_of(model: Any, blocks: Any) -> float:
    """Return the validation loss in nats per token."""
    rows = np.arange(len(blocks))
    batches = [
        {"input_ids": blocks[some]["input_ids"]} for some in np.array_split(rows, max(1, len(rows) // 32))
    ]
    return evaluate_blocks(model, batches)["loss"]


def adapt(way: str, size: Any, base: Path, text: Any, steps: int, rate: float, seed: int) -> dict[str, Any]:
    """Adapt the pretrained model in one way.

    Returns:
        `dict[str, Any]`: settings, validation loss and bytes of what was learned.
    """
    torch.manual_seed(seed)
    if way == "masks":
        mix = {"*.h.*.weight": "masked", "*": "frozen"}
        options = {"density": size, "seed": seed, "parameters": mix}
        config = hf_slt.supermask_config(backbone=str(base), **options)
        model = AutoModelForCausalLM.from_config(config)
        train(model, text.train, steps, rate, seed)
        with tempfile.TemporaryDirectory() as folder:
            model.save_ticket(folder, encoding="entropy")
            many = (Path(folder) / "mask.safetensors").stat().st_size
            model = AutoModelForCausalLM.from_pretrained(folder)  # what a reader of the file gets
    else:
        model = GPT2LMHeadModel.from_pretrained(base)
        if way == "lora":
            wanted = LoraConfig(r=size, lora_alpha=2 * size, target_modules=MATRICES, fan_in_fan_out=True)
            model = get_peft_model(model, wanted)
        train(model, text.train, steps, rate, seed)
        many = 2 * sum(one.numel() for one in model.parameters() if one.requires_grad)
    found = {"way": way, "size": size, "rate": rate, "seed": seed, "steps": steps, "bytes": many}
    return {**found, "loss": loss_of(model, text.validation)}


def compare(steps: int, first_steps: int, seeds: list[int], folder: Path) -> dict[str, Any]:
    """Pretrain, adapt in all ways, and return the record."""
    options: dict[str, Any] = {"block_size": LENGTH, "validation_blocks": 256}
    prose = load_blocks(DataArguments(**options))
    tokenizer = folder / "tokenizer"
    prose.tokenizer.save_pretrained(tokenizer)
    programs = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        programs.append(str(folder / f"{path.stem}.txt"))
        Path(programs[-1]).write_text(path.read_text(encoding="utf-8", errors="replace"), encoding="utf-8")
    held_out = programs[::10]
    code = load_blocks(
        DataArguments(
            **options,
            tokenizer=str(tokenizer),
            train_files=[one for one in programs if one not in held_out],
            validation_files=held_out,
        )
    )
    torch.manual_seed(0)
    sizes = {
        "n_layer": 4,
        "n_embd": 128,
        "n_head": 4,
        "n_positions": LENGTH,
        "vocab_size": len(prose.tokenizer),
    }
    ends = {"bos_token_id": prose.tokenizer.eos_token_id, "eos_token_id": prose.tokenizer.eos_token_id}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **ends, **dropouts, initializer_range=0.05))
    train(model, prose.train, first_steps, 3e-3, 0)
    base = folder / "base"
    model.save_pretrained(base)
    record: dict[str, Any] = {
        "pretrained": {"steps": first_steps, "loss_prose": loss_of(model, prose.validation)},
        "not_adapted": loss_of(model, code.validation),
        "tokens_per_step": BATCH * LENGTH,
        "runs": [],
    }
    ways = [("all", None), *(one for density, rank in PAIRS for one in (("masks", density), ("lora", rank)))]
    for way, size in ways:
        tried = [adapt(way, size, base, code, steps, rate, seeds[0]) for rate in RATES[way]]
        best = min(tried, key=lambda one: one["loss"])
        tried += [adapt(way, size, base, code, steps, best["rate"], seed) for seed in seeds[1:] if size]
        record["runs"] += tried
        for one in tried:
            print(json.dumps(one), flush=True)
    return record


def table(record: dict[str, Any]) -> str:
    """Return the record as a table: bytes, and the mean loss over the seeds at the best rate."""
    rows = [f"| not adapted | | {record['not_adapted']:.3f} | |"]
    groups: dict[tuple, list[dict]] = {}
    for one in record["runs"]:
        groups.setdefault((one["way"], one["size"]), []).append(one)
    for (way, size), runs in groups.items():
        rate = min(runs, key=lambda one: one["loss"] if one["seed"] == runs[0]["seed"] else np.inf)["rate"]
        losses = [one["loss"] for one in runs if one["rate"] == rate]
        name = {"masks": f"masks, density {size}", "lora": f"LoRA, rank {size}", "all": "all weights"}[way]
        span = f"{min(losses):.3f} to {max(losses):.3f}" if len(losses) > 1 else ""
        rows.append(f"| {name} | {runs[0]['bytes'] / 1e3:,.1f} kB | {np.mean(losses):.3f} | {span} |")
    return "\n".join(["| | bytes | loss | seeds |", "|---|---:|---:|---|", *rows])


def main() -> None:
    """Compare masks with LoRA, write the record and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150, help="steps of each adaptation, 1,024 tokens each")
    parser.add_argument("--first_steps", type=int, default=500, help="steps of the pretraining")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the adaptations")
    parser.add_argument("--output", type=Path, default=RECORD, help="file for the record")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = compare(args.steps, args.first_steps, args.seeds, Path(folder))
    with replacing(args.output) as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
