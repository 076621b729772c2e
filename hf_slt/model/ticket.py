"""A ticket on disk: bit arrays and what is needed to use them, with digests of everything.

    ticket/
      config.json                     the model's configuration, with the digest of all masks
      mask.safetensors                every mask, packed; its metadata alone rebuilds the weights
      model.safetensors.index.json    maps every tensor to mask.safetensors, for tools that look for weights

(`save_pretrained` writes the same under transformers' own name, model.safetensors, which needs no index.)

A mask is one code a weight, in bit planes (see `codes.py`). With `encoding` "packed" each mask is stored so;
with "entropy" all data stand in one tensor, `coded` (see hf_slt/sharing/coded_files.py). Digests are those of
packed bytes in either case. Trained values are float32, or shorter (see `quantisation.py`).

The way in is one: `find_mask_file` finds the file, `read_header` its description, `read_ticket` all of it.
The header is the authority: its tensors must be those that its configuration implies, and config.json and the
file's own table must say the same, which is checked before anything is allocated.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from safetensors.numpy import load

from .codes import count_codes, planes
from .configuration_supermask_gpt2 import HEADS, SLTError, SupermaskGPT2Config, TicketError, need  # noqa: F401
from .quantisation import BITS, dequantise, stored_form
from .random_weights import digest

FORMAT_VERSION = 2
MASK_FILE = "mask.safetensors"
MODEL_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
NEXT = ".next-"  # then a digest of config.json: where the files of a save lie until they are in their places
METADATA_KEY = "hf_slt"
DIGEST_KEY = "hf_slt_sha256"  # of the text under METADATA_KEY
DIGITS = 16  # of a tensor's digest that are stored; that of all masks has 64
ENCODINGS = ("packed", "entropy")
DECODERS: dict[str, Any] = {}  # modules that read encodings which need a library; the package puts them here
OLDER: dict[Any, Callable[[dict], dict]] = {}  # versions that the package can bring to the present one
CODED_KEYS = ("coded", "coded_masks")  # where all data, or in version 1 all masks, of a coded file stand
SCALES = "_scales"  # after the key of quantised values: where the scales of their rows stand
_LONGEST_JSON = 64 << 20  # bytes; a header of a thousand tensors takes one
_MOST_WEIGHTS = 512  # that a byte of a file may stand for; in a coded mask of density 0.0015 it is 500
_DTYPES = {"uint8": "U8", "int8": "I8", "float16": "F16", "float32": "F32"}  # as safetensors names them
AGAIN = "download or copy the file again"  # the cure of all damage
# Options that configurations of version 1 do not have, with the values that they stand for there.
ADDED: dict = dict.fromkeys("frozen_density densities mask_bits threshold n_of_m embedding_rank".split())
ADDED |= {"factors": [0.0, 1.0], "search": 1.0, "scales": "none", "scale_bits": 16, "head_bias": False}
# What may differ between config.json and the header: how a ticket is loaded, not what it computes.
LOADING_KEYS = set("transformers_version architectures auto_map _name_or_path use_cache mask_digest".split())


@dataclass(frozen=True)
class Entry:
    """One tensor of a ticket.

    `key` is where its data stand in the file (None if all of it is drawn); `law` and `scale` are None
    for a trained tensor, whose values are stored.
    """

    shape: tuple[int, ...]
    key: str | None = None
    law: str | None = None
    scale: float | None = None
    counts: tuple[int, ...] | None = None  # of a mask: how many weights have each code
    data_sha256: str | None = None  # of the packed mask or the trained float32 values: the first 16 digits
    weight_sha256: str | None = None  # of the drawn float32 weights, before masking: the same
    bits: int = 1  # of a code; 32, 16, 8 or 4 of a trained value

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def kind(self) -> str:
        """As `SupermaskGPT2Config.kind_of`: masked, frozen or trained."""
        return "trained" if self.law is None else "frozen" if self.counts is None else "masked"

    def stored(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Keys, shapes and types of its data in a packed file."""
        if self.key is None:
            return {}
        if self.counts is not None:
            return {self.key: ((self.bits * -(-sum(self.counts) // 8),), np.dtype(np.uint8))}
        if self.bits not in BITS:
            return {self.key: (self.shape, np.dtype(f"float{self.bits}"))}
        scales = ((self.shape[0],), np.dtype(np.float16))
        return {self.key: stored_form(self.shape, self.bits), self.key + SCALES: scales}


@dataclass(frozen=True)
class Header:
    """The metadata of a mask file."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Entry]
    encoding: str = "packed"
    mask_digest: str = ""
    format_version: int = FORMAT_VERSION

    def masked(self) -> dict[str, Entry]:
        return {name: entry for name, entry in self.tensors.items() if entry.kind == "masked"}


@dataclass(frozen=True)
class Ticket:
    """A mask file, read and checked: arrays by tensor name, masks packed, trained values in float32."""

    path: Path
    header: Header
    arrays: dict[str, np.ndarray]


def mask_digest(digests: Mapping[str, str]) -> str:
    """One digest of all stored data: SHA-256 over 'name digest' lines, sorted by name."""
    return sha256("".join(f"{name} {one}\n" for name, one in sorted(digests.items())))


def sha256(text: str | bytes) -> str:
    data = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    return hashlib.sha256(data).hexdigest()


# -- finding and reading --------------------------------------------------------------------------


def find_mask_file(source: str | os.PathLike, **where: Any) -> Path | None:
    """The mask file that a path, a folder or a Hub name means; None if there is no ticket.

    where: `cache_dir`, `revision`, `token`, `subfolder` and others of `hf_hub_download`.
    """
    if os.path.isfile(source):
        return weights_folder(Path(source).parent) / Path(source).name
    if os.path.isdir(source):
        source, where = weights_folder(Path(source, where.get("subfolder") or "")), {}
    for name in (MASK_FILE, MODEL_FILE):
        path = find_file(source, name, **where)
        # Scores and dense models have files of that name too, but not our header.
        if path is not None and (name == MASK_FILE or METADATA_KEY in read_table(path)[0]):
            return path
    return None


def find_file(source: str | os.PathLike, name: str, **where: Any) -> Path | None:
    """A file of a folder or of a Hub name; None if it is not there."""
    if os.path.isdir(source):
        path = Path(source, where.get("subfolder") or "", name)
        return path if path.exists() else None
    try:
        return Path(hf_hub_download(str(source), name, **where))
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
        return None  # transformers will say what is wrong with the name


def weights_folder(folder: Path) -> Path:
    """Where the weights of a folder are: in itself, or where a save that was cut short has put them."""
    return following if (following := next_folder(folder)).is_dir() else folder


def next_folder(folder: Path, config: Path | None = None) -> Path:
    """Where files that belong to a config.json, of this folder or to come, wait (see sharing/files.py)."""
    config = config or folder / CONFIG_FILE
    return folder / (NEXT + sha256(read_bytes(config) if config.exists() else b"")[:16])


def read_header(path: Path) -> Header:
    """The metadata of a mask file, checked in full against the file's own table; reads no tensor."""
    metadata, table = read_table(path)
    text = stored = metadata.get(METADATA_KEY)
    if not isinstance(text, str):
        raise TicketError(f"{path}: no {METADATA_KEY!r} metadata; the file was not written by hf_slt")
    with contextlib.suppress(ValueError):  # then the digest below is not that of the text
        text = text if text.startswith("{") else _decoder(path, "entropy").inflate(text, _LONGEST_JSON)
    if metadata != {"format": "pt", METADATA_KEY: stored, DIGEST_KEY: sha256(text)}:
        raise TicketError(f"{path}: the metadata do not have the digest they name; {AGAIN}")
    header = _parse_header(path, parse_json(path, text))
    entries = header.tensors.values()
    described = sum(one.size / 8 if one.kind == "frozen" else one.size for one in entries)
    if described > _MOST_WEIGHTS * (size := path.stat().st_size):
        raise TicketError(f"{path}: {described:.0f} weights in {size} bytes: too many; pack it, or {AGAIN}")
    found = {key: (tuple(one["shape"]), one.get("dtype")) for key, one in table.items()}
    coded = None if header.encoding == "packed" else CODED_KEYS[CODED_KEYS[1] in found]
    wanted = {
        key: (shape, _DTYPES[str(dtype)])
        for entry in entries
        if coded is None or (coded == CODED_KEYS[1] and entry.kind != "masked")
        for key, (shape, dtype) in entry.stored().items()
    }
    if coded is not None:  # of any length
        wanted[coded] = (found.get(coded, ((), ""))[0], "U8")
    for key in sorted(wanted.keys() | found.keys()):
        if wanted.get(key) != found.get(key):
            shown = found.get(key, "missing"), wanted.get(key, "nothing of it")
            raise TicketError(f"{path}: tensor {key} is {shown[0]}, the metadata say {shown[1]}; {AGAIN}")
    return header


def read_ticket(path: str | os.PathLike) -> Ticket:
    """All of a mask file, each array checked against the header; with config.json if one lies beside it."""
    ticket, faults = ticket_and_faults(Path(path))
    folder = ticket.path.parent
    beside = (folder.parent if folder.name.startswith(NEXT) else folder) / CONFIG_FILE
    if not faults and beside.exists():
        faults = list(config_faults(ticket.path, ticket.header, read_json(beside)))
    for fault in faults:
        raise fault
    return ticket


def ticket_and_faults(path: Path) -> tuple[Ticket, list[TicketError]]:
    """The ticket, and what is wrong with its arrays; a header that is wrong raises."""
    header = read_header(path)
    arrays: dict[str, np.ndarray] = {}
    try:
        stored = load(path.read_bytes())
        if header.encoding != "packed":
            arrays |= _decoder(path, header.encoding).decode_file(stored, header.tensors)
    except (SafetensorError, OSError, ValueError) as error:
        return Ticket(path, header, {}), [TicketError(f"{path}: damaged ({error}); {AGAIN}")]
    faults, digests = [], {}
    for name, entry in header.tensors.items():
        if entry.key is None:
            continue
        if entry.kind == "trained" and entry.bits in BITS:
            codes, scales = stored[entry.key], stored[entry.key + SCALES]
            arrays[name] = dequantise(codes, scales, entry.shape, entry.bits)
        elif name not in arrays:
            values = stored[entry.key]
            arrays[name] = values if entry.kind == "masked" else values.astype(np.float32)
        digests[name], array = digest(arrays[name]), arrays[name]
        if not (found := digests[name]).startswith(str(entry.data_sha256)):
            differ = f"digest {found[:8]}..., not the {str(entry.data_sha256)[:8]}... in its metadata"
            faults.append(TicketError(f"{path}: {name} has {differ}: damaged; {AGAIN}"))
        elif entry.counts is not None:
            with contextlib.suppress(ValueError):
                if count_codes(array, sum(entry.counts), len(entry.counts)) == list(entry.counts):
                    continue
            faults.append(TicketError(f"{path}: {name} has other codes than the {entry.counts} it says"))
    if not faults and (found := mask_digest(digests)) != header.mask_digest:
        differ = f"digest {found[:8]}... of all masks is not the {header.mask_digest[:8]}... in its metadata"
        faults.append(TicketError(f"{path}: {differ}; {AGAIN}"))
    return Ticket(path, header, arrays), faults


def _decoder(path: Path, encoding: str) -> Any:
    if encoding not in DECODERS:  # this code came from the Hub by itself
        cure = "pip install hf_slt, and import hf_slt; or ask for it stored by `slt pack --encoding packed`"
        raise ImportError(f"{path}: masks with encoding {encoding!r} need the package: {cure}")
    return DECODERS[encoding]


def read_table(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and table of tensors of a safetensors file; no tensor is read."""
    start, size = _read(path, 8)
    length = int.from_bytes(start, "little")
    if not 0 < length <= min(size - 8, _LONGEST_JSON):
        raise TicketError(f"{path}: a header of {length} bytes in a file of {size}: truncated; {AGAIN}")
    table = parse_json(path, _read(path, 8 + length)[0][8:])
    metadata = table.pop("__metadata__", {})
    for one in (metadata, *table.values()):
        if not isinstance(one, dict) or (one is not metadata and not isinstance(one.get("shape"), list)):
            raise TicketError(f"{path}: a table that lists no tensors; {AGAIN}")
    return metadata, table


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file that may come from a stranger."""
    return parse_json(path, read_bytes(path))


def read_bytes(path: Path) -> bytes:
    """All of a JSON file, if it is no longer than such files are."""
    data, size = _read(path, _LONGEST_JSON)
    if size > _LONGEST_JSON:
        raise TicketError(f"{path}: {size} bytes, more than the {_LONGEST_JSON} it may have; {AGAIN}")
    return data


def _read(path: Path, most: int) -> tuple[bytes, int]:
    """The first bytes of a file, and how many it has."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a device has no end, and a pipe waits for ever
            raise TicketError(f"{path}: not a regular file; {AGAIN}")
        with open(path, "rb") as file:
            return file.read(min(most, found.st_size)), found.st_size
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise TicketError(f"{path}: {reason}; the ticket is incomplete") from None


def parse_json(path: Path, data: bytes | str) -> dict[str, Any]:
    """A JSON object, in which no key stands twice, every number is finite, and nothing lies very deep."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key that stands twice")
        return found

    def finite(text: str) -> float:
        if not math.isfinite(float(text)):
            raise ValueError(f"{text} is not a number")
        return float(text)

    def depth(one: Any) -> int:
        inside = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        return 1 + max(map(depth, inside), default=0)

    try:
        found = json.loads(data, object_pairs_hook=unique, parse_constant=finite, parse_float=finite)
        if depth(found) > 16:  # where four are needed
            raise ValueError(f"{depth(found)} levels, one within the other")
    except (ValueError, RecursionError) as error:
        raise TicketError(f"{path}: not the JSON that it should be ({error}); {AGAIN}") from None
    if not isinstance(found, dict):
        raise TicketError(f"{path}: JSON, but not an object; {AGAIN}")
    return found


# -- checking -------------------------------------------------------------------------------------


def _parse_header(path: Path, facts: dict[str, Any]) -> Header:
    known = {"format_version": (FORMAT_VERSION, *OLDER), "encoding": ENCODINGS}
    for key, values in known.items():
        if facts.get(key) not in values or type(facts[key]) is bool:
            choices = " or ".join(map(repr, values))
            cure = "install the version of hf_slt that wrote the ticket"
            raise TicketError(f"{path}: {key} {facts.get(key)!r} is not {choices}, known here; {cure}")
    try:
        facts = OLDER.get(facts["format_version"], dict)(facts)
        names = {field.name for field in fields(Header)}
        if facts.keys() != names or type(facts["mask_digest"]) is not str:
            raise ValueError(f"keys {sorted(facts.keys() ^ names)}")
        entries = {}
        for name, entry in facts["tensors"].items():
            told: Any = {key: tuple(one) if type(one) is list else one for key, one in entry.items()}
            entries[name] = Entry(**told)
        header = Header(**{**facts, "tensors": entries})
        config = SupermaskGPT2Config.from_dict(dict(header.config))
        own, told = header.mask_digest, config.mask_digest
        need(own == told, f"mask_digest {own!r}, but {told!r} in the configuration")
        need(config.state == "ticket", f"state {config.state!r}, not 'ticket'")
        check_tensors(header, config)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        raise TicketError(f"{path}: metadata that describe no ticket ({error}); {AGAIN}") from None
    return header


def state_key(name: str, kind: str) -> str | None:
    """Where the data of a tensor stand in a state dict, after the base model's prefix; None if nowhere."""
    whole, leaf = name.removesuffix(".scale"), name.rsplit(".", 1)[-1]
    stem = re.sub(r"\.(query|key|value)$", r".\1_", whole)
    stem += "" if stem.endswith("_") else "."
    if leaf == "scale":
        return f"{stem}scale.weight"
    if leaf.startswith("ln_"):
        return f"{name}.gain.weight"
    return {"masked": f"{stem}mask", "trained": f"{name}.weight", "frozen": None}[kind]


def check_tensors(header: Header, config: SupermaskGPT2Config, *, sizes: bool = True) -> None:
    """Raise ValueError unless a header's tensors are those of a model of this configuration."""
    many = len(header.tensors)
    need(config.n_layer <= many, f"{config.n_layer} layers of {many} tensors")  # before names are made
    names = set(config.tensor_names())
    for name in sorted((names ^ header.tensors.keys()) - set(HEADS)):
        raise ValueError(f"{name} is missing" if name in names else f"{name} is no tensor of such a model")
    for name, entry in header.tensors.items():
        tensor, kind = config.tensor(name), config.kind_of(name)
        fits = not sizes or repr(entry.shape) == repr(tensor.shape)  # 1.0 is not 1
        need(fits, f"{name} has shape {entry.shape}, the model wants {tensor.shape}")
        found = (entry.kind, entry.law, entry.scale, entry.bits)
        bits = planes(len(config.factors)) if kind == "masked" else 1
        drawn, stored = (kind, tensor.law, tensor.scale, bits), (kind, None, None, config.bits_of(name))
        same = repr(found) == repr(wanted := stored if kind == "trained" else drawn)
        need(same, f"{name} is {found} (kind, law, scale, bits), the configuration says {wanted}")
        if entry.counts is not None:
            whole = all(type(one) is int and one >= 0 for one in entry.counts)
            many = max(1, round(tensor.search * entry.size))
            fits = whole and len(entry.counts) == len(config.factors) and sum(entry.counts) == many
            need(fits, f"{name} has codes {entry.counts} of {many} weights")
        place = state_key(name, kind)
        digests = entry.data_sha256, entry.weight_sha256
        lengths = [one and len(one) >= DIGITS for one in digests]
        fits = lengths == [None if place is None else True, None if kind == "trained" else True]
        fits = fits and entry.key in (place, f"transformer.{place}")
        need(fits, f"{name} has key {entry.key!r} and digests {digests}")


def config_faults(path: Path, header: Header, config: Mapping[str, Any]) -> Iterator[TicketError]:
    """Where config.json is not that of the model that the masks were made for."""
    sides = ADDED | dict(header.config), ADDED | dict(config)
    for key in sorted((sides[0].keys() | sides[1].keys()) - LOADING_KEYS):
        own, other = (json.dumps(one[key]) if key in one else "nothing" for one in sides)
        if own != other:
            cure = "it was altered or is of another ticket: copy the folder again"
            yield TicketError(f"{path}: made for {key}={own}, but {CONFIG_FILE} says {other}; {cure}")
    if (told := str(config.get("mask_digest"))) != header.mask_digest:
        differ = f"digest {header.mask_digest[:8]}... is not the {told[:8]}... in {CONFIG_FILE}"
        yield TicketError(f"{path}: {differ}; the file is damaged or belongs to another ticket")


def check_weights(path: str | os.PathLike, name: str, entry: Entry, found: str) -> None:
    """Raise TicketError unless the drawn weights have the digest that the ticket was trained on."""
    if not found.startswith(str(entry.weight_sha256)):
        differ = f"digest {found[:8]}..., not the {str(entry.weight_sha256)[:8]}... they were trained with"
        raise TicketError(f"{path}: the weights drawn for {name} have {differ}; the ticket was altered")
