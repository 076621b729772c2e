"""Checkpoints: everything that a run needs to resume with identical results, in safetensors and JSON.

    output_dir/checkpoints/step-00000500/
      model.safetensors        learned parameters, not sharded, for any number of processes
      optimizer.safetensors    moments by parameter name; the masks at the last evaluation, and those in use
      state.json               step, arguments, digests of the other two and of itself

A checkpoint appears by one rename and disappears by one, so every visible checkpoint is complete. Nothing is pickled.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..errors import SLTError
from ..text.tokens import file_sha256
from ..tickets.files import check_output_folder, staged
from ..tickets.format import sha256

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_FILES = ("model.safetensors", "optimizer.safetensors")


class CheckpointError(SLTError):
    """A checkpoint is damaged, missing, or belongs to another run."""


def lock(output_dir: Path) -> FileLock:
    """Lock a folder against other runs, as long as the lock exists.

    Args:
        output_dir (`Path`):
            The folder, which is made if it does not exist.

    Returns:
        `FileLock`: the lock.

    Raises:
        [`CheckpointError`]: if another run has locked it.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    kept = FileLock(output_dir.resolve() / ".lock", thread_local=False, is_singleton=True)
    try:
        kept.acquire(blocking=False)
    except Timeout:
        hint = "wait for its end, or give another output_dir"
        raise CheckpointError(f"{output_dir}: another run is writing there; {hint}") from None
    return kept


def check_free(output_dir: Path, resume: str | None, overwrite: bool) -> None:
    """Raise an error if a run cannot begin in this folder.

    Args:
        output_dir (`Path`):
            Folder of the run.
        resume (`str`, *optional*):
            The option resume_from_checkpoint.
        overwrite (`bool`):
            The option overwrite.

    Raises:
        [`CheckpointError`]: if it holds an earlier run, which is neither resumed nor overwritten.
        `NotADirectoryError`: if it is a file.
    """
    check_output_folder(output_dir)
    used = _steps_in(output_dir / "checkpoints") or (output_dir / "report.json").exists()
    if used and not (resume or overwrite):
        raise CheckpointError(
            f"{output_dir} is of an earlier run; add --resume_from_checkpoint or --overwrite, or give another "
            "--output_dir"
        )


