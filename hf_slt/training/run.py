"""A training run: its setup, and the parts of the loop in recipes/train_gpt2_slt.py.

    rate, rule, dropout, blocks = functions of (arguments, step)

Therefore a checkpoint needs only scores, optimizer moments, and the place in a stream of text: a run that was
killed resumes with identical results, and two processes see the same batches as one.
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
from accelerate.utils import DistributedType, broadcast_object_list, gather_object, parse_flag_from_env
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import PreTrainedModel

from ..errors import SLTError
from ..masks.held import Held
from ..masks.modules import set_rule
from ..masks.relaxation import Relaxed
from ..masks.rules import RAMPED
from ..models.checks import verify_ticket
from ..models.configuration import SupermaskConfigMixin
from ..progress import progress_bar
from ..text.blocks import Corpus, StreamedBlocks, load_blocks
from ..text.evaluation import evaluate_blocks
from ..tickets.files import replacing
from ..tickets.format import sha256
from .arguments import FREE_TO_CHANGE, Arguments, RunArguments, steps_of
from .batches import Batches, validation_batches
from .checkpoints import WHOLE, Checkpoints, Snapshot, lock
from .monitoring import Log, attention_moments, codes_of, mask_measures, scored_tensors

# -- functions of the step --------------------------------------------------------------------------


def rate_at(step: int, steps: int, warmup: int, floor: float) -> float:
    """Return the learning rate at a step, as a share of the highest: it rises linearly, then falls as a cosine.

    Args:
        step (`int`):
            Number of the step, from 0.
        steps (`int`):
            Number of all steps.
        warmup (`int`):
            Steps in which the rate rises.
        floor (`float`):
            Share at the end.

    Returns:
        `float`: the share.

    Example:

    >>> [round(rate_at(step, 12, 2, 0.1), 2) for step in (0, 1, 2, 7, 11)]
    [0.5, 1.0, 1.0, 0.55, 0.12]
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


def ramp_at(step: int, end: float, start: float | None, over: int) -> float:
    """Return a rule's density or threshold at a step: linear from `start`, constant after `over` steps.

    Args:
        step (`int`):
            Number of the step, from 0.
        end (`float`):
            Final value.
        start (`float` or `None`):
            First value. None keeps the final value throughout.
        over (`int`):
            Number of steps of the ramp.

    Returns:
        `float`: the value.

    Example:

    >>> [ramp_at(step, 0.25, 0.75, 4) for step in (0, 2, 4, 9)]
    [0.75, 0.5, 0.25, 0.25]
    """
    if start is None or step >= over:
        return end
    return start + (end - start) * step / over


# -- model and optimizer ----------------------------------------------------------------------------


def build_model(arguments: Arguments, tokenizer: Any) -> PreTrainedModel:
    """Build the model of a run, or of its control.

    Args:
        arguments ([`Arguments`]):
            All options.
        tokenizer (`PreTrainedTokenizerFast`):
            Its length is the vocabulary.

    Returns:
        `PreTrainedModel`: the model, with the scores that training starts from.
    """
    config = arguments.config(tokenizer)
    if arguments.run.control == "frozen_embeddings":
        frozen = {"embedding": "frozen", "embedding_bits": 32, "embedding_rank": None}
        config.supermask |= {name: value for name, value in frozen.items() if name in config.supermask}
    if arguments.run.control == "dense":
        return dense_twin(config, arguments.run.dense_std)
    return causal_lm_class(config)(config)


def causal_lm_class(config: Any) -> Any:
    """Return the supermask class of a causal language model of this configuration.

    Args:
        config:
            A supermask configuration.

    Returns:
        The class.
    """
    return config.model_class(config.auto_classes()["AutoModelForCausalLM"])


def check_twin(config: Any) -> None:
    """Check that a model has a dense twin: a stock model of the same sizes.

    Args:
        config:
            A supermask configuration.

    Raises:
        [`SLTError`]: if the stock class cannot have its structure.
    """
    if not config.layer_norm or getattr(config, "has_free_widths", False):
        raise SLTError(
            "the stock class has norms and heads of n_embd / n_head, so this model has no dense twin; leave "
            "the dense control out, or use the defaults of layer_norm, n_qk and n_v"
        )


def dense_twin(config: Any, std: float = 0.02) -> Any:
    """Build the stock model of the same sizes. All of its weights are trained.

    With a backbone it starts from the pretrained weights: this is ordinary fine-tuning.

    Args:
        config:
            A supermask configuration.
        std (`float`, defaults to 0.02):
            Standard deviation of the first weights.

    Returns:
        A model of the stock class.

    Raises:
        [`SLTError`]: if there is no such model.
    """
    check_twin(config)
    torch.manual_seed(config.seed)
    stock_class = causal_lm_class(config).stock_class
    if config.backbone:
        where = {"revision": config.backbone_revision} if config.backbone_revision else {}
        return stock_class.from_pretrained(config.backbone, config=config.stock_config(), **where)
    stock = config.stock_config()
    stock.initializer_range = std
    twin = stock_class(stock)
    twin.loss_type = "ForCausalLM"  # as in our models: the loss must be scaled in the same way
    return twin


