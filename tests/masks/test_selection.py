"""Selection against a naive sort; and where a device must not be waited for, no operator waits."""

import math
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from hf_slt.masks import selection
from hf_slt.masks.modules import install_plans
from hf_slt.masks.plans import FixedPlan, MaskedPlan
from hf_slt.masks.rules import EdgePopup
from hf_slt.masks.selection import keep_by_chance, keep_by_digits, keep_by_sample, keep_largest, kept_count
from hf_slt.weights.random_weights import TensorSpec


def naive_mask(values: torch.Tensor, count: int) -> torch.Tensor:
    """A stable sort of all values, descending: ties stay in row-major order."""
    flat = values.contiguous().view(-1).double().numpy()
    mask = np.zeros(flat.size, bool)
    mask[np.argsort(-flat, kind="stable")[:count]] = True
    return torch.from_numpy(mask).view(values.shape)


def make_values(size: int, levels: int, seed: int) -> torch.Tensor:
    """Few levels make many ties."""
    generator = torch.Generator().manual_seed(seed)
    if levels:
        return torch.randint(levels, (size,), generator=generator).float() - levels // 2
    return torch.randn(size, generator=generator)


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, 3000),
    levels=st.sampled_from([0, 1, 2, 5, 1000]),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
    sample=st.sampled_from([16, 64, 1 << 14]),
    magnitude=st.booleans(),
    parts=st.integers(1, 4),
)
def test_exactly_the_largest_ties_to_the_lower_index(size, levels, share, seed, sample, magnitude, parts):
    values, count = make_values(size, levels, seed), max(1, round(share * size))
    expected = naive_mask(values.abs() if magnitude else values, count)
    several = values.tensor_split(parts)  # of several tensors that are ranked together
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_SAMPLE", sample)  # small: the sampled path at every size
        patch.setattr(selection, "_PIECE", 4 * sample)
        assert torch.equal(keep_by_sample(several, count, magnitude), expected)
    assert torch.equal(keep_by_digits(several, count, magnitude), expected)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40), st.floats(0, 1))
@example([0.0, -0.0, 0.0, -0.0], 0.5)
@example([-1.0] * 9, 0.3)
@example([math.inf, -math.inf, math.inf, 3e38, -3e38], 0.4)
@example([1e-45, -1e-45, 0.0], 0.67)
def test_by_digits_any_float_has_its_place(values, share):
    """Negative numbers, both zeros, infinities, the smallest and the largest; one kept, or all."""
    values = torch.tensor(values)
    for count in {1, max(1, round(share * len(values))), len(values)}:
        assert torch.equal(keep_by_digits([values], count), naive_mask(values, count))
        assert torch.equal(keep_by_digits([values], count, True), naive_mask(values.abs(), count))


