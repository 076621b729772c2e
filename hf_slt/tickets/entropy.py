"""Masks at their entropy: all codes of a ticket in one stream, as short as their counts allow.

A mask that keeps k of n weights is one of (n choose k) masks: a code that knows only n and k needs
log2(n choose k) bits. The code of this module needs about one bit more per mask, and up to four bytes
more for the whole stream.

    mask -> bytes -> runs of bytes; each run has one model, for what is left: n weights, k of them kept
    P(byte) = (n - 8 choose k - j) / (n choose k),  j = bits set in it       # in integers, exactly

Codes of more than two levels are coded as nested masks: which codes are above 0; of these, which are above 1;
and so on. By the chain rule the entropies of these masks add up to the entropy of the codes.

The specification, in full, for a rewrite in another language or on a chip. Counts of codes are known from the
ticket's header; the stream holds nothing but the masks, sorted by name, then by level.

1. Letters. The masks follow each other sorted by name (by code point) and level. A mask of n weights, k
   kept, is its packed bytes, as in weights/codes.py: row-major, least significant bit first. The last letter
   has b = (n - 1) % 8 + 1 bits, and so 2**b values; the others have b = 8.
2. Runs. While 0 < k < n, where n is the number of weights of this mask not coded yet and k how many of
   them are kept: the next run is max(1, n // 32) letters, a quarter of those left. After it n and k
   are counted again. At k = 0 or k = n the rest of the mask is known, and has no letters in the stream.
3. Weights of a run's letters, with T = 2**24, j the number of bits set in v, and x^(i) the falling
   factorial x (x - 1) ... (x - i + 1), which is 0 for i > x:
       w[v] = 1 + floor((T - 2**b) * k^(j) * (n - k)^(b - j) / n^(b)),
   and T minus their sum is added to the first of the largest. All letters of a run have the weights
   of its first letter, as if they were independent. This costs about 0.03 bit per run.
4. Coder: rANS (Duda, arXiv 1311.2540). The state s has 64 bits, words on the stack have 32, and
   c[v] = w[0] + ... + w[v - 1]. To decode a letter:
       q = s mod T;  v is the letter with c[v] <= q < c[v] + w[v];
       s = floor(s / T) * w[v] + q - c[v];
       if s < 2**32 and the stack is not empty: s = s * 2**32 + pop().
   Encoding is the inverse, from the last letter of the last mask to the first of the first mask; it
   begins with s = 0x5EED, a mark, and an empty stack:
       if floor(s / 2**40) >= w[v]: push(s mod 2**32), s = floor(s / 2**32);
       s = floor(s / w[v]) * T + s mod w[v] + c[v].
5. Bytes. The stack from the bottom up, then s, low word first and without a high word that is 0; words
   are little-endian; zero bytes at the very end are dropped. A decoder appends zero bytes to a multiple
   of 4, and has s = 0x5EED and an empty stack after the last letter, or the stream is damaged.

No floating-point number decides anything, so the bytes are the same on every machine. The coder is
`stream.stack.AnsCoder` of the library constriction.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..weights.codes import pack_codes, unpack_codes

_TOTAL = 1 << 24  # constriction's precision
# The encoder begins with this state, and a decoder must end with it: damage almost always changes it. It costs
# nothing: the first letter takes 24 bits for any smaller state.
_MARK = np.array([0x5EED], np.uint32)
# Letters per call of the library. It uses 32 bits per letter, too much memory for a whole mask at once.
_CHUNK = 1 << 20
_ONES = np.array([value.bit_count() for value in range(256)], np.uint8)


def encode_codes(packed: Mapping[str, np.ndarray], counts: Mapping[str, Sequence[int]]) -> np.ndarray:
    """Code the packed codes of all tensors at their entropy.

    Args:
        packed (`Mapping[str, np.ndarray]`):
            Packed codes by tensor name.
        counts (`Mapping[str, Sequence[int]]`):
            How many weights have each code, by tensor name.

    Returns:
        `np.ndarray`: bytes, a row.

    Example:

    >>> encode_codes({"a": np.array([4, 1], np.uint8)}, {"a": (1, 1, 1)}).nbytes  # codes 2, 0, 1
    3
    """
    masks = {}
    for name, one in packed.items():
        codes = unpack_codes(one, sum(counts[name]), len(counts[name]))
        for level in range(len(counts[name]) - 1):
            masks[name, level] = codes > level
            codes = codes[masks[name, level]]
    return encode_masks(masks)


def decode_codes(coded: np.ndarray, counts: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Return the packed codes that `encode_codes` coded.

    Args:
        coded (`np.ndarray`):
            What `encode_codes` returned.
        counts (`Mapping[str, Sequence[int]]`):
            How many weights have each code, by tensor name.

    Returns:
        `dict[str, np.ndarray]`: packed codes by tensor name.

    Raises:
        `ValueError`: if the array is not a stream of such codes.

    Example:

    >>> decode_codes(encode_codes({"a": np.array([4, 1], np.uint8)}, {"a": (1, 1, 1)}), {"a": (1, 1, 1)})["a"]
    array([4, 1], dtype=uint8)
    """
    left = {(name, level): sum(some[level:]) for name, some in counts.items() for level in range(len(some))}
    sizes = {key: size for key, size in left.items() if (key[0], key[1] + 1) in left}
    masks = decode_masks(
        coded, {key: (size,) for key, size in sizes.items()}, {key: left[key[0], key[1] + 1] for key in sizes}
    )
    found = {}
    for name, some in counts.items():
        if len(some) == 2:  # one mask, which is packed already
            found[name] = masks[name, 0]
            continue
        codes, places = np.zeros(sum(some), np.uint8), np.arange(sum(some))
        for level in range(len(some) - 1):
            places = places[unpack_codes(masks[name, level], len(places)).view(bool)]
            codes[places] = level + 1
        found[name] = pack_codes(codes, len(some))
    return found


