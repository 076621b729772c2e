"""Tickets of Llama, Mistral, Qwen3 and Gemma 3 in llama.cpp: the same tokens and numbers as in transformers."""

import unicodedata

import pytest
import torch
import transformers
from llama import (
    POSITIONS,
    TEXT,
    UNSEEN,
    Llama,
    expected_log_probabilities,
    learn,
    odd_texts,
    perplexity,
    read_file,
    save,
)
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

import hf_slt
from hf_slt import SLTError
from hf_slt.runtimes.gguf_vocabulary import LLAMA_3, QWEN
from hf_slt.runtimes.llama_cpp import export_gguf
from hf_slt.text.tokenizer import train_tokenizer

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")
SIZES = {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": POSITIONS, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LLAMA_3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
BIASED = {"attention_bias": True, "mlp_bias": True}
GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 200000.0},
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {
    "num_hidden_layers": 3,
    "layer_types": ALTERNATING,
    "sliding_window": 8,
    "rope_parameters": GEMMA_ROPE,
}
# Stock configuration, and what is special about it.
CASES = {
    "llama": ("Llama", {"rms_norm_eps": 1e-4}),
    "llama-3.1": (
        "Llama",
        {"tie_word_embeddings": True, "head_dim": 16, "rope_parameters": LLAMA_3_ROPE, **BIASED},
    ),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": POSITIONS, "head_dim": 64}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "gemma3": ("Gemma3Text", {**GEMMA, "head_dim": 16, "query_pre_attn_scalar": 50}),
}
OPTIONS = {"law": "signed_constant", "seed": 1, "scales": "row", "layer_norm": "trained", "biases": "trained"}


def make(words, name: str, stock: dict, steps: int = 0, auto=AutoModelForCausalLM, **options):
    config = getattr(transformers, f"{name}Config")(**SIZES | {"pad_token_id": None} | stock)
    model = auto.from_config(hf_slt.supermask_config(config, **OPTIONS | options))
    return learn(model, words, steps) if steps else model.eval()


@pytest.fixture(scope="module")
def words():
    return train_tokenizer([TEXT], 300, POSITIONS)


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_computes_what_transformers_does(name, words, tmp_path):
    model = make(words, *CASES[name], steps=20, rule="signed", density=0.6)
    folder = save(tmp_path / "ticket", model, words)
    ids = [0, *words(UNSEEN).input_ids]
    ours, start = expected_log_probabilities(model, ids), torch.tensor([ids[:5]])
    written = model.generate(start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=40)
    export_gguf(folder, tmp_path / "a.gguf", "f32")
    with Llama(tmp_path / "a.gguf") as there:
        gelu = 1e-3 if name == "gemma3" else 2e-5  # llama.cpp has a table of GELU in float16
        assert_close(there.log_probabilities(ids, len(words)), ours, rtol=gelu, atol=gelu)
        assert there.greedy(ids[:5], 40) == written[0, 5:].tolist()
    printed = export_gguf(folder, tmp_path / "b.gguf")
    assert "tq1_0, 1.69 bits per weight" in printed  # rows of 256
    assert "f32" not in printed
    with Llama(tmp_path / "b.gguf") as there:
        theirs = there.log_probabilities(ids, len(words))
    assert (theirs - ours).square().mean().sqrt() / ours.std() < 0.03
    assert perplexity(theirs, ids) == pytest.approx(perplexity(ours, ids), rel=0.01)


