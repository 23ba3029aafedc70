"""The kernels for GPUs, compiled for an H100 without one: their registers, of which none spills."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def loss(dtype: str, *, lk: bool, with_mass: bool) -> dict[str, Any]:
    """Return `loss_kernel` for vocabularies that are multiples of 16, as 32,000 and 151,936 are."""
    of_mass = {"draft_mass": "*fp32", "greedy": "*i32"} if with_mass else {"draft_mass": None, "greedy": None}
    types = {"logits": f"*{dtype}", "size": "i32:16", "teacher": f"*{dtype}", "teacher_stride": "i32:16"}
    types |= {"lse": "*fp32"} | of_mass | {"teacher_index": "*i64", "first": "i32", "starts": "*i64"}
    types |= {"weights": "*fp64", "found": "*fp32", "num_rows": "i32", "eta": "fp32"}
    constants = {"LK": lk, "WITH_MASS": with_mass, "STEPS": 7, "BLOCK": 4096}
    return {
        "module": "eagle31.kernels.loss",
        "function": "loss_kernel",
        "types": types | constants,
        "num_warps": 8,
    }


def teacher(dtype: str, *, pruned: bool, with_mass: bool) -> dict[str, Any]:
    types = {"logits": f"*{dtype}", "stride": "i32:16", "size": "i32:16", "ids": "*i64" if pruned else None}
    types |= {"kept": f"*{dtype}", "num_kept": "i32:16", "lse": "*fp32"}
    types |= {"mass": "*fp32", "greedy": "*i32"} if with_mass else {"mass": None, "greedy": None}
    constants = {"PRUNED": pruned, "WITH_MASS": with_mass, "BLOCK": 4096}
    return {
        "module": "eagle31.kernels.loss",
        "function": "teacher_kernel",
        "types": types | constants,
        "num_warps": 8,
    }


SUMS = {"found": "*fp32", "num_rows": "i32", "starts": "*i64", "sums": "*fp64", "STEPS": 7, "BLOCK": 1024}
# What `compile_worker.compiled` takes.
KERNELS: dict[str, dict[str, Any]] = {
    **{f"kl, {dtype}": loss(dtype, lk=False, with_mass=False) for dtype in ("bf16", "fp32")},
    **{f"kl and metrics, {dtype}": loss(dtype, lk=False, with_mass=True) for dtype in ("bf16", "fp32")},
    **{f"lk_lambda, {dtype}": loss(dtype, lk=True, with_mass=True) for dtype in ("bf16", "fp32")},
    **{f"teacher, {dtype}": teacher(dtype, pruned=False, with_mass=False) for dtype in ("bf16", "fp32")},
    "teacher, full": teacher("bf16", pruned=False, with_mass=True),
    "teacher, pruned": teacher("bf16", pruned=True, with_mass=True),
    "sums of the loss": {
        "module": "eagle31.kernels.loss",
        "function": "sum_kernel",
        "types": SUMS,
        "num_warps": 4,
    },
}


@pytest.mark.full("compiles all kernels")
def test_no_kernel_spills() -> None:
    command = [sys.executable, "tests/eagle31/kernels/compile_worker.py", json.dumps(list(KERNELS.values()))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(zip(KERNELS, map(json.loads, done.stdout.splitlines()), strict=True))
    for name, usage in found.items():
        print(f"{name:24}{usage['reg']:4} registers {usage['shared']:6} bytes of shared memory")
    assert not [name for name, usage in found.items() if usage["stack"] or usage["local"]]
