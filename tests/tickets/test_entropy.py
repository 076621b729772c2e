"""The entropy coder of masks: how small, exact, the same everywhere, and safe on damaged input."""

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from hf_slt.tickets import entropy
from hf_slt.tickets.entropy import decode_masks, encode_masks
from hf_slt.weights.codes import pack_codes, unpack_codes
from hf_slt.weights.random_weights import digest, draw


def make_mask(name: str, shape: tuple[int, ...], density: float) -> np.ndarray:
    """The same on every machine."""
    return draw(7, name, shape, "uniform") < np.float32(2 * density - 1)


def facts(masks):
    return {n: m.shape for n, m in masks.items()}, {n: int(m.sum()) for n, m in masks.items()}


def entropy_bound(masks) -> float:
    """Sum of log2(n choose kept), by logarithms of its factors."""
    places = {name: np.arange(1, mask.sum() + 1) for name, mask in masks.items()}
    return sum(np.log2((mask.size - mask.sum() + places[n]) / places[n]).sum() for n, mask in masks.items())


def check_round_trip(masks) -> np.ndarray:
    coded = encode_masks(masks)
    decoded = decode_masks(coded, *facts(masks))
    assert set(decoded) == set(masks)
    for name, mask in masks.items():
        np.testing.assert_array_equal(decoded[name], pack_codes(mask), err_msg=name)
    return coded


# -- size -----------------------------------------------------------------------------------------

DENSITIES = (0.01, 0.05, 0.1, 0.3, 0.5, 0.7, 0.95, 0.99)
GOLDEN = "888473c79a77c6f9da52bca7b3665fc307921b641824e7ffd080f85ccc2307a9"


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("size", [50, 1000, 30_001, 300_000])
def test_the_overhead_is_a_bit_a_mask_and_four_bytes_a_stream(density, size):
    masks = {f"{i:02}": make_mask(f"{size}.{i}", (size,), density) for i in range(30)}
    bits, bound = 8 * check_round_trip(masks).nbytes, entropy_bound(masks)
    assert bound <= bits < 1.0003 * bound + len(masks) + 32


def test_a_mask_that_keeps_all_or_nothing_is_free():
    masks = {f"{i}": np.full((100, 77), i % 2 == 0) for i in range(50)}
    assert check_round_trip(masks).nbytes == 2
    assert check_round_trip({}).nbytes == 2


# -- exactness ------------------------------------------------------------------------------------

some_masks = st.dictionaries(
    st.text(max_size=3), arrays(bool, array_shapes(min_dims=0, max_dims=3, max_side=20)), max_size=5
)


@settings(deadline=None)
@given(some_masks)
def test_round_trips(masks):
    check_round_trip(masks)


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**32), st.floats(0, 1))
def test_round_trips_at_any_density(size, seed, density):
    check_round_trip({"a": np.random.default_rng(seed).random(size) < density})


@pytest.mark.parametrize("size", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 127, 129])
def test_ones_at_either_end(size):
    for kept in range(size + 1):
        first = np.arange(size) < kept
        check_round_trip({"a": first, "b": first[::-1], "c": ~first})


def test_parts_of_a_run_do_not_change_the_stream(monkeypatch):
    masks = {"a": make_mask("a", (1000, 101), 0.2)}
    coded = check_round_trip(masks)
    monkeypatch.setattr(entropy, "_CHUNK", 1000)
    np.testing.assert_array_equal(check_round_trip(masks), coded)


def test_packed_and_boolean_masks_have_one_code_in_any_order():
    masks = {"b": make_mask("b", (3, 7), 0.4), "a": make_mask("a", (100,), 0.1).T, "c": np.ones(5, bool)}
    coded = encode_masks(masks)
    packed = {name: pack_codes(masks[name]) for name in "cab"}
    np.testing.assert_array_equal(encode_masks(packed, facts(masks)[0]), coded)
    turned = np.asfortranarray(make_mask("b", (3, 7), 0.4))  # row-major is of the array, not of its memory
    np.testing.assert_array_equal(encode_masks({**masks, "b": turned}), coded)


