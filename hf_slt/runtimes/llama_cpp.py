"""A ticket as a GGUF file, which llama.cpp runs by itself: stock GPT-2 with its tokenizer.

llama.cpp multiplies by rows, one for each output. Where weights are -c, 0 and c (law signed_constant, and a
rule that keeps, drops or flips them), a row times its learned scale is ternary, and is stored in blocks:

    row = d * codes,    codes in {-1, 0, 1},    d = c * scale, in float16

    type        block                  bits a weight
    tq1_0       256 weights in 54 B    1.69             five codes in a byte
    tq2_0       256 weights in 66 B    2.06             four codes in a byte: the fastest on a CPU
    q2_0         64 weights in 18 B    2.25             the same, where 256 does not divide a row
    f16, f32                           16, 32           for any weights

Codes are exact. d is rounded to float16, by 2**-11 at most, as llama.cpp's GPT-2 has no float32 to put it in;
what was rounded, and by how much, is told. Norms, biases and positions are float32 in files of every type.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..model.ticket import SLTError
from ..sharing.files import replacing
from ..sharing.hub import TOKENIZER_FILES


@dataclass(frozen=True)
class Type:
    """How llama.cpp stores the weights of a tensor, in blocks along its rows."""

    number: int  # of ggml
    file_number: int  # of files that are mostly of it
    block: int = 1  # weights
    bytes: int = 4  # of a block


TERNARY = {"tq1_0": Type(34, 36, 256, 54), "tq2_0": Type(35, 37, 256, 66), "q2_0": Type(42, 41, 64, 18)}
FLOAT = {"f16": Type(1, 1, bytes=2), "f32": Type(0, 0)}
TYPES = TERNARY | FLOAT  # the smallest first
MOST_ROUNDING = 2**-11  # of the largest weight of a row: what float16 does to numbers within its range
# Stock GPT-2's names, and llama.cpp's.
NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}
NAMES |= {"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "lm_head": "output"}
NAMES |= {"ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
TABLES = ("token_embd.weight", "output.weight")
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of tokens


def export_gguf(
    folder: str | os.PathLike, path: str | os.PathLike, type: str = "auto", tokenizer: str | None = None
) -> str:
    """Write the ticket of a folder as one GGUF file, with the tokenizer beside it or another.

    Returns what there is to say of it: type, reason, what was rounded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, path = Path(folder), Path(path)
    if type not in ("auto", *TYPES):
        raise SLTError(f"type {type!r} is none that can be written; give auto, {', '.join(TYPES)}")
    if path.is_dir():
        raise SLTError(f"{path}: a folder; give the name of a file, such as {path / 'ticket.gguf'}")
    if not tokenizer and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        cure = "save one there (tokenizer.save_pretrained), or give --tokenizer"
        raise SLTError(f"{folder}: there is no tokenizer beside the model; {cure}")
    words = read_vocabulary(AutoTokenizer.from_pretrained(tokenizer or folder))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    check_expressible(model.config)
    return write_gguf(model.merge_and_unload(), words, path, type)


def check_expressible(config: Any) -> None:
    """Raise SLTError, naming the option, for a model that llama.cpp's GPT-2 cannot compute."""
    width = config.n_embd // config.n_head
    gelu = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
    other = [name for name in config.architectures or () if not name.endswith("LMHeadModel")]
    for fault, what in {
        f"a {''.join(other)}": not other,
        "layer_norm=False": config.layer_norm,
        f"n_qk {config.qk_width}, n_v {config.v_width} (not n_embd / n_head = {width})": (
            config.qk_width == config.v_width == width
        ),
        "head_bias=True": not config.head_bias,
        f"activation_function {config.activation_function!r}": config.activation_function in gelu,
        "scale_attn_weights=False": config.scale_attn_weights,
        "scale_attn_by_inverse_layer_idx=True": not config.scale_attn_by_inverse_layer_idx,
    }.items():
        if not what:
            raise SLTError(f"llama.cpp's GPT-2 has no place for {fault}; this ticket runs in Python only")


# -- weights ---------------------------------------------------------------------------------------------


