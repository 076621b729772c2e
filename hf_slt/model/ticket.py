"""A ticket on disk: bit arrays and what is needed to use them, with digests of everything.

    ticket/
      config.json                     the model's configuration, with the digest of all masks
      mask.safetensors                every mask, packed; its metadata alone rebuilds the weights
      model.safetensors.index.json    maps every tensor to mask.safetensors, for tools that look for weights

(`save_pretrained` of a ticket writes the same file under transformers' own name, model.safetensors,
which needs no index; all below holds for either.)

A mask of n bits is ceil(n / 8) bytes: bit i % 8 (least significant first) of byte i // 8 is weight i
of the row-major tensor; the bits after the last are zero. With `encoding` "packed" each mask is stored so;
with "entropy" all masks stand in one tensor, `coded_masks`, near their entropy (see `entropy.py`). Digests
are those of the packed bytes in either case: a ticket is the same ticket however it is stored. Trained values
are float32, or codes of 8 or 4 bits and the scales of their rows (see `quantisation.py`).

The way in is one: `find_mask_file` finds the file, `read_header` its description, `read_ticket` all of it. The
header is the authority: what config.json or the file's own table of tensors says otherwise is an error, found
before anything is allocated.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from .configuration_supermask_gpt2 import HEADS, RULES, SupermaskGPT2Config
from .entropy import decode_masks, encode_masks
from .files import SLTError
from .quantisation import BITS, dequantise, quantise, stored_form
from .random_weights import GENERATOR, LAWS, TensorSpec, digest

FORMAT_VERSION = 1
MASK_FILE = "mask.safetensors"
MODEL_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
METADATA_KEY = "hf_slt"
DIGEST_KEY = "hf_slt_sha256"  # of the text under METADATA_KEY
ENCODINGS = ("packed", "entropy")
CODED_KEY = "coded_masks"  # where all masks stand in an entropy-coded file
SCALES = "_scales"  # after the key of quantised values: where the scales of their rows stand
# Of these, what a new save does not write is of an older one, and would be loaded in its place.
WEIGHT_FILES = r"mask\.safetensors|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
_LONGEST_JSON = 64 << 20  # bytes; a header of a thousand tensors takes one
_DTYPES = {"uint8": "U8", "int8": "I8", "float16": "F16", "float32": "F32"}  # as safetensors names them
_AGAIN = "download or copy the file again"  # the cure of all damage

# What may differ between two configurations of one ticket: how it is loaded, not what it computes.
LOADING_KEYS = frozenset(
    "transformers_version architectures dtype auto_map _name_or_path use_cache mask_digest id2label "
    "label2id problem_type output_hidden_states output_attentions return_dict bos_token_id eos_token_id "
    "pad_token_id".split()
)


class TicketError(SLTError):
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
    data_sha256: str | None = None  # of the packed mask, or of the trained values in float32
    weight_sha256: str | None = None  # of the drawn float32 weights, before masking
    bits: int = 1  # that a stored value takes: 1 for a mask; 32, 8 or 4 for trained values

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def kind(self) -> str:
        """As `SupermaskGPT2Config.kind_of`: masked, frozen or trained."""
        return "trained" if self.law is None else "frozen" if self.kept is None else "masked"

    @property
    def masked(self) -> bool:
        return self.kind == "masked"

    @property
    def trained(self) -> bool:
        return self.kind == "trained"

    def stored(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Keys, shapes and types of its data in a packed file."""
        if self.key is None:
            return {}
        if self.masked:
            return {self.key: ((-(-self.size // 8),), np.dtype(np.uint8))}
        if self.bits not in BITS:
            return {self.key: (self.shape, np.dtype(np.float32))}
        scales = ((self.shape[0],), np.dtype(np.float16))
        return {self.key: stored_form(self.shape, self.bits), self.key + SCALES: scales}


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
    mask_digest: str = ""

    def masked(self) -> dict[str, Entry]:
        return {name: entry for name, entry in self.tensors.items() if entry.masked}

    def spec(self, name: str) -> TensorSpec:
        """The description that the frozen weights of a tensor are drawn by."""
        entry = self.tensors[name]
        if entry.law is None or entry.scale is None:
            raise ValueError(f"{name} is trained: its values are stored, not drawn")
        rows, columns = entry.shape
        return TensorSpec(name, (rows, columns), self.seed, entry.law, entry.scale, self.rule, self.density)


@dataclass(frozen=True)
class Ticket:
    """A mask file, read and checked: arrays by tensor name, masks packed, trained values in float32."""

    path: Path
    header: Header
    arrays: dict[str, np.ndarray]

    def masks(self) -> dict[str, np.ndarray]:
        """Every mask by tensor name, as boolean arrays."""
        masked = self.header.masked().items()
        return {name: unpack_mask(self.arrays[name], entry.shape) for name, entry in masked}


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
    return np.unpackbits(packed, count=math.prod(shape), bitorder="little").view(bool).reshape(shape)


def count_bits(packed: np.ndarray) -> int:
    """How many weights a packed mask keeps.

    >>> count_bits(np.array([25], np.uint8))
    3
    """
    return int(np.unpackbits(packed).sum(dtype=np.int64))


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
    """Write the mask file, and the index it needs, into a (staged) folder.

    `arrays` by tensor name: packed masks, and trained values in float32; `header.encoding` says how the
    masks are stored.
    """
    directory = Path(directory)
    stored: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        entry = header.tensors[name]
        key = str(entry.key)
        if entry.bits in BITS:
            stored[key], stored[key + SCALES] = quantise(array, entry.bits)
        elif not (entry.masked and header.encoding == "entropy"):
            stored[key] = array
    if header.encoding == "entropy":
        masked = header.masked()
        packed, shapes = {name: arrays[name] for name in masked}, {n: e.shape for n, e in masked.items()}
        stored[CODED_KEY] = encode_masks(packed, shapes)
    text = json.dumps(asdict(header), sort_keys=True)
    metadata = {"format": "pt", METADATA_KEY: text, DIGEST_KEY: _sha256(text)}
    (directory / file_name).write_bytes(_in_order(save(stored, metadata)))
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


# -- finding --------------------------------------------------------------------------------------


def find_mask_file(source: str | os.PathLike, **where: Any) -> Path | None:
    """The mask file that a path, a folder or a Hub name means; None if there is no ticket.

    where: `cache_dir`, `revision`, `token`, `subfolder` and others of `hf_hub_download`.
    """
    if os.path.isfile(source):
        return Path(source)
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
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(str(source), name, **where))
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
        return None  # transformers will say what is wrong with the name


def mask_path(directory: str | os.PathLike) -> Path:
    """The mask file of a ticket's folder, under either of its names; there may be none."""
    path = Path(directory) / MASK_FILE
    return path if path.exists() or not path.with_name(MODEL_FILE).exists() else path.with_name(MODEL_FILE)


# -- reading and checking -------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file that may come from a stranger."""
    return _parse_json(path, _read_bytes(path, _LONGEST_JSON))


def read_header(path: str | os.PathLike) -> Header:
    """The metadata of a mask file, checked in full against the file's own table; reads no tensor."""
    return _read_header(Path(path))[0]


def read_ticket(path: str | os.PathLike, *, check_config: bool = True) -> Ticket:
    """All of a mask file, each array checked against the header; with config.json if one lies beside it."""
    ticket, faults = ticket_and_faults(Path(path))
    beside = Path(path).with_name(CONFIG_FILE)
    if check_config and not faults and beside.is_file():
        faults = list(config_faults(Path(path), ticket.header, read_json(beside)))
    for fault in faults:
        raise fault
    return ticket


def _read_bytes(path: Path, limit: int) -> bytes:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a device has no end, and a pipe waits for ever
            raise TicketError(f"{path}: not a regular file; {_AGAIN}")
        if found.st_size > limit:
            raise TicketError(f"{path}: {found.st_size} bytes, more than the {limit} it may have; {_AGAIN}")
        return path.read_bytes()
    except FileNotFoundError:
        raise TicketError(f"{path}: no such file; the ticket is incomplete") from None


def _parse_json(path: Path, data: bytes | str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key that stands twice")
        return found

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    try:
        found = json.loads(data, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise TicketError(f"{path}: not the JSON that it should be ({error}); {_AGAIN}") from None
    if not isinstance(found, dict):
        raise TicketError(f"{path}: JSON, but not an object; {_AGAIN}")
    return found


def read_table(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and table of tensors of a safetensors file; no tensor is read."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise TicketError(f"{path}: not a regular file; {_AGAIN}")
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size - 8, _LONGEST_JSON):
                raise TicketError(
                    f"{path}: a header of {length} bytes in a file of {size}: truncated; {_AGAIN}"
                )
            table = _parse_json(path, file.read(length))
    except FileNotFoundError:
        raise TicketError(f"{path}: no such file; a ticket holds its masks in {MASK_FILE}") from None
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise TicketError(f"{path}: metadata that are not an object; {_AGAIN}")
    return metadata, table


def _read_header(path: Path) -> tuple[Header, dict[str, Any]]:
    metadata, table = read_table(path)
    text = metadata.get(METADATA_KEY)
    if not isinstance(text, str):
        raise TicketError(f"{path}: no {METADATA_KEY!r} metadata; the file was not written by hf_slt")
    if metadata != {"format": "pt", METADATA_KEY: text, DIGEST_KEY: _sha256(text)}:
        raise TicketError(f"{path}: the metadata do not have the digest they name; {_AGAIN}")
    header = _parse_header(path, _parse_json(path, text))
    found = {
        key: (tuple(one.get("shape", ())), one.get("dtype")) if isinstance(one, dict) else one
        for key, one in table.items()
    }
    wanted: dict[str, Any] = {
        key: (shape, _DTYPES[str(dtype)])
        for entry in header.tensors.values()
        if not (entry.masked and header.encoding == "entropy")
        for key, (shape, dtype) in entry.stored().items()
    }
    if header.encoding == "entropy":  # of any length
        wanted[CODED_KEY] = (found[CODED_KEY][0], "U8") if CODED_KEY in found else None
    if wanted != found:
        odd = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
        raise TicketError(
            f"{path}: tensor {odd[0]} is {found.get(odd[0], 'missing')}, the metadata say "
            f"{wanted.get(odd[0], 'nothing of it')}; {_AGAIN}"
        )
    return header, table


def _parse_header(path: Path, facts: dict[str, Any]) -> Header:
    if facts.get("format_version") != FORMAT_VERSION:
        raise TicketError(
            f"{path}: format version {facts.get('format_version')!r} is unknown, this is version "
            f"{FORMAT_VERSION}; install a newer hf_slt"
        )
    for key, known in (("encoding", ENCODINGS), ("rule", RULES), ("bit_order", ("little",))):
        if facts.get(key) not in known:
            choices = ", ".join(map(repr, known))
            raise TicketError(f"{path}: {key} {facts.get(key)!r} is not {choices}; install a newer hf_slt")
    if facts.get("generator") != GENERATOR:
        raise TicketError(
            f"{path}: generator {facts.get('generator')!r} is not {GENERATOR!r}: its weights cannot be drawn "
            "by this version of hf_slt; install the one that made the ticket"
        )
    try:
        names = {field.name for field in fields(Header)}
        if facts.keys() != names:
            raise ValueError(f"keys {sorted(facts.keys() ^ names)}")
        tensors = {name: _parse_entry(name, one) for name, one in facts["tensors"].items()}
        header = Header(**{**facts, "tensors": tensors})
        if type(header.seed) is not int or not isinstance(header.config, dict):
            raise ValueError(f"seed {header.seed!r} or a configuration that is none")
        _check_tensors(header)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise TicketError(f"{path}: metadata that describe no ticket ({error}); {_AGAIN}") from None
    return header


def _parse_entry(name: str, facts: dict[str, Any]) -> Entry:
    entry = Entry(**{**facts, "shape": tuple(facts["shape"])})
    numbers = [*entry.shape, entry.bits, *([entry.kept] if entry.kept is not None else [])]
    if len(entry.shape) != 2 or any(type(number) is not int for number in numbers):
        raise ValueError(f"{name}: shape, bits or kept that are no integers")
    stores = entry.kind != "frozen"
    if (
        (entry.kept is not None and not 0 <= entry.kept <= entry.size)
        or (entry.key is not None) != stores
        or (entry.data_sha256 is not None) != stores
        or entry.bits not in ((32, *BITS) if entry.trained else (1,))
        or (entry.trained and (entry.kept is not None or entry.scale is not None))
        or (not entry.trained and (entry.law not in LAWS or not math.isfinite(float(entry.scale or 0))))
    ):
        raise ValueError(f"{name}: an entry that contradicts itself")
    return entry


def _check_tensors(header: Header) -> None:
    """Raise ValueError unless the tensors are those that the header's own configuration implies."""
    config = SupermaskGPT2Config.from_dict(dict(header.config))
    if config.state != "ticket":
        raise ValueError(f"state {config.state!r}, not 'ticket'")
    for key in ("seed", "rule", "density"):
        if getattr(config, key) != getattr(header, key):
            raise ValueError(f"{key} {getattr(header, key)!r}, but {getattr(config, key)!r} in its configuration")
    names = set(config.tensor_names())
    if odd := sorted((names - header.tensors.keys()) | (header.tensors.keys() - names - set(HEADS))):
        raise ValueError(f"{odd[0]} is missing" if odd[0] in names else f"{odd[0]} is no tensor of such a model")
    for name, entry in header.tensors.items():
        spec, kind = config.tensor(name), config.kind_of(name)
        wanted = (spec.shape, kind, *((None, None) if kind == "trained" else (spec.law, spec.scale)))
        if (found := (entry.shape, entry.kind, entry.law, entry.scale)) != wanted:
            raise ValueError(f"{name} is {found}, the configuration implies {wanted}")
        if kind == "trained" and entry.bits != config.embedding_bits:
            raise ValueError(f"{name} has {entry.bits} bits a value, the configuration {config.embedding_bits}")


def ticket_and_faults(path: Path) -> tuple[Ticket, list[TicketError]]:
    """The ticket, and what is wrong with its arrays; a header that is wrong raises."""
    header, _ = _read_header(path)
    arrays: dict[str, np.ndarray] = {}
    try:
        stored = load(path.read_bytes())
        if header.encoding == "entropy":
            masked = header.masked()
            arrays |= decode_masks(
                stored[CODED_KEY],
                {name: entry.shape for name, entry in masked.items()},
                {name: int(entry.kept or 0) for name, entry in masked.items()},
            )
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        return Ticket(path, header, {}), [TicketError(f"{path}: damaged ({error}); {_AGAIN}")]
    faults = []
    for name, entry in header.tensors.items():
        if entry.key is None:
            continue
        if entry.bits in BITS:
            codes, scales = stored[entry.key], stored[entry.key + SCALES]
            arrays[name] = dequantise(codes, scales, entry.shape, entry.bits)
        elif name not in arrays:
            arrays[name] = stored[entry.key]
        if (found := digest(arrays[name])) != entry.data_sha256:
            faults.append(
                TicketError(
                    f"{path}: {name} has digest {found[:8]}..., not the {str(entry.data_sha256)[:8]}... in "
                    f"its metadata: damaged; {_AGAIN}"
                )
            )
        elif entry.masked and not _is_mask(arrays[name], entry):
            faults.append(TicketError(f"{path}: {name} does not keep {entry.kept} of {entry.size} weights"))
    if (found := mask_digest(header.tensors)) != header.mask_digest:
        faults.append(
            TicketError(
                f"{path}: digest {found[:8]}... of all masks is not the {str(header.mask_digest)[:8]}... in "
                f"its metadata; {_AGAIN}"
            )
        )
    return Ticket(path, header, arrays), faults


def _is_mask(packed: np.ndarray, entry: Entry) -> bool:
    return count_bits(packed) == entry.kept and not (entry.size % 8 and packed[-1] >> entry.size % 8)


def config_faults(path: Path, header: Header, config: Mapping[str, Any]) -> Iterator[TicketError]:
    """Where config.json is not that of the model that the masks were made for."""
    absent = object()
    for key in sorted((header.config.keys() | config.keys()) - LOADING_KEYS):
        own, other = header.config.get(key, absent), config.get(key, absent)
        if own != other or type(own) is not type(other):
            shown = ["nothing" if value is absent else repr(value) for value in (own, other)]
            yield TicketError(
                f"{path}: made for {key}={shown[0]}, but {CONFIG_FILE} says {shown[1]}; the file was altered "
                "or the mask belongs to another ticket: copy the folder again"
            )
    if config.get("mask_digest") != header.mask_digest:
        yield TicketError(
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
