"""The base of the mixins: nothing at run time, a model of transformers to a type checker."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel as MixinBase
else:
    MixinBase = object

__all__ = ["MixinBase"]
