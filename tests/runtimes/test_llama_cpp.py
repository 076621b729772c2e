"""Tickets in llama.cpp itself: the same tokens, the same numbers; or one line that says why not."""

import json
import math
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from cases import TINY
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch.testing import assert_close
from transformers import AutoTokenizer, GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_slt import (
    SLTError,
    SupermaskGPT2Config,
    SupermaskGPT2ForSequenceClassification,
    SupermaskGPT2LMHeadModel,
    SupermaskGPT2Model,
)
from hf_slt.cli import main
from hf_slt.runtimes.llama_cpp import FLOAT, MOST_ROUNDING, TYPES, export_gguf
from hf_slt.text.blocks import train_tokenizer

gguf = pytest.importorskip("gguf")
llama = pytest.importorskip("xllamacpp")

TEXT = (
    "A ticket is a seed and a mask. The seed draws every weight, and nothing changes it. The mask says which "
    "weights stay and which ones go. So a small file holds a large model: whoever has the seed has the "
    "weights, and whoever has the mask has what was learned. "
)
UNSEEN = "The seed says which weights go, and a small mask changes nothing of it. Whoever stays was learned!"
SHAPE = {**TINY, "n_layer": 2, "n_embd": 256, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}
SHAPE |= {"law": "signed_constant", "pad_token_id": None}
EXACT = {"qk_scale": 1, "initializer_range": 0.25, "scale_with_width": False}  # constants are powers of two
# What is not the plain ticket of weights -c, 0 and c: options, and the types that its matrices and table get.
CASES = {
    "normal": ({"law": "normal"}, "f32", "f32"),
    "signed-row_scales": ({"rule": "signed", "density": None, "scales": "row"}, "tq1_0", "tq1_0"),
    "tensor_scales-trained_gains": ({"scales": "tensor", "layer_norm": "trained"}, "tq1_0", "tq1_0"),
    "untied": ({"tie_word_embeddings": False, "initializer_range": 0.03125}, "tq1_0", "tq1_0"),
    "trained_tables": ({"embedding": "trained", "embedding_bits": 8}, "tq1_0", "f32"),
    "frozen_tables-multicoat": ({"rule": "multicoat", "density": None, "embedding": "frozen"}, "f32", "f32"),
    "width-128": ({"n_embd": 128, "n_inner": 320}, "q2_0", "q2_0"),
    "width-32": ({"n_embd": 32}, "f32", "f32"),
    "width-32-halves": ({"n_embd": 32, **EXACT}, "f16", "f16"),
}


def save(folder: Path, model, words) -> Path:
    model.save_ticket(folder)
    words.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def words():
    return train_tokenizer([TEXT], 300, 128)


def make(words, steps: int = 0, **changes) -> SupermaskGPT2LMHeadModel:
    """A model that has read the text for some steps; with random scales, gains and tables."""
    torch.manual_seed(0)
    model = SupermaskGPT2LMHeadModel(SupermaskGPT2Config(**SHAPE | {"vocab_size": len(words)} | changes))
    for name, values in model.named_parameters():
        if name.endswith("values"):  # scales and gains start at one, tables as they were drawn
            torch.nn.init.uniform_(values, 0.5, 1.5) if len(values) == 1 else torch.nn.init.normal_(
                values, std=0.05
            )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    ids = torch.tensor(words(3 * TEXT, verbose=False).input_ids)
    for _ in range(steps):
        rows = torch.stack(
            [ids[start : start + 64] for start in torch.randint(0, len(ids) - 64, (4,)).tolist()]
        )
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.to_ticket().eval()


@pytest.fixture(scope="module")
def ticket(words, tmp_path_factory):
    """One that writes words, not one and the same token."""
    return save(tmp_path_factory.mktemp("llama") / "ticket", make(words, 40), words)


