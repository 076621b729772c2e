"""hf_slt: a GPT-2 whose weights are never trained, a seed and a mask.

Importing it registers the model with transformers' Auto classes.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model.configuration_supermask_gpt2 import SupermaskGPT2Config
    from .model.modeling_supermask_gpt2 import (
        SupermaskGPT2ForSequenceClassification,
        SupermaskGPT2LMHeadModel,
        SupermaskGPT2Model,
    )
    from .model.ticket import TicketError, verify_ticket
    from .sharing.mask_algebra import combine_tickets, compare_tickets

__version__ = "0.1.0"
__all__ = [
    "SupermaskGPT2Config",
    "SupermaskGPT2ForSequenceClassification",
    "SupermaskGPT2LMHeadModel",
    "SupermaskGPT2Model",
    "TicketError",
    "combine_tickets",
    "compare_tickets",
    "register",
    "verify_ticket",
]

_HOMES = {
    "SupermaskGPT2Config": "model.configuration_supermask_gpt2",
    "SupermaskGPT2ForSequenceClassification": "model.modeling_supermask_gpt2",
    "SupermaskGPT2LMHeadModel": "model.modeling_supermask_gpt2",
    "SupermaskGPT2Model": "model.modeling_supermask_gpt2",
    "TicketError": "model.ticket",
    "combine_tickets": "sharing.mask_algebra",
    "compare_tickets": "sharing.mask_algebra",
    "verify_ticket": "model.ticket",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def register() -> None:
    """Make the model known to transformers' Auto classes; importing the package has done so."""
    import transformers

    config, modeling = (
        importlib.import_module(f".model.{kind}_supermask_gpt2", __name__)
        for kind in ("configuration", "modeling")
    )
    config_class = config.SupermaskGPT2Config
    transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    # Named for the Hub as well: the code travels with every save, for trust_remote_code.
    config_class.register_for_auto_class()
    for auto, model in (
        (transformers.AutoModel, modeling.SupermaskGPT2Model),
        (transformers.AutoModelForCausalLM, modeling.SupermaskGPT2LMHeadModel),
        (transformers.AutoModelForSequenceClassification, modeling.SupermaskGPT2ForSequenceClassification),
    ):
        auto.register(config_class, model, exist_ok=True)
        model.register_for_auto_class(auto.__name__)


# The `slt` command reads files without torch, which takes seconds to import, and registers when it must.
if Path(sys.argv[0] if sys.argv else "").name not in ("slt", "slt.exe"):
    register()
