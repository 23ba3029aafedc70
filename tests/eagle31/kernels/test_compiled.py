"""The kernels for GPUs, compiled for an H100: registers, and none of them in memory."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.runs.forked import ROOT

BF16, FP32, INDEX = "*bf16", "*fp32", "*i64"
INTEGERS = ("heads", "first", "count", "width", "num_rows", "STEP_ROWS")
TYPES = {
    **dict.fromkeys(("lse", "cos", "sin", "inverse", "partial"), FP32),
    **dict.fromkeys(("rows", "places", "sources", "index"), INDEX),
    "scale": "fp32",
}


class Row(NamedTuple):
    """A kernel with the sizes of a recipe."""

    module: str
    kernel: str
    constants: dict[str, Any]
    num_warps: int


def rows() -> Iterator[Row]:
    from eagle31.kernels.rollout_terms import _widths

    for group, width, value_width in ((4, 128, 128), (1, 192, 128), (8, 128, 128), (4, 64, 64)):
        sizes = _widths(group, width, value_width)
        num_warps = sizes.pop("num_warps")
        for kernel in ("_merge_kernel", "_backward_kernel"):
            yield Row("rollout_terms", kernel, {"HEADS": 8, "GROUP": group, **sizes}, num_warps)
    yield Row("rollout_terms", "_spread_kernel", {"WIDTH": 128, "BLOCK": 256}, 1)
    yield Row("rollout_terms", "_add_rows_kernel", {"BLOCK": 2048}, 4)
    for plain, half in ((0, 64), (128, 32)):
        blocks = {"BLOCK_HEADS": 2048 // half, "BLOCK_HALF": half, "BLOCK_PLAIN": max(plain, 1)}
        for backward in (False, True):
            turn = {"PLAIN": plain, "HALF": half, "PAIRS": plain > 0, "BACKWARD": backward}
            yield Row("rotation", "_turn_kernel", turn | blocks, 4)
    for backward in (False, True):
        expand = {"PLAIN": 128, "SHARED": 64, "VALUE": 128, "BACKWARD": backward}
        blocks = {"BLOCK_HEADS": 8, "BLOCK_PLAIN": 128, "BLOCK_SHARED": 64, "BLOCK_VALUE": 128}
        yield Row("expanded_heads", "_expand_kernel", expand | blocks, 4)
    for block in (512, 4096, 8192):
        yield Row("norm_backward", "_norm_backward_kernel", {"BLOCK": block}, min(16, max(4, block // 512)))


@pytest.mark.full("compiling takes a minute")
def test_no_kernel_spills_registers() -> None:
    command = [sys.executable, "-m", "tests.eagle31.kernels.test_compiled"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    print(run.stdout)
    found = run.stdout.splitlines()
    assert len(found) == len(list(rows()))
    assert all("LOCAL:0" in line for line in found), run.stdout


def type_of(name: str) -> str:
    """Return the type of an argument; pointers are to bfloat16 unless said otherwise."""
    return TYPES.get(name) or ("i32" if name in INTEGERS or name.endswith("stride") else BF16)


def resources(row: Row) -> str:
    """Compile a kernel, and return the line that says what it uses."""
    from importlib import import_module

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(import_module(f"eagle31.kernels.{row.module}"), row.kernel)
    types: Mapping[str, str] = {
        name: "constexpr" if name in row.constants else type_of(name) for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=row.constants)
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": row.num_warps})
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = (line.strip() for line in listing.splitlines() if "REG:" in line)
    return f"{row.kernel} {row.constants} {line}"


if __name__ == "__main__":
    for each in rows():
        print(resources(each), flush=True)
