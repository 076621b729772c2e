"""Loads this model with the package hf_slt, for trust_remote_code=True. It holds no code of its own."""

from hf_slt import SupermaskGPT2Config, SupermaskGPT2ForSequenceClassification, SupermaskGPT2LMHeadModel, SupermaskGPT2Model  # noqa: F401
