"""The base of the mixins: `object` at run time, but a model of transformers for a type checker."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel as MixinBase
else:
    MixinBase = object

__all__ = ["MixinBase"]
