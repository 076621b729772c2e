"""Tickets written, from a model in memory or from another ticket; `model/ticket.py` tells what is written.

model -> describe: header and arrays -> write_masks -> mask.safetensors, index; config, code -> one rename
"""

import copy
import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from ..model.codes import count_codes, planes
from ..model.layers import FORWARDS, TicketLayer
from ..model.quantisation import BITS, dequantise
from ..model.random_weights import digest
from ..model.ticket import (
    CODED_KEYS,
    CONFIG_FILE,
    DIGEST_KEY,
    DIGITS,
    ENCODINGS,
    INDEX_FILE,
    MASK_FILE,
    METADATA_KEY,
    MODEL_FILE,
    SCALES,
    Entry,
    Header,
    SLTError,
    Ticket,
    mask_digest,
    read_header,
    read_json,
    sha256,
)
from .coded_files import deflate, encode_file
from .files import copy_own_file, staged
from .verify import verified_ticket

AUTO_MAP = {
    "AutoConfig": "configuration_supermask_gpt2.SupermaskGPT2Config",
    "AutoModel": "modeling_supermask_gpt2.SupermaskGPT2Model",
    "AutoModelForCausalLM": "modeling_supermask_gpt2.SupermaskGPT2LMHeadModel",
    "AutoModelForSequenceClassification": "modeling_supermask_gpt2.SupermaskGPT2ForSequenceClassification",
}
_HUB_OPTIONS = ("repo_id", "commit_message", "private", "token", "revision", "create_pr")
_SMALLEST = np.float32(2**-14)  # the least normal float16
_DROPPED = np.int32((1 << 13) - 1)  # bits of a float32 significand that float16 has not


def stored_data(model: Any) -> list[tuple[str, Any, Any]]:
    """Every layer, its path and what a ticket stores of its tensors; a joint rule selects once for all."""
    with FORWARDS.get(model.config.state, nullcontext)():
        return [(path, layer, layer.data()) for path, layer in model.supermask_layers()]


