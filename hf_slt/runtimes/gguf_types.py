"""How llama.cpp stores the weights of a tensor: in blocks along its rows, one row for each output.

If weights are -c, 0 and c (law signed_constant, and a rule that keeps, drops or flips them), a row times its
learned scale is stored as small codes, and a float16 number d for each block:

    row = d * codes,    d = c * scale

    type     codes       block                  bits per weight
    q1_0     -1, 1       128 weights in 18 B    1.125            if nothing is dropped: rule sign
    tq1_0    -1, 0, 1    256 weights in 54 B    1.69             five codes in a byte
    tq2_0    -1, 0, 1    256 weights in 66 B    2.06             four codes in a byte: the fastest on a CPU
    q2_0     -1, 0, 1     64 weights in 18 B    2.25             four codes in a byte, in shorter blocks
    q4_0     -1, 0, 1     32 weights in 18 B    4.5              two codes in a byte (it could hold -8 to 7)
    f16, f32                                    16, 32           for any weights

Codes are exact. d is rounded to float16, by 2**-11 at most. A row must fill its blocks, because ggml has no padding.
Therefore each tensor gets its own type: the smallest type that can hold it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..errors import SLTError


@dataclass(frozen=True)
class Type:
    """A type of ggml.

    Args:
        number (`int`):
            Its number in ggml.
        file_number (`int`):
            ggml's number for files that mostly have this type.
        block (`int`, defaults to 1):
            Weights in a block.
        bytes (`int`, defaults to 4):
            Bytes of a block.
        zero (`bool`, defaults to `True`):
            Whether a weight can be zero.
    """

    number: int
    file_number: int
    block: int = 1
    bytes: int = 4
    zero: bool = True

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.bytes / self.block


CODED = {
    "q1_0": Type(41, 40, 128, 18, zero=False),
    "tq1_0": Type(34, 36, 256, 54),
    "tq2_0": Type(35, 37, 256, 66),
    "q2_0": Type(42, 41, 64, 18),
    "q4_0": Type(2, 2, 32, 18),
}
FLOAT = {"f16": Type(1, 1, bytes=2), "f32": Type(0, 0)}
TYPES = CODED | FLOAT  # the smallest first
MOST_ROUNDING = 2**-11  # largest rounding error of float16, as a share of the largest weight of a row


def is_ternary(rows: np.ndarray) -> bool:
    """Return whether every row holds only -c, 0 and c, for a c of its own.

    Args:
        rows (`np.ndarray`):
            The matrix in float32, one row per output.

    Returns:
        `bool`: True if every row does.

    Example:

    >>> is_ternary(np.array([[0.5, 0.0, -0.5], [2.0, 2.0, 0.0]])), is_ternary(np.array([[0.5, 1.0]]))
    (True, False)
    """
    sizes = np.abs(rows)
    return bool(((sizes == 0) | (sizes == sizes.max(1, keepdims=True))).all())


def rounding(rows: np.ndarray, type: str) -> float:
    """Return the largest rounding error of a type, as a share of the largest weight of the same row.

    Args:
        rows (`np.ndarray`):
            The matrix in float32, one row per output.
        type (`str`):
            One of `TYPES`. If it is one of `CODED`, the matrix must be ternary.

    Returns:
        `float`: the error, 0 for `"f32"`. It is infinite if a weight is too large for float16.
    """
    if type == "f32":
        return 0.0
    most = np.abs(rows).max(1)
    with np.errstate(over="ignore"):
        if type in CODED:
            errors = np.abs(most.astype(np.float16).astype(np.float32) - most)
        else:
            errors = np.abs(rows.astype(np.float16).astype(np.float32) - rows).max(1)
    return float((errors / np.where(most == 0, 1, most)).max())


def misfit(rows: np.ndarray, type: str) -> str | None:
    """Return why a type cannot hold a matrix. The float types hold all numbers in their range.

    Args:
        rows (`np.ndarray`):
            The matrix in float32, one row per output.
        type (`str`):
            One of `TYPES`.

    Returns:
        `str` or `None`: the reason, in words that follow the name of the matrix, or None if the type can hold it.
    """
    kind = TYPES[type]
    if type in CODED and not is_ternary(rows):
        return "has weights other than -c, 0 and c"
    if not kind.zero and not rows.all():
        return "has zeros"
    if rows.shape[1] % kind.block:
        return f"has rows of {rows.shape[1]} weights, which is not a multiple of the block of {kind.block}"
    if rounding(rows, type) > MOST_ROUNDING:
        return "has weights outside the range of float16"
    return None


def smallest_type(rows: np.ndarray) -> str:
    """Return the smallest type that holds a matrix.

    Weights that are not ternary are not rounded: they get float16 only if it holds all of them exactly.

    Args:
        rows (`np.ndarray`):
            The matrix in float32, one row per output.

    Returns:
        `str`: one of `TYPES`.
    """
    for name in TYPES:
        if misfit(rows, name) is None and (name != "f16" or is_ternary(rows) or rounding(rows, name) == 0):
            return name
    raise AssertionError("f32 holds every matrix")


def choose_types(
    matrices: Mapping[str, np.ndarray], wanted: str, tables: Iterable[str] = ()
) -> dict[str, str]:
    """Return the type of each matrix.

    Args:
        matrices (`Mapping[str, np.ndarray]`):
            The matrices by name, one row per output.
        wanted (`str`):
            One of `TYPES`, or `"auto"`. Every matrix that this type can hold gets it. The others get the smallest.
        tables (`Iterable[str]`, *optional*):
            Names of the tables among them. It is an error if the type can hold only these.

    Returns:
        `dict[str, str]`: one of `TYPES` for each name.

    Raises:
        [`SLTError`]: if the wanted type can hold no matrix, or if weights are outside the range of float16.
    """
    if wanted == "auto":
        return {name: smallest_type(rows) for name, rows in matrices.items()}
    faults = {name: misfit(rows, wanted) for name, rows in matrices.items()}
    blocks = [name for name in matrices if name not in tables]
    if wanted in FLOAT:
        for name, fault in faults.items():
            if fault:
                raise SLTError(f"type {wanted}: {name} {fault}; use f32")
    elif blocks and all(faults[name] for name in blocks):
        found = smallest_type(matrices[blocks[0]])
        raise SLTError(
            f"type {wanted} holds none of the matrices: {blocks[0]} {faults[blocks[0]]}; use {found}"
        )
    return {name: smallest_type(rows) if faults[name] else wanted for name, rows in matrices.items()}


def pack(rows: np.ndarray, type: str) -> np.ndarray:
    """Convert a matrix to the form in which a type stores it, or a vector to float32.

    Args:
        rows (`np.ndarray`):
            The matrix in float32, one row per output, or a vector.
        type (`str`):
            One of `TYPES`; for a vector, `"f32"`.

    Returns:
        `np.ndarray`: numbers of a float type, or the bytes of the blocks.
    """
    import gguf

    if type in FLOAT:
        return rows.astype(np.float16 if type == "f16" else np.float32)
    if type in ("tq1_0", "tq2_0"):
        return gguf.quantize(rows, gguf.GGMLQuantizationType[type.upper()])
    blocks = rows.reshape(-1, TYPES[type].block)
    signs = np.sign(blocks).astype(np.int8)
    if type == "q1_0":  # a bit says whether a weight is positive; the first is the lowest of its byte
        codes = np.packbits(signs > 0, axis=1, bitorder="little")
    elif type == "q2_0":  # a byte has four codes from 0 to 3, the first in its lowest bits
        fours = (signs + 1).astype(np.uint8).reshape(-1, 16, 4) << np.array([0, 2, 4, 6], np.uint8)
        codes = np.bitwise_or.reduce(fours, axis=2)
    else:  # q4_0: byte i has the codes of weights i (low) and i + 16 (high), which are 8 too large
        halves = (signs + 8).astype(np.uint8).reshape(-1, 2, 16)
        codes = halves[:, 0] | (halves[:, 1] << 4)
    scales = np.abs(blocks).max(1).astype("<f2").view(np.uint8).reshape(-1, 2)
    return np.concatenate([scales, codes], axis=1)


def describe_types(
    matrices: Mapping[str, np.ndarray], types: Mapping[str, str], wanted: str = "auto"
) -> Iterator[str]:
    """Yield what a user should know about a file: one line for each type, and one about rounding.

    Args:
        matrices (`Mapping[str, np.ndarray]`):
            The matrices by name, one row per output.
        types (`Mapping[str, str]`):
            The type of each matrix, as `choose_types` returns it.
        wanted (`str`, defaults to `"auto"`):
            The type that the user asked for. If another, a float type, was used, the line explains why.

    Yields:
        `str`: the lines.
    """
    for type in TYPES:
        names = [name for name in matrices if types[name] == type]
        if not names:
            continue
        count = f"{len(names)} matrices" if len(names) > 1 else names[0]
        lengths = " and ".join(str(length) for length in sorted({matrices[name].shape[1] for name in names}))
        why = ""
        if type in FLOAT and type != wanted:
            ternary = [is_ternary(matrices[name]) for name in names]
            why = ", not a multiple of a block" if all(ternary) else "" if any(ternary) else ", not ternary"
        yield f"{type}, {TYPES[type].bits:.3g} bits per weight: {count} with rows of {lengths}{why}"
    errors = {name: rounding(rows, types[name]) for name, rows in matrices.items()}
    worst = max(errors, key=lambda name: errors[name])
    most = f"by {100 * errors[worst]:.2g} %"
    if not errors[worst]:
        yield "rounded: nothing"
    elif is_ternary(matrices[worst]):
        yield f"rounded: c, to float16, {most} at most ({worst}); signs and zeros are exact"
    else:
        yield f"rounded: weights, to float16, {most} of the largest in a row at most ({worst})"
