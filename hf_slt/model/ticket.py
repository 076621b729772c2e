"""A ticket on disk: bit arrays and what is needed to use them, with digests of everything.

    ticket/
      config.json                     the model's configuration, with the digest of all masks
      mask.safetensors                every mask, packed; its metadata alone rebuilds the weights
      model.safetensors.index.json    maps every tensor to mask.safetensors: from_pretrained finds it

(`save_pretrained` of a ticket writes the same file under transformers' own name, model.safetensors,
which needs no index; all below holds for either.)

A mask of n bits is ceil(n / 8) bytes: bit i % 8 (least significant first) of byte i // 8 is weight i
of the row-major tensor; the bits after the last are zero. With `encoding` "packed" each mask is stored so;
with "entropy" all masks stand in one tensor, `coded_masks`, near their entropy (see `entropy.py`). Digests
are those of the packed bytes in either case: a ticket is the same ticket however it is stored. Trained values
are float32, or codes of 8 or 4 bits and the scales of their rows (see `quantisation.py`).

This module knows names, arrays and files; it knows no model and needs no torch.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from .entropy import decode_masks, encode_masks
from .files import SLTError, staged
from .quantisation import BITS, dequantise, quantise, stored_form
from .random_weights import GENERATOR, digest, draw

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


# What may differ between two configurations of one ticket: how it is loaded, not what it computes.
_LOADING_KEYS = frozenset(
    "transformers_version architectures dtype auto_map _name_or_path use_cache mask_digest id2label "
    "label2id problem_type output_hidden_states output_attentions return_dict bos_token_id eos_token_id "
    "pad_token_id".split()
)


AGAIN = "download or copy the file again"  # the cure of all damage


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
        return int(np.prod(self.shape))

    @property
    def entropy_bits(self) -> float:
        """The least a mask takes of which only the number kept is known."""
        return entropy_bits(self.size, self.kept) if self.kept is not None else 0.0

    @property
    def value_bytes(self) -> int:
        """Bytes of trained values, with the scales of their rows."""
        if not self.trained:
            return 0
        return -(-self.size * self.bits // 8) + (2 * self.shape[0] if self.bits in BITS else 0)

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

    @property
    def coded(self) -> bool:
        """Whether the file holds something else than the tensors of the model's state dict."""
        return self.encoding != "packed" or any(entry.bits in BITS for entry in self.tensors.values())

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def entropy_bits(size: int, kept: int) -> float:
    """log2(size choose kept).

    >>> round(entropy_bits(100, 2), 3)
    12.273
    """
    nats = math.lgamma(size + 1) - math.lgamma(kept + 1) - math.lgamma(size - kept + 1)
    return nats / math.log(2)


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
    """Write the mask file, and the index it needs, into a (staged) folder.

    `arrays` by key of the state dict: packed masks, and trained values; `header.encoding` says how the
    masks are stored.
    """
    directory = Path(directory)
    arrays = _encode(header, arrays)
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


