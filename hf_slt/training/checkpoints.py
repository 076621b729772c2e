"""Checkpoints: all that a run needs to go on to the same bits, in safetensors and JSON.

    output_dir/checkpoints/step-00000500/
      model.safetensors        learned parameters, whole, whatever the number of processes
      optimizer.safetensors    moments by parameter name; the masks at the last look
      state.json               step, arguments, digests

A checkpoint appears by one rename, so there are only whole ones. Nothing is pickled.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
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

from ..model.ticket import SLTError
from ..sharing.files import staged

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_FILES = ("model.safetensors", "optimizer.safetensors")


class CheckpointError(SLTError):
    """A checkpoint is damaged, missing, or belongs to another run."""


@dataclass
class Snapshot:
    """The state of a run after `step` optimizer steps, gathered from all processes."""

    step: int
    model: dict[str, Tensor]
    moments: dict[str, Tensor]  # "parameter/moment"
    groups: list[dict[str, Any]]
    best: tuple[int, float] | None = None  # step and validation loss
    masks: dict[str, Tensor] = field(default_factory=dict)  # at the last look

    @classmethod
    def take(cls, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> "Snapshot":
        """Gather parameters and moments; every process must call it. Only the first holds the result."""
        # Parameters first: that shards again what an evaluation left whole, which no optimizer state is for.
        parameters: Any = get_model_state_dict(model, options=WHOLE)
        whole: Any = get_optimizer_state_dict(model, optimizer, options=WHOLE)
        moments = {
            f"{name}/{key}": torch.as_tensor(value)
            for name, values in whole.get("state", {}).items()
            for key, value in values.items()
        }
        return cls(step, parameters, moments, whole.get("param_groups", []), **more)

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put the state back; every process calls it with the whole snapshot."""
        state: Any = {}
        for path, value in self.moments.items():
            name, key = path.rsplit("/", 1)
            state.setdefault(name, {})[key] = value
        parameters: Any = self.model
        set_model_state_dict(model, parameters, options=WHOLE)
        whole: Any = {"state": state, "param_groups": self.groups}
        set_optimizer_state_dict(model, optimizer, whole, options=WHOLE)


class Checkpoints:
    """The checkpoints of one run: the last few and the best."""

    def __init__(self, output_dir: Path, arguments: Mapping[str, Any], keep: int) -> None:
        self.folder = output_dir / "checkpoints"
        self.arguments = json.loads(json.dumps(arguments))  # as it comes back from disk
        self.keep = keep

    def begin(self, resume: str | None, overwrite: bool) -> Path | None:
        """The checkpoint to go on from, if any: `resume` names it, or is "true" for the last.

        Refuses the folder of an earlier run that is neither to be gone on from nor thrown away.
        """
        for left in self.folder.glob(".step-*"):  # half written when a run was killed
            shutil.rmtree(left)
        found = self._found()
        if resume == "true":
            return found[-1] if found else None
        if resume:
            if not (path := Path(resume)).is_dir():
                known = ", ".join(one.name for one in found) or "no checkpoint"
                raise CheckpointError(f"{path}: no such folder; {self.folder} holds {known}")
            return path
        if (found or (self.folder.parent / "report.json").exists()) and not overwrite:
            raise CheckpointError(
                f"{self.folder.parent} is of an earlier run; add --resume_from_checkpoint or --overwrite"
            )
        shutil.rmtree(self.folder, ignore_errors=True)
        return None

    def save(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint; then, and only then, remove those that are no longer kept."""
        path = self.folder / f"step-{snapshot.step:08d}"
        with staged(path) as stage:
            masks = {f"{name}/mask": mask for name, mask in snapshot.masks.items()}
            for name, tensors in zip(_FILES, (snapshot.model, snapshot.moments | masks), strict=True):
                save_file(_apart(tensors), stage / name)
            state = {
                "step": snapshot.step,
                "best": snapshot.best,
                "groups": snapshot.groups,
                "arguments": self.arguments,
                "sha256": {name: _sha256(stage / name) for name in _FILES},
            }
            (stage / "state.json").write_text(json.dumps(state, indent=1) + "\n")
        best = f"step-{snapshot.best[0]:08d}" if snapshot.best else ""
        for old in self._found()[: -self.keep]:
            if old.name != best:
                shutil.rmtree(old)
        return path

    def load(self, path: Path) -> Snapshot:
        """Read a checkpoint of this run; raise CheckpointError if it is damaged or of another run."""
        cure = "give --resume_from_checkpoint the one before it"
        try:
            state = json.loads((path / "state.json").read_text())
            for name, expected in state["sha256"].items():
                if (found := _sha256(path / name)) != expected:
                    raise CheckpointError(
                        f"{path / name}: digest {found[:8]}... is not {expected[:8]}...; {cure}"
                    )
            model, moments = (load_file(path / name) for name in _FILES)
        except (OSError, KeyError, json.JSONDecodeError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {error!r}; {cure}") from None
        then, now = state["arguments"], self.arguments
        if changed := sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name)):
            what = ", ".join(f"{name} was {then.get(name)!r}, is {now.get(name)!r}" for name in changed)
            raise CheckpointError(f"{path} is of another run: {what}; give the same, or another output_dir")
        masks = {
            name.removesuffix("/mask"): moments.pop(name) for name in list(moments) if name.endswith("/mask")
        }
        best = (state["best"][0], state["best"][1]) if state["best"] else None
        return Snapshot(state["step"], model, moments, state["groups"], best, masks)

    def _found(self) -> list[Path]:
        return sorted(self.folder.glob("step-*")) if self.folder.is_dir() else []


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, no two in one memory: safetensors refuses tied weights."""
    seen: set[int] = set()
    apart = {}
    for name, value in tensors.items():
        value = value.contiguous()
        apart[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return apart


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