def write_gguf(stock: Any, words: "Vocabulary", path: Path, type: str = "auto") -> str:
    """Write a stock GPT-2 and its vocabulary as one GGUF file; returns what there is to say of it."""
    try:
        import gguf
    except ImportError:
        raise SLTError("GGUF files need the package gguf: pip install 'hf_slt[llama]'") from None

    config, size = stock.config, len(words.tokens)
    if size > config.vocab_size:
        cure = "use the tokenizer that the model was trained with"
        raise SLTError(f"the tokenizer has {size} tokens, the model {config.vocab_size}; {cure}")
    tensors = dict(tensors_of(stock))
    main, why = choose_type(tensors, type)
    types = {name: type_of(name, rows, main) for name, rows in tensors.items()}
    errors = {name: rounding(rows, types[name]) for name, rows in tensors.items()}

    try:
        with replacing(path) as new:
            writer: Any = gguf.GGUFWriter(new, "gpt2")
            writer.add_file_type(TYPES[main].file_number)
            writer.add_context_length(config.n_positions)
            writer.add_embedding_length(config.n_embd)
            writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
            writer.add_block_count(config.n_layer)
            writer.add_head_count(config.n_head)
            writer.add_layer_norm_eps(config.layer_norm_epsilon)
            words.write(writer, config.vocab_size)
            for name, rows in tensors.items():
                kind = TYPES[types[name]]
                bytes = rows.size // kind.block * kind.bytes
                # Called float32, so that the writer takes shape and number as they are: not all it knows.
                writer.add_tensor_info(name, rows.shape, np.dtype(np.float32), bytes, kind.number)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, rows in tensors.items():
                writer.write_tensor_data(pack(rows, types[name]))
            writer.close()
        bytes = path.stat().st_size
    except OSError as error:
        raise SLTError(f"{path}: cannot be written ({error.strerror}); give another path") from error
    return "\n".join([f"{path}: {bytes:,} bytes", *told(main, why, types, errors)])


def tensors_of(stock: Any) -> Iterator[tuple[str, np.ndarray]]:
    """llama.cpp's tensors by its names; matrices with a row for each output."""
    for name, tensor in stock.state_dict().items():
        if name == "lm_head.weight" and stock.config.tie_word_embeddings:
            continue
        path, leaf = name.rsplit(".", 1)
        if path.startswith("transformer.h."):
            number, path = path.removeprefix("transformer.h.").split(".", 1)
            yield (
                f"blk.{number}.{NAMES[path]}.{leaf}",
                (tensor.T if tensor.ndim == 2 else tensor).float().numpy(),
            )
        else:
            yield f"{NAMES[path]}.{leaf}", tensor.float().numpy()


def choose_type(tensors: Mapping[str, np.ndarray], wanted: str) -> tuple[str, str]:
    """The type of the matrices, and why it is that; SLTError if it cannot be the one that is wanted."""
    matrices = {name: rows for name, rows in tensors.items() if rows.ndim == 2 and name.startswith("blk.")}
    other = next((name for name, rows in matrices.items() if not is_ternary(rows)), None)
    ternary = {name: rows for name, rows in tensors.items() if rows.ndim == 2 and is_ternary(rows)}
    ternary.pop("position_embd.weight", None)
    fitting = [
        name
        for name, type in TERNARY.items()
        if all(rows.shape[1] % type.block == 0 for rows in ternary.values())
    ]
    lengths = ", ".join(str(length) for length in sorted({rows.shape[1] for rows in ternary.values()}))
    if wanted in TERNARY:
        if other:
            raise SLTError(
                f"type {wanted} is for weights -c, 0 and c, and {other} has others; use auto or f32"
            )
        if wanted not in fitting:
            cure = f"use {fitting[0]}" if fitting else "use f16 or f32"
            raise SLTError(
                f"type {wanted} needs rows of {TERNARY[wanted].block} weights, not {lengths}; {cure}"
            )
    if wanted != "auto":
        return wanted, "as asked"
    if not other and fitting:
        block = TERNARY[fitting[0]].block
        return fitting[0], f"every row holds -c, 0 and c, and is a multiple of {block} long ({lengths})"
    why = f"{other} is not ternary" if other else f"rows of {lengths} fill no ternary block"
    if all(rounding(rows, "f16") == 0 for rows in matrices.values()):
        return "f16", f"{why}, and float16 holds every weight"
    return "f32", f"{why}, and float16 would round it"


def type_of(name: str, rows: np.ndarray, main: str) -> str:
    """The type of one tensor in a file that is mostly of another."""
    if rows.ndim == 1 or name == "position_embd.weight":
        return "f32"
    if main in TERNARY and not is_ternary(rows):
        return "f16" if rounding(rows, "f16") == 0 else "f32"
    if rounding(rows, main) > MOST_ROUNDING:
        raise SLTError(f"{name}: its weights are outside of what float16 holds; use f32")
    return main


def is_ternary(rows: np.ndarray) -> bool:
    """Whether every row holds -c, 0 and c for a c of its own."""
    sizes = np.abs(rows)
    return bool(((sizes == 0) | (sizes == sizes.max(1, keepdims=True))).all())


