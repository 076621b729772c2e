"""Frozen weights, identical bit for bit on every machine.

A weight is a pure function of (seed, name, index, law, scale): no generator state, so tensors
may be drawn in any order, in parts, by any number of threads, or never stored at all.

    key    = SHA-256("hf_slt/" + GENERATOR + "/" + seed + "/" + name), first 16 bytes
    bits   = word `index` of Philox4x64-10 under that key             # 32 uniform bits
    weight = float32(integer(bits)) * float32(scale) * 2**-shift      # one rounding

The specification, in full, for a rewrite in another language or on a chip:

1. `seed` is written in decimal, `name` in UTF-8. The first 16 bytes of the digest are two
   little-endian 64-bit words, the Philox key (k0, k1).
2. Philox4x64-10 (Salmon et al., SC 2011; the constants of Random123) turns block number b into
   four 64-bit words; its counter is (b + 1, 0, 0, 0), as in NumPy, which counts before it draws.
3. Word i of a tensor (row-major index i) is 32 bits: block i // 8, 64-bit word (i % 8) // 2,
   low half for even i and high half for odd i. Call it w.
4. `uniform` on (-1, 1):      k = 2 * (w >> 8) + 1 - 2**24,                   shift = 24.
   `signed_constant` +-1:     k = 1 - 2 * (w >> 31),                          shift = 0.
   `normal`, mean 0, std 1:   k = A[w & 0xffff] + B[w >> 16],                 shift = 21,
       A[j] = nearest integer to 0.6 * 2**21 * Q((j + 1/2) / 2**16), B[j] likewise with 0.8,
       Q the standard normal quantile. (0.6**2 + 0.8**2 = 1: a sum of two normals is normal.
       Two coarse tables give 2**32 outcomes, tails to 6 std, and no atom at zero.)
   `xavier_uniform`:          as `uniform`, with scale * sqrt(6 / (rows + columns)).
5. Every |k| is below 2**24, so float32(k) is exact. c = float32(scale) * 2**-shift, exact too;
   the weight is float32(k) * c rounded once to the nearest float32, ties to even.

The tables do not depend on how Q is computed: no entry lies within 5e-8 of a rounding tie, float64
is accurate to 1e-9, and `TABLE_DIGEST` is checked when they are built.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np

from .threads import map_in_threads

GENERATOR = "philox4x64-10/1"  # stored in the ticket; if any bit of a weight changes, so must this name
LAWS = ("normal", "signed_constant", "uniform", "xavier_uniform")
LAWS_WITH_STD = ("normal", "signed_constant")  # their scale is a standard deviation, as initializer_range
PRETRAINED = "pretrained"  # in place of a law: the numbers come from a checkpoint, the backbone
TABLE_DIGEST = "e826a52cdd8f495d8df125d4853240931f5e58f5898454d43d5ebdc48025652a"

# Both are multiples of 8, one Philox block. A thread draws a chunk, piece by piece. A piece of 1 MB stays in the last
# cache, and is large enough that threads seldom wait for each other: every call of NumPy takes the interpreter lock.
_CHUNK = 1 << 20
_PIECE = 1 << 18


class Origin(Protocol):
    """Where the numbers of a tensor come from, if no law draws them."""

    def read(self) -> np.ndarray:
        """Return the numbers in float32, in an array that the caller may change.

        Returns:
            `np.ndarray`: the numbers.
        """
        ...


@dataclass(frozen=True)
class TensorSpec:
    """One frozen tensor: everything that determines its weights, and the meaning of a mask over them.

    Args:
        name (`str`):
            Name of the tensor. The seed and the name decide the random numbers.
        shape (`tuple[int, ...]`):
            Shape of the tensor.
        seed (`int`, defaults to 0):
            Seed of the model.
        law (`str`, defaults to `"normal"`):
            Distribution of the weights, one of `LAWS`.
        scale (`float`, defaults to 1.0):
            Factor on the law: the standard deviation of `"normal"`, the magnitude of `"signed_constant"`.
        factors (`tuple[float, ...]`, defaults to `(0.0, 1.0)`):
            The factor that each code of a mask stands for.
        search (`float`, defaults to 1.0):
            Fraction of the weights that a mask is searched for.
        frozen_density (`float`, defaults to 1.0):
            Fraction to keep of the weights that are not searched.
        input_axes (`tuple[int, ...]`, defaults to `(0,)`):
            The axes that run over inputs. GPT-2's `Conv1D` stores (inputs, outputs): `(0,)`. A linear layer or
            an embedding stores (outputs, inputs): `(1,)`.
        state_bits (`int`, *optional*):
            Bits of a state, if codes are paths through a trellis (see `trellis.py`). The seed then draws a table of
            2 ** state_bits numbers, and `factors` only say how many codes there are.
        origin ([`Origin`], *optional*):
            Where the numbers come from, if no law draws them: a checkpoint, for example.
    """

    name: str
    shape: tuple[int, ...]
    seed: int = 0
    law: str = "normal"
    scale: float = 1.0
    factors: tuple[float, ...] = (0.0, 1.0)
    search: float = 1.0
    frozen_density: float = 1.0
    input_axes: tuple[int, ...] = (0,)
    state_bits: int | None = None
    origin: Origin | None = None

    @property
    def size(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def searched(self) -> int:
        """Number of weights that have a code."""
        return max(1, round(self.search * self.size))

    @property
    def fan_in(self) -> int:
        """Number of inputs of each output."""
        inputs = 1
        for axis in self.input_axes:  # by hand: torch.compile cannot trace math.prod of a generator
            inputs *= self.shape[axis]
        return inputs

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of an array with one number per output, which broadcasts over the tensor."""
        return tuple(1 if axis in self.input_axes else extent for axis, extent in enumerate(self.shape))

    def draw(self) -> np.ndarray:
        """Return the weights in float32, before any mask. For a trellis: the table that a path chooses from.

        Returns:
            `np.ndarray`: the weights in the shape of the tensor, or a row of 2 ** state_bits numbers.
        """
        if self.origin is not None:
            return self.origin.read().reshape(self.shape)
        if self.state_bits is None:
            return draw(self.seed, self.name, self.shape, self.law, self.scale)
        return draw(self.seed, self.name, (2**self.state_bits,), *self._table_law())

    def draw_in_pieces(self, out: np.ndarray | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Draw the weights in this thread, and yield them piece by piece, while a piece is in the core's cache.

        Args:
            out (`np.ndarray`, *optional*):
                A row of float32 that gets what `draw` returns. The pieces are then parts of it, which may be
                overwritten. Without it, no more than a piece is in memory.

        Yields:
            `tuple[int, np.ndarray]`: index of the first weight of a piece, and the piece in float32.
        """
        if self.origin is None and self.law != "constant":
            size = self.size if self.state_bits is None else 2**self.state_bits
            yield from draw_pieces(self.seed, self.name, 0, size, *self._table_law(), out)
            return
        whole = self.draw().reshape(-1)
        if out is not None:
            out[:] = whole
        yield 0, whole if out is None else out

    def drawn_digest(self) -> str:
        """Return the digest of what `draw` returns. This uses one thread, and little memory.

        Returns:
            `str`: the SHA-256, 64 hexadecimal digits.
        """
        found = hashlib.sha256()
        for _, piece in self.draw_in_pieces():
            found.update(little_endian(piece))
        return found.hexdigest()

    def draw_table(self) -> np.ndarray:
        """Return the table of a trellis in units of its law. This times one number is exactly what `draw` returns.

        Returns:
            `np.ndarray`: a row of 2 ** state_bits numbers.
        """
        return draw(self.seed, self.name, (2 ** (self.state_bits or 0),), self._table_law()[0])

    def base(self) -> np.ndarray:
        """Return what the factors multiply: the drawn weights or, for a trellis, the scale of its law everywhere.

        Returns:
            `np.ndarray`: float32, in the shape of the tensor.
        """
        return (
            self.draw() if self.state_bits is None else np.full(self.shape, self._table_law()[1], np.float32)
        )

    def _table_law(self) -> tuple[str, float]:
        """Return law and scale of a table. They do not depend on the shape of the tensor any more."""
        if self.law == "xavier_uniform":
            return "uniform", self.scale * xavier_bound(self.shape)
        return self.law, self.scale


def draw(seed: int, name: str, shape: Sequence[int], law: str = "normal", scale: float = 1.0) -> np.ndarray:
    """Draw the frozen weights of a tensor. They are identical on every machine.

    Args:
        seed (`int`):
            Seed of the model.
        name (`str`):
            Name of the tensor. Another name gives other numbers.
        shape (`Sequence[int]`):
            Shape of the tensor.
        law (`str`, defaults to `"normal"`):
            Distribution: one of `LAWS`, or `"constant"`.
        scale (`float`, defaults to 1.0):
            Factor on the numbers of the law.

    Returns:
        `np.ndarray`: the weights in float32.

    Raises:
        `ValueError`: for an unknown law, a seed that is not in 0 .. 2**64 - 1, or a scale that is not finite.

    Example:

    >>> draw(7, "wte", (2, 2), "signed_constant", 0.5).tolist()
    [[0.5, -0.5], [0.5, 0.5]]
    """
    shape = tuple(int(extent) for extent in shape)
    if law == "constant":  # initial values of trained tensors, not a law of frozen weights
        return np.full(shape, scale, np.float32)
    out = np.empty(shape, np.float32)
    flat = out.reshape(-1)
    if law == "xavier_uniform":
        law, scale = "uniform", scale * xavier_bound(shape)

    def fill(start: int) -> None:
        part = flat[start : start + _CHUNK]
        draw_range(seed, name, start, start + part.size, law, scale, out=part)

    map_in_threads(fill, range(0, flat.size, _CHUNK))
    return out


def draw_range(
    seed: int, name: str, start: int, stop: int, law: str = "normal", scale: float = 1.0, out: Any = None
) -> np.ndarray:
    """Draw weights `start` to `stop` of the flattened tensor, without the others.

    `xavier_uniform` needs the shape: pass `uniform` with scale * `xavier_bound(shape)`.

    Args:
        seed (`int`):
            Seed of the model.
        name (`str`):
            Name of the tensor.
        start (`int`):
            Index of the first weight.
        stop (`int`):
            Index after the last weight.
        law (`str`, defaults to `"normal"`):
            Distribution, one of `LAWS`.
        scale (`float`, defaults to 1.0):
            Factor on the numbers of the law.
        out (*optional*):
            Array to write to. Default: a new one.

    Returns:
        `np.ndarray`: the weights in float32, a row.

    Raises:
        `ValueError`: for an unknown law, a seed that is not in 0 .. 2**64 - 1, or a scale that is not finite.

    Example:

    >>> whole = draw(7, "wte", (100,))
    >>> bool((draw_range(7, "wte", 41, 59) == whole[41:59]).all())
    True
    """
    out = np.empty(stop - start, np.float32) if out is None else out
    for _ in draw_pieces(seed, name, start, stop, law, scale, out):
        pass
    return out


def draw_pieces(
    seed: int, name: str, start: int, stop: int, law: str, scale: float, out: np.ndarray | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """Draw the weights of `draw_range` piece by piece.

    Args:
        seed (`int`):
            Seed of the model.
        name (`str`):
            Name of the tensor.
        start (`int`):
            Index of the first weight.
        stop (`int`):
            Index after the last weight.
        law (`str`):
            Distribution, one of `LAWS` except `xavier_uniform`.
        scale (`float`):
            Factor on the numbers of the law.
        out (`np.ndarray`, *optional*):
            A row of float32 that gets the weights. The pieces are then parts of it. Without it, no more than a piece
            is in memory.

    Yields:
        `tuple[int, np.ndarray]`: index of the first weight of a piece, and the piece in float32.

    Raises:
        `ValueError`: for an unknown law, a seed that is not in 0 .. 2**64 - 1, or a scale that is not finite.
    """
    if law not in _INTEGERS:
        raise ValueError(f"law {law!r} is not one of {', '.join(LAWS)}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed {seed} is not in 0 .. 2**64 - 1")
    if not math.isfinite(scale):
        raise ValueError(f"scale {scale} is not finite")
    generator, scratch = _generator(seed, name, start), _Scratch(min(stop - start, _PIECE))
    begin = start
    while begin < stop:
        end = min(begin - begin % 8 + _PIECE, stop)
        part = np.empty(end - begin, np.float32) if out is None else out[begin - start : end - start]
        shift = _INTEGERS[law](_next_words(generator, begin, end), part, scratch)
        part *= np.ldexp(np.float32(scale), -shift)
        yield begin, part
        begin = end


def words_of(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """Return some of the random 32-bit words of a tensor.

    Args:
        seed (`int`):
            Seed of the model.
        name (`str`):
            Name of the tensor.
        start (`int`):
            Index of the first word.
        stop (`int`):
            Index after the last word.

    Returns:
        `np.ndarray`: the words, a row.
    """
    return _next_words(_generator(seed, name, start), start, stop)


def _generator(seed: int, name: str, start: int) -> np.random.Philox:
    return np.random.Philox(key=_key(seed, name), counter=start // 8)  # a block is 8 words of 32 bits


def _next_words(generator: np.random.Philox, start: int, stop: int) -> np.ndarray:
    """Return words `start` to `stop`. The next block of the generator must be the block of `start`."""
    blocks = -(-stop // 8) - start // 8
    raw = generator.random_raw(4 * blocks)
    return raw.astype("<u8", copy=False).view("<u4")[start % 8 :][: stop - start]


def xavier_bound(shape: Sequence[int]) -> float:
    """Return sqrt(6 / (rows + columns)), the half-width of Glorot and Bengio's uniform law.

    Args:
        shape (`Sequence[int]`):
            Shape of a matrix.

    Returns:
        `float`: the bound.

    Raises:
        `ValueError`: if it is not a matrix.
    """
    if len(shape) != 2:
        raise ValueError(f"xavier_uniform needs a matrix, not shape {tuple(shape)}")
    return math.sqrt(6 / (shape[0] + shape[1]))


def digest(array: np.ndarray) -> str:
    """Return the SHA-256 of an array's little-endian bytes in row-major order.

    Args:
        array (`np.ndarray`):
            Any array.

    Returns:
        `str`: 64 hexadecimal digits.
    """
    return hashlib.sha256(little_endian(array)).hexdigest()


def little_endian(array: np.ndarray) -> memoryview:
    """Return an array's little-endian bytes in row-major order.

    Args:
        array (`np.ndarray`):
            Any array.

    Returns:
        `memoryview`: the bytes. They are not copied if the array has this order already.
    """
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return little.reshape(-1).view(np.uint8).data


def _key(seed: int, name: str) -> np.ndarray:
    text = f"hf_slt/{GENERATOR}/{seed}/{name}"
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], dtype="<u8").astype(np.uint64)


class _Scratch:
    """Memory that all pieces use in turn: new memory costs more than the arithmetic."""

    def __init__(self, size: int) -> None:
        self.places, self.values = np.empty(size, np.intp), np.empty(size, np.float32)


# A law writes the integers k of some words, which float32 holds exactly, and returns the shift.


def _uniform(words: np.ndarray, out: np.ndarray, _scratch: _Scratch) -> int:
    out[:] = (words >> 8).view(np.int32) * 2 + (1 - 2**24)
    return 24


def _signed_constant(words: np.ndarray, out: np.ndarray, _scratch: _Scratch) -> int:
    out[:] = 1 - 2 * (words >> 31).view(np.int32)
    return 0


def _normal(words: np.ndarray, out: np.ndarray, scratch: _Scratch) -> int:
    first, second = _normal_tables()
    halves = words.view("<u2")
    places, values = scratch.places[: len(words)], scratch.values[: len(words)]
    # 16 bits index 2**16 entries: "wrap" never wraps, but saves a check of all places and a copy of the result.
    places[:] = halves[0::2]
    first.take(places, mode="wrap", out=out)
    places[:] = halves[1::2]
    out += second.take(places, mode="wrap", out=values)  # below 2**24 in magnitude, so the sum is exact
    return 21


_INTEGERS: dict[str, Callable[[np.ndarray, np.ndarray, _Scratch], int]] = {
    "normal": _normal,
    "uniform": _uniform,
    "signed_constant": _signed_constant,
}


@cache
def _normal_tables() -> tuple[np.ndarray, np.ndarray]:
    """Return the tables A and B of the specification in float32, checked against `TABLE_DIGEST`."""
    inverse = NormalDist().inv_cdf
    upper = [inverse((j + 0.5) / 2**16) for j in range(2**15, 2**16)]
    quantiles = np.array([-q for q in reversed(upper)] + upper)  # odd symmetry, exactly
    tables = [np.rint(part * 2**21 * quantiles).astype("<i4") for part in (0.6, 0.8)]
    found = digest(np.concatenate(tables))
    if found != TABLE_DIGEST:
        raise RuntimeError(
            f"normal quantile tables have digest {found}, not {TABLE_DIGEST}: this platform's logarithm or "
            "square root is wrong, and tickets drawn here would not be portable"
        )
    return tables[0].astype(np.float32), tables[1].astype(np.float32)  # exact