def build_optimizer(model: nn.Module, options: RunArguments) -> torch.optim.Optimizer:
    """Build AdamW or SGD over two groups, scores and trained weights. `lr` is the highest rate of each.

    Args:
        model (`nn.Module`):
            A model that learns, or a dense one.
        options ([`RunArguments`]):
            The options of the run.

    Returns:
        `torch.optim.Optimizer`: the optimizer.
    """
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    scores = [one for name, one in named if name.endswith("scores")]
    weights = [one for name, one in named if not name.endswith("scores")]
    rate = options.weight_learning_rate
    if options.control == "dense" and options.dense_learning_rate is not None:
        rate = options.dense_learning_rate
    groups = [
        # Only the order of scores matters, not their size. But a step of AdamW has a fixed length, the rate: the
        # larger the scores, the more steps it takes to change their order.
        {"params": scores, "lr": options.learning_rate, "weight_decay": options.score_decay},
        {"params": weights, "lr": rate, "weight_decay": options.weight_decay, "restarts": True},
    ]
    groups = [group for group in groups if group["params"]]
    if options.optim == "sgd":
        return torch.optim.SGD(groups, momentum=options.momentum)
    return torch.optim.AdamW(groups, betas=(options.adam_beta1, options.adam_beta2))


# -- the run ----------------------------------------------------------------------------------------


FSDP_NOT_USED = (
    "accelerate was configured for FSDP, but shards nothing on device {}: this run is {}. "
    "recipes/accelerate/fsdp2.yaml says how to try FSDP2 on CPUs"
)


WARMUP_TOO_LONG = (
    "warmup_steps {} is more than the {} steps of this run: the learning rate never reaches its highest value; "
    "give fewer, or a share of all steps such as --warmup_steps 0.05"
)


@cache
def print_once(text: str) -> None:
    """Print a text only once per program: several runs of a comparison would print the same text.

    Args:
        text (`str`):
            The text.
    """
    print(text)


def asks_for_fsdp() -> bool:
    """Return whether `accelerate launch` was configured for FSDP.

    Returns:
        `bool`: True under an accelerate configuration with FSDP.
    """
    return bool(parse_flag_from_env("ACCELERATE_USE_FSDP"))


