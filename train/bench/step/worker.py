"""One side of a step benchmark: a process that runs its training step on request.

It runs in the side's environment, so it imports only the standard library, torch, safetensors and the file
that builds the side's step. Requests and responses are lines of JSON on stdin and stdout.
"""

import ctypes
import gc
import importlib.util
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Json = dict[str, Any]


def main() -> None:
    spec = json.loads(sys.argv[1])
    # Only responses go to the pipe; what libraries print goes to the log.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(spec["threads"])
    try:
        side = Side(spec)
        answers.write(json.dumps(side.about) + "\n")
        handlers: dict[str, Callable[..., Json]] = {
            "round": side.round,
            "memory": side.memory,
            "gemm": side.gemm,
        }
        for line in sys.stdin:
            request = json.loads(line)
            answers.write(json.dumps(handlers[request.pop("do")](**request)) + "\n")
    except Exception as error:
        traceback.print_exc()
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}) + "\n")
        sys.exit(1)


class Side:
    """One side's step on the rows of a shape.

    The side's file has `build(spec, weights, rows, device)`. It returns the trained module, a function that
    runs forward and backward on a row and returns the loss, and a JSON object for the report.
    """

    def __init__(self, spec: Json) -> None:
        self.device = torch.device(spec["device"])
        self.dtype: torch.dtype = getattr(torch, spec["dtype"])
        module_spec = importlib.util.spec_from_file_location("side", spec["side_file"])
        assert module_spec is not None
        assert module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
        weights: dict[str, torch.Tensor] = {}
        rows: list[dict[str, torch.Tensor]] = [{} for _ in range(spec["num_rows"])]
        for name, tensor in load_file(spec["data"]).items():
            where, _, key = name.partition("/")
            group = weights if where == "weights" else rows[int(where)]
            group[key] = tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)
        self.model, self.step, notes = module.build(spec, weights, rows, self.device)
        trained = {n for n, p in self.model.named_parameters() if p.requires_grad}
        self.about: Json = {
            "torch": torch.__version__,
            "num_trained": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            "trains_head": any("lm_head" in name for name in trained),
            "trains_embedding": any("embed" in name for name in trained),
            **notes,
        }

    def round(self, row: int) -> Json:
        """Run forward and backward once, without an optimizer."""
        self.model.zero_grad(set_to_none=True)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            # All sides share the device, so each frees its cache and warms up again.
            self.step(row)
            self.model.zero_grad(set_to_none=True)
        self.synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        loss = self.step(row)
        self.synchronize()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if on_gpu:
            self.model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        return {"wall_seconds": wall, "cpu_seconds": cpu, "loss": float(loss)}

    def memory(self, row: int) -> Json:
        """Return one step's peak memory, gradients included, above the weights, inputs and libraries.

        On a CPU this is the kernel's high-water mark of resident memory, reset just before the step after
        freed memory was returned; on a GPU it is torch's peak of allocated memory.
        """
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            baseline = torch.cuda.memory_allocated()
        else:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            baseline = _status_bytes("VmRSS")
        self.step(row)
        self.synchronize()
        cuda = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() if cuda else _status_bytes("VmHWM")
        return {"baseline_bytes": baseline, "peak_bytes": peak, "step_bytes": peak - baseline}

    def gemm(self, sizes: list[list[int]]) -> Json:
        """Return the FLOP rates of plain products."""
        return {"gemm": gemm_rates(sizes, self.device, self.dtype)}

    def synchronize(self) -> None:
        synchronize(self.device)


def gemm_rates(
    sizes: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype, repeats: int = 3
) -> list[Json]:
    """Return the FLOP rates of plain products [m, k] @ [n, k].T, in wall and in CPU time."""
    rates: list[Json] = []
    for m, k, n in sizes:
        a = torch.randn(m, k, device=device, dtype=dtype)
        b = torch.randn(n, k, device=device, dtype=dtype)
        out = a @ b.T
        wall_seconds, cpu_seconds = [], []
        for _ in range(repeats):
            synchronize(device)
            wall, cpu = time.perf_counter(), time.process_time()
            torch.mm(a, b.T, out=out)
            synchronize(device)
            wall_seconds.append(time.perf_counter() - wall)
            cpu_seconds.append(time.process_time() - cpu)
        flops = 2 * m * k * n
        rates.append(
            {
                "size": [m, k, n],
                "wall_flops": flops / statistics.median(wall_seconds),
                "cpu_flops": flops / statistics.median(cpu_seconds),
            }
        )
    return rates


def synchronize(device: torch.device) -> None:
    """Wait for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


if __name__ == "__main__":
    main()
