"""Supermask classes in transformers' Auto classes."""

from typing import Any

from transformers import AutoConfig
from transformers.models.auto import modeling_auto


def register_architecture(config_class: Any, classes: dict[str, Any]) -> None:
    """Register a configuration and its models with the Auto classes of transformers.

    Args:
        config_class (`type`):
            The supermask configuration.
        classes (`dict[str, type]`):
            The model of each Auto class, by its name: `{"AutoModelForCausalLM": SupermaskGPT2LMHeadModel}`.
    """
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    for name, model_class in classes.items():
        getattr(modeling_auto, name).register(config_class, model_class, exist_ok=True)