def describe(model: Any, encoding: str = "packed") -> tuple[Header, dict[str, np.ndarray]]:
    """The header of a ticket of this model, and the arrays to store by tensor name."""
    entries, arrays, digests = {}, {}, {}
    for path, layer, stored in stored_data(model):
        known = getattr(layer, "weight_digests", {})
        if isinstance(layer, TicketLayer):
            _refuse_merged(path, layer)
        for tensor, data in zip(layer.tensors, stored, strict=True):
            entry = Entry(tensor.shape, None)
            if layer.kind != "trained":
                drawn = known.get(tensor.name) or digest(tensor.draw())
                entry = replace(entry, law=tensor.law, scale=tensor.scale, weight_sha256=drawn[:DIGITS])
            if data is not None:
                if layer.bits in BITS:  # as the file will give them back; new rows may not be rounded yet
                    data = dequantise(*quantise(data, layer.bits), tensor.shape, layer.bits)
                elif layer.bits == 16:
                    data = data.astype(np.float16).astype(np.float32)
                arrays[tensor.name], digests[tensor.name] = data, digest(data)
                short = digests[tensor.name][:DIGITS]
                entry = replace(entry, key=f"{path}.{layer.key(tensor)}", data_sha256=short, bits=layer.bits)
            if layer.kind == "masked":
                levels = len(tensor.factors)
                entry = replace(
                    entry, counts=tuple(count_codes(data, tensor.searched, levels)), bits=planes(levels)
                )
            entries[tensor.name] = entry
    config = copy.deepcopy(model.config)
    config.state, config.mask_digest = "ticket", mask_digest(digests)
    config.auto_map, config.architectures = dict(AUTO_MAP), [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    facts = json.loads(config.to_json_string())
    facts.pop("transformers_version", None)  # saving a ticket again elsewhere changes nothing
    if config.embedding_rank is None:  # nor does it in a version that has this option
        facts.pop("embedding_rank", None)
    return Header(facts, entries, encoding, config.mask_digest), arrays


@torch.no_grad()
def _refuse_merged(path: str, layer: TicketLayer) -> None:
    """Raise SLTError if something was added to the weights of a ticket, which its file cannot hold."""
    if not layer.is_current:  # it will be drawn again anyway
        return
    before = layer.weight.clone()
    layer.materialise()
    if not torch.equal(layer.weight, before):
        layer.weight.copy_(before)
        raise SLTError(
            f"the weights of {path} are not those of its mask, as if an adapter was merged into them; keep "
            "the adapter beside the ticket, or merge it into what merge_and_unload() of the ticket gives"
        )


def to_ticket(model: Any) -> Any:
    """The model as a ticket, in memory: masks in place of scores."""
    config = copy.deepcopy(model.config)
    config.state, config.mask_digest = "ticket", None
    with torch.device("meta"):
        ticket = type(model)(config)
    ticket.load_state_dict(
        {
            f"{path}.{layer.key(tensor)}": torch.tensor(data)
            for path, layer, stored in stored_data(model)
            for tensor, data in zip(layer.tensors, stored, strict=True)
            if data is not None
        },
        assign=True,
    )
    for _, layer in ticket.supermask_layers():
        layer._is_hf_initialized = True  # else transformers would fill it anew
    if model.can_generate():
        ticket.generation_config = copy.deepcopy(model.generation_config)
    return ticket.to(model.device, model.dtype).eval()


def save_pretrained(
    model: Any,
    save_directory: str | os.PathLike,
    is_main_process: bool = True,
    push_to_hub: bool = False,
    **kwargs: Any,
) -> None:
    """As in transformers, but atomic: the scores to go on from, or the ticket if this is one."""
    hub = {name: kwargs.pop(name) for name in _HUB_OPTIONS if name in kwargs}
    if model.config.state == "ticket":
        if is_main_process:
            save_ticket(model, save_directory, file_name=MODEL_FILE)
    else:
        model.config.auto_map = dict(AUTO_MAP)
        with staged(save_directory, keep=is_main_process) as stage:
            PreTrainedModel.save_pretrained(model, stage, is_main_process=is_main_process, **kwargs)
    if push_to_hub and is_main_process:
        model.push_to_hub(hub.pop("repo_id", Path(save_directory).name), **hub)


def save_ticket(
    model: Any, save_directory: str | os.PathLike, *, encoding: str = "packed", file_name: str = MASK_FILE
) -> Header:
    """Write config, masks and the code that loads them; no weight is inside."""
    _check_encoding(encoding)
    header, arrays = describe(model, encoding)
    with staged(save_directory) as stage:
        write_masks(stage, header, arrays, file_name)
        model.config_class.from_dict(dict(header.config)).save_pretrained(stage)
        if model.can_generate():
            model.generation_config.save_pretrained(stage)
        custom_object_save(model, stage)
    return header


def rewrite_ticket(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    encoding: str = "packed",
    masks: Mapping[str, np.ndarray] | None = None,
    verified: Ticket | None = None,
) -> Header:
    """The ticket of one folder written to another (or the same), whole or not at all.

    encoding: how the new file stores its masks.
    masks: packed codes by tensor name, in place of those in `source`.
    verified: the ticket in `source`, where that was read and checked before.
    """
    source, target = Path(source), Path(target)
    _check_encoding(encoding)
    ticket = verified or verified_ticket(source, weights=False)
    header, arrays = ticket.header, dict(ticket.arrays)
    config = read_json(source / CONFIG_FILE)
    if masks is not None:
        arrays |= masks
        digests = {name: digest(array) for name, array in arrays.items()}
        entries = {
            name: replace(
                entry,
                counts=tuple(count_codes(arrays[name], sum(entry.counts), len(entry.counts))),
                data_sha256=digests[name][:DIGITS],
            )
            if entry.counts is not None
            else entry
            for name, entry in header.tensors.items()
        }
        changed: Any = {"mask_digest": mask_digest(digests)}
        config |= changed
        header = replace(header, tensors=entries, config={**header.config, **changed}, **changed)
    header = replace(header, encoding=encoding)
    with staged(target) as stage:
        if target.resolve() != source.resolve():
            for path in source.iterdir():
                if path.name not in (MASK_FILE, MODEL_FILE, INDEX_FILE, CONFIG_FILE):
                    copy_own_file(path, stage)
        write_masks(stage, header, arrays)
        (stage / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return header


def _check_encoding(encoding: str) -> None:
    if encoding not in ENCODINGS:
        raise ValueError(f"encoding {encoding!r} is not one of {', '.join(map(repr, ENCODINGS))}")


def write_masks(
    directory: str | os.PathLike, header: Header, arrays: Mapping[str, np.ndarray], file_name: str = MASK_FILE
) -> None:
    """Write the mask file, and the index it needs, into a (staged) folder.

    `arrays` by tensor name: packed masks, and trained values in float32; `header.encoding` says how the
    masks are stored.
    """
    directory = Path(directory)
    stored: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        entry = header.tensors[name]
        key = str(entry.key)
        if entry.kind == "trained" and entry.bits in BITS:
            stored[key], stored[key + SCALES] = quantise(array, entry.bits)
        else:
            stored[key] = array.astype(np.float16) if entry.bits == 16 else array
    facts = asdict(header)
    for name, entry in facts["tensors"].items():  # without what does not apply: small tickets are small files
        facts["tensors"][name] = {key: one for key, one in entry.items() if one is not None}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    metadata = {"format": "pt", METADATA_KEY: text, DIGEST_KEY: sha256(text)}
    if header.encoding == "entropy":
        stored = {CODED_KEYS[0]: encode_file(stored, header.tensors)}
        metadata[METADATA_KEY] = deflate(text)
    (directory / file_name).write_bytes(_in_order(save(stored, metadata)))
    read_header(directory / file_name)  # nothing is saved that would not load
    if file_name == MODEL_FILE:
        return  # transformers looks there without being told
    index = {
        "metadata": {"total_size": sum(array.nbytes for array in stored.values())},
        "weight_map": dict.fromkeys(sorted(stored), MASK_FILE),
    }
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _in_order(data: bytes) -> bytes:
    """The same safetensors file with a sorted header: the library's order of metadata is random.

    One ticket is then one sequence of bytes, and saving or pushing it again changes nothing.
    """
    length = int.from_bytes(data[:8], "little")
    text = json.dumps(json.loads(data[8 : 8 + length]), sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors stay aligned
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def largest_code(bits: int) -> int:
    """127 for 8 bits, 7 for 4."""
    return 2 ** (bits - 1) - 1


def quantise(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes (int8, or for 4 bits two in a byte, the first in the low half, plus 8) and the scales of rows.

    >>> quantise(np.array([[7.0, -3.4, 0.0]], np.float32), 4)
    (array([95,  8], dtype=uint8), array([1.], dtype=float16))
    """
    largest = np.abs(values).max(axis=1, initial=0.0)
    if not np.isfinite(largest).all():
        raise ValueError("values that are not finite cannot be quantised")
    steps = (largest / np.float32(largest_code(bits))).astype(np.float32).view(np.int32)
    scales = np.maximum((((steps + _DROPPED) & ~_DROPPED).view(np.float32)), _SMALLEST)
    if scales.max(initial=0.0) > np.finfo(np.float16).max:
        raise ValueError(f"a value of {largest.max()} is too large for a scale in float16")
    codes = np.rint(values / scales[:, None]).astype(np.int8)
    if bits == 4:
        shifted = np.append((codes + 8).astype(np.uint8), np.zeros(codes.size % 2, np.uint8))
        codes = shifted[0::2] | shifted[1::2] << 4
    return codes, scales.astype(np.float16)
