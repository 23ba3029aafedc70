"""The kernels for GPUs, compiled for an H100 without one: their registers, of which none spills."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.runs.forked import ROOT

BF16, FP32, INDEX = "*bf16", "*fp32", "*i64"
INTEGERS = ("heads", "first", "count", "width", "num_rows", "STEP_ROWS")
TYPES = {
    **dict.fromkeys(("lse", "cos", "sin", "inverse", "partial", "found"), FP32),
    **dict.fromkeys(("rows", "places", "sources", "index", "teacher_index", "starts"), INDEX),
    **dict.fromkeys(("size", "stride", "teacher_stride", "num_kept"), "i32:16"),  # multiples of 16
    **dict.fromkeys(("weights", "sums"), "*fp64"),
    "scale": "fp32",
}


class Row(NamedTuple):
    """A kernel, the constants among its arguments, and types that are not those of `type_of`."""

    module: str
    kernel: str
    arguments: dict[str, Any]
    num_warps: int


def rows() -> Iterator[Row]:
    yield from loss_rows()
    from eagle31.kernels.rollout_terms import _widths

    for group, width, value_width in ((4, 128, 128), (1, 192, 128), (8, 128, 128), (4, 64, 64)):
        sizes = _widths(group, width, value_width)
        num_warps = sizes.pop("num_warps")
        for kernel, of_context in (("_merge_kernel", "output"), ("_backward_kernel", "padded_query")):
            constants = {"HEADS": 8, "GROUP": group, **sizes}
            yield Row("rollout_terms", kernel, constants, num_warps)
            # The rows of step 0 themselves, where a window leaves none of its keys.
            absent = dict.fromkeys(("rows", "places", of_context))
            yield Row("rollout_terms", kernel, constants | absent, num_warps)
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
        yield Row("norm_backward", "_norm_backward_kernel", {"BLOCK": block}, min(16, max(2, block // 256)))


def loss_rows() -> Iterator[Row]:
    """Yield the loss's kernels for vocabularies that are multiples of 16, as 32,000 and 151,936 are."""
    of_mass = {True: {"draft_mass": FP32, "mass": FP32, "greedy": "*i32"}}
    of_mass[False] = dict.fromkeys(of_mass[True], None)  # type: ignore[arg-type]
    for dtype in (BF16, FP32):
        logits = dict.fromkeys(("logits", "teacher", "kept"), dtype)
        for with_mass in (False, True):
            constants = {"WITH_MASS": with_mass, "STEPS": 7, "BLOCK": 4096}
            yield Row("loss", "loss_kernel", logits | of_mass[with_mass] | constants, 8)
        for pruned, with_mass in ((False, False), (False, True), (True, True)):
            ids = {"ids": INDEX if pruned else None}
            constants = {"PRUNED": pruned, "WITH_MASS": with_mass, "BLOCK": 4096}
            yield Row("loss", "teacher_kernel", logits | ids | of_mass[with_mass] | constants, 8)
    yield Row("loss", "sum_kernel", {"STEPS": 7, "BLOCK": 1024}, 4)


@pytest.mark.full("compiling takes a minute")
def test_no_kernel_spills_registers() -> None:
    # Triton does not compile where it interprets, so this is a process.
    command = [sys.executable, "-m", "tests.eagle31.kernels.test_compiled"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    print(run.stdout)
    found = run.stdout.splitlines()
    assert len(found) == len(list(rows()))
    assert all("STACK:0" in line and "LOCAL:0" in line for line in found), run.stdout


def type_of(name: str) -> str:
    """Return the type of an argument; pointers are to bfloat16 unless said otherwise."""
    return TYPES.get(name) or ("i32" if name in INTEGERS or name.endswith("stride") else BF16)


def resources(row: Row) -> str:
    """Compile a kernel, and return the line that says what it uses."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(import_module(f"eagle31.kernels.{row.module}"), row.kernel)
    arguments = {name: row.arguments.get(name, type_of(name)) for name in kernel.arg_names}
    types = {name: kind.removesuffix(":16") for name, kind in arguments.items() if isinstance(kind, str)}
    constants = {name: value for name, value in arguments.items() if name not in types}
    multiples = [name for name in types if arguments[name].endswith(":16") or types[name].startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in multiples},
    )
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": row.num_warps})
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = (line.strip() for line in listing.splitlines() if "REG:" in line)
    return f"{row.kernel} {row.arguments} {line}"


if __name__ == "__main__":
    for each in rows():
        print(resources(each), flush=True)
