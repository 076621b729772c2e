"""A run, set up and in pieces: what the loop in recipes/train_gpt2_slt.py is made of.

    rate, rule, dropout, blocks = functions of (arguments, step)

so that scores and optimizer moments are all there is to save: a run that was killed goes on to the same
bits, and two processes see the batches that one would have seen.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
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
from ..model.ticket import SLTError, sha256
from ..sharing.files import replacing
from ..sharing.verify import verify_ticket
from ..text.blocks import Corpus, StreamedBlocks, load_blocks
from ..text.evaluation import evaluate_blocks
from .arguments import FREE_TO_CHANGE, Arguments, RunArguments, steps_of
from .batches import Batches, validation_batches
from .checkpoints import WHOLE, Checkpoints, Snapshot, lock
from .monitoring import Log, attention_moments, codes_of, look_at
from .rules import RAMPED, RULES
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


def ramp_at(step: int, end: float, start: float | None, over: int) -> float:
    """A rule's density or threshold at a step: linear from `start`, constant after `over` steps.

    >>> [ramp_at(step, 0.25, 0.75, 4) for step in (0, 2, 4, 9)]
    [0.75, 0.5, 0.25, 0.25]
    """
    if start is None or step >= over:
        return end
    return start + (end - start) * step / over


# -- model and optimizer ----------------------------------------------------------------------------


def build_model(arguments: Arguments, corpus: Corpus) -> PreTrainedModel:
    """The model of a run, or of its control."""
    config = arguments.config(corpus.tokenizer)
    if arguments.run.control == "frozen_embeddings":
        config.embedding, config.embedding_bits, config.embedding_rank = "frozen", 32, None
    return dense_twin(config) if arguments.run.control == "dense" else SupermaskGPT2LMHeadModel(config)


def check_twin(config: SupermaskGPT2Config) -> None:
    """Raise SLTError for a model that stock GPT-2 cannot be."""
    width = config.n_embd / config.n_head
    if not config.layer_norm or not config.qk_width == config.v_width == width:
        raise SLTError(
            "stock GPT-2 has LayerNorm and heads of n_embd / n_head, so this model has no dense twin; leave "
            "the dense control out, or layer_norm, n_qk and n_v as they are by default"
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


def build_optimizer(model: nn.Module, options: RunArguments) -> torch.optim.Optimizer:
    """AdamW or SGD over two groups, scores and trained weights; `lr` is the highest rate of each."""
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    scores = [one for name, one in named if name.endswith("scores")]
    weights = [one for name, one in named if not name.endswith("scores")]
    groups = [
        # What counts of scores is their order, not their size; but the larger they are, the longer a step of
        # AdamW, whose length is the rate, takes to change it.
        {"params": scores, "lr": options.learning_rate, "weight_decay": options.score_decay},
        {"params": weights, "lr": options.weight_learning_rate, "weight_decay": options.weight_decay},
    ]
    groups = [group for group in groups if group["params"]]
    if options.optim == "sgd":
        return torch.optim.SGD(groups, momentum=options.momentum)
    return torch.optim.AdamW(groups, betas=(options.adam_beta1, options.adam_beta2))


# -- the run ----------------------------------------------------------------------------------------


@cache
def tell_once(text: str) -> None:
    """Print what the runs of one call have in common: controls read the text of the ticket."""
    print(text)


class Run:
    """One run, set up: the loop steps it on, `look` evaluates, `save` and `finish` write.

    A corpus that is given takes the place of the text that the arguments name. `make_optimizer` may be any
    function of the model and its RunArguments; the `lr` of each of its groups is taken for the highest.
    """

    def __init__(
        self,
        arguments: Arguments,
        corpus: Corpus | None = None,
        make_optimizer: Callable[[nn.Module, RunArguments], torch.optim.Optimizer] = build_optimizer,
    ) -> None:
        self.arguments, self.options, self.seed = arguments, arguments.run, arguments.model.seed
        self.folder, self.make_optimizer = Path(self.options.output_dir), make_optimizer
        tracker = None if self.options.report_to == "none" else self.options.report_to
        precision = "bf16" if self.options.bf16 else None  # or else as accelerate was configured
        self.accelerator = Accelerator(
            mixed_precision=precision, log_with=tracker, project_dir=str(self.folder)
        )
        if self.accelerator.mixed_precision == "fp16":
            raise SLTError("fp16 needs a loss scale, which no checkpoint here holds; use bf16")
        if self.accelerator.is_main_process:
            self.lock = lock(self.folder)  # two runs would mix one log
        with self.accelerator.main_process_first():  # it tokenises, the others read its cache
            self.corpus = corpus or load_blocks(arguments.data)
        if self.accelerator.is_main_process:
            tell_once(self.corpus.summary())
        sizes = self.options.per_device_train_batch_size, self.options.gradient_accumulation_steps
        self.batches = Batches(self.corpus.train, self.seed, *sizes, self.accelerator)
        self.steps = self._length()
        self.warmup = steps_of(self.options.warmup_steps, self.steps)
        model = build_model(arguments, self.corpus)
        self.config: Any = model.config
        self.learns_masks = isinstance(self.config, SupermaskGPT2Config)
        if self.options.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.options.torch_compile:
            model.compile()
        self.model, self.optimizer = self._prepare(model)
        for group in self.optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        self.done = 0  # optimizer steps
        self.best: tuple[int, float] | None = None  # step and validation loss
        self.masks: dict[str, Tensor] = {}  # codes, at the last look
        level = self.options.min_lr_rate == 1  # the rates so far are then those of a longer run too
        limit = self.options.save_total_limit
        self.checkpoints = Checkpoints(self.folder, self._identity(), limit, extendable=level)
        before = self._resume()
        self.log = Log(self.folder / "log.jsonl", self.accelerator, before, self.done)
        if tracker:
            self.accelerator.init_trackers("hf_slt", {k: str(v) for k, v in arguments.flat().items()})

    def _prepare(self, model: nn.Module) -> tuple[Any, Any]:
        """Model and optimizer as the processes share them: as accelerate was configured."""
        return self.accelerator.prepare(model, self.make_optimizer(model, self.options))

    def _length(self) -> int:
        """Optimizer steps of the run, also where they are given in passes over the text."""
        if self.options.control == "random_mask":
            return 0
        if self.options.max_steps > 0:
            return self.options.max_steps
        if isinstance(self.corpus.train, StreamedBlocks):
            raise SLTError("a stream has no known length to count passes of; give max_steps")
        return math.ceil(self.options.num_train_epochs * max(1, len(self.corpus.train) // self.batches.width))

    def _resume(self) -> Path | None:
        """Restore the checkpoint that the arguments ask for, and return the log it was written beside."""
        found: list[Path | None] = [None]
        if self.accelerator.is_main_process:
            found = [self.checkpoints.begin(self.options.resume_from_checkpoint, self.options.overwrite)]
        path = broadcast_object_list(found)[0]  # the first process decides for all
        if path is None:
            if self.options.resume_from_checkpoint and self.steps:
                self.accelerator.print(f"no checkpoint in {self.folder}: starting with step 0")
            return None
        snapshot = self.checkpoints.load(path)
        snapshot.restore(self.model, self.optimizer.optimizer)
        self.done, self.best, self.masks = snapshot.step, snapshot.best, snapshot.masks
        self.accelerator.print(f"resumed after step {self.done} from {path}")
        return path.parent.parent / "log.jsonl"

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be gone on from."""
        return {
            **{name: value for name, value in self.arguments.flat().items() if name not in FREE_TO_CHANGE},
            "steps": self.steps,
            "warmup_steps": self.warmup,
            "text": self.corpus.digest,
            "tokenizer_sha256": sha256(self.corpus.tokenizer.backend_tokenizer.to_str()),
            "precision": self.accelerator.mixed_precision,
            "processes": self.accelerator.num_processes,
        }

    # -- pieces of a step

    def begin_step(self) -> None:
        """Set what follows from the step alone: learning rates, the rule, and the random state of dropout."""
        share = rate_at(self.done, self.steps, self.warmup, self.options.min_lr_rate)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share
        if self.learns_masks:
            self._set_rule()
        place = self.done * self.accelerator.num_processes + self.accelerator.process_index
        torch.manual_seed((self.seed * 1_000_003 + place) % 2**63)

    def _set_rule(self) -> Any:
        """Give all layers the rule as it is at this step, and return it."""
        rule: Any = RULES[self.config.rule](**dict(self.config.rule_options))
        if self.done < self.steps:  # what is saved at the end is always of the density asked for
            options = {
                name: ramp_at(
                    self.done, getattr(rule, name), self.options.ramp_start, self.options.ramp_steps
                )
                for name in RAMPED
                if hasattr(rule, name)
            }
            rule = replace(rule, **options)
        for layer in self._layers():
            layer.rule = rule
        return rule

    def _layers(self) -> list[ScoresLayer]:
        modules = self.accelerator.unwrap_model(self.model).modules()
        return [module for module in modules if isinstance(module, ScoresLayer)]

    def clip_gradient(self) -> float:
        """Scale the gradient down where it is too long; its norm before that."""
        longest = self.options.max_grad_norm or math.inf
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), longest)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not math.isfinite(norm):
            raise SLTError(
                f"the gradient of step {self.done} is not finite: the run diverged; start again with "
                f"--overwrite and a learning rate below {self.options.learning_rate:g}"
            )
        return norm

    # -- between steps

    def due(self, option: str) -> bool:
        """Whether what is done every `option` steps is to be done now; all is, after the last step."""
        every = steps_of(getattr(self.options, option), self.steps)
        return self.done == self.steps or (every > 0 and self.done % every == 0)

    def progress_bar(self) -> tqdm:
        """A bar over all steps, seen in the first process only."""
        shows = self.accelerator.is_main_process and self.steps > 0
        label = self.options.control or "ticket"
        return tqdm(total=self.steps, initial=self.done, desc=label, disable=not shows, unit="step")

    @property
    def tokens_a_step(self) -> int:
        """Tokens that all processes read for one optimizer step."""
        return self.batches.width * self.arguments.data.block_size

    def log_training(self, losses: list[Tensor], norm: float, speed: float) -> str:
        """Log the mean of the losses since the last time, over all processes; what the bar says of it."""
        loss = self.accelerator.reduce(torch.stack(losses).mean(), "mean").item()
        rate = self.optimizer.param_groups[0]["lr"]
        self.log.write("train", self.done, loss=loss, rate=rate, gradient_norm=norm, tokens_per_second=speed)
        return f"loss {loss:.3f}, rate {rate:.1e}, {speed:.0f} tokens/s"

    def look(self) -> bool:
        """Evaluate and look at the masks; True if this is the best so far."""
        rule = self._set_rule() if self.learns_masks else None
        measures = evaluate_blocks(
            self.model,
            validation_batches(self.corpus.validation, self.batches.batch_size, self.accelerator),
            bytes_per_token=self.corpus.validation.bytes_per_token,
            reduce=self.accelerator.reduce,
        )
        self.log.write("evaluation", self.done, **measures)
        if rule is not None:
            parameters: Any = get_model_state_dict(self.model, options=WHOLE)
            if self.accelerator.is_main_process:  # others were given none
                codes = codes_of(self.config, rule, parameters)
                self.log.write("masks", self.done, **look_at(codes, self.masks, rule.factors))
                self.masks = codes
        if self.options.moments:
            # The same blocks in every process: sharded weights are gathered by all or by none.
            blocks = self.corpus.validation
            ids = torch.as_tensor(blocks[np.arange(min(8, len(blocks)))]["input_ids"]).long()
            model = self.accelerator.unwrap_model(self.model)
            trace, relative = (attention_moments(model, ids, relative=share) for share in (False, True))
            lists = {"trace": trace.tolist(), "relative": relative.tolist()}
            self.log.write("moments", self.done, lowest=relative.min().item(), **lists)
        improved = measures["loss"] < (math.inf if self.best is None else self.best[1])
        if improved:
            self.best = (self.done, measures["loss"])
        return improved

    def save(self) -> None:
        """Write a checkpoint."""
        known = {"best": self.best, "masks": self.masks}
        snapshot = Snapshot.take(self.done, self.model, self.optimizer.optimizer, **known)
        if self.accelerator.is_main_process:
            self.checkpoints.save(snapshot)
        self.accelerator.wait_for_everyone()

    def finish(self) -> dict[str, Any]:
        """Write ticket (or dense model), tokenizer and report; return the report, in the first process."""
        if self.steps == 0:
            self.look()
        parameters: Any = get_model_state_dict(self.model, options=WHOLE)
        if not self.accelerator.is_main_process:
            return {}
        model: Any = build_model(self.arguments, self.corpus)
        model.load_state_dict(parameters)
        target = self.folder / ("model" if self.options.control == "dense" else "ticket")
        if self.options.control == "dense":
            model.save_pretrained(target)
        else:
            model.save_ticket(target, encoding=self.options.encoding)
            verify_ticket(target)
        self.corpus.tokenizer.save_pretrained(target)
        last = next(record for record in reversed(self.log.records) if record["kind"] == "evaluation")
        report = {
            "control": self.options.control,
            "steps": self.steps,
            "tokens_seen": self.steps * self.tokens_a_step,
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