class Llama:
    """A file in llama.cpp, with float32 keys and values, on one thread."""

    def __init__(self, path: Path) -> None:
        options = llama.CommonParams()
        options.model.path = str(path)
        options.n_ctx, options.n_parallel = SHAPE["n_positions"], 1
        options.warmup, options.fit_params, options.verbosity = False, False, -1
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
        options.cache_type_k = options.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        options.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = llama.Server(options)

    def ask(self, what: str, **question):
        data, kind = json.dumps(question).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.server.listening_address}/{what}", data, kind)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def greedy(self, ids: list[int], new: int) -> list[int]:
        options = {"n_predict": new, "temperature": 0, "return_tokens": True}
        return self.ask("completion", prompt=ids, **options)["tokens"]

    def log_probabilities(self, ids: list[int], size: int) -> torch.Tensor:
        """Of every token after every beginning of `ids`: (length, size)."""
        # The token that it goes on with does not matter, but must be a whole letter: "a".
        options = {"n_predict": 1, "n_probs": size, "temperature": 0, "logit_bias": [["a", 1e4]]}
        found = torch.empty(len(ids), size)
        for end in range(len(ids)):
            answer = self.ask("completion", prompt=ids[: end + 1], **options)
            for one in answer["completion_probabilities"][0]["top_logprobs"]:
                found[end, one["id"]] = one["logprob"]
        return found


