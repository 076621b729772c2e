"""Attack the loading path: damage tickets in every way we could think of, and load them in all ways.

    python -m tests.attack --count 20000            # seeded; a failure prints how to repeat it
    python -m tests.attack --count 1 --first 1234   # that case alone

A damaged ticket must be refused with TicketError, or be exactly the same model: same logits, same masks. Anything
else is a failure: another model, another exception, many seconds, or more memory than three valid tickets of the
same size. One case is not under our control: AutoModel reads config.json before hf_slt is called. If it raises an
error there, or if config.json is a device or a pipe, the case is counted separately ("not asked").
A tokenizer has no digest: `slt page` and `slt export` must refuse a damaged one with SLTError, or write their file.

No damage here makes another valid ticket: new masks with new digests would simply be a new ticket.
"""

import argparse
import contextlib
import copy
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_slt import (
    SLTError,
    SupermaskGPT2Config,
    SupermaskGPT2ForSequenceClassification,
    SupermaskGPT2LMHeadModel,
    TicketError,
    verify_ticket,
)
from hf_slt.masks.rules import rule_option_names
from hf_slt.runtimes.llama_cpp import export_gguf
from hf_slt.runtimes.page import make_page
from hf_slt.text.blocks import train_tokenizer
from hf_slt.tickets.coded_files import deflate, inflate
from hf_slt.tickets.entries import Entry
from hf_slt.tickets.format import sha256, ticket_digest
from hf_slt.tickets.migrations import DIGITS
from hf_slt.weights.random_weights import TensorSpec, digest

CONFIG, MASKS, MODEL = "config.json", "mask.safetensors", "model.safetensors"
INDEX, GENERATION, TOKENIZER = "model.safetensors.index.json", "generation_config.json", "tokenizer.json"
SECONDS, WAITING, LEAST_MEGABYTES = (
    5,
    30,
    16,
)  # processor time; time in total; smaller growth of memory may come from the allocator
TINY = {
    "n_layer": 1,
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": 32,
    "n_positions": 16,
    "scale_with_width": True,
}
TINY |= {"seed": 7, "density": 0.4, "bos_token_id": 30, "eos_token_id": 30, "pad_token_id": 31}
WORDS = 300
IDS = torch.tensor([[1, 2, 3, 4, 5, 6], [9, 8, 7, 31, 31, 31]])  # a classifier looks before the padding

Files = dict[str, Any]  # by name: bytes of a file, or something else (see `lay_out`)


# -- the tickets ----------------------------------------------------------------------------------


@dataclass
class Victim:
    """A valid ticket: its files and its model."""

    files: Files
    model: Any
    auto: Any
    logits: torch.Tensor
    state: dict[str, torch.Tensor]

    @property
    def mask_file(self) -> str:
        return MASKS if MASKS in self.files else MODEL


def make_victims(folder: Path) -> dict[str, Victim]:
    plans: dict[str, dict[str, Any]] = {
        "packed": {},
        "second": {"scores": 1},  # another mask of the same weights
        "saved": {},
        "entropy": {"encoding": "entropy", "seed": 8, "density": 0.1},
        "trained": {"embedding": "trained"},
        "trained-8": {"embedding": "trained", "embedding_bits": 8, "encoding": "entropy"},
        "trained-4": {"embedding": "trained", "embedding_bits": 4, "tie_word_embeddings": False},
        "untied": {"tie_word_embeddings": False, "law": "uniform", "layer_norm": False},
        "frozen": {"embedding": "frozen", "encoding": "entropy", "law": "signed_constant"},
        "classifier": {"num_labels": 3},
        "signed": {"rule": "signed", "scales": "row", "scale_bits": 8, "head_bias": True},
        "multicoat": {
            "rule": "multicoat",
            "encoding": "entropy",
            "layer_norm": "trained",
            "scales": "tensor",
        },
        "searched": {"search": 0.3, "rule": "sign", "encoding": "entropy"},
        "version-2": {"rule": "signed", "scales": "row"},
        "words": {"vocab_size": WORDS},  # with its tokenizer
    }
    return {name: _make_victim(folder / name, name, **plan) for name, plan in plans.items()}


def _make_victim(folder: Path, name: str, *, scores: int = 0, encoding: str = "packed", **changes) -> Victim:
    cls: Any = SupermaskGPT2LMHeadModel
    auto: Any = AutoModelForCausalLM
    if "num_labels" in changes:
        cls, auto = SupermaskGPT2ForSequenceClassification, AutoModelForSequenceClassification
    own = {"density": None} if "rule" in changes else {}
    model = cls(SupermaskGPT2Config(**(TINY | own | changes)))
    generator = torch.Generator().manual_seed(scores)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    if name == "saved":
        model.to_ticket().save_pretrained(folder)
    else:
        model.save_ticket(folder, encoding=encoding)
    if name == "words":
        train_tokenizer(["the quick brown fox jumps over the lazy dog " * 9], WORDS, 16).save_pretrained(
            folder
        )
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".py"}
    if name == "version-2":
        make_version_2(files)
        for path in (CONFIG, MASKS):
            (folder / path).write_bytes(files[path])
        verify_ticket(folder)
    loaded = cls.from_pretrained(folder)
    return Victim(files, loaded, auto, logits_of(loaded), state_of(loaded))


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model(IDS).logits