def encode_masks(
    masks: Mapping[Any, np.ndarray], shapes: Mapping[Any, tuple[int, ...]] | None = None
) -> np.ndarray:
    """Code masks at their entropy, in one array of bytes.

    Args:
        masks (`Mapping[Any, np.ndarray]`):
            By name, boolean arrays of any shape, or (with a shape in `shapes`) the bytes of `pack_codes`.
        shapes (`Mapping[Any, tuple[int, ...]]`, *optional*):
            Shapes of packed masks, by name.

    Returns:
        `np.ndarray`: bytes, a row.

    Example:

    >>> mask = np.zeros(100, bool)
    >>> mask[[41, 59]] = True
    >>> encode_masks({"a": mask}).nbytes  # log2(100 choose 2) is 12.3 bits
    4
    """
    library = _constriction()
    coder = library.stream.stack.AnsCoder(_MARK)
    for name in sorted(masks, reverse=True):
        letters, size = _letters(name, masks[name], shapes)
        for run, left, kept in reversed(list(_runs(letters, size, _count(letters)))):
            if 0 < kept < left:
                model = _model(library, left, kept)
                for part in reversed(_parts(run)):
                    coder.encode_reverse(letters[part].astype(np.int32), model)
    coded = coder.get_compressed().astype("<u4").view(np.uint8)
    return coded[: coded.size - int(np.argmax(coded[::-1] != 0))].copy()