@torch.no_grad()
def expected_log_probabilities(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def perplexity(logs: torch.Tensor, ids: list[int]) -> float:
    return math.exp(-logs[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean().item())


def read_file(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Type and weights of every tensor, by the reader of the gguf package."""
    return {
        one.name: (one.tensor_type.name.lower(), gguf.dequantize(one.data, one.tensor_type))
        for one in gguf.GGUFReader(path).tensors
    }


# -- the same numbers --------------------------------------------------------------------------------------


def test_float32_writes_and_says_what_the_ticket_does(ticket, tmp_path):
    export_gguf(ticket, tmp_path / "a.gguf", "f32")
    model, words = SupermaskGPT2LMHeadModel.from_pretrained(ticket), AutoTokenizer.from_pretrained(ticket)
    there = Llama(tmp_path / "a.gguf")
    start = torch.tensor([words("A ticket").input_ids])
    ours = model.generate(start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=64)
    ours = ours[0, start.shape[1] :].tolist()
    assert len(ours) == 64
    assert len(set(ours)) > 15
    assert there.greedy(start[0].tolist(), 64) == ours
    ids = [0, *words(UNSEEN).input_ids]
    assert_close(
        there.log_probabilities(ids, len(words)), expected_log_probabilities(model, ids), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_ticket_by_auto(name, words, tmp_path):
    changes, type, table = CASES[name]
    model = make(words, **changes)
    told = export_gguf(save(tmp_path / "ticket", model, words), tmp_path / "a.gguf")
    assert f"type {type}," in told
    if type != "q2_0":  # which the package does not know
        types = {name: kind for name, (kind, _) in read_file(tmp_path / "a.gguf").items()}
        assert {kind for name, kind in types.items() if name.startswith("blk") and "ffn_up.w" in name} == {
            type
        }
        assert types["token_embd.weight"] == table
        assert types.get("output.weight", table) == table
    ids = [0, *words(UNSEEN).input_ids]
    theirs = Llama(tmp_path / "a.gguf").log_probabilities(ids, len(words))
    ours = expected_log_probabilities(model, ids)
    error = (theirs - ours).square().mean().sqrt() / ours.std()
    # llama.cpp rounds what ternary matrices are multiplied by to 8 bits, and values of GELU to float16.
    assert error < (1e-3 if type in FLOAT else 0.03)


@pytest.mark.parametrize("type", ["f16", "tq2_0", "tq1_0", "q2_0"])
def test_perplexity_in_every_type(type, ticket, tmp_path):
    export_gguf(ticket, tmp_path / "a.gguf", type)
    model, words = SupermaskGPT2LMHeadModel.from_pretrained(ticket), AutoTokenizer.from_pretrained(ticket)
    ids = [0, *words(UNSEEN).input_ids]
    theirs = Llama(tmp_path / "a.gguf").log_probabilities(ids, len(words))
    ours = expected_log_probabilities(model, ids)
    assert perplexity(theirs, ids) == pytest.approx(perplexity(ours, ids), rel=0.01)


@pytest.mark.parametrize("type", ["f32", "f16", "tq2_0", "tq1_0"])
def test_the_file_holds_the_weights_and_tells_what_was_rounded(type, ticket, tmp_path):
    told = export_gguf(ticket, tmp_path / "a.gguf", type)
    stock = SupermaskGPT2LMHeadModel.from_pretrained(ticket).merge_and_unload().state_dict()
    found, worst = read_file(tmp_path / "a.gguf"), 0.0
    for ours, theirs in {
        "transformer.wte.weight": "token_embd.weight",
        "transformer.h.1.attn.c_attn.weight": "blk.1.attn_qkv.weight",
        "transformer.h.0.attn.c_proj.weight": "blk.0.attn_output.weight",
        "transformer.h.1.mlp.c_fc.weight": "blk.1.ffn_up.weight",
        "transformer.h.0.mlp.c_proj.weight": "blk.0.ffn_down.weight",
    }.items():
        weight = (stock[ours] if "wte" in ours else stock[ours].T).numpy()
        kind, rows = found[theirs]
        assert kind == type
        assert np.array_equal(np.sign(rows), np.sign(weight))
        worst = max(worst, np.abs(rows - weight).max() / np.abs(weight).max())
    assert np.array_equal(found["position_embd.weight"][1], stock["transformer.wpe.weight"].numpy())
    assert worst <= MOST_ROUNDING
    assert ("rounded: nothing" in told) == (worst == 0)
    assert (type == "f32") == (worst == 0)
    if worst:
        assert f"by {100 * worst:.2g} %" in told


def test_a_constant_that_float16_holds_is_not_rounded(words, tmp_path):
    model = make(words, **EXACT)
    told = export_gguf(save(tmp_path / "ticket", model, words), tmp_path / "a.gguf")
    assert "type tq1_0" in told
    assert "rounded: nothing" in told


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="does not read a GGUF file of GPT-2 rightly yet",
)
@pytest.mark.parametrize("type", ["f32", "tq1_0"])
def test_transformers_reads_the_file(type, ticket, tmp_path):
    export_gguf(ticket, tmp_path / "a.gguf", type)
    stock = GPT2LMHeadModel.from_pretrained(tmp_path, gguf_file="a.gguf")
    model, words = SupermaskGPT2LMHeadModel.from_pretrained(ticket), AutoTokenizer.from_pretrained(ticket)
    ids = torch.tensor([words(UNSEEN).input_ids])
    with torch.no_grad():
        assert_close(stock(ids).logits, model(ids).logits, rtol=0, atol=1e-4 if type == "f32" else 0.02)
    again = AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    assert again(UNSEEN).input_ids == words(UNSEEN).input_ids
    assert again.eos_token_id == words.eos_token_id


# -- the tokenizer -----------------------------------------------------------------------------------------

ODD = [
    "", " ", "  ", "\n", "\r\n\t ", "a  b   c ", " leading", "trailing  ", "it's they'll I've I'm he'd CAN'T",
    "x'S 'tis ''s", "3.14159 1,000,000 ²³ ½ ١٢٣ 一二三", "déjà vu, naïve, Ångström", "ﬁ ﬂ", "ß",
    "Привет, мир", "שלום", "नमस्ते", "日本語のテキスト", "한국어", "🙂🙃 👩\u200d👩\u200d👧 🏳️\u200d🌈",
    "\u200b\u200d\ufeff", "\u00a0\u2003\u3000", "a\u0301\u0302", "\x00\x01\x7f",
    "<|endoftext|>", "a<|endoftext|>b <|endoftext|>", "<|endof", "||###$$%%",
    "def f(x):\n    return x ** 2  # comment\n", "\ud7ff\ue000\uffff", "\U0001d49c\U0001d4c1", "a" * 300,
    " " * 70 + "x",
]  # fmt: skip


def test_the_tokenizer_in_the_file_is_the_ticket_s(ticket, tmp_path):
    export_gguf(ticket, tmp_path / "a.gguf", "tq1_0")
    there, words = Llama(tmp_path / "a.gguf"), AutoTokenizer.from_pretrained(ticket)
    generator = np.random.default_rng(0)
    letters = [*"".join(ODD), *"ab'S 1\n"]
    mixed = ["".join(generator.choice(letters, 20)) for _ in range(300)]
    for text in [*ODD, *mixed]:
        assert there.ask("tokenize", content=text)["tokens"] == words(text, verbose=False).input_ids, text


# -- what cannot be ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_norm": False}, "layer_norm=False"),
        ({"n_qk": 16}, "n_qk 16"),
        ({"n_v": 16}, "n_v 16"),
        ({"head_bias": True}, "head_bias=True"),
        ({"activation_function": "relu"}, "activation_function 'relu'"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_what_llama_cpp_cannot_express_is_refused(changes, named, words, tmp_path):
    folder = save(tmp_path / "ticket", make(words, n_embd=32, **changes), words)
    with pytest.raises(SLTError, match=named):
        export_gguf(folder, tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.parametrize("kind", [SupermaskGPT2ForSequenceClassification, SupermaskGPT2Model])
def test_what_is_no_language_model_is_refused(kind, words, tmp_path):
    config = SupermaskGPT2Config(**SHAPE | {"vocab_size": len(words), "n_embd": 32})
    save(tmp_path / "ticket", kind(config), words)
    with pytest.raises(SLTError, match=kind.__name__):
        export_gguf(tmp_path / "ticket", tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("changes", "type", "named"),
    [
        ({"law": "normal"}, "tq2_0", "f32"),
        ({"n_embd": 128}, "tq1_0", "rows of 256 weights, not 128, 512; use q2_0"),
        ({"n_embd": 32}, "q2_0", "rows of 64 weights, not 32, 128; use f16"),
        ({"initializer_range": 1e-9}, "tq2_0", "float16"),
        ({"initializer_range": 1e9}, "f16", "float16"),
    ],
)
def test_a_type_that_cannot_hold_the_weights_is_refused(changes, type, named, words, tmp_path):
    folder = save(tmp_path / "ticket", make(words, **changes), words)
    with pytest.raises(SLTError, match=named):
        export_gguf(folder, tmp_path / "a.gguf", type)
    assert not (tmp_path / "a.gguf").exists()


def tokenizer_of(model, before, end: str | None = "<end>", **more) -> PreTrainedTokenizerFast:
    made = Tokenizer(model)
    made.pre_tokenizer, made.decoder = before, decoders.ByteLevel()
    for name, value in more.items():
        setattr(made, name, value)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end)


def bpe(**options) -> models.BPE:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    places = {letter: place for place, letter in enumerate([*letters, "ab"])}
    return models.BPE(places, [("a", "b")], **options)


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
BAD_TOKENIZERS = {
    "WordLevel": lambda: tokenizer_of(models.WordLevel({"a": 0}, unk_token="a"), BYTES),
    "Whitespace": lambda: tokenizer_of(bpe(), pre_tokenizers.Whitespace()),
    "Sequence": lambda: tokenizer_of(bpe(), pre_tokenizers.Sequence([pre_tokenizers.Digits(), BYTES])),
    "add_prefix_space": lambda: tokenizer_of(bpe(), pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "use_regex": lambda: tokenizer_of(
        bpe(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ),
    "normalizer": lambda: tokenizer_of(bpe(), BYTES, normalizer=normalizers.NFC()),
    "ignore_merges": lambda: tokenizer_of(bpe(ignore_merges=True), BYTES),
    "without merges": lambda: tokenizer_of(models.BPE({"a": 0}, []), BYTES),
    "end-of-text": lambda: tokenizer_of(bpe(), BYTES, None),
}


@pytest.mark.parametrize("named", BAD_TOKENIZERS)
def test_tokenizers_of_another_kind_are_refused(named, ticket, tmp_path):
    BAD_TOKENIZERS[named]().save_pretrained(tmp_path / "words")
    with pytest.raises(SLTError, match=named):
        export_gguf(ticket, tmp_path / "a.gguf", tokenizer=str(tmp_path / "words"))
    assert not (tmp_path / "a.gguf").exists()


def test_a_tokenizer_that_is_too_large_is_refused_and_a_small_one_is_filled_up(ticket, tmp_path):
    train_tokenizer([TEXT], 310, 128).save_pretrained(tmp_path / "large")
    with pytest.raises(SLTError, match="310 tokens, the model 300"):
        export_gguf(ticket, tmp_path / "a.gguf", tokenizer=str(tmp_path / "large"))
    small = train_tokenizer([TEXT], 290, 128)
    small.save_pretrained(tmp_path / "small")
    export_gguf(ticket, tmp_path / "a.gguf", tokenizer=str(tmp_path / "small"))
    assert Llama(tmp_path / "a.gguf").ask("tokenize", content=UNSEEN)["tokens"] == small(UNSEEN).input_ids


# -- the command ---------------------------------------------------------------------------------------------


def test_the_command_says_what_it_chose(capsys, ticket, tmp_path):
    assert main(["export", str(ticket), str(tmp_path / "a.gguf")]) == 0
    out, _ = capsys.readouterr()
    size = (tmp_path / "a.gguf").stat().st_size
    assert f"{size:,} bytes" in out
    assert "type tq1_0, 1.69 bits" in out
    assert main(["export", str(ticket), str(tmp_path / "b.gguf"), "--type", "f16"]) == 0
    assert (tmp_path / "b.gguf").stat().st_size > 5 * size


def damaged(folder: Path, words) -> Path:
    save(folder, make(words, n_embd=32), words)
    data = bytearray((folder / "mask.safetensors").read_bytes())
    data[-3] ^= 1
    (folder / "mask.safetensors").write_bytes(data)
    return folder


@pytest.mark.parametrize("fault", ["type", "folder", "below a file", "damaged", "no tokenizer", "no ticket"])
def test_what_goes_wrong_is_one_line_and_leaves_nothing(fault, capsys, ticket, words, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "place").mkdir()
    out, source, more = tmp_path / "place" / "a.gguf", ticket, []
    if fault == "type":
        more = ["--type", "q4_0"]
    elif fault == "folder":
        out = tmp_path / "place"
    elif fault == "below a file":
        out = tmp_path / "file" / "a.gguf"
    elif fault == "damaged":
        source = damaged(tmp_path / "damaged", words)
    elif fault == "no tokenizer":
        source = tmp_path / "bare"
        make(words, n_embd=32).save_ticket(source)
    else:
        source = tmp_path / "place"
    assert main(["export", str(source), str(out), *more]) == 1
    said, err = capsys.readouterr()
    assert said == ""
    assert err.startswith("slt: ")
    assert err.count("\n") == 1
    assert "Error" not in err
    assert not list((tmp_path / "place").iterdir())


def test_a_write_that_fails_leaves_the_file_that_was_there(ticket, tmp_path, monkeypatch):
    (tmp_path / "a.gguf").write_text("before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(SLTError, match="No space left"):
        export_gguf(ticket, tmp_path / "a.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]
    assert (tmp_path / "a.gguf").read_text() == "before"


def test_without_the_package_the_cure_is_named(ticket, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SLTError, match=r"pip install 'hf_slt\[llama\]'"):
        export_gguf(ticket, tmp_path / "a.gguf")


def test_types_are_those_of_llama_cpp():
    for name, type in TYPES.items():
        assert llama.ggml_type[f"GGML_TYPE_{name.upper()}"].value == type.number
