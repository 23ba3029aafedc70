import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_PROGRAM = """
import ctypes
from eagle31.malloc import keep_freed_memory
{call}
class MallocInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "{fields}".split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype, libc.malloc.restype = MallocInfo, ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
before = libc.mallinfo2().hblks
block = libc.malloc(24 << 20)
mapped = libc.mallinfo2().hblks - before
libc.free(block)
print(mapped, libc.mallinfo2().keepcost >= 24 << 20)
"""

# Fields of mallinfo2(3).
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


def allocated(call: str) -> str:
    """Return the number of mappings that 24 MiB take, and whether the heap keeps them once freed."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _PROGRAM.format(call=call, fields=_FIELDS)]
    return subprocess.run(
        command, cwd=root, check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


@pytest.mark.skipif(
    torch.cuda.is_available() or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33, no GPU"
)
def test_large_blocks_stay_in_the_heap() -> None:
    assert allocated("keep_freed_memory()") == "0 True"
    assert allocated("") == "1 False"