def state_of(model: Any) -> dict[str, torch.Tensor]:
    """Return every weight, and everything that a file holds: masks and trained values."""
    stored = {f"{name} (stored)": torch.from_numpy(one) for name, one in model.stored_arrays().items()}
    return {name: values.clone() for name, values in (model.state_dict() | stored).items()}


def make_version_2(files: Files) -> None:
    """Turn files into format version 2: options at the top level of the configuration, no digest of the ticket."""
    table, facts, tensors = take_apart(files[MASKS])
    config = json.loads(files[CONFIG])
    for one in (config, facts["config"]):
        options = one.pop("supermask")
        del options["digest"]
        one |= dict.fromkeys(rule_option_names()) | options.pop("rule_options") | options
    del facts["digest"]
    facts["format_version"] = 2
    files[CONFIG], files[MASKS] = json.dumps(config).encode(), put_together(table, facts, tensors)


# -- a safetensors file and its JSON, taken apart and put together --------------------------------------


def take_apart(data: bytes) -> tuple[dict, dict, bytes]:
    """Return the table (with the metadata), the header of the ticket in it, and the tensors."""
    length = struct.unpack("<Q", data[:8])[0]
    table = json.loads(data[8 : 8 + length])
    text = table["__metadata__"]["hf_slt"]
    return table, json.loads(text if text.startswith("{") else inflate(text, 1 << 24)), data[8 + length :]


def seal(facts: Any) -> None:
    """Give a header the correct digest of its contents, if it can be computed."""
    with contextlib.suppress(Exception):
        entries = {
            name: Entry(**{key: tuple(one) if type(one) is list else one for key, one in entry.items()})
            for name, entry in facts["tensors"].items()
        }
        if facts["format_version"] == 3:
            whole = ticket_digest(facts["config"], entries, facts["mask_digest"])
            facts["digest"] = facts["config"]["supermask"]["digest"] = whole


def put_together(table: dict, facts: Any, tensors: bytes) -> bytes:
    """Return a file with correct digests of header and ticket."""
    seal(facts)
    return with_header(table, facts, tensors)


def with_header(table: dict, facts: Any, tensors: bytes) -> bytes:
    """Return a file with a correct digest of the header text. The digest of the ticket stays as it is in `facts`."""
    text = to_text(facts)
    coded = table["__metadata__"]["hf_slt"][0] != "{" and text.isascii()
    table["__metadata__"] |= {"hf_slt": deflate(text) if coded else text, "hf_slt_sha256": sha256(text)}
    return with_table(to_text(table), tensors)


def with_table(text: str, tensors: bytes) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    data += b" " * (-len(data) % 8)
    return struct.pack("<Q", len(data)) + data + tensors


# Values that json.dumps cannot write: strings stand for them until the text is made.
RAW = {
    "@nan": "NaN",
    "@inf": "-Infinity",
    "@overflow": "1e999",
    "@digits": "9" * 5000,
    "@deep": "[" * 600 + "]" * 600,
    "@deeper": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "@rough": "[1,]",
}


