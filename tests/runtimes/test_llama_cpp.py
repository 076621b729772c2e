"""Tickets in llama.cpp itself: the same tokens, the same numbers; or one line that says why not."""

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from cases import TINY
from llama import (
    POSITIONS,
    RECIPES,
    TEXT,
    UNSEEN,
    Llama,
    LlamaServer,
    expected_log_probabilities,
    learn,
    odd_texts,
    perplexity,
    read_file,
    read_types,
    save,
)
from packaging.version import Version
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
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
from hf_slt.runtimes.gguf_types import MOST_ROUNDING, TYPES, pack
from hf_slt.runtimes.gguf_vocabulary import QWEN
from hf_slt.runtimes.llama_cpp import export_gguf
from hf_slt.text.blocks import train_tokenizer

gguf = pytest.importorskip("gguf")
xllamacpp = pytest.importorskip("xllamacpp")  # only for its constants: servers run in processes of their own
SHAPE = {**TINY, "n_layer": 2, "n_embd": 256, "n_positions": POSITIONS, "bos_token_id": 0, "eos_token_id": 0}
SHAPE |= {"law": "signed_constant", "pad_token_id": None}
EXACT = {"qk_scale": 1, "initializer_range": 0.25, "scale_with_width": False}  # constants are powers of two
# What is not the plain ticket of weights -c, 0 and c: options, and the types that its matrices and table get.
CASES = {
    "normal": ({"law": "normal"}, "f32", "f32"),
    "signed-row_scales": ({"rule": "signed", "density": None, "scales": "row"}, "tq1_0", "tq1_0"),
    "tensor_scales-trained_gains": ({"scales": "tensor", "layer_norm": "trained"}, "tq1_0", "tq1_0"),
    "untied": ({"tie_word_embeddings": False, "initializer_range": 0.03125}, "tq1_0", "tq1_0"),
    "trained_tables": ({"embedding": "trained", "embedding_bits": 8}, "tq1_0", "f32"),
    "frozen_tables-multicoat": ({"rule": "multicoat", "density": None, "embedding": "frozen"}, "f32", "q1_0"),
    "sign-row_scales": ({"rule": "sign", "density": None, "scales": "row"}, "q1_0", "q1_0"),
    "sign-width-128": ({"rule": "sign", "density": None, "n_embd": 128}, "q1_0", "q1_0"),
    "sign-width-64": ({"rule": "sign", "density": None, "n_embd": 64, "n_inner": 64}, "q2_0", "q2_0"),
    "width-128": ({"n_embd": 128, "n_inner": 320}, "q2_0", "q2_0"),
    "width-96": ({"n_embd": 96, "n_inner": 160}, "q4_0", "q4_0"),
    "width-48": ({"n_embd": 48, "n_inner": 48}, "f16", "f16"),
    "width-48-tiny": ({"n_embd": 48, "n_inner": 48, "initializer_range": 1e-9}, "f32", "f32"),
    "trellis": ({"rule": "trellis", "density": None, "law": "normal", "n_embd": 64}, "f32", "f32"),
}


@pytest.fixture(scope="module")
def words():
    return train_tokenizer([TEXT], 300, 128)


def make(words, steps: int = 0, **changes) -> SupermaskGPT2LMHeadModel:
    """A model that has read the text for some steps; with random scales, gains and tables."""
    model = SupermaskGPT2LMHeadModel(SupermaskGPT2Config(**SHAPE | {"vocab_size": len(words)} | changes))
    return learn(model, words, steps)


@pytest.fixture(scope="module")
def ticket(words, tmp_path_factory):
    """One that writes words, not one and the same token."""
    return save(tmp_path_factory.mktemp("llama") / "ticket", make(words, 120), words)


@pytest.fixture
def running():
    """Starts servers, which end with the test."""
    with ExitStack() as servers:
        yield lambda path: servers.enter_context(Llama(path))


# -- the same numbers --------------------------------------------------------------------------------------


