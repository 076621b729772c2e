"""The table of tiny architectures that the tests share."""

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

import hf_slt

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**TEXT, **ENDS, "num_key_value_heads": 2}
SPEECH = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 64,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
    "max_source_positions": 20, "max_target_positions": 32, "pad_token_id": 0, "decoder_start_token_id": 1,
    "suppress_tokens": None, "begin_suppress_tokens": None, **ENDS,
}  # fmt: skip
OPT = {key: value for key, value in TEXT.items() if key != "intermediate_size"} | ENDS
IDS = torch.randint(3, 60, (2, 10), generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
BATCHES = {
    "text": {"input_ids": IDS, "labels": IDS},
    "image": {"pixel_values": NOISE, "labels": torch.tensor([0, 2])},
    "speech": {"input_features": NOISE[:, 0, :8].repeat(1, 1, 3)[..., :40], "labels": IDS},
}
# Stock configuration, its options, Auto class, kind of input.
CASES = {
    "gpt2": ("GPT2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64}, AutoModelForCausalLM, "text"),
    "llama": ("Llama", GROUPED, AutoModelForCausalLM, "text"),
    "llama-tied": ("Llama", {**GROUPED, "tie_word_embeddings": True}, AutoModelForCausalLM, "text"),
    "mistral": ("Mistral", GROUPED, AutoModelForCausalLM, "text"),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 8}, AutoModelForCausalLM, "text"),
    "gemma3": ("Gemma3Text", {**GROUPED, "head_dim": 8}, AutoModelForCausalLM, "text"),
    "phi3": ("Phi3", GROUPED, AutoModelForCausalLM, "text"),
    "gpt_neox": ("GPTNeoX", {**TEXT, **ENDS}, AutoModelForCausalLM, "text"),
    "opt": ("OPT", {**OPT, "ffn_dim": 48, "word_embed_proj_dim": 32}, AutoModelForCausalLM, "text"),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 4}, AutoModelForCausalLM, "text"),
    "gpt_oss": ("GptOss", {**GROUPED, "head_dim": 8, "num_local_experts": 4}, AutoModelForCausalLM, "text"),
    "bert": ("Bert", TEXT, AutoModelForMaskedLM, "text"),
    "roberta": ("Roberta", {**TEXT, **ENDS}, AutoModelForMaskedLM, "text"),
    "distilbert": (
        "DistilBert",
        {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "vocab_size": 64, "pad_token_id": 0},
        AutoModelForMaskedLM,
        "text",
    ),
    "vit": (
        "ViT",
        {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 3},
        AutoModelForImageClassification,
        "image",
    ),
    "t5": (
        "T5",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64,
         "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
        AutoModelForSeq2SeqLM,
        "text",
    ),
    "whisper": ("Whisper", SPEECH, AutoModelForSpeechSeq2Seq, "speech"),
}  # fmt: skip
every_architecture = pytest.mark.parametrize("name", CASES)


def make(name: str, **options):
    """Make a model that learns, and take one large training step."""
    stock, sizes, auto, kind = CASES[name]
    config = getattr(transformers, f"{stock}Config")(**sizes)
    model = auto.from_config(hf_slt.supermask_config(config, **{"density": 0.5, "seed": 7, **options}))
    model.train()(**BATCHES[kind]).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    return model.eval()


@torch.no_grad()
def logits_of(model, name: str):
    batch = {
        key: one.to(model.dtype) if one.is_floating_point() else one
        for key, one in BATCHES[CASES[name][3]].items()
    }
    return model(**batch).logits.float()