def test_one_bit_per_weight_and_weights_of_a_trellis(words, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    model = make(words, "Llama", sizes, steps=5, rule="sign")
    printed = export_gguf(save(tmp_path / "sign", model, words), tmp_path / "a.gguf")
    assert "q1_0, 1.12 bits per weight: 16 matrices with rows of 128" in printed
    ids = [0, *words(UNSEEN).input_ids]
    with Llama(tmp_path / "a.gguf") as there:
        theirs = there.log_probabilities(ids, len(words))
    ours = expected_log_probabilities(model, ids)
    assert (theirs - ours).square().mean().sqrt() / ours.std() < 0.03
    model = make(words, "Llama", sizes, rule="trellis", law="normal").to_ticket()
    printed = export_gguf(save(tmp_path / "trellis", model, words), tmp_path / "b.gguf")
    assert "f32, 32 bits per weight: 16 matrices with rows of 128, not ternary" in printed
    stock, found = model.merge_and_unload().state_dict(), read_file(tmp_path / "b.gguf")
    assert (found["blk.1.ffn_gate.weight"][1] == stock["model.layers.1.mlp.gate_proj.weight"].numpy()).all()


@pytest.mark.parametrize(
    ("name", "stock", "named"),
    [
        ("Phi3", {}, "a phi3 is exported in two steps"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "'dynamic'",
        ),
        ("Mistral", {"sliding_window": 16}, "sliding_window 16"),
        ("Qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("Qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "'linear'"),
        (
            "Qwen3",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
            "sliding_window 16",
        ),
        ("Gemma3Text", {**GEMMA, "hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ("Gemma3Text", {**GEMMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("Gemma3Text", {**GEMMA, "layer_types": [*ALTERNATING[:2], "full_attention"]}, "without a period"),
    ],
    ids=lambda value: value if isinstance(value, str) and "_" in value else "",
)
def test_what_llama_cpp_cannot_express_is_refused(name, stock, named, words, tmp_path):
    folder = save(tmp_path / "ticket", make(words, name, stock), words)
    with pytest.raises(SLTError, match=named):
        export_gguf(folder, tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()


def test_what_has_no_norms_or_is_a_classifier_is_refused(words, tmp_path):
    folder = save(tmp_path / "a", make(words, "Llama", {}, layer_norm=False), words)
    with pytest.raises(SLTError, match="layer_norm=False"):
        export_gguf(folder, tmp_path / "a.gguf")
    model = make(words, "Llama", {}, auto=AutoModelForSequenceClassification)
    with pytest.raises(SLTError, match="SupermaskLlamaForSequenceClassification"):
        export_gguf(save(tmp_path / "b", model, words), tmp_path / "b.gguf")


# -- tokenizers --------------------------------------------------------------------------------------------


def split_by(pattern: str, size: int, ignore_merges: bool = False, nfc: bool = False, bos: bool = False):
    """A tokenizer that splits by a pattern, as those of Llama 3 and Qwen do."""
    made = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    made.normalizer = normalizers.NFC() if nfc else None
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [2 * TEXT, *2 * odd_texts(40)]
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=size, special_tokens=["<|endoftext|>"], initial_alphabet=letters),
    )
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    )


TOKENIZERS = {
    "llama-3": lambda: split_by(LLAMA_3, 500, ignore_merges=True, bos=True),
    "llama-3-merging": lambda: split_by(LLAMA_3, 500),
    "qwen": lambda: split_by(QWEN, 500, nfc=True),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_are_split_and_merged_as_in_python(name, words, tmp_path):
    tokenizer = TOKENIZERS[name]()
    folder = save(tmp_path / "ticket", make(words, "Llama", {"vocab_size": 512}), tokenizer)
    printed = export_gguf(folder, tmp_path / "a.gguf")
    assert ("NFC" in printed) == (name == "qwen")
    with Llama(tmp_path / "a.gguf") as there:
        for text in odd_texts(200):
            text = unicodedata.normalize("NFC", text)
            found = there.ask("tokenize", content=text, add_special=True)["tokens"]
            assert found == tokenizer(text).input_ids, text


def test_the_patterns_are_those_of_transformers():
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert QWEN == PRETOKENIZE_REGEX
    assert TikTokenConverter().pattern == LLAMA_3


def test_merges_that_llama_cpp_would_not_ignore_are_refused(words, tmp_path):
    folder = save(
        tmp_path / "a", make(words, "Llama", {"vocab_size": 512}), split_by(QWEN, 500, ignore_merges=True)
    )
    with pytest.raises(SLTError, match="ignore_merges True"):
        export_gguf(folder, tmp_path / "a.gguf")