def test_float32_writes_and_says_what_the_ticket_does(ticket, running, tmp_path):
    export_gguf(ticket, tmp_path / "a.gguf", "f32")
    model, words = SupermaskGPT2LMHeadModel.from_pretrained(ticket), AutoTokenizer.from_pretrained(ticket)
    there = running(tmp_path / "a.gguf")
    start = torch.tensor([words("A ticket").input_ids])
    ours = model.generate(start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=64)
    ours = ours[0, start.shape[1] :].tolist()
    assert len(ours) == 64
    assert len(set(ours)) > 15
    assert there.greedy(start[0].tolist(), 64) == ours
    ids = [0, *words(UNSEEN).input_ids]
    assert_close(
        there.log_probabilities(ids, len(words)), expected_log_probabilities(model, ids), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_ticket_by_auto(name, words, running, tmp_path):
    changes, type, table = CASES[name]
    model = make(words, **changes)
    printed = export_gguf(save(tmp_path / "ticket", model, words), tmp_path / "a.gguf")
    assert f"{type}, {TYPES[type].bits:.3g} bits per weight" in printed
    if type != "q2_0":  # which the package does not know
        types = read_types(tmp_path / "a.gguf")
        assert {kind for name, kind in types.items() if name.startswith("blk") and "ffn_up.w" in name} == {
            type
        }
        assert types["token_embd.weight"] == table
        assert types.get("output.weight", table) == table
    ids = [0, *words(UNSEEN).input_ids]
    theirs = running(tmp_path / "a.gguf").log_probabilities(ids, len(words))
    ours = expected_log_probabilities(model, ids)
    error = (theirs - ours).square().mean().sqrt() / ours.std()
    # llama.cpp rounds what coded matrices are multiplied by to 8 bits, and values of GELU to float16.
    assert error < max({"f32": 1e-3, "f16": 3e-3}.get(one, 0.03) for one in (type, table))


@pytest.mark.parametrize("type", ["f16", "tq2_0", "tq1_0", "q2_0"])
def test_perplexity_in_every_type(type, ticket, running, tmp_path):
    export_gguf(ticket, tmp_path / "a.gguf", type)
    model, words = SupermaskGPT2LMHeadModel.from_pretrained(ticket), AutoTokenizer.from_pretrained(ticket)
    ids = [0, *words(UNSEEN).input_ids]
    theirs = running(tmp_path / "a.gguf").log_probabilities(ids, len(words))
    ours = expected_log_probabilities(model, ids)
    assert perplexity(theirs, ids) == pytest.approx(perplexity(ours, ids), rel=0.01)


@pytest.mark.parametrize("type", ["f32", "f16", "tq2_0", "tq1_0"])
def test_the_file_holds_the_weights_and_tells_what_was_rounded(type, ticket, tmp_path):
    printed = export_gguf(ticket, tmp_path / "a.gguf", type)
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
    assert ("rounded: nothing" in printed) == (worst == 0)
    assert (type == "f32") == (worst == 0)
    if worst:
        assert f"by {100 * worst:.2g} %" in printed


def test_a_constant_that_float16_holds_is_not_rounded(words, tmp_path):
    model = make(words, **EXACT)
    printed = export_gguf(save(tmp_path / "ticket", model, words), tmp_path / "a.gguf")
    assert "tq1_0, " in printed
    assert "rounded: nothing" in printed


def dequantize_slowly(data: bytes, type: str) -> list[float]:
    """Weights of a matrix, one after the other, as llama.cpp's documentation has them."""
    kind, weights = TYPES[type], []
    for start in range(0, len(data), kind.bytes):
        scale = float(np.frombuffer(data[start : start + 2], "<f2")[0])
        codes = data[start + 2 : start + kind.bytes]
        for place in range(kind.block):
            if type == "q1_0":
                code = 2 * (codes[place // 8] >> (place % 8) & 1) - 1
            elif type == "q2_0":
                code = (codes[place // 4] >> 2 * (place % 4) & 3) - 1
            else:
                code = (codes[place % 16] >> 4 * (place // 16) & 15) - 8
            weights.append(code * scale)
    return weights


@pytest.mark.parametrize("type", ["q1_0", "q2_0", "q4_0"])
def test_our_own_packers(type):
    generator = np.random.default_rng(0)
    signs = generator.choice([-1, 1] if type == "q1_0" else [-1, 0, 1], (6, 256))
    rows = (signs * generator.choice([2.0**-10, 0.75, 3.0, 0.0], (6, 1))).astype(np.float32)
    assert dequantize_slowly(pack(rows, type).tobytes(), type) == rows.ravel().tolist()


def test_every_matrix_gets_the_type_that_fits_its_rows(words, running, tmp_path):
    """Rows of 144 fill no block, rows of 576 do; the same of 128 and 512."""
    model = make(words, n_embd=144)
    printed = export_gguf(save(tmp_path / "a", model, words), tmp_path / "a.gguf")
    assert "q2_0, 2.25 bits per weight: 2 matrices with rows of 576" in printed
    assert "f16, 16 bits per weight: 7 matrices with rows of 144, not a multiple of a block" in printed
    printed = export_gguf(save(tmp_path / "b", make(words, n_embd=128), words), tmp_path / "b.gguf", "tq2_0")
    assert "tq2_0, 2.06 bits per weight: 2 matrices with rows of 512" in printed
    assert "q2_0, 2.25 bits per weight: 7 matrices with rows of 128" in printed
    ids = [0, *words(UNSEEN).input_ids]
    theirs = running(tmp_path / "a.gguf").log_probabilities(ids, len(words))
    ours = expected_log_probabilities(model, ids)
    assert (theirs - ours).square().mean().sqrt() / ours.std() < 0.03


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


def test_the_tokenizer_in_the_file_is_the_ticket_s(ticket, running, tmp_path):
    export_gguf(ticket, tmp_path / "a.gguf", "tq1_0")
    there, words = running(tmp_path / "a.gguf"), AutoTokenizer.from_pretrained(ticket)
    for text in odd_texts(300):
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
        (
            {"n_embd": 128, "n_inner": 128},
            "tq1_0",
            "rows of 128 weights, which is not a multiple of the block of 256; use q2_0",
        ),
        (
            {"n_embd": 32, "n_inner": 32},
            "q2_0",
            "rows of 32 weights, which is not a multiple of the block of 64; use q4_0",
        ),
        ({}, "q1_0", "has zeros; use tq1_0"),
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


def splitting(pattern: str, behavior: str = "isolated") -> pre_tokenizers.Sequence:
    """Split by a pattern, as Llama 3 and Qwen do."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior), plain])


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
    "splits by": lambda: tokenizer_of(bpe(), splitting("[a-z]+")),
    "behavior": lambda: tokenizer_of(bpe(), splitting(QWEN, "removed")),
    "without merges": lambda: tokenizer_of(models.BPE({"a": 0}, []), BYTES),
    "end-of-text": lambda: tokenizer_of(bpe(), BYTES, None),
}


@pytest.mark.parametrize("named", BAD_TOKENIZERS)
def test_tokenizers_of_another_kind_are_refused(named, ticket, tmp_path):
    BAD_TOKENIZERS[named]().save_pretrained(tmp_path / "words")
    with pytest.raises(SLTError, match=named):
        export_gguf(ticket, tmp_path / "a.gguf", tokenizer=str(tmp_path / "words"))
    assert not (tmp_path / "a.gguf").exists()


def test_a_tokenizer_that_is_too_large_is_refused_and_a_small_one_is_filled_up(ticket, running, tmp_path):
    train_tokenizer([TEXT], 310, 128).save_pretrained(tmp_path / "large")
    with pytest.raises(SLTError, match="310 tokens, the model 300"):
        export_gguf(ticket, tmp_path / "a.gguf", tokenizer=str(tmp_path / "large"))
    small = train_tokenizer([TEXT], 290, 128)
    small.save_pretrained(tmp_path / "small")
    export_gguf(ticket, tmp_path / "a.gguf", tokenizer=str(tmp_path / "small"))
    assert running(tmp_path / "a.gguf").ask("tokenize", content=UNSEEN)["tokens"] == small(UNSEEN).input_ids


# -- the command ---------------------------------------------------------------------------------------------


def test_the_command_says_what_it_chose(capsys, ticket, tmp_path):
    assert main(["export", str(ticket), str(tmp_path / "a.gguf")]) == 0
    out, _ = capsys.readouterr()
    size = (tmp_path / "a.gguf").stat().st_size
    assert f"{size:,} bytes" in out
    assert "tq1_0, 1.69 bits" in out
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
        more = ["--type", "q5_0"]
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


def test_without_the_package_the_cure_is_named_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SLTError, match=r"the package gguf is not installed; pip install .*\[llama\]"):
        export_gguf(tmp_path / "no ticket is read", tmp_path / "a.gguf")


# -- a server that hangs -----------------------------------------------------------------------------------

FAKE = """
import http.server, json, threading, time

class CommonParams:
    def __init__(self):
        self.model = self.cpuparams = self.cpuparams_batch = type("Options", (), {})()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(question.get("sleep", 0))
        self.send_response(200)
        self.end_headers()
        tokens = question.get("n_predict", 0)
        self.wfile.write(json.dumps({"tokens_predicted": tokens, "tokens": [1] * tokens}).encode())

    def log_message(self, *words):
        pass

class Server:
    def __init__(self, options):
        if "never" in options.model.path:
            time.sleep(1000)
        print("noise")
        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.listening_address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __del__(self):
        time.sleep(1000)
"""


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """In other processes, llama.cpp is one whose destructor never ends."""
    (tmp_path / "xllamacpp.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_a_destructor_that_never_ends_is_not_waited_for(hanging):
    with LlamaServer("a.gguf", n_ctx=64) as server:
        assert server.ask("completion", n_predict=2)["tokens"] == [1, 1]
        started = time.monotonic()
    assert time.monotonic() - started < 30
    assert server.process.returncode is not None
    words = [sys.executable, RECIPES / "llama_generate.py", "a.gguf", "--new", "4", "--repeats", "1"]
    assert "tokens_per_second" in subprocess.check_output(words, text=True, timeout=60)


def test_a_server_that_does_not_answer_in_time_is_killed(hanging):
    server = LlamaServer("a.gguf", seconds=20, n_ctx=64)
    server.seconds = 1
    with pytest.raises(TimeoutError, match=r"a\.gguf: llama\.cpp did not answer within 1 seconds"):
        server.ask("completion", sleep=1000)
    assert server.process.returncode is not None
    with pytest.raises(TimeoutError, match=r"never\.gguf"):
        LlamaServer("never.gguf", seconds=1, n_ctx=64)


def test_a_file_that_llama_cpp_cannot_read_is_an_error(tmp_path):
    (tmp_path / "a.gguf").write_text("not GGUF")
    with pytest.raises(RuntimeError, match=r"a\.gguf: llama\.cpp ended with code"):
        LlamaServer(tmp_path / "a.gguf", n_ctx=64)


def test_types_are_those_of_llama_cpp():
    for name, type in TYPES.items():
        assert xllamacpp.ggml_type[f"GGML_TYPE_{name.upper()}"].value == type.number
