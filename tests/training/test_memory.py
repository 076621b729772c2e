"""A training process keeps the memory that it frees."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from hf_slt.training.memory import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def blocks(count):
    for _ in range(count):
        block = torch.ones(1 << 25)  # 128 MB
        del block

torch.set_num_threads(1)
blocks(20)  # until no new place is taken
before = faults()
blocks(10)
print(faults() - before)
"""


def page_faults(way: str) -> int:
    # Pages may be larger than 4 KB; then there are fewer faults, but still one for each page that comes new.
    ended = subprocess.run([sys.executable, "-c", FAULTS, way], capture_output=True, text=True, check=True)
    return int(ended.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is one of glibc")
def test_a_block_that_was_freed_comes_back_without_page_faults():
    fresh, kept = page_faults("fresh"), page_faults("keep")
    assert fresh > 10 * (1 << 27) // (1 << 21)  # at least one for every page, even of 2 MB
    assert kept < fresh / 10
