"""Frozen weights: the specification, rewritten naively, is the oracle; digests hold the format still."""

import hashlib
import math
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from hf_slt.weights import random_weights
from hf_slt.weights.random_weights import GENERATOR, LAWS, digest, draw, draw_range

NAME, SHAPE = "h.0.attn.c_attn.query", (300, 700)

# If one of these changes, every published ticket breaks: change GENERATOR too, or undo the change.
GOLDEN = {
    "normal": "c39399fe105426cc7564eafde822285b87af3382bae6de20a17a1e666eeb45a6",
    "uniform": "126eae830a536384302a9c948003aaa095a3f9cb334dc62d131b205807199eb2",
    "signed_constant": "afbe52855f3747ca48da576dd01f34554c312c7440ee16fd9925dd0642b36929",
    "xavier_uniform": "d18196b7117f389c881864c93dca3e4ca963ca24df71e3d060a7fc3c3aba5646",
}


def philox_block(key: tuple[int, int], counter: int) -> list[int]:
    """Philox4x64-10 in plain integers, from its published definition."""
    multipliers, bumps = (0xD2E7470EE14C6C93, 0xCA5A826395121157), (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
    low64 = 2**64 - 1
    x, k = [counter & low64, counter >> 64, 0, 0], list(key)
    for _ in range(10):
        a, b = x[0] * multipliers[0], x[2] * multipliers[1]
        x = [(b >> 64) ^ x[1] ^ k[0], b & low64, (a >> 64) ^ x[3] ^ k[1], a & low64]
        k = [(word + bump) & low64 for word, bump in zip(k, bumps, strict=True)]
    return x


def naive_weight(seed: int, name: str, index: int, law: str, scale: float) -> np.float32:
    key = struct.unpack("<2Q", hashlib.sha256(f"hf_slt/{GENERATOR}/{seed}/{name}".encode()).digest()[:16])
    word64 = philox_block(key, index // 8 + 1)[index % 8 // 2]
    word = word64 >> 32 if index % 2 else word64 & 0xFFFFFFFF
    if law == "uniform":
        integer, shift = 2 * (word >> 8) + 1 - 2**24, 24
    elif law == "signed_constant":
        integer, shift = (-1 if word >> 31 else 1), 0
    else:
        quantiles = [special.ndtri((half + 0.5) / 2**16) for half in (word & 0xFFFF, word >> 16)]
        integer, shift = sum(round(p * 2**21 * q) for p, q in zip((0.6, 0.8), quantiles, strict=True)), 21
    # float64 holds the product of two float32 exactly, so this rounds once.
    return np.float32(float(integer) * float(np.float32(scale)) * 2.0**-shift)


def test_philox_oracle_agrees_with_the_published_known_answers():
    # Random123, kat_vectors: philox4x64-10 with everything zero, and with everything one.
    zeros = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert philox_block((0, 0), 0) == zeros


@pytest.mark.parametrize("law", ["normal", "uniform", "signed_constant"])
def test_draw_is_the_specification(law):
    drawn = draw(12345, "wte", (7, 11), law, 0.02).ravel()
    expected = np.array([naive_weight(12345, "wte", i, law, 0.02) for i in range(77)])
    np.testing.assert_array_equal(drawn.view(np.uint32), expected.view(np.uint32))


def test_xavier_uniform_is_uniform_with_its_bound():
    expected = draw(3, "w", (20, 30), "uniform", 0.5 * math.sqrt(6 / 50))
    np.testing.assert_array_equal(draw(3, "w", (20, 30), "xavier_uniform", 0.5), expected)


@pytest.mark.parametrize("law", LAWS)
def test_golden_digests(law):
    assert digest(draw(7, NAME, SHAPE, law, 0.02)) == GOLDEN[law]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 3 * 2**17), st.integers(0, 300), st.sampled_from(["normal", "uniform", "signed_constant"])
)
def test_any_part_alone_is_the_same(start, length, law):
    whole = _whole(law)
    stop = min(start + length, whole.size)
    start = min(start, stop)
    np.testing.assert_array_equal(draw_range(1, "x", start, stop, law), whole[start:stop])


