"""Speed and memory of the training step of a recipe's drafter, in DeepSpeed in bf16 with ZeRO 1.

The drafter's shape and the plan of its memory come from the recipe. Every token of the row is supervised,
which takes the most time and memory.
"""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from eagle31.cost.flops import count_step, gemm_sizes, step_flops
from eagle31.model.config import DrafterConfig
from train.bench.gpu_check.record import NotRun, Options, Record
from train.bench.step.engine import build_engine, random_row, update
from train.bench.step.worker import gemm_rates, synchronize
from train.config.compose import composed
from train.planning.memory import USABLE_FRACTION, TrainerSettings, trainer_memory
from train.planning.memory_check import gigabytes
from train.planning.sizes import RunSizes, trainer_settings
from train.trainer.model_engine import ensure_process_group

ROW_TOKENS, DRY_ROW_TOKENS, ROUNDS = 8192, 320, 5
WARM_UP_TOKENS = 64  # Adam's moments appear in the first update
TOLERANCES = {"cuda": 0.15, "cpu": 0.4}  # of measured to planned memory; a CPU's libraries count as well
# What makes a recipe's target small enough for a dry run.
SMALL = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}


def measure(recipe: str, options: Options, record: Record, small: dict[str, int], *dry: str) -> None:
    """Record time per step, rates, and the peak of memory next to the plan's.

    Args:
        small: the keys of `target.architecture` that a dry run changes.
        dry: further overrides of a dry run.

    Raises:
        NotRun: the plan says that the step does not fit this GPU.
    """
    tokens = DRY_ROW_TOKENS if options.dry_run else ROW_TOKENS
    overrides = [f"train.row_tokens={tokens}", f"data.max_tokens={tokens}"]
    if options.dry_run:
        overrides += [*(f"target.architecture.{name}={value}" for name, value in small.items()), *dry]
    config = composed([f"recipe={recipe}", *overrides])
    sizes, device = RunSizes(config), torch.device(options.device_type)
    settings = replace(trainer_settings(config, num_ranks=1), rows_per_step=1, bf16=True, zero_stage=1)
    shape, num_steps = sizes.drafter, config.train.ttt_steps
    record.figure(
        "drafter",
        f"{sizes.num_parameters / 1e9:.3f} B parameters, hidden size {shape.hidden_size}, "
        f"{'MLA' if shape.mla else 'GQA'}, draft vocabulary {shape.draft_vocab_size:,}",
    )
    record.figure("row", f"{tokens:,} tokens, all supervised, {num_steps} steps")
    check_fits(sizes, settings, device)
    ensure_process_group()
    warm_up(settings, device)
    before = memory_now(device)
    engine = build_engine(shape, settings, num_steps, device)
    batch = random_row(shape, tokens, 0, torch.bfloat16, device)
    update(engine, random_row(shape, WARM_UP_TOKENS, 0, torch.bfloat16, device))
    reset_peak(device)
    update(engine, batch)
    peak = memory_peak(device) - before
    on_host = batch.to(torch.device("cpu"))
    synchronize(device)  # the copies do not wait
    counts = count_step(on_host, num_steps, shape)
    planned = trainer_memory(shape, sizes.tensors, settings, counts, device.type).total
    compare_memory(record, peak, planned, TOLERANCES[device.type])
    rounds = 2 if options.dry_run else ROUNDS
    seconds = [timed(lambda: update(engine, batch, with_metrics=False), device) for _ in range(rounds)]
    median = statistics.median(seconds)
    record.figure("forward, backward and update", round(1000 * median, 1), "ms")
    record.figure("tokens per second", round(tokens / median))
    record.figure("supervised positions per second", round(counts.rows[0] / median))
    flops = step_flops(shape, counts, head_trained=settings.train_lm_head).total
    rates = gemm_rates(gemm_sizes(shape, counts), device, torch.bfloat16)
    best = max(one["wall_flops"] for one in rates)
    record.figure("rate of the step", round(flops / median / 1e12, 3), "TFLOP/s")
    record.figure("best rate of its products alone", round(best / 1e12, 3), "TFLOP/s")
    record.figure("part of that rate", f"{flops / median / best:.1%}")


def warm_up(settings: TrainerSettings, device: torch.device) -> None:
    """Run a small step: libraries allocate memory at their first use, which is not part of a step's."""
    small = DrafterConfig(64, 64, 2, 2, 32, 256, 256, 64, (0, 1, 2))
    engine = build_engine(small, settings, 2, device)
    update(engine, random_row(small, WARM_UP_TOKENS, 0, torch.bfloat16, device))
    engine.destroy()


def check_fits(sizes: RunSizes, settings: TrainerSettings, device: torch.device) -> None:
    if device.type != "cuda":
        return
    needed = sizes.trainer(settings, "cuda").total
    there = torch.cuda.get_device_properties(device).total_memory
    if needed > there * USABLE_FRACTION:
        raise NotRun(f"The plan says {gigabytes(needed)}; this GPU has {gigabytes(there)}.")


def compare_memory(record: Record, peak: int, planned: int, tolerance: float) -> None:
    record.figure("peak memory", gigabytes(peak))
    record.figure("planned memory", gigabytes(planned))
    detail = f"measured {gigabytes(peak)}, planned {gigabytes(planned)}, ratio {peak / planned:.2f}"
    record.check(f"memory is as planned within {tolerance:.0%}", abs(peak / planned - 1) <= tolerance, detail)


def timed(action: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - started


def memory_now(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    _trim()
    return _resident("VmRSS")


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _trim()
        Path("/proc/self/clear_refs").write_text("5")


def memory_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")


def _trim() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _resident(key: str) -> int:
    lines: Sequence[str] = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