@dataclass
class Snapshot:
    """The state of a run after `step` optimizer steps, gathered from all processes.

    Args:
        step (`int`):
            Number of optimizer steps done.
        model (`dict[str, Tensor]`):
            Parameters by name.
        moments (`dict[str, Tensor]`):
            State of the optimizer, by "parameter/moment".
        groups (`list[dict[str, Any]]`):
            Options of the optimizer's groups.
        best (`tuple[int, float]`, *optional*):
            Step and validation loss of the best evaluation so far.
        masks (`dict[str, Tensor]`, *optional*):
            Codes at the last evaluation, by name of their scores.
        held (`dict[str, Tensor]`, *optional*):
            Codes that the next steps use, by name of their tensor.
        places (`list[Any]`, *optional*):
            Place of each process in a streamed text.
    """

    step: int
    model: dict[str, Tensor]
    moments: dict[str, Tensor]  # "parameter/moment"
    groups: list[dict[str, Any]]
    best: tuple[int, float] | None = None  # step and validation loss
    masks: dict[str, Tensor] = field(default_factory=dict)  # at the last evaluation
    held: dict[str, Tensor] = field(default_factory=dict)  # in use by the next steps
    places: list[Any] = field(default_factory=list)  # in the stream of text, one per process

    @classmethod
    def take(cls, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> "Snapshot":
        """Gather parameters and moments. Every process must call this; only the first gets the result.

        Args:
            step (`int`):
                Number of optimizer steps done.
            model (`nn.Module`):
                The model.
            optimizer (`torch.optim.Optimizer`):
                Its optimizer.
            more:
                Other fields of the snapshot.

        Returns:
            [`Snapshot`]: the snapshot, which is empty in all processes except the first.
        """
        # Parameters first: this shards them again if an evaluation left them whole, as the optimizer state needs.
        parameters: Any = get_model_state_dict(model, options=WHOLE)
        whole: Any = get_optimizer_state_dict(model, optimizer, options=WHOLE)
        moments = {
            f"{name}/{key}": torch.as_tensor(value)
            for name, values in whole.get("state", {}).items()
            for key, value in values.items()
        }
        return cls(step, parameters, moments, whole.get("param_groups", []), **more)

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put the state back. Every process calls this with the whole snapshot.

        Args:
            model (`nn.Module`):
                A model of the same configuration.
            optimizer (`torch.optim.Optimizer`):
                Its optimizer.
        """
        state: Any = {}
        for path, value in self.moments.items():
            name, key = path.rsplit("/", 1)
            state.setdefault(name, {})[key] = value
        parameters: Any = self.model
        set_model_state_dict(model, parameters, options=WHOLE)
        whole: Any = {"state": state, "param_groups": self.groups}
        set_optimizer_state_dict(model, optimizer, whole, options=WHOLE)


class Checkpoints:
    """The checkpoints of one run: the last few and the best.

    Args:
        output_dir (`Path`):
            Folder of the run.
        arguments (`Mapping`):
            Values that must be the same for a checkpoint to be resumed.
        keep (`int`):
            How many of the last checkpoints to keep.
        extendable (`bool`, defaults to `False`):
            Whether `steps` may be larger than it was.
    """

    def __init__(
        self, output_dir: Path, arguments: Mapping[str, Any], keep: int, extendable: bool = False
    ) -> None:
        self.folder = output_dir / "checkpoints"
        self.arguments = json.loads(json.dumps(arguments))  # as they are when read from disk
        self.keep, self.extendable = keep, extendable

    def begin(self, resume: str | None, overwrite: bool) -> Path | None:
        """Find the checkpoint to resume from, if any.

        It is an error if the folder has an earlier run that is neither resumed nor overwritten.

        Args:
            resume (`str` or `None`):
                Path of a checkpoint, or `"true"` for the last one. None starts anew.
            overwrite (`bool`):
                Whether an earlier run in the folder may be overwritten.

        Returns:
            `Path | None`: the checkpoint; None to start anew.

        Raises:
            [`CheckpointError`]: if there is no such checkpoint, or if the folder has an earlier run.
        """
        for left in self.folder.glob(".step-*"):  # half written or half removed when a run was killed
            shutil.rmtree(left)
        found = _steps_in(self.folder)
        if resume == "true":
            return found[-1] if found else None
        if resume:
            if not (path := Path(resume)).is_dir():
                known = ", ".join(one.name for one in found) or "no checkpoint"
                raise CheckpointError(f"{path}: no such folder; {self.folder} holds {known}")
            return path
        check_free(self.folder.parent, resume, overwrite)
        for path in found:
            _remove(path)
        return None

    def save(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint, and after that remove those that are no longer kept.

        Args:
            snapshot ([`Snapshot`]):
                The state of the run.

        Returns:
            `Path`: the folder of the checkpoint.

        Raises:
            [`CheckpointError`]: if it cannot be written.
        """
        path = self.folder / f"step-{snapshot.step:08d}"
        try:
            with staged(path) as stage:
                self._write(snapshot, stage)
        except (OSError, SafetensorError) as error:
            hint = "free some disk space, and resume from the previous one with --resume_from_checkpoint"
            raise CheckpointError(f"{path}: cannot be written ({error}); {hint}") from error
        best = f"step-{snapshot.best[0]:08d}" if snapshot.best else ""
        found = _steps_in(self.folder)
        now = found.index(path) + 1  # there are later ones if the run was resumed from an earlier one
        for old in found[: max(0, now - self.keep)] + found[now:]:
            if old.name != best:
                _remove(old)
        return path

    def _write(self, snapshot: Snapshot, stage: Path) -> None:
        masks = {f"{name}/mask": mask for name, mask in snapshot.masks.items()}
        masks |= {f"{name}/held": mask for name, mask in snapshot.held.items()}
        for name, tensors in zip(_FILES, (snapshot.model, snapshot.moments | masks), strict=True):
            save_file(_apart(tensors), stage / name)
        state = {
            "step": snapshot.step,
            "best": snapshot.best,
            "groups": snapshot.groups,
            "places": snapshot.places,
            "arguments": self.arguments,
            "sha256": {name: file_sha256(stage / name) for name in _FILES},
        }
        whole = {"state": state, "sha256": sha256(json.dumps(state))}
        (stage / "state.json").write_text(json.dumps(whole, indent=1) + "\n")

    def load(self, path: Path) -> Snapshot:
        """Read a checkpoint of this run.

        Args:
            path (`Path`):
                The folder of the checkpoint.

        Returns:
            [`Snapshot`]: the state of the run.

        Raises:
            [`CheckpointError`]: if it is damaged or of another run.
        """
        before = sorted(one for one in path.parent.glob("step-*") if one.name < path.name)
        hint = f"resume with --resume_from_checkpoint {before[-1]}" if before else "start with --overwrite"
        try:
            whole = json.loads((path / "state.json").read_text())
            state = whole["state"]
            wanted = {"state.json": whole["sha256"], **state["sha256"]}
            found = {name: file_sha256(path / name) for name in _FILES}
            found["state.json"] = sha256(json.dumps(state))
            for name, expected in wanted.items():
                if found[name] != expected:
                    differ = f"digest {found[name][:8]}... is not {expected[:8]}...: damaged"
                    raise CheckpointError(f"{path / name}: {differ}; {hint}")
            model, moments = (load_file(path / name) for name in _FILES)
        except CheckpointError:
            raise
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {error!r}; {hint}") from None
        self._check_arguments(path, state["arguments"])
        masks, held = (
            {name.removesuffix(end): moments.pop(name) for name in list(moments) if name.endswith(end)}
            for end in ("/mask", "/held")
        )
        best = (state["best"][0], state["best"][1]) if state["best"] else None
        places = state.get("places", [])  # version 0.1 had none
        return Snapshot(state["step"], model, moments, state["groups"], best, masks, held, places)

    def _check_arguments(self, path: Path, then: dict[str, Any]) -> None:
        now = self.arguments
        changed = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
        if not changed or (changed == ["steps"] and self.extendable and now["steps"] > then["steps"]):
            return
        what = ", ".join(f"{name} was {then.get(name)!r}, is {now.get(name)!r}" for name in changed)
        if "steps" in changed and self.extendable:
            what += " (a run can be made longer, not shorter)"
        elif "steps" in changed:
            what += (
                " (the learning rates so far are a cosine over the former steps; only with min_lr_rate 1, a "
            )
            what += "constant rate, can a run be made longer)"
        raise CheckpointError(f"{path} is of another run: {what}; give the same, or another output_dir")


def _steps_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the oldest first."""
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def _remove(path: Path) -> None:
    """Rename a checkpoint, then remove it: a kill in between leaves nothing that looks like a checkpoint."""
    shutil.rmtree(path.rename(path.with_name(f".{path.name}")))


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors, no two in the same memory: safetensors refuses tied weights."""
    seen: set[int] = set()
    apart = {}
    for name, value in tensors.items():
        value = value.contiguous()
        apart[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return apart