def naive_decode(coded: bytes, masks: list[tuple[int, int]]) -> list[list[int]]:
    """The specification of entropy.py, word by word, with nothing but Python's integers."""
    coded += bytes(-len(coded) % 4)
    stack = [int.from_bytes(coded[i : i + 4], "little") for i in range(0, len(coded), 4)]
    total, state = 2**24, 0
    while state < 2**32 and stack:
        state = state * 2**32 + stack.pop()
    found = []
    for n, k in masks:
        bits: list[int] = []
        while 0 < k < n:
            width, run = min(8, n), max(1, n // 32)
            weights = []
            for value in range(2**width):
                j = bin(value).count("1")
                chosen = math.comb(n - width, k - j) if j <= k else 0
                weights.append(1 + (total - 2**width) * chosen // math.comb(n, k))
            weights[weights.index(max(weights))] += total - sum(weights)
            for _ in range(run):
                quantile, value, before = state % total, 0, 0
                while before + weights[value] <= quantile:
                    before += weights[value]
                    value += 1
                state = state // total * weights[value] + quantile - before
                if state < 2**32 and stack:
                    state = state * 2**32 + stack.pop()
                letter = [value >> i & 1 for i in range(width)]
                bits, n, k = bits + letter, n - width, k - sum(letter)
        found.append(bits + [int(k > 0)] * n)
    assert (state, stack) == (0x5EED, [])
    return found


@pytest.mark.parametrize("density", [0.02, 0.4, 0.9])
def test_the_specification_is_enough_to_decode(density):
    masks = {f"{size:04}": make_mask(f"{size}", (size,), density) for size in (1, 5, 8, 13, 100, 999, 2001)}
    shapes, kept = facts(masks)
    found = naive_decode(encode_masks(masks).tobytes(), [(shapes[name][0], kept[name]) for name in masks])
    assert found == [mask.astype(int).tolist() for mask in masks.values()]


def test_the_same_bytes_everywhere():
    masks = {f"{density}": make_mask(f"{density}", (331, 97), density) for density in DENSITIES}
    assert digest(encode_masks(masks)) == GOLDEN


# -- damage ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample():
    masks = {name: make_mask(name, (40, 21), density) for name, density in (("a", 0.3), ("b", 0.6))}
    return encode_masks(masks), *facts(masks)


def test_a_stream_cut_short_is_refused(sample):
    coded, shapes, kept = sample
    for length in range(coded.size):
        with pytest.raises(ValueError, match=r"too short|damaged|must be one row of bytes"):
            decode_masks(coded[:length], shapes, kept)


@pytest.mark.parametrize("tail", [[0], [1], [0, 0, 0, 0], [255] * 4, [7] * 100])
def test_a_stream_with_more_is_refused(sample, tail):
    coded, shapes, kept = sample
    with pytest.raises(ValueError, match=r"too long|damaged|does not end with 0"):
        decode_masks(np.concatenate([coded, np.array(tail, np.uint8)]), shapes, kept)


def test_flipped_bits_are_refused_or_give_other_masks(sample):
    """A few altered streams are the streams of other masks: for those a ticket has its digests."""
    coded, shapes, kept = sample
    whole, missed = decode_masks(coded, shapes, kept), 0
    for place in range(0, coded.size * 8, 3):
        other = coded.copy()
        other[place // 8] ^= 1 << place % 8
        try:
            found = decode_masks(other, shapes, kept)
        except ValueError:
            continue
        missed += 1
        assert any((found[name] != whole[name]).any() for name in whole)
        for name, packed in found.items():
            assert unpack_codes(packed, math.prod(shapes[name])).sum() == kept[name]
    assert missed < 0.01 * coded.size * 8 / 3


def test_noise_is_refused():
    generator = np.random.default_rng(0)
    for length in range(1, 200):
        noise = generator.integers(1, 256, length, np.uint8)
        with pytest.raises(ValueError, match=r"altered|damaged"):
            decode_masks(noise, {"a": (50, 30), "b": (3,)}, {"a": 700, "b": 1})


def test_other_shapes_or_counts_are_refused(sample):
    coded, shapes, kept = sample
    for other in ({"a": (40, 22)}, {"b": (4, 21)}, {"c": (40, 21)}, {"b": (0,)}):
        with pytest.raises(ValueError, match=r"altered|damaged"):
            decode_masks(coded, {**shapes, **other}, {"c": 400, **kept})
    for count in (0, 1, kept["b"] + 1, 840, 841, -1, 10**9):
        with pytest.raises(ValueError, match=r"altered|damaged"):
            decode_masks(coded, shapes, {**kept, "b": count})


@pytest.mark.parametrize("form", [np.zeros(0, np.uint8), np.ones(4, np.uint32), np.ones((2, 2), np.uint8)])
def test_an_array_of_another_form_is_refused(form):
    with pytest.raises(ValueError, match="must be one row of bytes"):
        decode_masks(form, {}, {})


def test_packed_masks_are_checked_before_they_are_coded():
    with pytest.raises(ValueError, match="a: a packed mask needs its shape"):
        encode_masks({"a": np.zeros(3, np.uint8)})
    with pytest.raises(ValueError, match=r"a: uint8 of shape \(3,\) are not 25 packed bits"):
        encode_masks({"a": np.zeros(3, np.uint8)}, {"a": (25,)})
    with pytest.raises(ValueError, match="a: bits are set after the last of 21"):
        encode_masks({"a": np.full(3, 255, np.uint8)}, {"a": (21,)})


# -- the library ----------------------------------------------------------------------------------


def test_a_missing_library_is_named_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "constriction", None)
    for work in (lambda: encode_masks({}), lambda: decode_masks(np.ones(1, np.uint8), {}, {})):
        with pytest.raises(ImportError, match="pip install constriction"):
            work()
