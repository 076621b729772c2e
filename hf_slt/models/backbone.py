"""Masks over pretrained weights: the numbers come from a checkpoint instead of a seed.

    config = supermask_config(backbone="openai-community/gpt2", density=0.95)
    model  = AutoModelForCausalLM.from_config(config)       # fetches the checkpoint as transformers does

The checkpoint is loaded by the stock class, from safetensors only, and none of its code is run. A ticket stores its
name and a digest of each of its tensors, but no tensor. Parameters that the checkpoint does not have, such as a new
head, are drawn from the seed.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.utils import cached_file, logging
from transformers.utils.hub import extract_commit_hash

from ..errors import SLTError
from ..masks.plans import FixedPlan, MaskedPlan, ParameterPlan, TrainedPlan
from ..weights.random_weights import PRETRAINED, TensorSpec

_NOT_SIZES = {"dtype", "transformers_version", "architectures", "_name_or_path", "use_cache", "auto_map"}
_LOADING = Lock()  # transformers cannot load two models at a time; threads that draw wait for one load


@dataclass(frozen=True)
class Backbone:
    """A checkpoint, as a stock class of transformers loads it.

    Args:
        name (`str`):
            Folder or Hub name.
        revision (`str`, *optional*):
            Branch, tag or commit on the Hub.
        stock_class (`type`):
            The class that loads it.
        facts (`str`):
            The stock configuration to load it with, in JSON.
    """

    name: str
    revision: str | None
    stock_class: Any
    facts: str

    @classmethod
    def of(cls, config: Any, stock_class: Any) -> "Backbone":
        """Return the backbone that a configuration names, for a stock class.

        Args:
            config:
                A supermask configuration with an option `backbone`.
            stock_class:
                The model class of transformers that loads the checkpoint.

        Returns:
            [`Backbone`]: the backbone. Nothing is loaded yet.
        """
        facts = json.loads(config.stock_config().to_json_string())
        kept = {name: value for name, value in facts.items() if name not in _NOT_SIZES}
        return cls(config.backbone, config.backbone_revision, stock_class, json.dumps(kept, sort_keys=True))

    def weights(self) -> Mapping[str, np.ndarray]:
        """Return every parameter that the checkpoint has, by its path in the stock model.

        Returns:
            `Mapping[str, np.ndarray]`: arrays by path.
        """
        with _LOADING:
            return _load(self)[0]

    @property
    def commit(self) -> str | None:
        """The commit that was loaded from the Hub; None for a folder."""
        with _LOADING:
            return _load(self)[1]

    def __str__(self) -> str:
        return f"{self.name!r}" + (f" (revision {self.revision})" if self.revision else "")


@dataclass(frozen=True)
class BackbonePart:
    """Where the numbers of one tensor lie in a checkpoint.

    Args:
        backbone ([`Backbone`]):
            The checkpoint.
        parameter (`str`):
            Path of the parameter in the stock model.
        axis (`int`, defaults to 0):
            The axis along which the parameter is divided into tensors.
        start (`int`, *optional*):
            Where the tensor begins on that axis. By default the tensor is the whole parameter.
        stop (`int`, *optional*):
            Where it ends.
        heads (`int`, *optional*):
            If given, the parameter has its three tensors head by head.
    """

    backbone: Backbone
    parameter: str
    axis: int = 0
    start: int | None = None
    stop: int | None = None
    heads: int | None = None

    def read(self) -> np.ndarray:
        """Return a copy of the numbers.

        Returns:
            `np.ndarray`: the numbers in float32.

        Raises:
            [`SLTError`]: if the checkpoint has no such parameter.
        """
        found = self.backbone.weights().get(self.parameter)
        if found is None:
            raise SLTError(
                f"the checkpoint {self.backbone} has no {self.parameter}; give the right checkpoint as backbone="
            )
        if self.heads is not None:  # (head, tensor, row) to (tensor, head, row)
            inside = found.reshape(self.heads, 3, -1, *found.shape[1:])
            found = inside.swapaxes(0, 1).reshape(found.shape)
        place = (slice(None),) * self.axis + (slice(self.start, self.stop),)
        return np.array(found[place])


def over_backbone(plan: ParameterPlan, path: str, backbone: Backbone) -> ParameterPlan:
    """Return the plan of a parameter with the numbers of a checkpoint in place of drawn ones.

    Args:
        plan ([`ParameterPlan`]):
            The plan by the options of the model.
        path (`str`):
            Path of the parameter in the stock model.
        backbone ([`Backbone`]):
            The checkpoint.

    Returns:
        [`ParameterPlan`]: the new plan.
    """
    whole = BackbonePart(backbone, path)
    if isinstance(plan, MaskedPlan):
        return replace(plan, tensors=_parts_of(plan, path, backbone))
    if isinstance(plan, FixedPlan):
        name = plan.tensor.name.removesuffix(".weight")
        return FixedPlan(_pretrained(replace(plan.tensor, name=name, shape=plan.shape), whole), plan.shape)
    if isinstance(plan, TrainedPlan):
        return replace(plan, tensor=_pretrained(plan.tensor, whole))
    return plan


def _pretrained(tensor: TensorSpec, origin: BackbonePart) -> TensorSpec:
    return replace(tensor, law=PRETRAINED, scale=1.0, origin=origin)


def _parts_of(plan: MaskedPlan, path: str, backbone: Backbone) -> list[TensorSpec]:
    if len(plan.tensors) == 1:
        return [_pretrained(plan.tensors[0], BackbonePart(backbone, path))]
    found, start = [], 0
    for tensor in plan.tensors:
        stop = start + tensor.shape[plan.axis]
        found.append(_pretrained(tensor, BackbonePart(backbone, path, plan.axis, start, stop, plan.heads)))
        start = stop
    return found


@lru_cache(maxsize=2)
def _load(backbone: Backbone) -> tuple[dict[str, np.ndarray], str | None]:
    """Return the parameters of a checkpoint, and its commit. Parameters that it does not have are left out."""
    stock_class = backbone.stock_class
    where = {"revision": backbone.revision} if backbone.revision else {}
    try:
        with _quiet(), torch.device("cpu"):
            facts = PreTrainedConfig.get_config_dict(backbone.name, **where)[0]
            wanted = stock_class.config_class.model_type
            if (found := facts.get("model_type")) != wanted:
                raise SLTError(
                    f"the checkpoint {backbone} is of model_type {found!r}, not {wanted!r}; give another"
                )
            config = stock_class.config_class.from_dict(json.loads(backbone.facts))
            options = {"config": config, "dtype": torch.float32, "use_safetensors": True, **where}
            file = cached_file(backbone.name, "config.json", **where)
            model, report = stock_class.from_pretrained(backbone.name, output_loading_info=True, **options)
    except SLTError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError) as error:  # missing, or of other sizes, or damaged
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise SLTError(
            f"the pretrained weights {backbone} cannot be loaded as {stock_class.__name__}: {lines[0]} "
            "(give backbone= as a folder or a Hub name; the files must be safetensors)"
        ) from error
    missing = set(report["missing_keys"])
    found = {
        path: one.detach().numpy()
        for path, one in model.named_parameters(remove_duplicate=False)
        if path not in missing
    }
    return found, extract_commit_hash(file, None)  # of a file in the cache of the Hub; None in a folder


@contextmanager
def _quiet() -> Iterator[None]:
    """Load without a progress bar, and without a report about the missing weights of a new head."""
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
