"""Finding a ticket: one loop over optimizer steps that moves scores and nothing else.

    for step in steps:
        rates and density are functions of the step           # nothing to save but scores and optimizer
        the blocks of the step are a function of (seed, step) # nor the place in the data
        loss -> gradient of the scores -> AdamW or SGD

Because all else follows from the step, a run that was killed goes on to the same bits, and two
processes see the batches that one would have seen.
"""

import hashlib
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from ..model.configuration_supermask_gpt2 import SupermaskGPT2Config
from ..model.modeling_supermask_gpt2 import SupermaskGPT2LMHeadModel
from ..sharing.files import replacing
from ..sharing.verify import verify_ticket
from ..text.blocks import Corpus, StreamedBlocks, load_blocks
from ..text.evaluation import evaluate_blocks
from .arguments import FREE_TO_CHANGE, Arguments, ModelArguments, RunArguments
from .batches import Batches, validation_batches
from .checkpoints import WHOLE, Checkpoints, Snapshot
from .monitoring import Clock, Interruption, Log, attention_moments, look_at, masks_of
from .scores import ScoresLayer

# -- functions of the step --------------------------------------------------------------------------


def rate_at(step: int, steps: int, warmup: int, floor: float) -> float:
    """Share of the highest rate at a step: up a line, down a cosine to the floor.

    >>> [round(rate_at(step, 12, 2, 0.1), 2) for step in (0, 1, 2, 7, 11)]
    [0.5, 1.0, 1.0, 0.55, 0.12]
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


def density_at(step: int, density: float, start: float | None, over: int) -> float:
    """Density at a step: linear from `start`, constant after `over` steps.

    >>> [density_at(step, 0.25, 0.75, 4) for step in (0, 2, 4, 9)]
    [0.75, 0.5, 0.25, 0.25]
    """
    if start is None or step >= over:
        return density
    return start + (density - start) * step / over


# -- model and optimizer ----------------------------------------------------------------------------


def build_model(arguments: Arguments, corpus: Corpus) -> PreTrainedModel:
    """The model of a run, or of its control."""
    config = arguments.model.config(corpus, arguments.data.block_size)
    control = arguments.run.control
    if control == "frozen_embeddings":
        config.embedding, config.embedding_bits = "frozen", 32
    if control == "dense":
        return dense_twin(config)
    return SupermaskGPT2LMHeadModel(config)


def check_twin(model: SupermaskGPT2Config | ModelArguments) -> None:
    """Raise ValueError for a model that stock GPT-2 cannot be."""
    width = model.n_embd / model.n_head
    if not model.layer_norm or not (model.n_qk or width) == (model.n_v or width) == width:
        raise ValueError(
            "stock GPT-2 has LayerNorm and heads of n_embd / n_head; there is no dense twin of this"
        )


def dense_twin(config: SupermaskGPT2Config) -> GPT2LMHeadModel:
    """Stock GPT-2 of the same sizes, freshly initialised, all weights trained."""
    check_twin(config)
    names = GPT2Config().to_dict().keys() & config.to_dict().keys()
    own = {"model_type", "architectures", "transformers_version", "initializer_range"}
    torch.manual_seed(config.seed)
    twin = GPT2LMHeadModel(GPT2Config(**{name: getattr(config, name) for name in names - own}))
    twin.loss_type = "ForCausalLM"  # as ours: else the loss would be scaled otherwise
    return twin


def group_of(name: str) -> str:
    """The group of a parameter, by its name.

    >>> group_of("transformer.h.0.attn.c_attn.key_scores"), group_of("transformer.wte.scores")
    ('key', 'embedding')
    >>> group_of("transformer.h.0.attn.c_proj.scores"), group_of("transformer.wte.weight")
    ('output', 'weight')
    """
    *_, module, leaf = name.split(".")
    if not leaf.endswith("scores"):
        return "weight"
    if leaf != "scores":
        return leaf.removesuffix("_scores")
    if ".mlp." in name:
        return "mlp"
    return "output" if module == "c_proj" else "embedding"


def build_optimizer(model: nn.Module, run: RunArguments) -> torch.optim.Optimizer:
    """AdamW or SGD with one group per kind of parameter; `highest` is the rate of its peak."""
    members: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members.setdefault(group_of(name), []).append(parameter)
    groups = []
    for name, parameters in members.items():
        scores = name != "weight"
        highest = run.learning_rate * getattr(run, f"{name}_rate") if scores else run.weight_learning_rate
        decay = 0.0 if scores else run.weight_decay
        groups.append({"params": parameters, "lr": highest, "highest": highest, "weight_decay": decay})
    if run.optimizer == "adamw":
        return torch.optim.AdamW(groups, betas=(run.beta1, run.beta2))
    return torch.optim.SGD(groups, momentum=run.momentum)


# -- the run ----------------------------------------------------------------------------------------


class Run:
    """One run, set up: `loop` trains, `finish` writes what is to be shared.

    A corpus that is given takes the place of the text that the arguments name.
    """

    def __init__(self, arguments: Arguments, corpus: Corpus | None = None) -> None:
        self.arguments, self.run, self.seed = arguments, arguments.run, arguments.model.seed
        self.folder = Path(self.run.output_dir)
        self.accelerator = Accelerator(
            mixed_precision=self.run.mixed_precision, log_with=self.run.log_with, project_dir=str(self.folder)
        )
        with self.accelerator.main_process_first():  # it tokenises, the others read its cache
            self.corpus = corpus or load_blocks(arguments.data)
        self.accelerator.print(self.corpus.summary())
        self.batches = Batches(
            self.corpus.train, self.seed, self.run.batch_size, self.run.accumulation, self.accelerator
        )
        self.steps, self.warmup = self._lengths()
        model = build_model(arguments, self.corpus)
        self.config = model.config
        if self.run.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.run.compile:
            model.compile()
        self.model, self.optimizer = self._prepare(model, build_optimizer(model, self.run))
        self.done = 0  # optimizer steps
        self.best: tuple[int, float] | None = None  # step and validation loss
        self.masks: dict[str, Tensor] = {}  # at the last look
        self.checkpoints = Checkpoints(self.folder, self._identity(), self.run.keep_checkpoints)
        if self.accelerator.mixed_precision == "fp16":
            raise ValueError("fp16 needs a loss scale, which no checkpoint here holds; use bf16")
        found: list[Path | None] = [None]
        if self.accelerator.is_main_process:
            self.checkpoints.begin(self.run.resume, self.run.overwrite)
            found = [self.checkpoints.latest()]
        if path := broadcast_object_list(found)[0]:  # the first process decides for all
            snapshot = self.checkpoints.load(path)
            snapshot.restore(self.model, self.optimizer.optimizer)
            self.done, self.best, self.masks = snapshot.step, snapshot.best, snapshot.masks
            self.accelerator.print(f"resumed after step {self.done} from {path}")
        self.log = Log(self.folder / "log.jsonl", self.accelerator, self.done)
        if self.run.log_with:
            self.accelerator.init_trackers("hf_slt", {k: str(v) for k, v in arguments.flat().items()})

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        """Model and optimizer as the processes share them: as accelerate was configured."""
        return self.accelerator.prepare(model, optimizer)

    def _lengths(self) -> tuple[int, int]:
        """Steps of the run and of its warm-up, also where they are given in passes over the data."""
        run = self.run
        if run.control == "random_mask":
            return 0, 0
        if run.epochs is None and run.warmup_epochs is None:
            return run.steps, run.warmup_steps
        if isinstance(self.corpus.train, StreamedBlocks):
            raise ValueError("epochs and warmup_epochs need data of known length; give steps when streaming")
        per_epoch = max(1, len(self.corpus.train) // self.batches.width)
        steps = run.steps if run.epochs is None else round(run.epochs * per_epoch)
        if steps < 1:
            raise ValueError(f"epochs {run.epochs} of {per_epoch} steps make none; train for longer")
        return steps, run.warmup_steps if run.warmup_epochs is None else round(run.warmup_epochs * per_epoch)

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be gone on from."""
        flat = self.arguments.flat()
        identity = {name: value for name, value in flat.items() if name not in FREE_TO_CHANGE}
        tokenizer = self.corpus.tokenizer.backend_tokenizer.to_str()
        return {
            **identity,
            "text": self.corpus.digest,
            "tokenizer_sha256": hashlib.sha256(tokenizer.encode()).hexdigest(),
            "precision": self.accelerator.mixed_precision,
            "processes": self.accelerator.num_processes,
        }

    def loop(self) -> bool:
        """Train from where the run stands; False if a signal ended it before the last step."""
        run, shows = self.run, self.accelerator.is_main_process and self.steps > 0
        losses, clock = [], Clock(self.batches.width * self.arguments.data.block_size)
        self.model.train()
        label = run.control or "ticket"
        bar = tqdm(total=self.steps, initial=self.done, desc=label, disable=not shows, unit="step")
        with Interruption() as interruption, bar:
            while self.done < self.steps:
                loss, norm = self.step()
                losses.append(loss)
                clock.count()
                bar.update()
                if self.done % run.log_every == 0 or self.done == self.steps:
                    mean = self.accelerator.reduce(torch.stack(losses).mean(), "mean").item()
                    rate, speed = self.optimizer.param_groups[0]["lr"], clock.speed()
                    self.log.write(
                        "train", self.done, loss=mean, rate=rate, gradient_norm=norm, tokens_per_second=speed
                    )
                    bar.set_postfix_str(f"loss {mean:.3f}, rate {rate:.1e}, {speed:.0f} tokens/s")
                    losses.clear()
                with clock.stopped():
                    improved = self._due(run.evaluate_every) and self.look()
                    asked = interruption.agreed(self.accelerator)
                    if asked or (run.save_every and (improved or self.done % run.save_every == 0)):
                        self.save()
                if asked and self.done < self.steps:
                    self.accelerator.print(f"interrupted after step {self.done}; go on with --resume")
                    return False
        return True

    def _due(self, every: int) -> bool:
        return self.done == self.steps or (every > 0 and self.done % every == 0)

    def step(self) -> tuple[Tensor, float]:
        """One optimizer step: mean loss of this process and the length of the gradient."""
        run, model = self.run, self.model
        share = rate_at(self.done, self.steps, self.warmup, run.rate_floor)
        for group in self.optimizer.param_groups:
            group["lr"] = group["highest"] * share
        self._set_density()
        # Dropout too follows from the step, so that there is no random state to save.
        place = self.done * self.accelerator.num_processes + self.accelerator.process_index
        torch.manual_seed((self.seed * 1_000_003 + place) % 2**63)
        total = torch.zeros((), device=self.accelerator.device)
        for micro, batch in enumerate(self.batches.of_step(self.done), 1):
            last = micro == run.accumulation
            with nullcontext() if last else self.accelerator.no_sync(model):
                loss = model(**batch).loss / run.accumulation
                self.accelerator.backward(loss)
            total += loss.detach()
        norm = self.accelerator.clip_grad_norm_(model.parameters(), run.clip or math.inf)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not math.isfinite(norm):
            raise ValueError(
                f"the gradient of step {self.done} is not finite: the run diverged; lower the learning rate, "
                "and go on from an earlier checkpoint"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return total, norm

    def _set_density(self) -> float:
        run, density = self.run, self.arguments.model.density
        if self.done < self.steps:  # what is saved at the end is always of the density asked for
            density = density_at(self.done, density, run.density_start, run.density_steps)
        for module in self.accelerator.unwrap_model(self.model).modules():
            if isinstance(module, ScoresLayer):
                module.density = density
        return density

    def look(self) -> bool:
        """Evaluate and look at the masks; True if this is the best so far."""
        density = self._set_density()
        measures = evaluate_blocks(
            self.model,
            validation_batches(self.corpus.validation, self.run.batch_size, self.accelerator),
            bytes_per_token=self.corpus.validation.bytes_per_token,
            reduce=self.accelerator.reduce,
        )
        self.log.write("evaluation", self.done, **measures)
        if isinstance(self.config, SupermaskGPT2Config):
            masks = masks_of(self.config, self._whole_parameters(), density)
            if self.accelerator.is_main_process:
                self.log.write("masks", self.done, **look_at(masks, self.masks))
            self.masks = masks
        if self.run.moments:
            self._log_moments()
        improved = measures["loss"] < (math.inf if self.best is None else self.best[1])
        if improved:
            self.best = (self.done, measures["loss"])
        return improved

    def _log_moments(self) -> None:
        # The same blocks in every process: sharded weights are gathered by all or by none.
        blocks = self.corpus.validation
        ids = torch.as_tensor(blocks[np.arange(min(8, len(blocks)))]["input_ids"]).long()
        model = self.accelerator.unwrap_model(self.model)
        trace, relative = (attention_moments(model, ids, relative=share) for share in (False, True))
        lists = {"trace": trace.tolist(), "relative": relative.tolist()}
        self.log.write("moments", self.done, lowest=relative.min().item(), **lists)

    def save(self) -> None:
        """Write a checkpoint."""
        snapshot = Snapshot.take(
            self.done, self.model, self.optimizer.optimizer, best=self.best, masks=self.masks
        )
        if self.accelerator.is_main_process:
            self.checkpoints.save(snapshot)
        self.accelerator.wait_for_everyone()

    def _whole_parameters(self) -> dict[str, Tensor]:
        parameters: Any = get_model_state_dict(self.model, options=WHOLE)
        return parameters

    def finish(self) -> dict[str, Any]:
        """Write ticket (or dense model), tokenizer, figures and report; return the report."""
        if self.steps == 0:
            self.look()
        parameters = self._whole_parameters()
        if not self.accelerator.is_main_process:
            return {}
        model: Any = build_model(self.arguments, self.corpus)
        model.load_state_dict(parameters)
        target = self.folder / ("model" if self.run.control == "dense" else "ticket")
        if self.run.control == "dense":
            model.save_pretrained(target)
        else:
            model.save_ticket(target)
            verify_ticket(target)
        self.corpus.tokenizer.save_pretrained(target)
        last = next(record for record in reversed(self.log.records) if record["kind"] == "evaluation")
        report = {
            "control": self.run.control,
            "steps": self.steps,
            "tokens_seen": self.steps * self.batches.width * self.arguments.data.block_size,
            **{name: value for name, value in last.items() if name not in ("kind", "step")},
            **dict(zip(("best_step", "best_loss"), self.best or (), strict=False)),
            "bytes": sum(path.stat().st_size for path in target.glob("*.safetensors")),
            "saved": str(target),
            "text": self.corpus.digest,
            "arguments": self.arguments.flat(),
        }
        with replacing(self.folder / "report.json") as temporary:
            temporary.write_text(json.dumps(report, indent=1) + "\n")
        return report


def train(arguments: Arguments) -> dict[str, Any] | None:
    """Run to the end; the report, also in output_dir/report.json, is empty in all processes but the first.

    None, in all processes, if a signal ended the run before its last step.
    """
    run = Run(arguments)
    report = run.finish() if run.loop() else None
    run.accelerator.end_training()
    return report
