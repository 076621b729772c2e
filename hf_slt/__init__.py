"""hf_slt: a GPT-2 whose weights are never trained, a seed and a mask.

Importing it registers the model with transformers' Auto classes, and adds to the code that travels with a
ticket what that is too short for: layers that learn, saving, pushing, merging.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from .model.configuration_supermask_gpt2 import SupermaskGPT2Config
from .model.modeling_supermask_gpt2 import (
    SupermaskGPT2ForSequenceClassification,
    SupermaskGPT2LMHeadModel,
    SupermaskGPT2Model,
)
from .model.pretrained import NEEDS_PACKAGE, TicketPreTrainedModel
from .model.ticket import DECODERS, OLDER, SLTError, TicketError
from .sharing import coded_files, named_masks
from .sharing.export import HeadView, merge_and_unload, to_ternary
from .sharing.hub import push_model
from .sharing.mask_algebra import combine_tickets, compare_tickets, mask_arrays, ticket_of_masks
from .sharing.saving import save_pretrained, save_ticket, to_ticket
from .sharing.verify import from_version_1, verify_ticket
from .training.resizing import resize_token_embeddings  # and with it the layers that learn

__version__ = "0.1.0"
__all__ = [
    "SLTError",
    "SupermaskGPT2Config",
    "SupermaskGPT2ForSequenceClassification",
    "SupermaskGPT2LMHeadModel",
    "SupermaskGPT2Model",
    "TicketError",
    "combine_tickets",
    "compare_tickets",
    "verify_ticket",
]

DECODERS["entropy"] = coded_files
OLDER[1] = from_version_1
_methods = {
    "delete_mask": named_masks.delete_mask,
    "load_mask": named_masks.load_mask,
    "mask_arrays": mask_arrays,
    "merge_and_unload": merge_and_unload,
    "push_to_hub": push_model,
    "resize_token_embeddings": resize_token_embeddings,
    "save_pretrained": save_pretrained,
    "save_ticket": save_ticket,
    "set_mask": named_masks.set_mask,
    "to_ternary": to_ternary,
    "to_ticket": to_ticket,
    "using_mask": named_masks.using_mask,
    "active_mask": property(named_masks.active_mask),
    "mask_names": property(named_masks.mask_names),
    "from_mask_arrays": classmethod(ticket_of_masks),
    "head_view": staticmethod(HeadView),
    "read_fitting_ticket": staticmethod(named_masks.read_fitting_ticket),
}
assert _methods.keys() == set(NEEDS_PACKAGE)
for _name, _method in _methods.items():
    setattr(TicketPreTrainedModel, _name, _method)
AutoConfig.register(SupermaskGPT2Config.model_type, SupermaskGPT2Config)
SupermaskGPT2Config.register_for_auto_class()  # for the Hub as well: the code travels with every save
for _auto, _model in (
    (AutoModel, SupermaskGPT2Model),
    (AutoModelForCausalLM, SupermaskGPT2LMHeadModel),
    (AutoModelForSequenceClassification, SupermaskGPT2ForSequenceClassification),
):
    _auto.register(SupermaskGPT2Config, _model)
    _model.register_for_auto_class(_auto.__name__)
