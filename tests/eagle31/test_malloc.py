import subprocess
import sys
from pathlib import Path

import pytest
import torch

_PROGRAM = """
import torch
from eagle31.malloc import keep_freed_memory
{call}
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
for _ in range(3):
    [torch.ones(4 << 20) for _ in range(8)]
print(resident() - before)
"""


def kept(call: str) -> int:
    """Bytes that a process still holds of the eight blocks of 16 MiB that it has freed."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _PROGRAM.format(call=call)]
    return int(subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(torch.cuda.is_available() or not sys.platform.startswith("linux"), reason="glibc, no GPU")
def test_freed_memory_is_kept() -> None:
    assert kept("keep_freed_memory()") > 120 << 20
    assert kept("") < 60 << 20
