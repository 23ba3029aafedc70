import subprocess
import sys
from pathlib import Path

import pytest
import torch

_PROGRAM = """
import resource, torch
from eagle31.malloc import keep_freed_memory
{call}
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        [torch.ones(4 << 20) for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults() * resource.getpagesize())
"""


def allocated_anew(call: str) -> int:
    """Bytes whose pages the kernel hands out again while eight blocks of 16 MB come and go."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _PROGRAM.format(call=call)]
    return int(subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(torch.cuda.is_available() or not sys.platform.startswith("linux"), reason="glibc, no GPU")
def test_pages_of_freed_blocks_are_used_again() -> None:
    assert allocated_anew("keep_freed_memory()") < 1 << 20
    assert allocated_anew("") > 100 << 20