class Run:
    """One run, ready for the loop.

    Args:
        arguments ([`Arguments`]):
            All options.
        corpus ([`Corpus`], *optional*):
            The text. By default, the one that the arguments name.
        make_optimizer (`Callable`, *optional*):
            Makes the optimizer of a model and its [`RunArguments`]. The `lr` of each group is the highest rate.
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
        precision = "bf16" if self.options.bf16 else None  # None: as accelerate was configured
        self.accelerator = Accelerator(
            mixed_precision=precision, log_with=tracker, project_dir=str(self.folder)
        )
        if self.accelerator.mixed_precision == "fp16":
            raise SLTError("fp16 needs a loss scale, which checkpoints here do not store; use bf16")
        self._own_accumulation()
        if self.accelerator.is_main_process:
            self.lock = lock(self.folder)  # two runs would write into the same log
            kind = self.accelerator.distributed_type
            if asks_for_fsdp() and kind != DistributedType.FSDP:
                print_once(FSDP_NOT_USED.format(self.accelerator.device, kind.value))
        with self.accelerator.main_process_first():  # the first tokenises, the others read its cache
            self.corpus = corpus or load_blocks(arguments.data)
        if self.accelerator.is_main_process:
            print_once(self.corpus.summary())
        sizes = self.options.per_device_train_batch_size, self.options.gradient_accumulation_steps
        workers = self.options.dataloader_num_workers
        self.batches = Batches(self.corpus.train, self.seed, *sizes, self.accelerator, workers)
        self.steps = self._length()
        self.warmup = steps_of(self.options.warmup_steps, self.steps)
        self.relaxed_steps = steps_of(self.options.relaxed_steps, self.steps)
        if 0 < self.steps < self.warmup and self.accelerator.is_main_process:
            print_once(WARMUP_TOO_LONG.format(self.warmup, self.steps))
        model = build_model(arguments, self.corpus.tokenizer)
        self.config: Any = model.config
        self.learns_masks = isinstance(self.config, SupermaskConfigMixin)
        if self.options.moments and not self.config.model_type.endswith("gpt2"):
            raise SLTError("moments are measured in GPT-2 only; leave the option out")
        if self.options.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.options.torch_compile:
            model.compile()
        self.model, self.optimizer = self._prepare(model)
        for group in self.optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        self.done = 0  # optimizer steps
        self._norm = self._largest_norm = torch.zeros(())  # of the gradient; read only when it is logged
        self.best: tuple[int, float] | None = None  # step and validation loss
        self.masks: dict[str, Tensor] = {}  # codes at the last evaluation
        self.held: dict[str, Tensor] = {}  # codes that several steps use
        level = self.options.min_lr_rate == 1  # then a longer run would have had the same rates so far
        limit = self.options.save_total_limit
        self.checkpoints = Checkpoints(self.folder, self._identity(), limit, extendable=level)
        before = self._resume()
        self.log = Log(self.folder / "log.jsonl", self.accelerator, before, self.done)
        if tracker:
            self.accelerator.init_trackers("hf_slt", {k: str(v) for k, v in arguments.flat().items()})

    def _prepare(self, model: nn.Module) -> tuple[Any, Any]:
        """Return model and optimizer as accelerate distributes them over the processes."""
        return self.accelerator.prepare(model, self.make_optimizer(model, self.options))

    def _own_accumulation(self) -> None:
        """Prevent accelerate from dividing the gradient: the loop does this already, by the option of the run.

        `accelerate launch --gradient_accumulation_steps N` sets another number, by which `accelerator.backward`
        would divide a second time.
        """
        launched, wanted = (
            self.accelerator.gradient_accumulation_steps,
            self.options.gradient_accumulation_steps,
        )
        if launched not in (1, wanted):
            raise SLTError(
                f"gradient_accumulation_steps is {launched} for accelerate and {wanted} for this run; give it "
                "after the name of the script only"
            )
        self.accelerator.gradient_accumulation_steps = 1

    def _length(self) -> int:
        """Return the number of optimizer steps, which may be given as passes over the text."""
        if self.options.control == "random_mask":
            return 0
        if self.options.max_steps > 0:
            return self.options.max_steps
        if isinstance(self.corpus.train, StreamedBlocks):
            raise SLTError("a stream has no known length, so passes cannot be counted; give max_steps")
        return math.ceil(self.options.num_train_epochs * max(1, len(self.corpus.train) // self.batches.width))

    def _resume(self) -> Path | None:
        """Restore the checkpoint that the arguments ask for, and return the log of its run."""
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
        places = snapshot.places or [None] * self.accelerator.num_processes
        self.batches.restore(snapshot.step, places[self.accelerator.process_index])
        self.done, self.best = snapshot.step, snapshot.best
        self.masks, self.held = snapshot.masks, snapshot.held
        self.accelerator.print(f"resumed after step {self.done} from {path}")
        return path.parent.parent / "log.jsonl"

    def _identity(self) -> dict[str, Any]:
        """Return the values that must be the same for a checkpoint to be resumed."""
        return {
            **{name: value for name, value in self.arguments.flat().items() if name not in FREE_TO_CHANGE},
            "steps": self.steps,
            "warmup_steps": self.warmup,
            "relaxed_steps": self.relaxed_steps,
            "text": self.corpus.digest,
            "tokenizer_sha256": sha256(self.corpus.tokenizer.backend_tokenizer.to_str()),
            "precision": self.accelerator.mixed_precision,
            "processes": self.accelerator.num_processes,
        }

    # -- pieces of a step

    def begin_step(self) -> None:
        """Set what depends only on the step: learning rates, the rule, and the random state of dropout."""
        self._set_rates()
        if self.learns_masks:
            self._set_rule()
        place = self.done * self.accelerator.num_processes + self.accelerator.process_index
        torch.manual_seed((self.seed * 1_000_003 + place) % 2**63)

    def _set_rates(self) -> None:
        """Set the learning rates of this step. Those of scales and gains may start again when the mask begins."""
        floor, again = self.options.min_lr_rate, self.options.weight_restart
        share = rate_at(self.done, self.steps, self.warmup, floor)
        since = self.done - self.relaxed_steps
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share
            if again and since >= 0 and group.get("restarts"):
                group["lr"] = again * rate_at(since, self.steps - self.relaxed_steps, 0, floor)

    @property
    def is_relaxed(self) -> bool:
        """Whether the next step uses no mask."""
        return self.done < self.relaxed_steps

    def _set_rule(self) -> Any:
        """Give all layers the rule as it is at this step, and return it."""
        rule: Any = self.config.make_rule()
        if self.done < self.steps:  # after the last step the rule has the final density
            options = {
                name: ramp_at(
                    self.done, getattr(rule, name), self.options.ramp_start, self.options.ramp_steps
                )
                for name in RAMPED
                if hasattr(rule, name)
            }
            rule = replace(rule, **options)
        if self.is_relaxed:
            rule = Relaxed(rule)
        elif self.options.mask_steps > 1:
            if (self.done - self.relaxed_steps) % self.options.mask_steps == 0:
                self.held = {}
            rule = Held(rule, self.held)
        set_rule(self.accelerator.unwrap_model(self.model), rule)
        return rule

    def clip_gradient(self) -> None:
        """Scale the gradient down if its norm is too large, without waiting for the device."""
        longest = self.options.max_grad_norm or math.inf
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), longest)
        self._norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        # The maximum of a number and NaN is NaN: the next check finds a bad step, however long ago it was.
        self._largest_norm = torch.maximum(self._largest_norm.to(self._norm), self._norm)

    def check_gradient(self) -> float:
        """Check that every gradient since the last call was finite.

        This is called whenever something is logged, evaluated or saved, so damaged scores are never saved.

        Returns:
            `float`: the norm of the last gradient.

        Raises:
            [`SLTError`]: if a gradient was not finite.
        """
        largest, self._largest_norm = float(self._largest_norm), torch.zeros(())
        if not math.isfinite(largest):
            raise SLTError(
                f"a gradient before step {self.done} was not finite: the run diverged; start again with "
                f"--overwrite and a learning rate below {self.options.learning_rate:g}"
            )
        return float(self._norm)

    # -- between steps

    def due(self, option: str) -> bool:
        """Return whether the work that is done every `option` steps is due now. After the last step all work is.

        Args:
            option (`str`):
                Name of an option that counts steps, such as `"eval_steps"`.

        Returns:
            `bool`: whether it is due.
        """
        every = steps_of(getattr(self.options, option), self.steps)
        return self.done == self.steps or (every > 0 and self.done % every == 0)

    def progress_bar(self) -> Any:
        """Return a progress bar over all steps. Only the first process shows it. Outside a terminal it prints lines.

        Returns:
            The bar.
        """
        shows = self.accelerator.is_main_process and self.steps > 0
        label = self.options.control or "ticket"
        return progress_bar(total=self.steps, initial=self.done, desc=label, disable=not shows, unit="step")

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens that all processes read for one optimizer step."""
        return self.batches.width * self.arguments.data.block_size

    def log_training(self, losses: list[Tensor], speed: float) -> str:
        """Log the mean of the losses since the last call, over all processes.

        Args:
            losses (`list[Tensor]`):
                Losses of this process since the last call.
            speed (`float`):
                Tokens per second.

        Returns:
            `str`: the text of the bar.

        Raises:
            [`SLTError`]: if a gradient was not finite.
        """
        norm = self.check_gradient()
        loss = self.accelerator.reduce(torch.stack(losses).mean(), "mean").item()
        rate = self.optimizer.param_groups[0]["lr"]
        self.log.write("train", self.done, loss=loss, rate=rate, gradient_norm=norm, tokens_per_second=speed)
        return f"loss {loss:.3f}, rate {rate:.1e}, {speed:.0f} tokens/s"

    def evaluate(self) -> bool:
        """Evaluate the model and log the state of its masks.

        Returns:
            `bool`: whether this is the best evaluation so far.

        Raises:
            [`SLTError`]: if a gradient was not finite.
        """
        self.check_gradient()
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
            if self.accelerator.is_main_process:  # the others did not get the parameters
                tensors = scored_tensors(self.accelerator.unwrap_model(self.model))
                codes = codes_of(tensors, rule, parameters)
                measures_of_masks = mask_measures(tensors, codes, self.masks, rule.factors)
                self.log.write("masks", self.done, **measures_of_masks)
                self.masks = codes
        if self.options.moments:
            # The same blocks in every process, because all processes must gather sharded weights together.
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
        self.check_gradient()
        places = gather_object([self.batches.place]) if self.batches.streams else []
        known = {"best": self.best, "masks": self.masks, "held": self.held, "places": places}
        snapshot = Snapshot.take(self.done, self.model, self.optimizer.optimizer, **known)
        if self.accelerator.is_main_process:
            self.checkpoints.save(snapshot)
        self.accelerator.wait_for_everyone()

    def finish(self) -> dict[str, Any]:
        """Write ticket (or dense model), tokenizer and report.

        Returns:
            `dict[str, Any]`: the report in the first process, an empty dictionary in the others.
        """
        if self.steps == 0:
            self.evaluate()
        parameters: Any = get_model_state_dict(self.model, options=WHOLE)
        if not self.accelerator.is_main_process:
            return {}
        model: Any = build_model(self.arguments, self.corpus.tokenizer)
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
            "tokens_seen": self.steps * self.tokens_per_step,
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

    def close(self) -> None:
        """Finish the trackers. The process group stays: `accelerator.end_training` would destroy it,
        and the next run of this program needs it.
        """
        for tracker in self.accelerator.trackers:
            tracker.finish()