def _encode(header: Header, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the file holds, of what the state dict holds: both by key."""
    stored = dict(arrays)
    for entry in header.tensors.values():
        if entry.bits in BITS:
            key = str(entry.key)
            stored[key], stored[key + SCALES] = quantise(arrays[key], entry.bits)
    if header.encoding == "entropy":
        masked = {name: entry for name, entry in header.tensors.items() if entry.masked}
        shapes = {name: entry.shape for name, entry in masked.items()}
        packed = {name: stored.pop(str(entry.key)) for name, entry in masked.items()}
        stored[CODED_KEY] = encode_masks(packed, shapes)
    return stored


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
    if header.encoding not in ENCODINGS:
        raise TicketError(
            f"{path}: encoding {header.encoding!r} is not one of {', '.join(map(repr, ENCODINGS))}; install "
            "a newer hf_slt"
        )
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
    """Every stored array by tensor name, masks packed, each checked against the header."""
    arrays, faults = _read_arrays(Path(path), header)
    if faults:
        raise faults[0]
    return arrays


def read_masks(path: str | os.PathLike, header: Header) -> dict[str, np.ndarray]:
    """Every mask by tensor name, as boolean arrays."""
    arrays = read_arrays(path, header)
    entries = header.tensors.items()
    return {name: unpack_mask(arrays[name], entry.shape) for name, entry in entries if entry.masked}


def _read_arrays(path: Path, header: Header) -> tuple[dict[str, np.ndarray], list[TicketError]]:
    try:
        stored = _decode(header, load_file(path))
    except (SafetensorError, OSError) as error:
        return {}, [TicketError(f"{path}: {error}: damaged; {AGAIN}")]
    except KeyError as error:
        return {}, [TicketError(f"{path}: tensor {error.args[0]} is missing; {AGAIN}")]
    except ValueError as error:
        return {}, [TicketError(f"{path}: a tensor cannot be decoded ({error}); {AGAIN}")]
    arrays, faults = {}, []
    for name, entry in header.tensors.items():
        if entry.key is None:
            continue
        if entry.key not in stored:
            faults.append(TicketError(f"{path}: tensor {entry.key} is missing; {AGAIN}"))
            continue
        arrays[name] = stored.pop(entry.key)
        try:
            check_array(path, name, entry, arrays[name])
        except TicketError as fault:
            faults.append(fault)
    faults += [TicketError(f"{path}: tensor {key} is not in the metadata; {AGAIN}") for key in sorted(stored)]
    if (found := mask_digest(header.tensors)) != header.mask_digest:
        faults.append(
            TicketError(
                f"{path}: digest {found[:8]}... of all masks is not the {header.mask_digest[:8]}... in its "
                f"metadata; {AGAIN}"
            )
        )
    return arrays, faults


def _decode(header: Header, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inverse of `_encode`."""
    for entry in header.tensors.values():
        if entry.bits in BITS:
            codes, scales = stored.pop(str(entry.key)), stored.pop(str(entry.key) + SCALES)
            form = stored_form(entry.shape, entry.bits), ((entry.shape[0],), np.dtype(np.float16))
            if ((codes.shape, codes.dtype), (scales.shape, scales.dtype)) != form:
                raise ValueError(f"{entry.key} is stored as {codes.shape, codes.dtype}, not {form[0]}")
            stored[str(entry.key)] = dequantise(codes, scales, entry.shape, entry.bits)
    if header.encoding == "entropy":
        masked = {name: entry for name, entry in header.tensors.items() if entry.masked}
        shapes = {name: entry.shape for name, entry in masked.items()}
        kept = {name: int(entry.kept or 0) for name, entry in masked.items()}
        packed = decode_masks(stored.pop(CODED_KEY), shapes, kept)
        stored |= {str(masked[name].key): bits for name, bits in packed.items()}
    return stored


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


def mask_path(directory: str | os.PathLike) -> Path:
    """The mask file of a ticket's folder, under either of its names."""
    path = Path(directory) / MASK_FILE
    return path if path.exists() or not path.with_name(MODEL_FILE).exists() else path.with_name(MODEL_FILE)


def verify_ticket(directory: str | os.PathLike, *, weights: bool = True) -> Header:
    """Check everything in a ticket's folder and return its header; raise TicketError at the first fault.

    Files present and readable, versions known, configuration, every mask, and (with `weights`) every
    frozen weight drawn again and compared with its digest.
    """
    for fault in find_faults(directory, weights=weights):
        raise fault
    return read_header(mask_path(directory))


def find_faults(directory: str | os.PathLike, *, weights: bool = True) -> Iterator[TicketError]:
    """All that is wrong with a ticket's folder, as `verify_ticket` would raise it."""
    directory = Path(directory)
    if not directory.is_dir():
        yield TicketError(f"{directory}: no such folder")
        return
    config, path = None, mask_path(directory)
    try:
        config = _read_json(directory / CONFIG_FILE)
    except TicketError as fault:
        yield fault
    if path.name == MASK_FILE and path.exists() and path.with_name(MODEL_FILE).exists():
        yield TicketError(f"{directory / MODEL_FILE}: would be loaded instead of {MASK_FILE}; remove it")
    try:
        header = read_header(path)
    except TicketError as fault:
        yield fault
        return
    if path.name == MASK_FILE:
        try:
            index = _read_json(directory / INDEX_FILE).get("weight_map")
            if index != dict.fromkeys(_stored_keys(header), MASK_FILE):
                cure = "save the ticket again"
                yield TicketError(
                    f"{directory / INDEX_FILE}: does not list the tensors of {MASK_FILE}; {cure}"
                )
        except TicketError as fault:
            yield fault
    yield from _read_arrays(path, header)[1]
    if config is not None:
        try:
            check_config(path, header, config)
        except TicketError as fault:
            yield fault
    for name, entry in header.tensors.items() if weights else ():
        if not entry.trained:
            try:
                check_weights(path, name, entry, digest(draw_entry(header, name)))
            except TicketError as fault:
                yield fault


def _stored_keys(header: Header) -> set[str]:
    coded = header.encoding == "entropy"
    entries = [entry for entry in header.tensors.values() if entry.key and not (coded and entry.masked)]
    scales = {str(entry.key) + SCALES for entry in entries if entry.bits in BITS}
    return {str(entry.key) for entry in entries} | scales | ({CODED_KEY} if coded else set())


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


# -- tickets from tickets ---------------------------------------------------------------------------


def backbone_differences(one: Header, other: Header) -> list[str]:
    """What keeps the masks of one ticket from fitting the frozen weights of another, in words."""
    found = [
        f"{what} {getattr(one, what)!r} and {getattr(other, what)!r}"
        for what in ("generator", "seed")
        if getattr(one, what) != getattr(other, what)
    ]
    for name in sorted({**one.tensors, **other.tensors}):
        if name not in one.tensors or name not in other.tensors:
            found.append(f"{name} is in only one of them")
            continue
        mine, theirs = one.tensors[name], other.tensors[name]
        for what in ("shape", "law", "scale", "masked", "bits"):
            if getattr(mine, what) != getattr(theirs, what):
                found.append(f"{name} with {what} {getattr(mine, what)} and {getattr(theirs, what)}")
                break  # one line a tensor is enough to name it
    free = _LOADING_KEYS | {"density", "rule", "state", "seed"}
    for key in sorted((one.config.keys() & other.config.keys()) - free):
        if one.config[key] != other.config[key]:
            found.append(f"{key} {one.config[key]!r} and {other.config[key]!r}")
    return found


def rewrite_ticket(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    encoding: str = "packed",
    masks: Mapping[str, np.ndarray] | None = None,
) -> Header:
    """The ticket of one folder written to another (or the same), whole or not at all.

    encoding: how the new file stores its masks.
    masks: packed masks by tensor name, in place of those in `source`; the density becomes what they keep.
    """
    source, target = Path(source), Path(target)
    if encoding not in ENCODINGS:
        raise ValueError(f"encoding {encoding!r} is not one of {', '.join(map(repr, ENCODINGS))}")
    header = verify_ticket(source, weights=False)
    arrays = read_arrays(mask_path(source), header)
    config = _read_json(source / CONFIG_FILE)
    if masks is not None:
        arrays |= masks
        entries = {
            name: replace(entry, kept=count_bits(arrays[name]), data_sha256=digest(arrays[name]))
            if entry.masked
            else entry
            for name, entry in header.tensors.items()
        }
        masked = [entry for entry in entries.values() if entry.masked]
        density = sum(entry.kept or 0 for entry in masked) / sum(entry.size for entry in masked)
        digest_of_all = mask_digest(entries)
        changed = {"density": density, "mask_digest": digest_of_all}
        config |= changed
        header = replace(
            header,
            tensors=entries,
            config={**header.config, **changed},
            density=density,
            mask_digest=digest_of_all,
        )
    header = replace(header, encoding=encoding)
    with staged(target, stale=WEIGHT_FILES) as stage:
        if target.resolve() != source.resolve():
            for path in source.iterdir():
                if path.is_file() and path.name not in (MASK_FILE, MODEL_FILE, INDEX_FILE, CONFIG_FILE):
                    shutil.copyfile(path, stage / path.name)
        by_key = {str(header.tensors[name].key): array for name, array in arrays.items()}
        write_masks(stage, header, by_key)
        (stage / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return header


def count_bits(packed: np.ndarray) -> int:
    """How many weights a packed mask keeps.

    >>> count_bits(np.array([25], np.uint8))
    3
    """
    return int(np.unpackbits(packed).sum(dtype=np.int64))
