"""A ticket on disk: bit arrays and what is needed to use them, with digests of everything.

    ticket/
      config.json                     the model's configuration, with the digest of all masks
      mask.safetensors                every mask, packed; its metadata alone rebuilds the weights
      model.safetensors.index.json    maps every tensor to mask.safetensors: from_pretrained finds it

(`save_pretrained` of a ticket writes the same file under transformers' own name, model.safetensors,
which needs no index; all below holds for either.)

A mask of n bits is ceil(n / 8) bytes: bit i % 8 (least significant first) of byte i // 8 is weight i
of the row-major tensor; the bits after the last are zero.

This module knows names, arrays and files; it knows no model and needs no torch.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from .random_weights import GENERATOR, digest, draw

FORMAT_VERSION = 1
MASK_FILE = "mask.safetensors"
MODEL_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
METADATA_KEY = "hf_slt"
DIGEST_KEY = "hf_slt_sha256"  # of the text under METADATA_KEY
# Of these, what a new save does not write is of an older one, and would be loaded in its place.
WEIGHT_FILES = r"mask\.safetensors|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"


# What may differ between two configurations of one ticket: how it is loaded, not what it computes.
_LOADING_KEYS = frozenset(
    "transformers_version architectures dtype auto_map _name_or_path use_cache mask_digest id2label "
    "label2id problem_type output_hidden_states output_attentions return_dict bos_token_id eos_token_id "
    "pad_token_id".split()
)


AGAIN = "download or copy the file again"  # the cure of all damage


class TicketError(ValueError):
    """A ticket is damaged, incomplete, of another backbone or of an unknown version."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a ticket.

    `key` is where its data stand in the file (None if all of it is drawn); `law` and `scale` are None
    for a trained tensor, whose values are stored.
    """

    shape: tuple[int, ...]
    key: str | None
    law: str | None = None
    scale: float | None = None
    kept: int | None = None
    data_sha256: str | None = None  # of the bytes under `key`: packed mask, or trained values
    weight_sha256: str | None = None  # of the drawn float32 weights, before masking

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def masked(self) -> bool:
        return self.kept is not None

    @property
    def trained(self) -> bool:
        return self.law is None


@dataclass(frozen=True)
class Header:
    """The metadata of a mask file."""

    seed: int
    config: Mapping[str, Any]
    tensors: Mapping[str, Entry]
    density: float
    rule: str
    generator: str = GENERATOR
    format_version: int = FORMAT_VERSION
    encoding: str = "packed"
    bit_order: str = "little"
    mask_digest: str = field(default="")

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def pack_mask(mask: np.ndarray) -> np.ndarray:
    """Bits to bytes, least significant first, row-major.

    >>> pack_mask(np.array([[True, False, False], [True, True, False]])).tolist()
    [25]
    """
    return np.packbits(np.ascontiguousarray(mask, dtype=bool).reshape(-1), bitorder="little")


def unpack_mask(packed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes to bits: the inverse of `pack_mask`.

    >>> unpack_mask(np.array([25], np.uint8), (2, 3)).tolist()
    [[True, False, False], [True, True, False]]
    """
    return np.unpackbits(packed, count=int(np.prod(shape)), bitorder="little").view(bool).reshape(shape)


def mask_digest(tensors: Mapping[str, Entry]) -> str:
    """One digest of all stored data: SHA-256 over 'name digest' lines, sorted by name."""
    lines = (f"{name} {entry.data_sha256}\n" for name, entry in sorted(tensors.items()) if entry.key)
    return _sha256("".join(lines))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# -- writing --------------------------------------------------------------------------------------