def test_adversarial_order_is_still_exact():
    """A sample that is not typical: the values follow the stride of the sample."""
    size = 1 << 17
    values = torch.arange(size, dtype=torch.float32)
    values[:: round(size ** (1 / 3))] = 1e9
    assert torch.equal(keep_largest(values, size // 3), naive_mask(values, size // 3))


@pytest.mark.parametrize("levels", [0, 2, 1])
@pytest.mark.parametrize("threads", [1, 3])
def test_large_tensors_on_several_threads(monkeypatch, threads, levels):
    """As they are, not with small pieces: normal values, two values, a constant."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    several = make_values(2_500_003, levels, 7).split([1_200_001, 1, 1_300_001])
    count = 700_001
    expected = naive_mask(torch.cat(several).abs(), count)
    assert torch.equal(torch.cat(selection.keep_largest_of_all(several, count, True)), expected)


def test_scores_of_any_type():
    """In float64, values that float32 does not tell apart; types together; and half precision."""
    values = 1 + 1e-12 * make_values(300_000, 0, 8).double()
    assert torch.equal(keep_largest(values, 1000), naive_mask(values, 1000))
    together = [values, make_values(300_000, 5, 9)]
    found = selection.keep_largest_of_all(together, 100_000)
    assert torch.equal(torch.cat(found), naive_mask(torch.cat(together), 100_000))
    half = values.half() + make_values(300_000, 3, 10).half()
    assert torch.equal(keep_largest(half, 1000), naive_mask(half, 1000))


def test_strides_do_not_matter():
    values = make_values(12 * 35, 5, 0).view(35, 12)
    for view in (values.t(), values[::2], values[:, 1::3], values.flip(0)):
        assert torch.equal(keep_largest(view, 40), naive_mask(view, 40))


def test_kept_count_rounds():
    assert kept_count(1 - 0.9, 10) == 1  # int() would give 0
    assert [kept_count(0.3, n) for n in (1, 10, 1000, 1_000_003)] == [1, 3, 300, 300_001]
    assert kept_count(1.0, 7) == 7


@pytest.mark.parametrize("size", [50, 100_000, 300_000])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_score_among_many_is_refused(bad, size):
    values = make_values(size, 0, 1)
    values[17] = bad
    with pytest.raises(ValueError, match="not finite"):
        keep_largest(values, 10)


@pytest.mark.parametrize("count", [0, 6])
def test_impossible_counts(count):
    with pytest.raises(ValueError, match=f"cannot keep {count} of 5"):
        keep_largest(torch.ones(5), count)


def test_it_is_an_operator_that_torch_can_trace():
    values = make_values(1000, 3, 4).view(20, 50)
    torch.library.opcheck(torch.ops.hf_slt.keep_largest.default, ([values, values[:3]], 300, True))
    stacked = torch.stack([values, -values, values.flip(0)])
    many = torch.func.vmap(lambda one: keep_largest(one, 300))(stacked)
    assert torch.equal(many, torch.stack([keep_largest(one, 300) for one in stacked]))


MEMORY = """
import sys
import torch
from hf_slt.masks import selection
from hf_slt.masks.rules import RULES

def peak():  # of this process alone: ru_maxrss also has what its parent had
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

def select(scores):
    if sys.argv[1] == "cpu":
        return RULES["global"](density=0.3).codes_of_all(scores, [])
    return selection.keep_by_digits([one.view(-1) for one in scores], sum(map(torch.numel, scores)) // 3, True)

select([torch.randn(600, 600), torch.randn(99)])  # whatever is loaded or made at the first call
scores = [torch.randn(1 << size) for size in (21, 23, 22, 21)]
before = peak()
found = select(scores)
selected = peak()
copies = [one.clone() for one in scores]
print(sum(map(torch.numel, scores)) * 4, selected - before, peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads what Linux tells of a process")
@pytest.mark.parametrize("way", ["cpu", pytest.param("other devices", marks=pytest.mark.slow)])
def test_to_rank_all_tensors_together_takes_less_than_a_copy_of_them(way):
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, way], capture_output=True, text=True, timeout=300, check=True
    )
    copy, selection, selection_and_copy = map(int, run.stdout.split())
    assert copy / 8 < selection < copy  # a mask of bytes, a quarter, has to be there
    assert selection_and_copy > selection + 0.5 * copy  # as one would be seen


# -- without waiting ------------------------------------------------------------------------------------


class Waits(Exception):
    pass


class NoWaiting(TorchDispatchMode):
    """Raises at an operator whose result, or the shape of it, the host needs before it can go on."""

    reads = set(
        "_local_scalar_dense item nonzero equal is_nonzero masked_select unique_dim unique_consecutive "
        "_unique _unique2 bincount repeat_interleave".split()
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        chosen = args[1] if name in ("index", "index_put", "index_put_", "_unsafe_index") else ()
        by_mask = [one for one in chosen if one is not None and one.dtype in (torch.bool, torch.uint8)]
        moved = name == "_to_copy" and kwargs.get("device") not in (None, args[0].device)
        moved |= name == "copy_" and args[0].device != args[1].device
        if name in self.reads or by_mask or moved:
            raise Waits(name)
        return func(*args, **kwargs)


@contextmanager
def no_waiting():
    """That, and what reads a tensor's memory without an operator."""

    def refuse(*_):
        raise Waits

    reading = dict.fromkeys(("tolist", "numpy", "cpu", "__dlpack__"), refuse)
    with NoWaiting(), mock.patch.multiple(torch.Tensor, **reading):
        yield


WAITING = {
    "item": lambda x: x[0].item(),
    "if": lambda x: 1 if x.sum() > 0 else 2,
    "int": lambda x: int((x > 0).sum()),
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: torch.equal(x, x),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "x[mask]": lambda x: x[x > 0],
    "x[mask] =": lambda x: x.index_put_((x > 0,), torch.zeros(())),
    "tolist": lambda x: x.tolist(),
    "to": lambda x: x.to("meta"),
    "keep_by_sample": lambda x: keep_by_sample([x], 40),
    "keep_by_sample-large": lambda x: keep_by_sample([x.repeat(3000)], 40),
}


@pytest.mark.parametrize("wait", WAITING.values(), ids=WAITING.keys())
def test_the_net_catches_what_waits(wait):
    with no_waiting(), pytest.raises(Waits):
        wait(torch.randn(100))


@pytest.mark.parametrize("magnitude", [True, False])
def test_by_digits_never_waits(magnitude):
    values = torch.randn(1000)
    with no_waiting():
        mask = keep_by_digits([values], 300, magnitude)
        keep_by_chance(values, 0, "w")
    assert torch.equal(mask, naive_mask(values.abs() if magnitude else values, 300))


@pytest.mark.parametrize("magnitude", [True, False])
def test_ties_across_pieces(monkeypatch, magnitude):
    monkeypatch.setattr(selection, "piece_size", lambda _: 64)
    values = make_values(1000, 5, 3)
    for count in (1, 333, 600, 1000):
        expected = naive_mask(values.abs() if magnitude else values, count)
        assert torch.equal(keep_by_digits(values.tensor_split(3), count, magnitude), expected)
        assert torch.equal(keep_by_digits([values], count, magnitude), expected)


@pytest.fixture(params=["conv1d", "linear", "embedding"])
def layer(request):
    rule = EdgePopup(density=0.3)

    def spec(name, shape, inputs):
        return TensorSpec(name, shape, seed=3, input_axes=(inputs,))

    if request.param == "conv1d":
        layer = Conv1D(17, 24)
        widths = {"query": 5, "key": 5, "value": 7}
        tensors = [spec(f"c_attn.{name}", (24, width), 0) for name, width in widths.items()]
        bias = FixedPlan(TensorSpec("bias", (17,), law="constant", scale=0.0), (17,))
        install_plans(layer, {"weight": MaskedPlan(tensors, rule, axis=1), "bias": bias})
        return layer
    layer = nn.Linear(16, 24, bias=False) if request.param == "linear" else nn.Embedding(24, 16)
    scales = [TensorSpec("w.scale", (1, 24), law="constant")]
    install_plans(layer, {"weight": MaskedPlan([spec("w", (24, 16), 1)], rule, scales=scales)})
    return layer


def test_neither_does_a_layer_nor_its_gradient(layer, monkeypatch):
    x = torch.randn(5, layer.weight.shape[isinstance(layer, nn.Linear)])
    x = torch.tensor([3, 3, 0]) if isinstance(layer, nn.Embedding) else x

    def gradients():
        layer.zero_grad()
        (layer.weight.square().sum() + layer(x).square().sum()).backward()
        return [scores.grad.clone() for scores in layer.parameters()]

    expected, weight = gradients(), layer.weight.detach().clone()
    with no_waiting(), pytest.raises(Waits):
        layer.weight  # noqa: B018  it is computed when it is read
    monkeypatch.setattr(selection, "keep_by_sample", keep_by_digits)  # as on any device but a CPU
    with no_waiting():
        found = gradients()
    assert torch.equal(layer.weight, weight)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
