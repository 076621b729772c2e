"""Find a ticket: train the scores of a supermask GPT-2 on text, and write a folder that is ready to share.

    python recipes/train_gpt2_slt.py --train_files my/*.txt --output_dir runs/mine
    accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/train_gpt2_slt.py --config recipes/nano.yaml

The command line overrides the preset (--config; nano.yaml by default), which overrides the defaults of the code. With
--compare, controls are trained after the ticket on the same text for the same steps, and one table and one figure
show them all.

This is the whole training loop, and the only one: `hf_slt.training` has its parts, and the studies in this folder
import the loop from here. Change it as you like.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from hf_slt.errors import SLTError
from hf_slt.training.arguments import Arguments, parse_arguments
from hf_slt.training.memory import keep_freed_memory
from hf_slt.training.monitoring import Clock, Interruption
from hf_slt.training.report import train_and_compare
from hf_slt.training.run import Run

HERE = Path(__file__).parent


def optimizer_step(run: Run) -> Tensor:
    """Move the scores once, and return the mean loss in this process."""
    accelerator, model = run.accelerator, run.model
    batches = run.options.gradient_accumulation_steps

    # Learning rate, density and dropout are functions of the step, and so is the text that is read below.
    # Therefore a checkpoint holds scores and optimizer moments, and a killed run resumes to identical bits.
    run.begin_step()

    total = torch.zeros((), device=accelerator.device)
    for number, batch in enumerate(run.batches.of_step(run.done), 1):
        # Gradients of small batches add up to that of a large one; processes exchange the sum, not the parts.
        with nullcontext() if number == batches else accelerator.no_sync(model):
            # Forward: every layer computes with weight * mask. The weights are frozen random numbers; the
            # mask keeps the share `density` of them, those with the largest |score|.
            loss = model(**batch).loss / batches
            # Backward: "kept or not" has no derivative, so the gradient passes straight through the mask. A score
            # learns how its weight would change the loss, whether the weight is kept or not. Weights get no gradient.
            accelerator.backward(loss)
        total += loss.detach()

    run.clip_gradient()
    run.optimizer.step()  # the next forward makes new masks from the new scores
    run.optimizer.zero_grad()
    run.done += 1
    return total


def train(run: Run) -> bool:
    """Train to the last step. Return False if a signal ended the run earlier."""
    losses, clock = [], Clock(run.tokens_per_step)
    run.model.train()
    # The first Ctrl-C or SIGTERM stops the run after the current step.
    with Interruption() as interruption, run.progress_bar() as bar:
        while run.done < run.steps:
            losses.append(optimizer_step(run))  # not read now: that would delay the next step
            clock.count()
            bar.update()
            if run.due("logging_steps"):
                bar.set_postfix_str(run.log_training(losses, clock.speed()))
                losses.clear()

            with clock.stopped():  # tokens per second count training only
                # An evaluation also counts the mask bits that changed since the last one.
                improved = run.due("eval_steps") and run.evaluate()
                stop = interruption.agreed(
                    run.accelerator, run.done
                )  # all processes must stop together, or some would wait forever
                if stop or (run.options.save_steps and (improved or run.due("save_steps"))):
                    run.save()
            if stop and run.done < run.steps:
                run.accelerator.print(
                    f"interrupted after step {run.done}; resume with --resume_from_checkpoint"
                )
                return False
    return True


def find_ticket(arguments: Arguments, **options: Any) -> dict[str, Any] | None:
    """Run from set-up to ticket. Return the report (empty except in the first process), or None if interrupted."""
    run = Run(arguments, **options)
    try:
        return run.finish() if train(run) else None
    finally:
        run.close()


def main() -> int:
    """Train the ticket and the controls of the command line. Return the exit code."""
    arguments = parse_arguments(description=__doc__.split("\n")[0], preset=HERE / "nano.yaml")
    keep_freed_memory()
    disable_progress_bar()  # hides the bars of loading and saving; the bar over all steps stays
    if not sys.stderr.isatty():
        disable_progress_bars()  # of reading and tokenising: they would fill a log file
    try:
        report = train_and_compare(arguments, find_ticket, HERE.parent / "model_cards" / "template.md")
    except KeyboardInterrupt:
        return 130
    except (SLTError, OSError, SafetensorError) as error:  # a full disk can raise SafetensorError
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # once: all runs of a comparison share it
    return 130 if report is None else 0  # 130: the exit code of shells for Ctrl-C


if __name__ == "__main__":
    sys.exit(main())
