"""The kernels of Triton against a naive sort, in Triton's interpreter; and whether they compile for GPUs."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from hf_slt.masks import selection

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

# Triton reads the variable when it is imported, so each part runs in a process of its own.
SELECT = """
import math
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from hf_slt.masks import digit_kernels
from hf_slt.masks.digit_kernels import keep_by_kernels

def naive_mask(values, count):
    flat = values.double().numpy()
    mask = np.zeros(flat.size, bool)
    mask[np.argsort(-flat, kind="stable")[:count]] = True
    return torch.from_numpy(mask)

generator, checked = torch.Generator().manual_seed(0), 0
for size in (1, 7, 4095, 4096, 4097, 9000):
    for levels in (0, 1, 2, 5):
        values = torch.randn(size, generator=generator)
        if levels:
            values = torch.randint(levels, (size,), generator=generator).float() - levels // 2
        if size > 7:
            values[2:8] = torch.tensor([-0.0, 0.0, math.inf, -math.inf, 1e-45, -1e-45])
        for magnitude in (False, True):
            for count in {1, max(1, size // 3), size}:
                expected = naive_mask(values.abs() if magnitude else values, count)
                for parts in ([values], [values[:0], *values.tensor_split(3)]):
                    assert torch.equal(keep_by_kernels(parts, count, magnitude), expected)
                    checked += 1
half = torch.randn(5000, generator=generator).bfloat16()
assert torch.equal(keep_by_kernels([half], 1000), naive_mask(half, 1000))
print(checked)
"""

COUNT = """
import json
import sys
import torch
sys.path[:0] = sys.argv[1:]
import benchmark
from test_selection import NoWaiting

values = torch.randn(1 << 18)
with NoWaiting():
    print(json.dumps(benchmark.launches_of_kernels(values, 3000)))
"""

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_slt.masks import digit_kernels

kinds = {"values": "*fp32", "mask": "*i1", "size": "i32", "dropped": "i64"}
for kernel in (
    digit_kernels._count_upper, digit_kernels._count_lower, digit_kernels._count_ties, digit_kernels._write_mask
):
    for magnitude in (True, False):
        constants = {"magnitude": magnitude, "block": 4096}
        kind = {name: "constexpr" if name in constants else kinds.get(name, "*i64") for name in kernel.arg_names}
        source = ASTSource(kernel, kind, constants)
        assert triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ptx"]
print("compiled")
"""


def run(code: str, *words: object, interpreted: bool = True) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpreted else {}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_exactly_the_largest_ties_to_the_lower_index():
    assert int(run(SELECT)) > 200


def test_few_launches_and_nothing_is_read_back(pytestconfig):
    """Kernels and operators of torch together; `NoWaiting` raises at an operator that the host would wait for."""
    folders = (pytestconfig.rootpath / name for name in ("recipes", "tests/masks"))
    assert json.loads(run(COUNT, *folders)) == {"all": 10, "of full size": 4}


def test_they_compile_for_a_gpu():
    assert run(COMPILE, interpreted=False) == "compiled\n"


def test_only_devices_that_triton_compiles_for():
    found = {kind: selection._has_triton(kind) for kind in ("cuda", "xpu", "cpu", "mps")}
    assert found == {"cuda": True, "xpu": True, "cpu": False, "mps": False}
    assert torch.equal(selection.keep_largest(torch.ones(3), 1), torch.tensor([True, False, False]))
