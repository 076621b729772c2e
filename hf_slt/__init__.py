"""hf_slt: supermasks for Transformers. Weights are random numbers from a seed; a learned mask says which to use.

Importing it registers the supermask models with transformers' Auto classes. Names are imported when they are
first used, so that `import hf_slt` takes no longer than `import transformers`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .about import __version__ as __version__
from .registration import register_when_needed

if TYPE_CHECKING:
    from .errors import SLTError, TicketError
    from .masks.any_module import fix_masks_, supermask_
    from .masks.cache import fixed_masks
    from .models.architectures import supermask_config
    from .models.checks import verify_ticket
    from .models.gpt2 import (
        SupermaskGPT2Config,
        SupermaskGPT2ForSequenceClassification,
        SupermaskGPT2LMHeadModel,
        SupermaskGPT2Model,
    )
    from .sharing.mask_algebra import combine_tickets, compare_tickets

# Where each public name is.
_HOMES = {
    "SLTError": "errors",
    "SupermaskGPT2Config": "models.gpt2",
    "SupermaskGPT2ForSequenceClassification": "models.gpt2",
    "SupermaskGPT2LMHeadModel": "models.gpt2",
    "SupermaskGPT2Model": "models.gpt2",
    "TicketError": "errors",
    "combine_tickets": "sharing.mask_algebra",
    "compare_tickets": "sharing.mask_algebra",
    "fix_masks_": "masks.any_module",
    "fixed_masks": "masks.cache",
    "supermask_": "masks.any_module",
    "supermask_config": "models.architectures",
    "verify_ticket": "models.checks",
}
__all__ = [
    "SLTError",
    "SupermaskGPT2Config",
    "SupermaskGPT2ForSequenceClassification",
    "SupermaskGPT2LMHeadModel",
    "SupermaskGPT2Model",
    "TicketError",
    "combine_tickets",
    "compare_tickets",
    "fix_masks_",
    "fixed_masks",
    "supermask_",
    "supermask_config",
    "verify_ticket",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    if name.startswith("Supermask"):  # a class for another architecture, which is made when it is needed
        return getattr(import_module(".models.architectures", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_when_needed()