def _whole(law, cache={}):  # noqa: B006  the default is the cache
    if law not in cache:
        cache[law] = draw(1, "x", (3 * 2**20 + 5,), law)  # four chunks, the last one not full
    return cache[law]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("chunk", [8, 4096])
@pytest.mark.parametrize("piece", [8, 32])
def test_threads_chunks_and_pieces_change_nothing(monkeypatch, threads, chunk, piece):
    expected = draw_range(7, NAME, 0, 2100)
    monkeypatch.setattr("hf_slt.weights.threads.core_count", lambda: threads)
    monkeypatch.setattr(random_weights, "_CHUNK", chunk)
    monkeypatch.setattr(random_weights, "_PIECE", piece)
    np.testing.assert_array_equal(draw(7, NAME, (30, 70)), expected.reshape(30, 70))
    np.testing.assert_array_equal(draw_range(7, NAME, 3, 2099), expected[3:2099])  # begins within a block


def test_the_process_changes_nothing():
    code = (
        "import torch; torch.set_default_dtype(torch.float16); torch.manual_seed(3);"
        "import numpy as np; np.random.seed(9);"
        "from hf_slt.weights.random_weights import draw, digest;"
        f"print(digest(draw(7, {NAME!r}, {SHAPE}, 'normal', 0.02)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == GOLDEN["normal"]


def test_seed_and_name_and_index_all_matter():
    base = draw(1, "a", (1000,))
    for other in (draw(2, "a", (1000,)), draw(1, "b", (1000,)), draw(1, "a", (1001,))[1:]):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.15


def test_normal_law_is_normal():
    sample = draw(11, "sample", (2_000_000,), "normal", 1.0)
    assert stats.kstest(sample[:200_000], "norm").pvalue > 1e-3
    n = sample.size
    for power, expected in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        spread = np.sqrt((stats.norm.moment(2 * power) - stats.norm.moment(power) ** 2) / n)
        assert abs(np.mean(sample.astype(float) ** power) - expected) < 4 * spread
    for beyond in (3, 4, 4.5):
        expected = 2 * n * stats.norm.sf(beyond)
        assert abs((np.abs(sample) > beyond).sum() - expected) < 5 * np.sqrt(expected)
    assert not (sample == 0).sum() > 5  # no atom at zero


def test_uniform_law_is_uniform_and_open():
    sample = draw(11, "sample", (1_000_000,), "uniform", 1.0)
    assert stats.kstest(sample[:200_000], "uniform", args=(-1, 2)).pvalue > 1e-3
    assert np.abs(sample).max() < 1
    assert np.abs(sample).min() > 0


def test_signed_constant_law():
    sample = draw(11, "sample", (100_000,), "signed_constant", 0.02)
    assert set(np.unique(sample)) == {np.float32(-0.02), np.float32(0.02)}
    assert abs(sample.mean()) < 4 * 0.02 / np.sqrt(sample.size)


def test_tables_stand_clear_of_rounding_ties():
    """Why any good inverse of the normal distribution gives the same tables."""
    quantiles = special.ndtri((np.arange(2**16) + 0.5) / 2**16)
    for part, table in zip((0.6, 0.8), random_weights._normal_tables(), strict=True):
        exact = part * 2**21 * quantiles
        np.testing.assert_array_equal(np.rint(exact), table)
        assert np.abs(np.abs(exact - np.floor(exact)) - 0.5).min() > 5e-8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, "a", (2,), "cauchy"), "law 'cauchy'"),
        ((-1, "a", (2,)), "seed -1"),
        ((2**64, "a", (2,)), "seed 18446744073709551616"),
        ((0, "a", (2,), "normal", math.inf), "scale inf"),
        ((0, "a", (2,), "xavier_uniform"), "needs a matrix"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw(*arguments)


def test_memory_beside_the_result_is_small():
    tracemalloc.start()
    try:
        drawn = draw(0, "w", (2048, 4096))  # 32 MiB
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * drawn.nbytes
