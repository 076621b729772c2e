"""Train two models that are not language models with transformers' own `Trainer`: a BERT classifier and a ViT.

    python recipes/train_with_trainer.py bert        # which of two words comes first in a sentence of 16
    python recipes/train_with_trainer.py vit         # images of 16 x 16: stripes across, stripes down, or squares

The data are generated from a seed. Masks over random weights are learned; the small head is trained and stored with
them. The ticket then loads with its Auto class, like any checkpoint. This takes a minute or less on one core.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    Trainer,
    TrainingArguments,
    ViTConfig,
    set_seed,
)

import hf_slt

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
# The head is small and new for each task, so it is trained and stored. All other matrices are masked.
OPTIONS: dict[str, Any] = {
    "law": "signed_constant",
    "density": 0.5,
    "scales": "row",
    "layer_norm": "trained",
    "scale_with_width": True,
    "parameters": {"classifier": "trained"},
}


class Examples(Dataset):
    """Inputs and labels in the form that `Trainer` expects.

    Args:
        name (`str`):
            Name of the inputs: `"input_ids"` or `"pixel_values"`.
        inputs (`torch.Tensor`):
            One row per example.
        labels (`torch.Tensor`):
            One class per example.
    """

    def __init__(self, name: str, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.name, self.inputs, self.labels = name, inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {self.name: self.inputs[index], "labels": self.labels[index]}


def sentences(count: int, seed: int) -> Examples:
    """Make sentences of 16 words out of 32, each with word 1 and word 2 once. Class 1: word 1 comes first."""
    dice = torch.Generator().manual_seed(seed)
    words = torch.randint(3, 32, (count, 16), generator=dice)
    places = torch.stack([torch.randperm(16, generator=dice)[:2] for _ in range(count)])
    words.scatter_(1, places, torch.tensor([[1, 2]]).expand(count, 2))
    return Examples("input_ids", words, (places[:, 0] < places[:, 1]).long())


def images(count: int, seed: int) -> Examples:
    """Make noisy images of stripes across, stripes down, or squares, with any shift and any colour."""
    dice = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=dice)
    shifts = torch.randint(8, (count, 1), generator=dice)
    waves = (torch.arange(16) + shifts) // 4 % 2
    across, down = waves[:, :, None].expand(-1, 16, 16), waves[:, None, :].expand(-1, 16, 16)
    kinds = torch.stack([across, down, across ^ down], 1)[torch.arange(count), labels]
    colour = torch.randn(count, 3, 1, 1, generator=dice)
    noise = torch.randn(count, 3, 16, 16, generator=dice)
    return Examples("pixel_values", (2 * kinds[:, None] - 1) * colour + 0.3 * noise, labels)


TASKS: dict[str, Any] = {
    "bert": (
        AutoModelForSequenceClassification,
        BertConfig(vocab_size=32, max_position_embeddings=16, num_labels=2, **SIZES),
        sentences,
    ),
    "vit": (
        AutoModelForImageClassification,
        ViTConfig(image_size=16, patch_size=4, num_labels=3, **SIZES),
        images,
    ),
}


def train(task: str, output_dir: str | Path, steps: int = 400, seed: int = 0) -> dict[str, Any]:
    """Train the model of a task, save its ticket and load it again.

    Args:
        task (`str`):
            `"bert"` or `"vit"`.
        output_dir (`str` or `Path`):
            Folder for the ticket.
        steps (`int`, defaults to 400):
            Optimizer steps of 64 examples.
        seed (`int`, defaults to 0):
            Seed of the weights and of the order of the examples.

    Returns:
        `dict[str, Any]`: share of new examples that the loaded ticket gets right, and bytes of its file.
    """
    auto, stock, make = TASKS[task]
    set_seed(seed)
    model = auto.from_config(hf_slt.supermask_config(stock, seed=seed, **OPTIONS))
    scores = [one for name, one in model.named_parameters() if name.endswith("scores")]
    others = [one for name, one in model.named_parameters() if not name.endswith("scores")]
    groups = [{"params": scores, "lr": 1e-2}, {"params": others, "lr": 1e-3}]
    arguments = TrainingArguments(
        output_dir=str(Path(output_dir) / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=64,
        warmup_steps=steps // 10,
        lr_scheduler_type="cosine",
        logging_steps=max(1, steps // 8),
        save_strategy="no",
        report_to="none",
        seed=seed,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = Trainer(
        model, arguments, train_dataset=make(8192, 1), optimizers=(torch.optim.AdamW(groups), None)
    )
    trainer.train()
    folder = Path(output_dir) / "ticket"
    model.save_ticket(folder, encoding="entropy")
    ticket, examples = auto.from_pretrained(folder).eval(), make(512, 2)
    with torch.no_grad():
        found = ticket(**{examples.name: examples.inputs}).logits.argmax(-1)
    right = float((found == examples.labels).float().mean())
    return {
        "task": task,
        "right": right,
        "bytes": (folder / "mask.safetensors").stat().st_size,
        "steps": steps,
    }


def main() -> None:
    """Train the task of the command line and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--output_dir", default="runs/trainer", help="folder for the ticket")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of 64 examples")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the data order")
    args = parser.parse_args()
    print(json.dumps(train(args.task, args.output_dir, args.steps, args.seed)))


if __name__ == "__main__":
    main()