def decode_masks(
    coded: np.ndarray, shapes: Mapping[Any, tuple[int, ...]], kept: Mapping[Any, int]
) -> dict[Any, np.ndarray]:
    """Return the packed masks that `encode_masks` coded.

    An array that is not a stream of such masks raises an error. This finds most damage, not all: a short code has no
    room for checks, and a few altered streams are valid streams of other masks. Digests find the rest.

    Args:
        coded (`np.ndarray`):
            What `encode_masks` returned.
        shapes (`Mapping[Any, tuple[int, ...]]`):
            Shapes of the masks, by name.
        kept (`Mapping[Any, int]`):
            How many weights each mask keeps, by name.

    Returns:
        `dict[Any, np.ndarray]`: packed masks by name.

    Raises:
        `ValueError`: if the array is not a stream of such masks.

    Example:

    >>> mask = np.array([True, False, False, True, True, False])
    >>> decode_masks(encode_masks({"a": mask}), {"a": (2, 3)}, {"a": 3})["a"].tolist()
    [25]
    """
    library = _constriction()
    if coded.dtype != np.uint8 or coded.ndim != 1 or not coded.size or not coded[-1]:
        raise ValueError(
            f"coded masks of {coded.dtype}, shape {coded.shape}: must be one row of bytes that does not end with 0"
        )
    words = (
        np.concatenate([coded, np.zeros(-coded.size % 4, np.uint8)]).view("<u4").astype(np.uint32, copy=False)
    )
    coder = library.stream.stack.AnsCoder(words)
    masks = {}
    for name in sorted(shapes):
        size = math.prod(shapes[name])
        masks[name] = letters = np.zeros(-(-size // 8), np.uint8)
        for run, left, ones in _runs(letters, size, kept[name]):
            if 0 < ones < left:
                model = _model(library, left, ones)
                for part in _parts(run):
                    letters[part] = coder.decode(model, part.stop - part.start)
            elif ones:
                letters[run] = 255
                letters[-1] >>= -size % 8
    if not np.array_equal(coder.get_compressed(), _MARK):
        raise ValueError(
            f"{coded.size} bytes are not the code of these {len(masks)} masks: too short, too long or altered"
        )
    return masks


def _runs(letters: np.ndarray, size: int, kept: int) -> Iterator[tuple[slice, int, int]]:
    """Yield slices of `letters`, each with the numbers of weights and of kept weights from its start to the end.

    In the last slice none or all are kept. The kept weights of a run are counted when the next run is
    requested: a decoder fills the run before that.
    """
    start, left, ones = 0, size, kept
    while 0 < ones < left:
        run = slice(start, start + max(1, left // 32))
        yield run, left, ones
        ones -= _count(letters[run])
        start, left = run.stop, max(0, size - 8 * run.stop)
    if ones not in (0, left):
        raise ValueError(f"the coded masks are damaged: {size} weights of which {kept} are kept do not fit")
    yield slice(start, letters.size), left, ones


def _parts(run: slice) -> list[slice]:
    return [slice(first, min(first + _CHUNK, run.stop)) for first in range(run.start, run.stop, _CHUNK)]


def _model(library: Any, left: int, kept: int) -> Any:
    """Return the weights of the specification, as a model of the library's coder."""
    bits = min(8, left)
    scale, whole = _TOTAL - 2**bits, math.perm(left, bits)
    by_ones = [
        1 + scale * math.perm(kept, ones) * math.perm(left - kept, bits - ones) // whole
        for ones in range(bits + 1)
    ]
    weights = np.array(by_ones)[_ONES[: 2**bits]]
    weights[np.argmax(weights)] += _TOTAL - weights.sum()
    # The library scales its argument to a sum of _TOTAL - 2**bits, rounds down, and adds 1 to each letter.
    # Integers with that sum need no scaling and no rounding.
    return library.stream.model.Categorical((weights - 1).astype(np.float64), perfect=False)


def _letters(
    name: Any, mask: np.ndarray, shapes: Mapping[Any, tuple[int, ...]] | None
) -> tuple[np.ndarray, int]:
    """Return the bytes of a mask, and its number of weights."""
    if mask.dtype == bool:
        return np.packbits(mask.reshape(-1), bitorder="little"), mask.size
    if shapes is None:
        raise ValueError(f"{name}: a packed mask needs its shape")
    size = math.prod(shapes[name])
    if mask.dtype != np.uint8 or mask.shape != (-(-size // 8),):
        raise ValueError(f"{name}: {mask.dtype} of shape {mask.shape} are not {size} packed bits")
    if size % 8 and mask[-1] >> size % 8:
        raise ValueError(f"{name}: bits are set after the last of {size}")
    return mask, size


def _count(letters: np.ndarray) -> int:
    return sum(int(_ONES[letters[part]].sum(dtype=np.int64)) for part in _parts(slice(0, letters.size)))


def _constriction() -> Any:
    try:
        import constriction  # not at the top: only tickets of this encoding need it
    except ImportError as error:
        raise ImportError(
            "masks with encoding 'entropy' need the library constriction: pip install constriction"
        ) from error
    return constriction
