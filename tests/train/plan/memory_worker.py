"""Measure the peak memory of real training steps; prints a line of JSON for each."""

import ctypes
import gc
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # else DeepSpeed imports it in each child
import torch

from eagle31.cost.flops import count_step
from eagle31.model.config import DrafterConfig
from eagle31.model.shapes import GqaShape, MlaShape
from eagle31.training.rollout import CHUNK_ROWS
from tests.gpu.engine import build_engine, random_row, update
from train.plan.memory import TrainerSettings, trainer_memory
from train.trainer.process_groups import ensure_process_group

CPU = torch.device("cpu")
LIBC = ctypes.CDLL("libc.so.6")
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of malloc.h


def resident_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def settle() -> int:
    """Return freed memory to the system, reset the high-water mark, and return the resident memory."""
    gc.collect()
    LIBC.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    mla = spec["config"].pop("mla", None)
    config = DrafterConfig(**spec["config"], attention=GqaShape() if mla is None else MlaShape(**mla))
    settings, num_steps = TrainerSettings(**spec["settings"]), spec["num_steps"]
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    before = settle()
    engine = build_engine(config, settings, num_steps, CPU)
    tensors = {name: list(weight.shape) for name, weight in engine.module.drafter.named_parameters()}
    batch = random_row(config, settings.row_tokens, spec["prompt_tokens"], dtype, CPU)
    update(engine, random_row(config, 32, 0, dtype, CPU))  # Adam's moments appear in the first update
    settle()
    update(engine, batch, chunk_rows=settings.rollout_chunk)
    peak = resident_bytes("VmHWM") - before
    # In chunks, a row of which the assistant wrote only the end takes as much, and far less time.
    written = batch if settings.rollout_chunk else random_row(config, settings.row_tokens, 0, dtype, CPU)
    settled = settle()
    list(engine.module.hits(written, settings.draft_tokens, settings.rollout_chunk or CHUNK_ROWS))
    validation = resident_bytes("VmHWM") - settled
    memory = trainer_memory(config, tensors, settings, count_step(batch, num_steps, config), "cpu")
    engine.destroy()
    step = max(memory.step.total, memory.update)
    planned = {"planned": memory.held + step, "memory": asdict(memory)}
    return {"peak": peak, "validation": validation, **planned}


def measure_alone(spec: dict[str, Any]) -> None:
    """Measure in a forked process, so that no measurement depends on the one before it."""
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        return
    ensure_process_group()
    # Libraries allocate memory at their first use, which is not part of a step.
    small = DrafterConfig(64, 64, 2, 2, 32, 256, 256, 64, (0, 1, 2))
    settings = TrainerSettings(**spec["settings"])
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    warm = build_engine(small, settings, 2, CPU)
    update(warm, random_row(small, 64, 0, dtype, CPU))
    warm.destroy()
    del warm
    print(json.dumps(measure(spec)), flush=True)
    os._exit(0)


def main() -> None:
    # Freed memory is returned at once, so that the process holds only its tensors.
    LIBC.mallopt(M_MMAP_THRESHOLD, 1 << 14)
    LIBC.mallopt(M_ARENA_MAX, 1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.freeze()  # DeepSpeed collects garbage often, and each child would visit all that was imported
    for spec in json.loads(sys.argv[1]):
        measure_alone(spec)


if __name__ == "__main__":
    main()