def to_text(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    for mark, raw in RAW.items():
        text = text.replace(json.dumps(mark), raw)
    return text


VALUES: list[Any] = [
    *RAW,
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    1.5,
    -0.5,
    1e-30,
    1e30,
    2**31,
    2**63,
    10**30,
    10**400,
]
VALUES += [
    "",
    "x",
    "\x00",
    "ticket",
    "scores",
    "float16",
    "bfloat16",
    "int8",
    "relu",
    "../../config.json",
    "7",
]
VALUES += [[], [1], [0, 0], [2**40, 2**40], {}, {"a": 1}, [[[[]]]], "y" * 10_000, "\ud800"]


def places(tree: Any, path: tuple = ()) -> Iterator[tuple]:
    """Return the paths of all parts of a JSON value."""
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inside:
        yield (*path, key)
        yield from places(value, (*path, key))


def at(tree: Any, path: tuple) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def edit_tree(rng: random.Random, tree: dict) -> dict:
    """Make one change somewhere in a JSON object."""
    tree = copy.deepcopy(tree)
    path = rng.choice(list(places(tree)))
    inside, key = at(tree, path[:-1]), path[-1]
    value = inside[key]
    match rng.choice(["delete", "rename", "value", "value", "value", "near", "near", "add", "other", "wrap"]):
        case "delete":
            del inside[key]
        case "rename" if isinstance(inside, dict):
            place = rng.randrange(len(key) + 1)
            inside[key[:place] + rng.choice("aex_ \u00e9") + key[place + 1 :]] = inside.pop(key)
        case "near" if type(value) in (int, float):
            inside[key] = rng.choice(
                [value + 1, value - 1, value * 2, -value, float(value), str(value), value * 10**9]
            )
        case "near" if isinstance(value, bool):
            inside[key] = rng.choice([not value, int(value), None])
        case "near" if isinstance(value, str) and value:
            place = rng.randrange(len(value))
            inside[key] = value[:place] + rng.choice("0aZ/") + value[place + 1 :]
        case "add" if isinstance(inside, dict):
            inside[rng.choice(KEYS)] = rng.choice(VALUES)
        case "other":
            inside[key] = copy.deepcopy(at(tree, rng.choice(list(places(tree)))))
        case "wrap":
            inside[key] = rng.choice([[value], {"value": value}])
        case _:
            inside[key] = rng.choice(VALUES)
    return tree


KEYS = """
    num_attention_heads hidden_size num_hidden_layers max_position_embeddings num_labels layer_norm seed law
    layer_norm_epsilon activation_function scale_attn_weights scale_attn_by_inverse_layer_idx n_head n_qk n_v
    factors search frozen_density scales scale_bits head_bias densities mask_bits threshold n_of_m
    tie_word_embeddings qk_scale embedding_law embedding_range embedding_bits n_inner state density rule dtype
    torch_dtype attn_implementation _attn_implementation pruned_heads per_layer_config pad_token_id id2label
    add_cross_attention weight_generator quantization_config to_dict check tensor_names __class__ __dict__
    attribute_map lm_head score wte h.0.attn.c_attn.query coded coded_masks data_offsets shape unknown
    supermask rule_options digest mask_digest options options_class make_rule make_plans stock_config auto_map
""".split()
COMPUTING = """
    layer_norm layer_norm_epsilon activation_function scale_attn_weights n_embd n_layer vocab_size n_head seed
    scale_attn_by_inverse_layer_idx tie_word_embeddings n_positions density law qk_scale state pad_token_id
    scale_with_width initializer_range embedding embedding_bits dtype n_inner mask_digest model_type
    factors search frozen_density scales scale_bits head_bias
""".split()


def home(config: dict, key: str) -> dict:
    """Return the object of a configuration that has an option."""
    nested = config.get("supermask", {})
    rule = nested.get("rule_options", {})
    return next((one for one in (rule, nested) if key in one), config)


def duplicate_key(rng: random.Random, tree: dict) -> str:
    """Return the text of an object in which one key occurs twice, first with another value."""
    key = rng.choice(sorted(tree))
    return "{" + f"{json.dumps(key)}: {to_text(rng.choice(VALUES))}, " + to_text(tree)[1:]


# -- damage -------------------------------------------------------------------------------------------

Damage = Callable[[random.Random, Files, Victim, dict[str, Victim]], None]
DAMAGES: dict[str, Damage] = {}


def damage(kind: str) -> Callable[[Damage], Damage]:
    def add(function: Damage) -> Damage:
        DAMAGES[kind] = function
        return function

    return add


@damage("flipped bits")
def _flip(rng, files, victim, victims):
    name = rng.choice([*files, victim.mask_file, CONFIG])
    data = bytearray(files[name])
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    files[name] = bytes(data)


@damage("flipped bits of the masks")
def _flip_masks(rng, files, victim, victims):
    tensors = len(take_apart(files[victim.mask_file])[2])
    data = bytearray(files[victim.mask_file])
    data[-1 - rng.randrange(tensors)] ^= 1 << rng.randrange(8)
    files[victim.mask_file] = bytes(data)


@damage("bytes of the header")
def _header_bytes(rng, files, victim, victims):
    data = bytearray(files[victim.mask_file])
    length = struct.unpack("<Q", data[:8])[0]
    start = rng.randrange(8 + length)
    stop = min(len(data), start + rng.choice([1, 1, 2, 8, 100]))
    new = {"set": rng.randbytes(stop - start), "cut": b"", "more": data[start:stop] * 2, "text": b'"}{,:0'}
    data[start:stop] = new[rng.choice(list(new))]
    files[victim.mask_file] = bytes(data)


@damage("length of the header")
def _header_length(rng, files, victim, victims):
    data = files[victim.mask_file]
    length = struct.unpack("<Q", data[:8])[0]
    new = rng.choice([0, 1, length - 1, length + 1, len(data) - 8, len(data), 2**31, 2**40, 2**63, 2**64 - 1])
    files[victim.mask_file] = struct.pack("<Q", new) + data[8:]


@damage("truncated")
def _truncate(rng, files, victim, victims):
    name = rng.choice([*files, victim.mask_file])
    files[name] = files[name][
        : rng.choice([0, 1, 7, 8, 9, rng.randrange(len(files[name])), len(files[name]) - 1])
    ]


@damage("longer, or with parts exchanged")
def _splice(rng, files, victim, victims):
    name = rng.choice([*files, victim.mask_file])
    data = files[name]
    one, two, three = sorted(rng.randrange(len(data)) for _ in range(3))
    new = [
        data + rng.randbytes(rng.choice([1, 8, 1000])),
        data * 2,
        data[:one] + data[two:three] + data[one:two],
    ]
    new += [
        data[:one] + bytes(three - one) + data[three:],
        b"\xff" + data,
        b"\xef\xbb\xbf" + data,
        data[one:],
    ]
    files[name] = rng.choice(new)


@damage("config.json edited")
def _edit_config(rng, files, victim, victims):
    files[CONFIG] = to_text(edit_tree(rng, json.loads(files[CONFIG]))).encode("utf-8", "surrogatepass")


@damage("config.json: what is computed")
def _edit_computing(rng, files, victim, victims):
    whole = json.loads(files[CONFIG])
    key = rng.choice(COMPUTING)
    config = home(whole, key) if rng.random() < 0.8 else whole
    if key == "model_type" or (key in config and rng.random() < 0.3):
        del config[key]
    else:
        near = {
            bool: [not config.get(key)],
            int: [config.get(key, 0) + 1 if type(config.get(key)) is int else 1],
        }
        config[key] = rng.choice(near.get(type(config.get(key)), []) * 5 + VALUES)
    files[CONFIG] = to_text(whole).encode("utf-8", "surrogatepass")


@damage("config.json: an alias or a key of transformers")
def _alias(rng, files, victim, victims):
    config = json.loads(files[CONFIG])
    inside = rng.choice([config, config, config.get("supermask", config)])
    inside[rng.choice(KEYS)] = rng.choice([1, 4, 8, 32, *VALUES])
    files[CONFIG] = to_text(config).encode("utf-8", "surrogatepass")


@damage("a key twice")
def _twice(rng, files, victim, victims):
    name = rng.choice([CONFIG, CONFIG, victim.mask_file, INDEX, GENERATION])
    if name == victim.mask_file:
        table, facts, tensors = take_apart(files[name])
        if rng.random() < 0.5:
            files[name] = with_table(duplicate_key(rng, table), tensors)
        else:
            text = duplicate_key(rng, facts)
            table["__metadata__"] |= {
                "hf_slt": text,
                "hf_slt_sha256": sha256(text.encode("utf-8", "surrogatepass")),
            }
            files[name] = with_table(json.dumps(table), tensors)
    elif name in files:
        files[name] = duplicate_key(rng, json.loads(files[name])).encode("utf-8", "surrogatepass")
    else:
        files[CONFIG] = b'{"a": 1, "a": 2}'


@damage("header edited, with a true digest")
def _edit_header(rng, files, victim, victims):
    table, facts, tensors = take_apart(files[victim.mask_file])
    files[victim.mask_file] = put_together(table, edit_tree(rng, facts), tensors)


@damage("header of a tensor edited, with true digests")
def _edit_entry(rng, files, victim, victims):
    table, facts, tensors = take_apart(files[victim.mask_file])
    entry = facts["tensors"][rng.choice(sorted(facts["tensors"]))]
    key = rng.choice(sorted(entry))
    value = entry[key]
    if key == "counts":
        place = rng.randrange(len(value))
        value[place] = rng.choice([value[place] + 1, value[place] - 1, 0, -1, 10**18, 0.5, True])
        entry[key] = rng.choice([value, value[::-1], [*value, 0], value[:1], []])
    elif key == "scale" and value:
        entry[key] = rng.choice([value * 2, -value, 0.0, "@nan", "@overflow", 1e38])
    elif key.endswith("sha256") and value:
        entry[key] = rng.choice([value[::-1], "", value[:15], "0" * 16, value.upper() + " "])
    else:
        entry[key] = rng.choice(VALUES)
    files[victim.mask_file] = put_together(table, facts, tensors)


@damage("config.json and header agree, the tensors do not")
def _consistent(rng, files, victim, victims):
    table, facts, tensors = take_apart(files[victim.mask_file])
    config = json.loads(files[CONFIG])
    options = config.get("supermask", config)
    wide = rng.choice([2, 3, 1000, 131072 // 16, 10**9, 10**30])
    choices: list[dict[str, Any]] = [
        {"n_embd": 16 * wide},
        {"vocab_size": 32 * wide},
        {"n_embd": 16 * wide, "vocab_size": 32 * wide},
        {"n_positions": 16 * wide},
        {"n_layer": wide},
        {"n_layer": 0},
        {"n_inner": wide},
        {"n_qk": wide},
        {"n_v": 7 * wide},
        {"seed": wide},
        {"initializer_range": 0.01 * wide},
        {"qk_scale": wide},
        {"law": "xavier_uniform"},
        {"embedding_range": 0.7},
        {"scale_with_width": False},
        {"activation_function": "none of them"},
        {"num_labels": 10**9 * wide, "id2label": None},
        {"attn_pdrop": 3.0},
        {"dtype": "int8"},
        {"dtype": "save"},
        {"embedding": "frozen" if options.get("embedding") == "trained" else "trained"},
        {"factors": [0.0, 1.0, 2.0, 3.0, 4.0]},
        {"factors": [1.0] * wide if wide < 10**6 else []},
        {"factors": ["@nan", 1.0]},
        {"search": 0.7, "frozen_density": 0.5},
        {"search": 1e-30, "frozen_density": 1.0},
        {"scales": "row" if options["scales"] == "none" else "none"},
        {"scale_bits": 32 if options["scales"] != "none" else 5},
        {"head_bias": "yes"},
    ]
    changes = rng.choice(choices)
    for one in (config, facts["config"]):
        for key, value in changes.items():
            home(one, key)[key] = value
        if one.get("id2label", 1) is None:
            del one["id2label"]
    facts |= {key: value for key, value in changes.items() if key in facts}
    if rng.random() < 0.8:  # change the tensors of the header too, but not the stored data
        with contextlib.suppress(Exception):  # the configuration may be impossible
            new = SupermaskGPT2Config(
                **{key: one for key, one in changes.items() if key != "id2label"} | TINY | changes
            )
            none_kept = rng.random() < 0.5
            for name, entry in facts["tensors"].items():
                spec = new.tensor(name)
                entry["shape"] = list(spec.shape)
                if "law" in entry:
                    entry |= {"law": spec.law, "scale": spec.scale}
                if none_kept and "counts" in entry:
                    entry["counts"] = rng.choice([[0, spec.size], [spec.size, 0]])
    files[victim.mask_file] = put_together(table, facts, tensors)
    if "supermask" in config:
        config["supermask"]["digest"] = facts["digest"]
    files[CONFIG] = to_text(config).encode()


@damage("tensors of the file")
def _tensors(rng, files, victim, victims):
    table, facts, tensors = take_apart(files[victim.mask_file])
    names = sorted(set(table) - {"__metadata__"})
    name, other = rng.choice(names), rng.choice(names)
    match rng.choice(
        ["missing", "extra", "frozen", "renamed", "reshaped", "dtype", "exchanged", "offsets", "edit"]
    ):
        case "missing":
            del table[name]
        case "extra":
            table["more"] = {"dtype": "U8", "shape": [4], "data_offsets": [len(tensors), len(tensors) + 4]}
            tensors += b"1234"
        case "frozen":
            entry = {
                "shape": [10**5, 10**5],
                "law": "normal",
                "scale": 1.0,
                "weight_sha256": "0" * 16,
            }
            facts["tensors"][rng.choice(["h.1.mlp.c_fc", "more", "wte"])] = entry
        case "renamed":
            table[name + "_"] = table.pop(name)
        case "reshaped":
            table[name]["shape"] = rng.choice(
                [[1, *table[name]["shape"]], [0], [], [2**40], [-1], ["8"], [2**62, 4]]
            )
        case "dtype":
            table[name]["dtype"] = rng.choice(["I8", "F16", "F32", "BF16", "BOOL", "U64", "F4", "X", 7, None])
        case "exchanged" if name != other:
            table[name]["data_offsets"], table[other]["data_offsets"] = (
                table[other]["data_offsets"],
                table[name]["data_offsets"],
            )
        case "offsets":
            table[name]["data_offsets"] = rng.choice(
                [[0, 0], [0, 2**40], [8, 0], [-8, 8], [], None, [0.5, 1], "0"]
            )
        case _:
            table[name] = edit_tree(rng, {"one": table[name]}).get("one", {})
    files[victim.mask_file] = put_together(table, facts, tensors)


@damage("metadata of the file")
def _metadata(rng, files, victim, victims):
    table, _, tensors = take_apart(files[victim.mask_file])
    table["__metadata__"] = edit_tree(rng, {"one": table["__metadata__"]}).get("one", {})
    files[victim.mask_file] = with_table(to_text(table), tensors)


@damage("index edited")
def _edit_index(rng, files, victim, victims):
    index = json.loads(
        files.get(INDEX, b'{"metadata": {}, "weight_map": {"transformer.wte.weight": "model.safetensors"}}')
    )
    if rng.random() < 0.5:
        elsewhere = rng.choice(
            ["../other/model.safetensors", "/dev/zero", MODEL, "", "model-00001-of-00002.safetensors"]
        )
        index["weight_map"][
            rng.choice([*index["weight_map"], "transformer.wte.weight", "lm_head.weight"])
        ] = elsewhere
        files[MODEL if MODEL not in files else "other.safetensors"] = dense_weights()
    else:
        index = edit_tree(rng, index)
    files[INDEX] = to_text(index).encode("utf-8", "surrogatepass")


@damage("generation_config.json edited")
def _edit_generation(rng, files, victim, victims):
    generation = edit_tree(rng, json.loads(files.get(GENERATION, b'{"max_length": 5}')))
    files[GENERATION] = to_text(generation).encode("utf-8", "surrogatepass")


@damage("files of two tickets")
def _mix(rng, files, victim, victims):
    others = [one for one in victims.values() if one is not victim]
    other = rng.choice([victims["second"], *others] if victim is not victims["second"] else others)
    name = rng.choice([CONFIG, victim.mask_file, INDEX])
    source = other.mask_file if name == victim.mask_file else name
    if source in other.files:
        files[name] = other.files[source]
    if name == victim.mask_file and rng.random() < 0.3:  # all masks of the other ticket under this header
        table, facts, _ = take_apart(victim.files[name])
        files[name] = put_together(table, facts, take_apart(files[name])[2])


def dense_weights() -> bytes:
    names = ["transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"]
    return save({name: torch.ones(32, 16) for name in names}, {"format": "pt"})


@damage("a dense model.safetensors")
def _dense(rng, files, victim, victims):
    if rng.random() < 0.6:
        del files[victim.mask_file]
        if rng.random() < 0.5:
            files.pop(INDEX, None)
    files[rng.choice([MODEL, MODEL, MASKS])] = dense_weights()


@damage("a file is missing")
def _missing(rng, files, victim, victims):
    for name in rng.sample(sorted(files), rng.choice([1, 1, 2])):
        del files[name]
    if victim.mask_file not in files:
        files[CONFIG] = victim.files[CONFIG]  # without either file it is not a ticket


@damage("a link, a pipe or a folder in place of a file")
def _special(rng, files, victim, victims):
    name = rng.choice([CONFIG, victim.mask_file, victim.mask_file, INDEX, GENERATION])
    elsewhere = [
        "/dev/zero",
        "/dev/null",
        "/dev/random",
        "/nowhere",
        name,
        "/etc/hostname",
        "..",
        "/proc/self/mem",
    ]
    files[name] = rng.choice([("pipe",), ("folder",), ("socket",), *(("link", one) for one in elsewhere)])


@damage("state")
def _state(rng, files, victim, victims):
    where = rng.choice(["config", "header", "both", "typo"])
    value = rng.choice(["scores", "Ticket", "", None, True, ["ticket"], "dense", 10**400])
    if where in ("config", "both"):
        config = json.loads(files[CONFIG])
        home(config, "state")["state"] = value
        files[CONFIG] = to_text(config).encode()
    if where in ("header", "both"):
        table, facts, tensors = take_apart(files[victim.mask_file])
        home(facts["config"], "state")["state"] = value
        files[victim.mask_file] = put_together(table, facts, tensors)
    if where == "typo":
        files[CONFIG] = files[CONFIG].replace(b'"state"', rng.choice([b'"statd"', b'"State"', b'"state "']))


@damage("a save that was not ours")
def _next(rng, files, victim, victims):
    """Put files where an interrupted save would leave them."""
    other = rng.choice(list(victims.values()))
    digest = sha256(rng.choice([files[CONFIG], files[CONFIG], other.files[CONFIG]]))[:16]
    laid = rng.choice([dict(other.files), {}, {other.mask_file: other.files[other.mask_file]}, dict(files)])
    if rng.random() < 0.5:
        laid.pop(CONFIG, None)
    if other.files[CONFIG] == files[CONFIG] or rng.random() < 0.3:
        laid = {name: data[: len(data) // 2] for name, data in laid.items()}
    files[f".next-{digest}"] = rng.choice([laid, laid, laid, ("link", ".."), ("pipe",), b""])


@damage("a bomb: a header that inflates")
def _inflating(rng, files, victim, victims):
    table, facts, tensors = take_apart(files[victim.mask_file])
    many = rng.choice([10**5, 10**6, 4 * 10**6])
    text = rng.choice(
        [
            to_text(facts) + " " * many,
            '{"a": [' + "[]," * (many // 3) + "0]}",
            to_text(facts | {"note": "x" * many}),
            to_text(facts | {"tensors": {f"t{number}": {} for number in range(many // 20)}}),
        ]
    )
    table["__metadata__"] |= {"hf_slt": deflate(text), "hf_slt_sha256": sha256(text)}
    files[victim.mask_file] = with_table(to_text(table), tensors)


@damage("a bomb: gigabytes of nothing at the end")
def _endless(rng, files, victim, victims):
    name, length = (
        rng.choice([victim.mask_file, victim.mask_file, CONFIG, GENERATION]),
        rng.choice([1, 8]) << 30,
    )
    data = files.get(name, b"{}")
    if name == victim.mask_file and rng.random() < 0.6:  # list them in the table
        table, facts, tensors = take_apart(data)
        key = rng.choice([one for one in table if one != "__metadata__"])
        start = table[key]["data_offsets"][0]
        table[key] |= {"shape": [length - start], "dtype": "U8", "data_offsets": [start, length]}
        data = put_together(table, facts, tensors)
        length += len(data) - len(tensors)
    files[name] = ("sparse", data, length)


@damage("a bomb: many layers")
def _layers(rng, files, victim, victims):
    table, facts, tensors = take_apart(files[victim.mask_file])
    blocks = {name: one for name, one in facts["tensors"].items() if name.startswith("h.0.")}
    for layer in range(1, many := rng.choice([1000, 2000])):
        facts["tensors"] |= {name.replace("h.0.", f"h.{layer}."): one for name, one in blocks.items()}
    config = json.loads(files[CONFIG])
    config["n_layer"] = facts["config"]["n_layer"] = many
    files[victim.mask_file] = put_together(table, facts, tensors)
    files[CONFIG] = to_text(config).encode()


@damage("names that are shown, and keys that are missing")
def _names(rng, files, victim, victims):
    table, facts, tensors = take_apart(files[victim.mask_file])
    config = json.loads(files[CONFIG])
    odd = rng.choice(["\x1b[2J", "![x](http://x)", "<script>", "a|b\n# c", "`", "\u202e", ""])
    keys = ["rule", "density", "seed", "weight_generator", "architectures", "auto_map"]
    what = rng.choice([*keys, "tensor"])
    if what == "tensor":
        name = rng.choice(sorted(facts["tensors"]))
        facts["tensors"][name + odd + "x"] = facts["tensors"].pop(name)
    else:
        value = rng.choice([odd, -1, 5, [5], {"a": 5}, None])
        both = rng.random() < 0.5
        for one in (config, facts["config"]) if both else (rng.choice([config, facts["config"]]),):
            inside = home(one, what)
            if rng.random() < 0.4:
                inside.pop(what, None)
            else:
                inside[what] = value
    files[victim.mask_file] = put_together(table, facts, tensors)
    if "supermask" in config and "digest" in facts:
        config["supermask"]["digest"] = facts["digest"]
    files[CONFIG] = to_text(config).encode("utf-8", "surrogatepass")


@damage("another model under the same digest")
def _forge(rng, files, victim, victims):
    """Make a consistent ticket of another seed, with all its digests, but keep the digest that people compare."""
    table, facts, tensors = take_apart(files[victim.mask_file])
    if "digest" not in facts:  # an older version without it
        return _flip(rng, files, victim, victims)
    config = json.loads(files[CONFIG])
    options = config["supermask"]
    factors = [one * rng.choice([2, 3, -1]) for one in options["factors"]]
    choices: list[dict[str, Any]] = [
        {"factors": factors},
        {"seed": options["seed"] + rng.choice([1, 2, 10**6])},
        {"n_head": rng.choice([1, 4, 8])},
        {"layer_norm_epsilon": rng.choice([1e-3, 1e-12])},
        {"activation_function": rng.choice(["relu", "gelu", "silu"])},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"pad_token_id": 3},
    ]
    changes = rng.choice(choices)
    for one in (config, facts["config"]):
        for key, value in changes.items():
            home(one, key)[key] = value
    if "seed" in changes:
        for name, entry in facts["tensors"].items():
            if "weight_sha256" in entry:
                drawn = TensorSpec(name, tuple(entry["shape"]), changes["seed"], entry["law"], entry["scale"])
                entry["weight_sha256"] = digest(drawn.draw())[:DIGITS]
    files[victim.mask_file] = with_header(table, facts, tensors)
    files[CONFIG] = to_text(config).encode()


@damage("a tokenizer that is damaged, or a bomb")
def _tokenizer(rng, files, victim, victims):
    files.clear()
    files |= victims["words"].files
    facts = json.loads(files[TOKENIZER])
    new: Any = {"id": 0, "content": "zzz", "single_word": False, "lstrip": False, "rstrip": False}
    new |= {"normalized": False, "special": rng.random() < 0.5}
    number = rng.choice([60_000_000, 2**32 - 1, 2**31, WORDS, WORDS - 1, 3, 0])
    match rng.choice(["token", "added", "edit", "edit", "edit", "flip", "cut", "config"]):
        case "token":
            facts["model"]["vocab"]["zzz"] = number
        case "added":
            facts["added_tokens"].append(new | {"id": number})
        case "edit":
            facts = edit_tree(rng, facts)
        case "flip":
            data = bytearray(files[TOKENIZER])
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            files[TOKENIZER] = bytes(data)
            return
        case "cut":
            files[TOKENIZER] = files[TOKENIZER][: rng.randrange(len(files[TOKENIZER]))]
            return
        case "config":
            settings = edit_tree(rng, json.loads(files["tokenizer_config.json"]))
            files["tokenizer_config.json"] = to_text(settings).encode("utf-8", "surrogatepass")
            return
    files[TOKENIZER] = to_text(facts).encode("utf-8", "surrogatepass")


# -- one case ---------------------------------------------------------------------------------------


def lay_out(folder: Path, files: Files) -> None:
    folder.mkdir()
    for name, what in files.items():
        path = folder / name
        if isinstance(what, bytes):
            path.write_bytes(what)
        elif isinstance(what, dict):
            lay_out(path, what)
        elif what[0] == "sparse":
            path.write_bytes(what[1])
            os.truncate(path, what[2])
        elif what[0] == "link":
            path.symlink_to(what[1])
        elif what[0] == "pipe":
            os.mkfifo(path)
        elif what[0] == "socket":
            os.mknod(path, 0o140600)
        else:
            path.mkdir()


def bytes_of(files: Files) -> int:
    """Return the bytes that files take on disk."""
    sizes = {bytes: len, dict: bytes_of, tuple: lambda what: len(what[1]) if what[0] == "sparse" else 0}
    return sum(sizes[type(what)](what) for what in files.values())


class Memory:
    """The peak memory of this process since the start of a measurement."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak on Linux
        self.before = self._most()

    def _most(self) -> float:
        with contextlib.suppress(OSError):
            found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
            if found:
                return int(found[1]) / 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def grown(self) -> float:
        """Return how much the peak has grown, in megabytes."""
        return self._most() - self.before


def megabytes_per_byte(folder: Path) -> float:
    """Return the memory for verifying and loading a valid ticket, in megabytes per byte of its files."""
    model = SupermaskGPT2LMHeadModel(SupermaskGPT2Config(**TINY | {"n_embd": 512, "vocab_size": 4096}))
    model.save_ticket(folder)
    del model
    memory = Memory()
    verify_ticket(folder)
    SupermaskGPT2LMHeadModel.from_pretrained(folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    shutil.rmtree(folder)
    return memory.grown() / size


class TooLong(BaseException):
    """Took more than SECONDS, or waited for more than WAITING."""


class Alarm:
    """Raises TooLong in its block, once. A call that signals cannot interrupt may take longer than both limits."""

    armed = False

    def __enter__(self) -> None:
        Alarm.armed = True
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, WAITING)

    def __exit__(self, *_: Any) -> None:
        Alarm.armed = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _ring(*_: Any) -> None:
    if Alarm.armed:
        Alarm.armed = False
        raise TooLong


@dataclass
class Result:
    """The outcome of every way to load a damaged ticket: "refused", "same", "not asked", or a failure."""

    number: int
    kind: str
    victim: str
    outcomes: dict[str, str] = field(default_factory=dict)
    details: str = ""

    @property
    def failed(self) -> bool:
        return any(outcome not in ("refused", "same", "not asked") for outcome in self.outcomes.values())


def run_case(seed: int, number: int, victims: dict[str, Victim], folder: Path, honest: float) -> Result:
    """Damage one ticket and load it in all ways. `honest`: megabytes per byte that a valid ticket takes."""
    rng = random.Random(f"{seed} {number}")
    kinds = list(DAMAGES)
    weights = [0.1 if kind.startswith("a bomb") else 1 for kind in kinds]  # bombs take long to make
    kind = kinds[number] if number < len(kinds) else rng.choices(kinds, weights)[0]
    name = rng.choice(list(victims))
    victim, result = victims[name], Result(number, kind, name)
    files = dict(victim.files)
    DAMAGES[kind](rng, files, victim, victims)
    lay_out(folder, files)
    ways: dict[str, Callable[[], bool]] = {
        "verify": lambda: bool(verify_ticket(folder)),
        "class": lambda: _same_model(type(victim.model).from_pretrained(folder), victim),
        "auto": lambda: _same_model(victim.auto.from_pretrained(folder, trust_remote_code=False), victim),
        "load_mask": lambda: _same_mask(victim, folder),
        "file": lambda: _same_model(type(victim.model).from_pretrained(folder / victim.mask_file), victim),
    }
    if kind.startswith("a tokenizer"):
        ways = {
            "page": lambda: bool(make_page(folder)),
            "export": lambda: bool(export_gguf(folder, folder / "x.gguf", "f32")),
        }
    if isinstance(files.get(CONFIG), tuple):
        del ways["auto"]  # transformers would read all of a device, or gigabytes
    sparse = type(files.get(victim.mask_file)) is tuple and files[victim.mask_file][0] == "sparse"
    if not (sparse or isinstance(files.get(victim.mask_file), bytes)) or (
        isinstance(files.get(MODEL), bytes) and MASKS in files
    ):
        ways.pop("file", None)
    for way, load in ways.items():
        memory = Memory()
        try:
            with Alarm():
                result.outcomes[way] = "same" if load() else "ANOTHER MODEL"
        except SLTError as error:
            result.outcomes[way] = (
                "refused" if isinstance(error, TicketError) or "verify" not in ways else type(error).__name__
            )
            result.details += "" if result.outcomes[way] == "refused" else traceback.format_exc()
        except TooLong:
            result.outcomes[way] = f"MORE THAN {SECONDS} SECONDS"
            result.details += traceback.format_exc()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of a Rust library is not an Exception
            frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
            ours = any("hf_slt" + os.sep in name for name in frames)
            result.outcomes[way] = type(error).__name__ if ours or way != "auto" else "not asked"
            result.details += traceback.format_exc() if ours or way != "auto" else ""
        if (grown := memory.grown()) > max(LEAST_MEGABYTES, 3 * honest * bytes_of(files)):
            result.outcomes[way] = f"{grown:.0f} MB FOR {bytes_of(files)} BYTES"
    if result.outcomes.get("verify") == "same" and "refused" in map(
        result.outcomes.get, ("class", "auto", "file")
    ):
        result.outcomes["verify"] = "PASSED WHAT DOES NOT LOAD"
    return result


def _same_model(model: Any, victim: Victim) -> bool:
    state = state_of(model)
    return (
        state.keys() == victim.state.keys()
        and all(torch.equal(state[name], values) for name, values in victim.state.items())
        and logits_of(model).dtype == victim.logits.dtype
        and torch.equal(logits_of(model), victim.logits)
    )


def _same_mask(victim: Victim, folder: Path) -> bool:
    model = victim.model
    model.load_mask(folder, "loaded")
    try:
        model.set_mask("loaded")
        state = state_of(model)
        return all(torch.equal(state[name], values) for name, values in victim.state.items())
    finally:
        model.set_mask("default")
        model.delete_mask("loaded")


def campaign(count: int, seed: int = 0, first: int = 0, bar: bool = False) -> Iterator[Result]:
    """Run `count` cases and yield their results."""
    os.environ["RUST_BACKTRACE"] = "0"  # otherwise a panic of tokenizers reads 50 MB of debug symbols
    numbers = tqdm(range(first, first + count), disable=not bar, unit="ticket", mininterval=1, smoothing=0)
    with tempfile.TemporaryDirectory() as place, _quiet():
        victims, honest = make_victims(Path(place)), megabytes_per_byte(Path(place, "honest"))
        for number in numbers:
            folder = Path(place, "damaged")
            yield run_case(seed, number, victims, folder, honest)
            shutil.rmtree(folder)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = {one: signal.signal(one, _ring) for one in (signal.SIGALRM, signal.SIGPROF)}
    transformers.logging.disable_progress_bar()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        transformers.logging.enable_progress_bar()
        for one, handler in before.items():
            signal.signal(one, handler)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20_000, help="how many damaged tickets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first case; with --count 1, only that case"
    )
    options = parser.parse_args()
    table: dict[str, Counter] = {kind: Counter() for kind in DAMAGES}
    failures = 0
    with contextlib.suppress(KeyboardInterrupt):  # the table then shows what was tried so far
        for result in campaign(options.count, options.seed, options.first, bar=True):
            table[result.kind]["tickets"] += 1
            for outcome in result.outcomes.values():
                table[result.kind][outcome if outcome in ("refused", "same", "not asked") else "FAILED"] += 1
            if result.failed or options.count == 1:
                failures += result.failed
                again = f"python -m tests.attack --seed {options.seed} --first {result.number} --count 1"
                tqdm.write(
                    f"{result.kind}, ticket {result.victim!r}: {result.outcomes}\n  {again}\n{result.details}"
                )
    columns = ("tickets", "refused", "same", "not asked", "FAILED")
    print(f"{'loads, by kind of damage':56}" + "".join(f"{column:>10}" for column in columns))
    for kind, counts in (*table.items(), ("all", sum(table.values(), Counter()))):
        print(f"{kind:56}" + "".join(f"{counts[column]:10,}" for column in columns))
    sys.exit(f"{failures} failed" if failures else 0)


if __name__ == "__main__":
    main()
