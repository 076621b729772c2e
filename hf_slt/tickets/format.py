"""A ticket on disk: bit arrays and what is needed to use them, with digests of everything.

    ticket/
      config.json                     the model's configuration, with the digest of all masks
      mask.safetensors                every mask, packed; its metadata alone rebuilds the weights
      model.safetensors.index.json    maps every tensor to mask.safetensors, for tools that look for weights

(`save_pretrained` writes the same under transformers' own name, model.safetensors, which needs no index.)

A mask is one code per weight, in bit planes (see `codes.py`). With `encoding` "packed" these planes are stored;
with "entropy" one tensor, `coded`, holds all data (see `coded_files.py`). In both cases, digests are of the
packed bytes. Trained values are float32, or shorter (see `quantisation.py`).

There is a single loading path: `find_mask_file` finds the file, `read_header` reads its description, and
`read_ticket` reads all of it.
The header decides: its tensors must be those that its configuration implies, and config.json and the file's own
table must agree with it. This is checked before any memory is allocated.
"""

import contextlib
import hashlib
import html
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from safetensors.numpy import load

from ..about import __version__, install_command
from ..errors import TicketError, printable, require
from ..weights.codes import count_codes, only_chooses, planes
from ..weights.quantisation import BITS, dequantise
from ..weights.random_weights import LAWS, PRETRAINED, TensorSpec, digest
from ..weights.trellis import check_path, memory_of
from .coded_files import CODED_KEYS, decode_file, inflate
from .entries import SCALES, Entry
from .migrations import DIGITS, HEADER_MIGRATIONS, NESTED, nested_config

FORMAT_VERSION = 3
MASK_FILE = "mask.safetensors"
MODEL_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
VERSION_KEY = "hf_slt_version"  # in config.json: the version of hf_slt that wrote the folder
STAGING_PREFIX = ".next-"  # + digest of config.json: folder of new files until they are moved
METADATA_KEY = "hf_slt"
DIGEST_KEY = "hf_slt_sha256"  # of the text under METADATA_KEY
ENCODINGS = ("packed", "entropy")
# The longest JSON text that is read, in bytes. Nothing larger has been seen; the environment variable raises it. A
# header may take a sixteenth of it, enough to describe about 5,000 tensors.
MAX_JSON_BYTES = int(os.environ.get("HF_SLT_MAX_JSON_BYTES") or 16 << 20)
_HEADER_SHARE = 16
_MOST_INFLATED = 16  # largest ratio of inflated to deflated header; tickets have ratios of 4 to 9
_LONGEST_AXIS = 1 << 48
_MOST_WEIGHTS = 512  # largest number of weights per byte; a coded mask of density 0.0015 has 500
_DTYPES = {"uint8": "U8", "int8": "I8", "float16": "F16", "float32": "F32"}  # as safetensors names them
_ITEM_BYTES = {"U8": 1, "I8": 1, "F16": 2, "F32": 4}
REDOWNLOAD_HINT = "download or copy the file again"
_LIMIT_HINT = "if you trust the file, set HF_SLT_MAX_JSON_BYTES to a larger number"
# What may differ between config.json and the header: how a ticket is loaded, not what it computes.
LOADING_KEYS = {
    "transformers_version",
    VERSION_KEY,
    "architectures",
    "auto_map",
    "_name_or_path",
    "use_cache",
}
_DIGESTS = ("mask_digest", "digest")
_NOT_COMPUTED = LOADING_KEYS | {"dtype"}  # a ticket loaded in 16 bits is the same ticket