def write_masks(
    directory: str | os.PathLike, header: Header, arrays: Mapping[str, np.ndarray], file_name: str = MASK_FILE
) -> None:
    """Write the mask file, and the index it needs, into a (staged) folder; `arrays` by key of the file."""
    directory = Path(directory)
    text = header.to_json()
    metadata = {"format": "pt", METADATA_KEY: text, DIGEST_KEY: _sha256(text)}
    (directory / file_name).write_bytes(_in_order(save(dict(arrays), metadata)))
    if file_name == MODEL_FILE:
        return  # transformers looks there without being told
    index = {
        "metadata": {"total_size": sum(array.nbytes for array in arrays.values())},
        "weight_map": dict.fromkeys(sorted(arrays), MASK_FILE),
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


# -- reading and checking -------------------------------------------------------------------------


def has_header(path: str | os.PathLike) -> bool:
    """Whether a safetensors file is one of ours; a damaged one raises TicketError."""
    return METADATA_KEY in _read_metadata(Path(path))


def read_header(path: str | os.PathLike) -> Header:
    """The metadata of a mask file, checked for version and form; reads no tensor."""
    path = Path(path)
    metadata = _read_metadata(path)
    text = metadata.get(METADATA_KEY)
    if text is None:
        raise TicketError(f"{path}: no {METADATA_KEY!r} metadata; the file was not written by hf_slt")
    if metadata != {"format": "pt", METADATA_KEY: text, DIGEST_KEY: _sha256(text)}:
        raise TicketError(f"{path}: the metadata do not have the digest they name; {AGAIN}")
    try:
        fields = json.loads(text)
        if fields["format_version"] != FORMAT_VERSION:
            raise TicketError(
                f"{path}: format version {fields['format_version']} is unknown, this is version "
                f"{FORMAT_VERSION}; install a newer hf_slt"
            )
        tensors = {
            name: Entry(**{**entry, "shape": tuple(entry["shape"])})
            for name, entry in fields["tensors"].items()
        }
        header = Header(**{**fields, "tensors": tensors})
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise TicketError(f"{path}: metadata that cannot be read ({error!r}); {AGAIN}") from None
    if header.generator != GENERATOR:
        raise TicketError(
            f"{path}: generator {header.generator!r} is not {GENERATOR!r}: its weights cannot be drawn by "
            "this version of hf_slt; install the one that made the ticket"
        )
    return header


def _read_metadata(path: Path) -> dict[str, str]:
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if not 0 < length <= size - 8:
                raise TicketError(
                    f"{path}: a header of {length} bytes in a file of {size}: truncated; {AGAIN}"
                )
            return json.loads(file.read(length)).get("__metadata__", {})
    except FileNotFoundError:
        raise TicketError(f"{path}: no such file; a ticket holds its masks in {MASK_FILE}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError) as error:
        raise TicketError(f"{path}: not a safetensors file ({error}); {AGAIN}") from None


def read_arrays(path: str | os.PathLike, header: Header) -> dict[str, np.ndarray]:
    """Every stored array by tensor name, each checked against the header."""
    path = Path(path)
    try:
        stored = load_file(path)
    except (SafetensorError, OSError) as error:
        raise TicketError(f"{path}: {error}: damaged; {AGAIN}") from None
    arrays = {}
    for name, entry in header.tensors.items():
        if entry.key is None:
            continue
        if entry.key not in stored:
            raise TicketError(f"{path}: tensor {entry.key} is missing; {AGAIN}")
        arrays[name] = stored.pop(entry.key)
        check_array(path, name, entry, arrays[name])
    if stored:
        raise TicketError(f"{path}: tensor {min(stored)} is not in the metadata; {AGAIN}")
    if (found := mask_digest(header.tensors)) != header.mask_digest:
        raise TicketError(
            f"{path}: digest {found[:8]}... of all masks is not the {header.mask_digest[:8]}... in its "
            f"metadata; {AGAIN}"
        )
    return arrays


def check_array(path: str | os.PathLike, name: str, entry: Entry, array: np.ndarray) -> None:
    """Raise TicketError unless a stored array is the one that the header describes."""
    form = (
        ((-(-entry.size // 8),), np.dtype(np.uint8)) if entry.masked else (entry.shape, np.dtype(np.float32))
    )
    if (array.shape, array.dtype) != form:
        raise TicketError(f"{path}: {name} is stored as {array.shape, array.dtype}, not {form}; {AGAIN}")
    if (found := digest(array)) != entry.data_sha256:
        raise TicketError(
            f"{path}: {name} has digest {found[:8]}..., not the {str(entry.data_sha256)[:8]}... in its "
            f"metadata: damaged; {AGAIN}"
        )
    if entry.masked:
        bits = np.unpackbits(array, bitorder="little")
        if bits[entry.size :].any() or int(bits.sum()) != entry.kept:
            raise TicketError(f"{path}: {name} keeps {int(bits.sum())} weights, not {entry.kept}")


def check_config(path: str | os.PathLike, header: Header, config: Mapping[str, Any]) -> None:
    """Raise TicketError unless config.json describes the model that the masks were made for."""
    for key, value in header.config.items():
        if key not in _LOADING_KEYS and config.get(key, value) != value:
            raise TicketError(
                f"{path}: made for {key}={value!r}, but {CONFIG_FILE} says {config[key]!r}; "
                "the mask belongs to another ticket"
            )
    if config.get("mask_digest") != header.mask_digest:
        raise TicketError(
            f"{path}: digest {header.mask_digest[:8]}... is not the {str(config.get('mask_digest'))[:8]}... "
            f"in {CONFIG_FILE}; the file is damaged or belongs to another ticket"
        )


def check_weights(path: str | os.PathLike, name: str, entry: Entry, found: str) -> None:
    """Raise TicketError unless the drawn weights have the digest that the ticket was trained on."""
    if found != entry.weight_sha256:
        raise TicketError(
            f"{path}: the weights drawn for {name} have digest {found[:8]}..., not the "
            f"{str(entry.weight_sha256)[:8]}... they were trained with; seed, law or scale was altered"
        )


def verify_ticket(directory: str | os.PathLike, *, weights: bool = True) -> Header:
    """Check everything in a ticket's folder and return its header; raise TicketError at the first fault.

    Files present and readable, versions known, configuration, every mask, and (with `weights`) every
    frozen weight drawn again and compared with its digest.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise TicketError(f"{directory}: no such folder")
    config = _read_json(directory / CONFIG_FILE)
    path, other = directory / MASK_FILE, directory / MODEL_FILE
    if path.exists() and other.exists():
        raise TicketError(f"{other}: would be loaded instead of {MASK_FILE}; remove it")
    if other.exists():
        path = other
    header = read_header(path)
    if path.name == MASK_FILE:
        keys = [entry.key for entry in header.tensors.values() if entry.key]
        if _read_json(directory / INDEX_FILE).get("weight_map") != dict.fromkeys(keys, MASK_FILE):
            raise TicketError(
                f"{directory / INDEX_FILE}: does not list the tensors of {MASK_FILE}; save the ticket again"
            )
    read_arrays(path, header)
    check_config(path, header, config)
    if weights:
        for name, entry in header.tensors.items():
            if not entry.trained:
                check_weights(path, name, entry, digest(draw_entry(header, name)))
    return header


def draw_entry(header: Header, name: str) -> np.ndarray:
    """The frozen weights of one tensor of a ticket, before masking."""
    entry = header.tensors[name]
    if entry.law is None or entry.scale is None:
        raise ValueError(f"{name} is trained: its values are stored, not drawn")
    return draw(header.seed, name, entry.shape, entry.law, entry.scale)


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise TicketError(f"{path}: no such file; the ticket is incomplete") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TicketError(f"{path}: not JSON ({error}); {AGAIN}") from None
