"""hf_slt: a GPT-2 whose weights are never trained, a seed and a mask.

Importing it registers the model with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from .configuration_supermask_gpt2 import SupermaskGPT2Config
from .modeling_supermask_gpt2 import (
    SupermaskGPT2ForSequenceClassification,
    SupermaskGPT2LMHeadModel,
    SupermaskGPT2Model,
)
from .ticket import TicketError, verify_ticket

__version__ = "0.1.0"
__all__ = [
    "SupermaskGPT2Config",
    "SupermaskGPT2ForSequenceClassification",
    "SupermaskGPT2LMHeadModel",
    "SupermaskGPT2Model",
    "TicketError",
    "verify_ticket",
]

AutoConfig.register(SupermaskGPT2Config.model_type, SupermaskGPT2Config)
# Named for the Hub as well: the code travels with every save, for trust_remote_code.
SupermaskGPT2Config.register_for_auto_class()
for _auto, _model in (
    (AutoModel, SupermaskGPT2Model),
    (AutoModelForCausalLM, SupermaskGPT2LMHeadModel),
    (AutoModelForSequenceClassification, SupermaskGPT2ForSequenceClassification),
):
    _auto.register(SupermaskGPT2Config, _model)
    _model.register_for_auto_class(_auto.__name__)