@dataclass(frozen=True, repr=False)
class Header:
    """The metadata of a mask file. Printing it shows a few lines; `tensors` has the details.

    Args:
        config (`Mapping[str, Any]`):
            The whole configuration, with the options of hf_slt in one object.
        tensors (`Mapping[str, Entry]`):
            The tensors of the model by name.
        encoding (`str`, defaults to `"packed"`):
            How masks are stored: `"packed"` or `"entropy"`.
        mask_digest (`str`, defaults to `""`):
            Digest of the stored data.
        digest (`str`, defaults to `""`):
            Digest that names the ticket.
        format_version (`int`, defaults to `FORMAT_VERSION`):
            Version of the format of the file.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Entry]
    encoding: str = "packed"
    mask_digest: str = ""
    digest: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of hf_slt in the configuration."""
        return self.config[NESTED]

    def spec(self, name: str) -> TensorSpec:
        """Return the description of a drawn tensor: with it, its weights and factors can be computed.

        Args:
            name (`str`):
                Name of a tensor.

        Returns:
            [`TensorSpec`]: the description.
        """
        entry, options = self.tensors[name], self.options
        state_bits = options.get("state_bits") if entry.kind == "masked" else None
        return TensorSpec(
            name,
            entry.shape,
            options["seed"],
            str(entry.law),
            entry.scale or 0.0,
            tuple(options["factors"]),
            options["search"],
            1.0 if options["frozen_density"] is None else options["frozen_density"],
            input_axes=entry.input_axes or (0,),
            state_bits=state_bits,
        )

    @property
    def is_strict(self) -> bool:
        """Whether masks only keep, drop or choose numbers that the seed drew.

        If so, the seed determines which models a mask can reach. Numbers that are trained and stored in addition to
        the masks, such as scales and gains, do not count here.
        """
        if self.options.get("backbone"):
            return False  # pretrained numbers, which no seed drew
        return only_chooses(self.options["factors"], self.options.get("state_bits"))

    def summary(self) -> dict[str, str]:
        """Return the most important facts, such as the model, the seed and the rule.

        Returns:
            `dict[str, str]`: a few labels, and a text for each.
        """
        options = self.options
        settings = [options["rule"], *(f"{name} {value}" for name, value in options["rule_options"].items())]
        kinds = [entry.kind for entry in self.tensors.values()]
        counted = [f"{kinds.count(kind)} {kind}" for kind in ("masked", "trained", "frozen") if kind in kinds]
        facts = {
            "model": self.config.get("model_type"),
            "weights": f"{sum(entry.size for entry in self.tensors.values()):,}",
            "tensors": ", ".join(counted),
            "seed": options["seed"],
            "rule": ", ".join(settings),
            "file": f"{self.encoding}, format {self.format_version}",
            "digest": self.digest,
        }
        if options.get("backbone"):
            facts["backbone"] = options["backbone"]
        return {label: printable(str(value)[:200]) for label, value in facts.items()}

    def __repr__(self) -> str:
        lines = [f"  {label:<9}{value}" for label, value in self.summary().items()]
        return "\n".join([f"{type(self).__name__} of a ticket:", *lines])

    def _repr_html_(self) -> str:
        """Return the summary as an HTML table for notebooks."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(label)}</th><td>{html.escape(value)}</td></tr>"
            for label, value in self.summary().items()
        )
        return f"<table>{rows}</table>"

    def masked(self) -> dict[str, Entry]:
        """Return the masked tensors.

        Returns:
            `dict[str, Entry]`: entries by tensor name.
        """
        return {name: entry for name, entry in self.tensors.items() if entry.kind == "masked"}


@dataclass(frozen=True)
class Ticket:
    """A mask file, read and checked.

    Args:
        path (`Path`):
            The file.
        header ([`Header`]):
            Its header.
        arrays (`dict[str, np.ndarray]`):
            By tensor name, packed codes of masks and trained values in float32.
    """

    path: Path
    header: Header
    arrays: dict[str, np.ndarray]


def mask_digest(digests: Mapping[str, str]) -> str:
    """Return one digest of all stored data: SHA-256 over 'name digest' lines, sorted by name.

    Args:
        digests (`Mapping[str, str]`):
            The digest of each tensor's data, by name.

    Returns:
        `str`: 64 hexadecimal digits.
    """
    return sha256("".join(f"{name} {one}\n" for name, one in sorted(digests.items())))


def ticket_digest(config: Mapping[str, Any], tensors: Mapping[str, Entry], masks: str) -> str:
    """Return the digest that names a ticket. It covers everything that its computation depends on.

    Args:
        config (`Mapping[str, Any]`):
            The configuration, its options nested. Keys that only say how to load the ticket are left out.
        tensors (`Mapping[str, Entry]`):
            Shapes, laws, scales, counts and digests of all tensors.
        masks (`str`):
            The digest of all stored data, see `mask_digest`.

    Returns:
        `str`: 64 hexadecimal digits.
    """
    plain = {name: value for name, value in config.items() if name not in _NOT_COMPUTED}
    plain[NESTED] = {name: value for name, value in config[NESTED].items() if name not in _DIGESTS}
    entries = {name: {**asdict(entry), "key": None} for name, entry in tensors.items()}
    for entry in entries.values():  # older tickets have no such field; their digests must stay the same
        if entry["input_axes"] is None:
            del entry["input_axes"]
    facts = {"config": plain, "tensors": entries, "masks": masks}
    return sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")))


def sha256(text: str | bytes) -> str:
    """Return the SHA-256 of a text, in UTF-8, or of bytes.

    Args:
        text (`str` or `bytes`):
            The text.

    Returns:
        `str`: 64 hexadecimal digits.
    """
    data = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    return hashlib.sha256(data).hexdigest()


# -- finding and reading --------------------------------------------------------------------------


def find_mask_file(source: str | os.PathLike, **download_kwargs: Any) -> Path | None:
    """Find the mask file that a path, a folder or a Hub name means.

    Args:
        source (`str` or `os.PathLike`):
            A mask file, a ticket's folder or a Hub name.
        download_kwargs:
            `cache_dir`, `revision`, `token`, `subfolder` and others of `hf_hub_download`.

    Returns:
        `Path`, *optional*: the file; None if there is no ticket.
    """
    if os.path.isfile(source):
        return weights_folder(Path(source).parent) / Path(source).name
    if os.path.isdir(source):
        source, download_kwargs = weights_folder(Path(source, download_kwargs.get("subfolder") or "")), {}
    for name in (MASK_FILE, MODEL_FILE):
        path = find_file(source, name, **download_kwargs)
        # Scores and dense models have files of that name too, but not our header.
        if path is not None and (name == MASK_FILE or METADATA_KEY in read_table(path)[0]):
            return path
    return None


def find_file(source: str | os.PathLike, name: str, **download_kwargs: Any) -> Path | None:
    """Find a file of a folder or of a Hub name.

    Args:
        source (`str` or `os.PathLike`):
            The folder or Hub name.
        name (`str`):
            Name of the file.
        download_kwargs:
            As in `find_mask_file`.

    Returns:
        `Path`, *optional*: the file; None if it does not exist.
    """
    if os.path.isdir(source):
        path = Path(source, download_kwargs.get("subfolder") or "", name)
        return path if path.exists() else None
    try:
        return Path(hf_hub_download(str(source), name, **download_kwargs))
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
        return None  # transformers will say what is wrong with the name


def weights_folder(folder: Path) -> Path:
    """Return where the files of a save are: in the folder itself, or in the subfolder of an interrupted save.

    Args:
        folder (`Path`):
            Folder of a ticket.

    Returns:
        `Path`: the folder, or its subfolder.
    """
    return following if (following := next_folder(folder)).is_dir() else folder


def next_folder(folder: Path, config: Path | None = None) -> Path:
    """Return the folder in which files that belong to a config.json wait to be moved (see tickets/files.py).

    Args:
        folder (`Path`):
            The folder of the ticket.
        config (`Path`, *optional*):
            The config.json that they belong to. Default: that of the folder.

    Returns:
        `Path`: a subfolder, which may not exist.
    """
    config = config or folder / CONFIG_FILE
    return folder / (STAGING_PREFIX + sha256(read_bytes(config) if config.exists() else b"")[:16])


def read_header(path: Path) -> Header:
    """Read the metadata of a mask file, and check them in full against the file's own table. No tensor is read.

    Args:
        path (`Path`):
            The mask file.

    Returns:
        [`Header`]: what the file says about the ticket.

    Raises:
        [`TicketError`]: at the first fault.
    """
    with _opened(path) as (file, size):
        return _read_header(path, file, size)


def _read_header(path: Path, file: BinaryIO, size: int) -> Header:
    metadata, table = _read_table(path, file, size)
    text = stored = metadata.get(METADATA_KEY)
    if not isinstance(text, str):
        raise TicketError(f"{path}: no {METADATA_KEY!r} metadata; the file was not written by hf_slt")
    longest = MAX_JSON_BYTES // _HEADER_SHARE
    with contextlib.suppress(ValueError):  # after an error the digest below does not match
        text = text if text.startswith("{") else inflate(text, min(longest, _MOST_INFLATED * len(text)))
    if metadata != {"format": "pt", METADATA_KEY: stored, DIGEST_KEY: sha256(text)}:
        raise TicketError(f"{path}: the metadata do not have the digest they name; {REDOWNLOAD_HINT}")
    if len(text) > longest:
        raise TicketError(f"{path}: metadata of {len(text)} bytes, more than {longest}; {_LIMIT_HINT}")
    header = _parse_header(path, parse_json(path, text))
    check_loading_keys(path, header.config)
    entries = header.tensors.values()
    described = sum(one.size / 8 if one.kind == "frozen" else one.size for one in entries)
    if described > _MOST_WEIGHTS * size:
        raise TicketError(
            f"{path}: {described:.0f} weights in {size} bytes: too many; store it as packed, or {REDOWNLOAD_HINT}"
        )
    found = {key: (tuple(one["shape"]), one.get("dtype")) for key, one in table.items()}
    coded = None if header.encoding == "packed" else CODED_KEYS[CODED_KEYS[1] in found]
    packed = {name: entry.stored() for name, entry in header.tensors.items()}
    wanted = {
        key: (shape, _DTYPES[str(dtype)])
        for name, entry in header.tensors.items()
        if coded is None or (coded == CODED_KEYS[1] and entry.kind != "masked")
        for key, (shape, dtype) in packed[name].items()
    }
    if coded is not None:
        length = found.get(coded, ((), ""))[0]
        # Coded data are not longer than the data themselves, except for rounding.
        plain = sum(
            math.prod(shape) * dtype.itemsize for one in packed.values() for shape, dtype in one.values()
        )
        fits = (
            len(length) == 1 and type(length[0]) is int and length[0] <= 1.01 * plain + 16 * len(packed) + 64
        )
        wanted[coded] = (length if fits else (), "U8")
    for key in sorted(wanted.keys() | found.keys()):
        if wanted.get(key) != found.get(key):
            shown = found.get(key, "missing"), wanted.get(key, "nothing about it")
            raise TicketError(
                f"{path}: tensor {key} is {shown[0]}, the metadata say {shown[1]}; {REDOWNLOAD_HINT}"
            )
    end = file.tell() + sum(math.prod(shape) * _ITEM_BYTES[dtype] for shape, dtype in wanted.values())
    if end != size:
        raise TicketError(f"{path}: {size} bytes, but its table describes {end}; {REDOWNLOAD_HINT}")
    return header


def read_ticket(path: str | os.PathLike, *, by_itself: bool = False) -> Ticket:
    """Read all of a mask file. Each array is checked against the header, and the header against config.json.

    Args:
        path (`str` or `os.PathLike`):
            The mask file.
        by_itself (`bool`, defaults to `False`):
            Whether the caller has named this file, and not a ticket's folder. A config.json beside it may then be
            that of another kind of model. In a ticket's folder it may not.

    Returns:
        [`Ticket`]: header and arrays.

    Raises:
        [`TicketError`]: at the first fault.
    """
    ticket, faults = ticket_and_faults(Path(path))
    folder = ticket.path.parent
    beside = (folder.parent if folder.name.startswith(STAGING_PREFIX) else folder) / CONFIG_FILE
    if not faults and beside.exists():
        config = read_json(beside)
        if not by_itself or str(config.get("model_type")).startswith("supermask_"):
            faults = list(config_faults(ticket.path, ticket.header, config))
    for fault in faults:
        raise fault
    return ticket


def ticket_and_faults(path: Path) -> tuple[Ticket, list[TicketError]]:
    """Read a mask file.

    Args:
        path (`Path`):
            The file.

    Returns:
        `tuple[Ticket, list[TicketError]]`: the ticket, and what is wrong with its arrays.

    Raises:
        [`TicketError`]: if its header is wrong.
    """
    arrays: dict[str, np.ndarray] = {}
    with _opened(path) as (file, size):  # once: another file may take its place at any moment
        header = _read_header(path, file, size)
        file.seek(0)
        data = file.read(size)
    try:
        stored = load(data)
        if header.encoding != "packed":
            arrays |= decode_file(stored, header.tensors)
    except (SafetensorError, ValueError) as error:
        return Ticket(path, header, {}), [TicketError(f"{path}: damaged ({error}); {REDOWNLOAD_HINT}")]
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
            faults.append(TicketError(f"{path}: {name} has {differ}: damaged; {REDOWNLOAD_HINT}"))
        elif entry.counts is not None:
            with contextlib.suppress(ValueError):
                if count_codes(array, sum(entry.counts), len(entry.counts)) == list(entry.counts):
                    continue
            faults.append(
                TicketError(f"{path}: {name} does not have the counts of codes {entry.counts} it names")
            )
    if not faults and (found := mask_digest(digests)) != header.mask_digest:
        differ = f"digest {found[:8]}... of all masks is not the {header.mask_digest[:8]}... in its metadata"
        faults.append(TicketError(f"{path}: {differ}; {REDOWNLOAD_HINT}"))
    return Ticket(path, header, arrays), faults


def read_table(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read metadata and table of tensors of a safetensors file. No tensor is read.

    Args:
        path (`Path`):
            The file.

    Returns:
        `tuple[dict[str, Any], dict[str, Any]]`: metadata, and the table of tensors.

    Raises:
        [`TicketError`]: if it is no safetensors file.
    """
    with _opened(path) as (file, size):
        return _read_table(path, file, size)


