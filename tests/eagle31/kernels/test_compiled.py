"""The kernels for GPUs, compiled without one as training launches them: they compile, and no register spills.

What is compiled are the launches of steps on the pretended GPU, with the shapes of the drafters of SOME
recipes; with --full of all.
"""

import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, MockTensor

from eagle31 import kernels
from eagle31.model.config import DrafterConfig
from tests.pretended_gpu.device import CUDA, PretendedGpu
from tests.pretended_gpu.recipe_steps import random_parts
from tests.pretended_gpu.steps import host_batch, step
from tests.runs import forked
from tests.runs.forked import ROOT
from train.config.compose import composed
from train.plan.sizes import RunSizes, trainer_settings

run = JITFunction.run  # the pretended GPU replaces it
ALL = [path.stem for path in sorted((ROOT / "recipes" / "recipe").glob("*.yaml"))]
SOME = ["kimi_k2_6", "llama3_1_8b", "qwen3_5_9b"]  # MLA, heads of 128 and 256


class Launch(NamedTuple):
    """A kernel, and its arguments and options by name, with their dtypes in the place of tensors."""

    kernel: JITFunction
    given: dict[str, Any]

    @property
    def constants(self) -> tuple[Any, ...]:
        """Return what the compiled kernel depends on, apart from divisors of integers."""
        constant = {param.name for param in self.kernel.params if param.is_constexpr} | {"num_warps"}
        kept = {name: x for name, x in self.given.items() if name in constant or x is None}
        dtypes = {name: x.dtype for name, x in self.given.items() if isinstance(x, MockTensor)}
        return self.kernel.fn.__name__, *sorted(map(str, (kept | dtypes).items()))


def steps(recipes: Sequence[str]) -> Iterator[tuple[DrafterConfig, torch.dtype, dict[str, Any]]]:
    """Yield drafters, the dtypes of their training, and further arguments of a step."""
    seen: set[tuple[Any, ...]] = set()
    for recipe in recipes:
        if recipe in ("adapt", "any_target"):  # they have no shapes
            continue
        sizes = RunSizes(composed([f"recipe={recipe}"]))
        config, num_steps = sizes.drafter, sizes.config.train.ttt_steps
        dtype = torch.bfloat16 if trainer_settings(sizes.config, num_ranks=1).bf16 else torch.float32
        heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        widths = config.attention, *heads, config.hidden_size
        if widths not in seen:
            yield config, dtype, {"num_steps": num_steps, "with_metrics": True}
        loss = dtype, config.pruned, num_steps
        if loss not in seen:
            yield config, dtype, {"num_steps": num_steps, "with_metrics": False}
        if recipe == "llama3_1_8b":  # with a window so narrow that the last steps read no key of step 0
            yield replace(config, sliding_window=2), dtype, {"num_steps": num_steps}
        seen |= {widths, loss}


def launches(recipes: Sequence[str]) -> Iterator[Launch]:
    """Yield the launches of eagle31's kernels, those with the same constants once."""
    found: dict[tuple[Any, ...], Launch] = {}

    def record(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        given = {name: MockTensor(x.dtype) if isinstance(x, Tensor) else x for name, x in given.items()}
        launch = Launch(kernel, given)
        if kernel.fn.__module__.startswith(kernels.__name__):
            found.setdefault(launch.constants, launch)

    for config, dtype, options in steps(recipes):
        with PretendedGpu(), patch.object(JITFunction, "run", record):
            drafter, frozen = random_parts(config, True, dtype, CUDA)
            step(drafter, frozen, host_batch(config, dtype), **options)
    missing = all_kernels() - {launch.kernel.fn.__name__ for launch in found.values()}
    assert not missing, f"no step launches {missing}"
    yield from found.values()


def all_kernels() -> set[str]:
    modules = [
        import_module(f"{kernels.__name__}.{one.name}") for one in pkgutil.iter_modules(kernels.__path__)
    ]
    names = [name for one in modules for name, x in vars(one).items() if isinstance(x, JITFunction)]
    return {name for name in names if name.endswith("_kernel")}


def compile_for(launch: Launch, architecture: int) -> str:
    """Compile what a launch would, and return the line that says what it uses."""
    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", architecture, 32),
        get_current_device=lambda: architecture,  # Triton keeps compiled kernels by device
        get_current_stream=lambda _: 0,
    )
    driver.set_active(device)
    compiled = run(launch.kernel, grid=None, warmup=True, **launch.given)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = (line.strip() for line in listing.splitlines() if "REG:" in line)
    return f"sm_{architecture} {' '.join(launch.constants)} {line}"


LONG = pytest.mark.full("compiling takes a minute")


@pytest.mark.parametrize(
    ("architecture", "recipes"),
    [(90, SOME), pytest.param(90, ALL, marks=LONG), pytest.param(100, ALL, marks=LONG)],
)
def test_every_launch_compiles_and_no_register_spills(architecture: int, recipes: list[str]) -> None:
    # Triton does not compile where it interprets, so this is a process.
    printed = forked.run("tests/eagle31/kernels/test_compiled.py", architecture, *recipes, torchrun=False)
    lines = [line for line in printed.splitlines() if "REG:" in line]
    assert len(lines) >= len(all_kernels())
    assert all("STACK:0" in line and "LOCAL:0" in line for line in lines), printed


if __name__ == "__main__":
    for each in launches(sys.argv[2:]):
        print(compile_for(each, int(sys.argv[1])), flush=True)