def rounding(rows: np.ndarray, type: str) -> float:
    """The largest error that a type makes in a row, as a share of the largest weight of the row."""
    if type == "f32":
        return 0.0
    most = np.abs(rows).max(1)
    with np.errstate(over="ignore"):
        if type in TERNARY:
            errors = np.abs(most.astype(np.float16).astype(np.float32) - most)
        else:
            errors = np.abs(rows.astype(np.float16).astype(np.float32) - rows).max(1)
    return float((errors / np.where(most == 0, 1, most)).max())


def pack(rows: np.ndarray, type: str) -> np.ndarray:
    """The bytes of a tensor."""
    import gguf

    if type in FLOAT:
        return rows.astype(np.float16 if type == "f16" else np.float32)
    if type != "q2_0":
        return gguf.quantize(rows, gguf.GGMLQuantizationType[type.upper()])
    blocks = rows.reshape(-1, 16, 4)  # a byte has four codes, the first in its lowest bits
    codes = (np.sign(blocks).astype(np.int8) + 1).astype(np.uint8) << np.array([0, 2, 4, 6], np.uint8)
    scales = np.abs(blocks).max((1, 2)).astype("<f2").view(np.uint8).reshape(-1, 2)
    return np.concatenate([scales, np.bitwise_or.reduce(codes, axis=2)], axis=1)


def told(main: str, why: str, types: Mapping[str, str], errors: Mapping[str, float]) -> Iterator[str]:
    """What there is to say of a file."""
    yield f"type {main}, {8 * TYPES[main].bytes / TYPES[main].block:.3g} bits a weight: {why}"
    for name in TABLES:
        if types.get(name, main) != main:
            yield f"{name} is {types[name]}, the smallest type that holds it without loss"
    worst = max(errors, key=lambda name: errors[name])
    most = f"by {100 * errors[worst]:.2g} %"
    if not errors[worst]:
        yield "rounded: nothing"
    elif types[worst] in TERNARY:
        yield f"rounded: c, to float16, {most} at most ({worst}); signs and zeros are exact"
    else:
        yield f"rounded: weights, to float16, {most} of the largest in a row at most ({worst})"


# -- the tokenizer -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """What llama.cpp needs to know of a byte-level BPE tokenizer."""

    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    bos: int
    eos: int
    adds_bos: bool

    def write(self, writer: Any, rows: int) -> None:
        """Into the header of a file; a table of more rows than tokens has unused ones."""
        unused = range(len(self.tokens), rows)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([*self.tokens, *(f"[PAD{index}]" for index in unused)])
        writer.add_token_types([*self.kinds, *(UNUSED for _ in unused)])
        writer.add_token_merges(self.merges)
        writer.add_bos_token_id(self.bos)
        writer.add_eos_token_id(self.eos)
        writer.add_add_bos_token(self.adds_bos)


def read_vocabulary(tokenizer: Any) -> Vocabulary:
    """The vocabulary of a tokenizer, which must split and merge text as GPT-2's does."""
    cure = "llama.cpp gets byte-level BPE as GPT-2 has it, and nothing else"
    if not getattr(tokenizer, "is_fast", False):
        raise SLTError(f"a slow tokenizer ({type(tokenizer).__name__}); {cure}")
    facts = json.loads(tokenizer.backend_tokenizer.to_str())
    model, before = facts["model"], facts["pre_tokenizer"] or {}
    plain = {"add_prefix_space": False, "use_regex": True}
    odd = [name for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(name)]
    odd += [name for name in ("byte_fallback", "ignore_merges") if model.get(name)]
    if model["type"] != "BPE" or before.get("type") != "ByteLevel":
        shown = f"a tokenizer of {model['type']} after {before.get('type', 'no splitting')}"
        raise SLTError(f"{shown}; {cure}")
    odd += [name for name, value in plain.items() if before.get(name, value) != value]
    odd += ["normalizer"] if facts["normalizer"] else []
    added = facts["added_tokens"]
    odd += [name for name in ("lstrip", "rstrip", "single_word") for token in added if token[name]]
    if odd:
        raise SLTError(f"a tokenizer with {odd[0]}; {cure}")
    if not model["merges"]:
        raise SLTError("a tokenizer without merges, which llama.cpp does not load; train one of more tokens")
    if tokenizer.eos_token_id is None:
        raise SLTError("the tokenizer has no end-of-text token; set tokenizer.eos_token and save it again")

    ids = tokenizer.get_vocab()
    size = max(ids.values()) + 1
    tokens, kinds = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    for token, index in ids.items():
        tokens[index], kinds[index] = token, NORMAL
    for token in added:
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    eos = tokenizer.eos_token_id
    bos = eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    around = tokenizer("", add_special_tokens=True).input_ids
    if around not in ([], [bos]):
        raise SLTError(f"a tokenizer that puts tokens {around} around a text; {cure}")
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    return Vocabulary(tokens, kinds, merges, bos, eos, bool(around))