def _read_table(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= size - 8:
        raise TicketError(
            f"{path}: a header of {length} bytes in a file of {size}: truncated; {REDOWNLOAD_HINT}"
        )
    if length > MAX_JSON_BYTES:
        raise TicketError(f"{path}: a header of {length} bytes, more than {MAX_JSON_BYTES}; {_LIMIT_HINT}")
    table = parse_json(path, file.read(length))
    metadata = table.pop("__metadata__", {})
    for one in (metadata, *table.values()):
        if not isinstance(one, dict) or (one is not metadata and not isinstance(one.get("shape"), list)):
            raise TicketError(f"{path}: a table that lists no tensors; {REDOWNLOAD_HINT}")
    return metadata, table


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from an untrusted file.

    Args:
        path (`Path`):
            The file.

    Returns:
        `dict[str, Any]`: the object.

    Raises:
        [`TicketError`]: if the file does not exist, is too long, or holds no valid JSON object.
    """
    return parse_json(path, read_bytes(path))


def read_bytes(path: Path) -> bytes:
    """Read all of a JSON file, unless it is too long.

    Args:
        path (`Path`):
            The file.

    Returns:
        `bytes`: its bytes.

    Raises:
        [`TicketError`]: if it cannot be read, or is too long.
    """
    with _opened(path) as (file, size):
        if size > MAX_JSON_BYTES:
            raise TicketError(
                f"{path}: {size} bytes, more than the {MAX_JSON_BYTES} that are allowed; {_LIMIT_HINT}"
            )
        return file.read(size)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open an untrusted file. Yield the file and its length."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a device has no end, and opening a pipe waits
            raise TicketError(f"{path}: not a regular file; {REDOWNLOAD_HINT}")
        with open(path, "rb") as file:
            yield file, os.fstat(file.fileno()).st_size
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise TicketError(f"{path}: {reason}; the ticket is incomplete") from None


def parse_json(path: Path, data: bytes | str) -> dict[str, Any]:
    """Parse a JSON object in which no key occurs twice, every number is finite, and nothing is nested very deep.

    Args:
        path (`Path`):
            Name of the file, for messages.
        data (`bytes` or `str`):
            The text.

    Returns:
        `dict[str, Any]`: the object.

    Raises:
        [`TicketError`]: if the text is not such an object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key occurs twice")
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
        if depth(found) > 16:  # a ticket needs four
            raise ValueError(f"objects nested in {depth(found)} levels")
    except (ValueError, RecursionError) as error:
        raise TicketError(f"{path}: not valid JSON ({error}); {REDOWNLOAD_HINT}") from None
    if not isinstance(found, dict):
        raise TicketError(f"{path}: JSON, but not an object; {REDOWNLOAD_HINT}")
    return found


# -- checking -------------------------------------------------------------------------------------


def _parse_header(path: Path, facts: dict[str, Any]) -> Header:
    version, encoding = facts.get("format_version"), facts.get("encoding")
    if type(version) is not int or version < 1:
        raise TicketError(f"{path}: format_version {str(version)[:99]!r} is not a version; {REDOWNLOAD_HINT}")
    if version > FORMAT_VERSION:
        raise TicketError(
            f"{path}: this file has format version {version}; hf_slt {__version__} reads 1 to {FORMAT_VERSION}; "
            f"upgrade hf_slt: {install_command()}"
        )
    if encoding not in ENCODINGS:
        raise TicketError(
            f"{path}: this file has encoding {str(encoding)[:99]!r}; hf_slt {__version__} reads "
            f"{' and '.join(ENCODINGS)}; upgrade hf_slt: {install_command()}"
        )
    try:
        has_digest = facts["format_version"] not in HEADER_MIGRATIONS
        facts = HEADER_MIGRATIONS.get(facts["format_version"], dict)(facts)
        names = {field.name for field in fields(Header)}
        if facts.keys() != names or type(facts["mask_digest"]) is not str:
            raise ValueError(f"keys {sorted(facts.keys() ^ names)}")
        entries = {}
        for name, entry in facts["tensors"].items():
            plain: Any = {key: tuple(one) if type(one) is list else one for key, one in entry.items()}
            entries[name] = Entry(**plain)
        header = Header(**{**facts, "tensors": entries})
        _check_options(header)
        for name, entry in entries.items():
            _check_entry(name, entry, header.options)
        found = ticket_digest(header.config, entries, header.mask_digest)
        if not has_digest:  # an older version
            header = replace(header, digest=found)
        for stored in (header.digest, header.options["digest"] if has_digest else found):
            require(stored == found, f"digest {str(stored)[:8]}..., but its content has {found[:8]}...")
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        raise TicketError(f"{path}: the metadata describe no ticket ({error}); {REDOWNLOAD_HINT}") from None
    return header


def _is_name(value: Any) -> bool:
    """Return whether this is a name. Names are shown in terminals and cards: they hold no markup and no escapes."""
    return type(value) is str and re.fullmatch(r"[\w.+/-]{1,200}", value, re.ASCII) is not None


def _check_options(header: Header) -> None:
    """Raise an exception of any type unless codes and weights can be computed from the options."""
    options = header.options
    own, inside = header.mask_digest, options["mask_digest"]
    require(own == inside, f"mask_digest {own!r}, but {inside!r} in the configuration")
    require(options["state"] == "ticket", f"state {options['state']!r}, not 'ticket'")
    for key in ("rule", "weight_generator"):
        require(_is_name(options[key]), f"{key} {str(options[key])[:99]!r} is not a name")
    settings = options["rule_options"]
    named = type(settings) is dict and all(map(_is_name, settings))
    require(named, f"rule_options {str(settings)[:99]} are not options")
    for key, value in settings.items():
        require(
            type(value) is not str or _is_name(value),
            f"{key} {str(value)[:99]!r} is neither a number nor a name",
        )
    require(type(options["seed"]) is int and 0 <= options["seed"] < 2**64, f"seed {options['seed']!r}")
    factors = options["factors"]
    require(
        type(factors) is list
        and 2 <= len(set(factors)) == len(factors) <= 16
        and all(type(one) is float and math.isfinite(one) for one in factors),
        f"factors {str(factors)[:99]} are not 2 to 16 different numbers",
    )
    search, kept = options["search"], options["frozen_density"]
    require(type(search) in (int, float) and 0 < search <= 1, f"search {search!r} is not in (0, 1]")
    require(
        kept is None or (type(kept) in (int, float) and 0 <= kept <= 1 and search < 1),
        f"frozen_density {kept!r} with search {search!r}",
    )
    if "state_bits" in options:
        check_path(len(factors), options["state_bits"], search, (options["law"], options["embedding_law"]))


def _check_entry(name: str, entry: Entry, options: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless an entry describes a tensor."""
    shape = entry.shape
    require(_is_name(name), f"{str(name)[:99]!r} is not a name for a tensor")
    require(type(shape) is tuple and 0 < len(shape) <= 8, f"{name} has shape {shape!r}")
    require(all(type(one) is int and 0 < one < _LONGEST_AXIS for one in shape), f"{name} has shape {shape!r}")
    if entry.kind == "trained":
        require(entry.scale is None and entry.counts is None, f"{name} has a scale or counts, but no law")
        require(type(entry.bits) is int and entry.bits in (32, 16, *BITS), f"{name} has {entry.bits!r} bits")
    else:
        laws = (*LAWS, PRETRAINED) if options.get("backbone") else LAWS
        require(entry.law in laws, f"{name} has law {entry.law!r}")
        require(
            type(entry.scale) is float and math.isfinite(entry.scale), f"{name} has scale {entry.scale!r}"
        )
        bits = planes(len(options["factors"])) if entry.kind == "masked" else 1
        require(type(entry.bits) is int and entry.bits == bits, f"{name} has {entry.bits!r} bits per code")
    if entry.counts is not None:
        whole = type(entry.counts) is tuple and all(type(one) is int and one >= 0 for one in entry.counts)
        searched = max(1, round(options["search"] * entry.size))
        fits = whole and len(entry.counts) == len(options["factors"]) and sum(entry.counts) == searched
        require(fits, f"{name} has codes {entry.counts} of {searched} weights")
    axes: Any = entry.input_axes
    state_bits = options.get("state_bits")
    if entry.kind == "masked" and state_bits is not None:
        fits = type(axes) is tuple and 0 < len(axes) < len(shape) and len({*axes}) == len(axes)
        fits = fits and all(type(one) is int and 0 <= one < len(shape) for one in axes)
        require(fits, f"{name} has input_axes {axes!r} of shape {shape}")
        inputs = math.prod(shape[axis] for axis in axes)
        require(
            inputs >= memory_of(entry.bits, state_bits), f"{name} has {inputs} inputs, too few for its states"
        )
    else:
        require(axes is None, f"{name} has input_axes {axes!r}, but no path")
    stored, drawn = entry.kind != "frozen", entry.kind != "trained"
    wanted = {"data_sha256": stored, "weight_sha256": drawn, "key": stored}
    for field, is_needed in wanted.items():
        value = getattr(entry, field)
        fits = (
            type(value) is str and len(value) >= (1 if field == "key" else DIGITS)
            if is_needed
            else value is None
        )
        require(fits, f"{name} has {field} {value!r}")


def check_loading_keys(path: Path, config: Mapping[str, Any]) -> None:
    """Raise `TicketError` for values on which transformers would fail before it calls hf_slt.

    Args:
        path (`Path`):
            The file that the configuration is from.
        config (`Mapping[str, Any]`):
            A config.json, or the configuration in a header.
    """
    names, code = config.get("architectures"), config.get("auto_map")
    fits = names is None or (type(names) is list and all(type(one) is str for one in names))
    if not fits:
        raise TicketError(
            f"{path}: architectures {str(names)[:99]} is not a list of names; {REDOWNLOAD_HINT}"
        )
    fits = code is None or (type(code) is dict and all(type(one) is str for one in code.values()))
    if not fits:
        raise TicketError(f"{path}: auto_map {str(code)[:99]} is not an object of names; {REDOWNLOAD_HINT}")


def config_faults(path: Path, header: Header, config: Mapping[str, Any]) -> Iterator[TicketError]:
    """Yield an error for everything in config.json that does not fit the model that the masks were made for.

    Args:
        path (`Path`):
            The mask file.
        header ([`Header`]):
            Its header.
        config (`Mapping[str, Any]`):
            The JSON object of the config.json beside it.

    Yields:
        One error for each fault.
    """
    try:
        check_loading_keys(path.with_name(CONFIG_FILE), config)
    except TicketError as fault:
        yield fault
    sides = []
    for one in (header.config, config):
        one = nested_config(one)
        options = one.pop(NESTED)
        if not isinstance(options, dict):
            yield TicketError(f"{path.with_name(CONFIG_FILE)}: {NESTED} is not an object; {REDOWNLOAD_HINT}")
            return
        sides.append(one | {f"{NESTED}.{key}": value for key, value in options.items()})
    digests = {f"{NESTED}.{key}" for key in _DIGESTS}
    for key in sorted((sides[0].keys() | sides[1].keys()) - LOADING_KEYS - digests):
        own, other = (json.dumps(one[key]) if key in one else "nothing" for one in sides)
        if own != other:
            shown = key.removeprefix(f"{NESTED}.")
            hint = "it was altered or is of another ticket: copy the folder again"
            yield TicketError(f"{path}: made for {shown}={own}, but {CONFIG_FILE} says {other}; {hint}")
    masks, whole = (sides[1].get(f"{NESTED}.{key}") for key in _DIGESTS)
    if masks != header.mask_digest:
        differ = f"digest {header.mask_digest[:8]}... is not the {str(masks)[:8]}... in {CONFIG_FILE}"
        yield TicketError(f"{path}: {differ}; the file is damaged or belongs to another ticket")
    elif whole not in (None, header.digest):
        differ = f"digest {header.digest[:8]}... is not the {str(whole)[:8]}... in {CONFIG_FILE}"
        yield TicketError(f"{path}: {differ}; the file is damaged or belongs to another ticket")


def check_weights(path: str | os.PathLike, name: str, entry: Entry, found: str) -> None:
    """Raise `TicketError` unless the drawn weights have the digest that the ticket was trained on.

    Args:
        path (`str` or `os.PathLike`):
            The mask file, for the message.
        name (`str`):
            Name of the tensor.
        entry ([`Entry`]):
            What the ticket says about the tensor.
        found (`str`):
            Digest of the weights drawn here.

    Raises:
        [`TicketError`]: if they differ.
    """
    if not found.startswith(str(entry.weight_sha256)):
        differ = f"digest {found[:8]}..., not the {str(entry.weight_sha256)[:8]}... they were trained with"
        if entry.law == PRETRAINED:
            raise TicketError(
                f"{path}: {name} of the pretrained weights has {differ}: the ticket was made for another checkpoint; "
                "give the right one as backbone="
            )
        raise TicketError(f"{path}: the weights drawn for {name} have {differ}; the ticket was altered")
