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

The tables do not depend on how Q is computed: no entry lies within 5e-8 of a rounding tie, where
float64 is good to 1e-9, and `TABLE_DIGEST` is checked when they are built.
"""

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

GENERATOR = "philox4x64-10/1"  # travels in the ticket; any change of one bit must change this name
LAWS = ("normal", "uniform", "signed_constant", "xavier_uniform")
TABLE_DIGEST = "e826a52cdd8f495d8df125d4853240931f5e58f5898454d43d5ebdc48025652a"

# A multiple of 8 (one Philox block). The temporaries of one chunk stay within a core's cache.
_CHUNK = 1 << 17


@dataclass(frozen=True)
class TensorSpec:
    """One frozen tensor: all that its weights follow from, what a mask over them means, how it is found."""

    name: str
    shape: tuple[int, int]
    seed: int = 0
    law: str = "normal"
    scale: float = 1.0
    factors: tuple[float, ...] = (0.0, 1.0)  # that the codes of a mask stand for
    search: float = 1.0  # share of the weights that a mask is searched for
    frozen_density: float = 1.0  # share of the others that is kept
    rule: str = "edge_popup"
    options: tuple[tuple[str, Any], ...] = ()  # of the rule

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def searched(self) -> int:
        return max(1, round(self.search * self.size))  # how many weights have a code

    def draw(self) -> np.ndarray:
        """The weights in float32, before any mask."""
        return draw(self.seed, self.name, self.shape, self.law, self.scale)


def draw(seed: int, name: str, shape: Sequence[int], law: str = "normal", scale: float = 1.0) -> np.ndarray:
    """The float32 array of this seed, name, shape, law and scale; the same bits everywhere.

    >>> draw(7, "wte", (2, 2), "signed_constant", 0.5).tolist()
    [[0.5, -0.5], [0.5, 0.5]]
    """
    shape = tuple(int(extent) for extent in shape)
    if law == "constant":  # where learning starts, no law of frozen weights
        return np.full(shape, scale, np.float32)
    out = np.empty(shape, np.float32)
    flat = out.reshape(-1)
    if law == "xavier_uniform":
        law, scale = "uniform", scale * xavier_bound(shape)
    starts = range(0, flat.size, _CHUNK)

    def fill(start: int) -> None:
        part = flat[start : start + _CHUNK]
        draw_range(seed, name, start, start + part.size, law, scale, out=part)

    if len(starts) > 1:
        with ThreadPoolExecutor(_threads()) as pool:  # NumPy releases the interpreter lock
            list(pool.map(fill, starts))
    else:
        fill(0)
    return out


def draw_range(
    seed: int, name: str, start: int, stop: int, law: str = "normal", scale: float = 1.0, out: Any = None
) -> np.ndarray:
    """Weights `start` to `stop` of the flattened tensor, without drawing the others; in `out`, if given.

    `xavier_uniform` needs the shape: pass `uniform` with scale * `xavier_bound(shape)`.

    >>> whole = draw(7, "wte", (100,))
    >>> bool((draw_range(7, "wte", 41, 59) == whole[41:59]).all())
    True
    """
    if law not in _INTEGERS:
        raise ValueError(f"law {law!r} is not one of {', '.join(LAWS)}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed {seed} is not in 0 .. 2**64 - 1")
    if not math.isfinite(scale):
        raise ValueError(f"scale {scale} is not finite")
    integers, shift = _INTEGERS[law](words_of(seed, name, start, stop))
    factor = np.ldexp(np.float32(scale), -shift)
    return np.multiply(integers, factor, out=out, dtype=np.float32, casting="unsafe")


def words_of(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """Words `start` to `stop` of a tensor's 32-bit words."""
    first = start // 8  # a Philox block is 8 words of 32 bits
    blocks = -(-stop // 8) - first
    raw = np.random.Philox(key=_key(seed, name), counter=first).random_raw(4 * blocks)
    return raw.astype("<u8", copy=False).view("<u4")[start - 8 * first :][: stop - start]


def xavier_bound(shape: Sequence[int]) -> float:
    """sqrt(6 / (rows + columns)), the half-width of Glorot and Bengio's uniform law."""
    if len(shape) != 2:
        raise ValueError(f"xavier_uniform needs a matrix, not shape {tuple(shape)}")
    return math.sqrt(6 / (shape[0] + shape[1]))


def digest(array: np.ndarray) -> str:
    """SHA-256 of an array's little-endian bytes in row-major order, in hexadecimal."""
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return hashlib.sha256(little.reshape(-1).view(np.uint8).data).hexdigest()


def _key(seed: int, name: str) -> np.ndarray:
    text = f"hf_slt/{GENERATOR}/{seed}/{name}"
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], dtype="<u8").astype(np.uint64)


def _uniform(words: np.ndarray) -> tuple[np.ndarray, int]:
    return ((words >> 8).view(np.int32) * 2 + (1 - 2**24)), 24


def _signed_constant(words: np.ndarray) -> tuple[np.ndarray, int]:
    return 1 - 2 * (words >> 31).view(np.int32), 0


def _normal(words: np.ndarray) -> tuple[np.ndarray, int]:
    first, second = _normal_tables()
    halves = words.view("<u2")  # clip never clips: 16 bits index 2**16 entries; it spares a bounds check
    total = np.take(first, halves[0::2], mode="clip")
    total += np.take(second, halves[1::2], mode="clip")
    return total, 21


_INTEGERS: dict[str, Callable[[np.ndarray], tuple[np.ndarray, int]]] = {
    "normal": _normal,
    "uniform": _uniform,
    "signed_constant": _signed_constant,
}


@cache
def _normal_tables() -> tuple[np.ndarray, np.ndarray]:
    """The tables A and B of the specification, checked against `TABLE_DIGEST`."""
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
    return tables[0], tables[1]


def _threads() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this operating system
        return os.cpu_count() or 1
