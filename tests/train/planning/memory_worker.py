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

import torch
from torch import nn

from data.target.head import TargetHead
from eagle31.cost.flops import count_step
from eagle31.model.config import DrafterConfig, MlaShape
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch
from eagle31.training.step import schedule_batch
from train.planning.memory import TrainerSettings, trainer_memory
from train.trainer.model_engine import (
    TrainedModule,
    deepspeed_config,
    ensure_process_group,
    initialize_model_engine,
)

MICRO_BATCHES = 2


def resident_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def settle() -> int:
    """Return freed memory to the system, reset the high-water mark, and return the resident memory."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def build(config: DrafterConfig, num_steps: int, settings: TrainerSettings) -> Any:
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    drafter = Drafter(config, with_head=settings.train_lm_head)
    width, target = config.hidden_size, config.target_hidden_size
    head = TargetHead(nn.RMSNorm(target), nn.Linear(target, config.vocab_size, bias=False)).to(dtype)
    lm_head = None
    if not settings.train_lm_head:
        lm_head = nn.Linear(width, config.draft_vocab_size, bias=False).to(dtype).requires_grad_(False)
    ids = torch.arange(config.draft_vocab_size) if config.pruned else None
    frozen = FrozenParts(torch.randn(config.vocab_size, width, dtype=dtype), head, ids, lm_head)
    checkpointing = settings.activation_checkpointing
    module = TrainedModule(drafter, frozen, num_steps, 0.8, activation_checkpointing=checkpointing)
    return initialize_model_engine(
        module,
        deepspeed_config(
            zero_stage=settings.zero_stage,
            bf16=settings.bf16,
            micro_batches=MICRO_BATCHES,
            world_size=1,
            offload_optimizer=False,
            offload_parameters=False,
        ),
        lr=1e-4,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=0.5,
    )


def row(config: DrafterConfig, num_tokens: int, prompt_tokens: int, dtype: torch.dtype) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(num_tokens, dtype=torch.bool)
    mask[:prompt_tokens] = False
    shape = (num_tokens, len(config.aux_layer_ids), config.target_hidden_size)
    return PackedBatch(
        input_ids=torch.randint(config.vocab_size, (num_tokens,), generator=generator),
        loss_mask=mask,
        document_ids=torch.zeros(num_tokens, dtype=torch.long),
        position_ids=torch.arange(num_tokens),
        aux_hidden_states=torch.randn(shape, generator=generator).to(dtype),
        final_hidden_states=torch.randn(num_tokens, shape[2], generator=generator).to(dtype),
    )


def run(engine: Any, batch: PackedBatch, num_steps: int) -> None:
    for _ in range(MICRO_BATCHES):
        loss, _ = engine(batch, schedule_batch(batch, num_steps), True)
        engine.backward(loss / len(batch.input_ids))
        engine.step()


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    mla = spec["config"].pop("mla", None)
    config = DrafterConfig(**spec["config"], mla=None if mla is None else MlaShape(**mla))
    settings, num_steps = TrainerSettings(**spec["settings"]), spec["num_steps"]
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    before = settle()
    engine = build(config, num_steps, settings)
    batch = row(config, settings.row_tokens, spec["prompt_tokens"], dtype)
    run(engine, row(config, 32, 0, dtype), num_steps)  # Adam's moments appear in the first update
    settle()
    run(engine, batch, num_steps)
    peak = resident_bytes("VmHWM") - before
    num_parameters = sum(p.numel() for p in engine.module.drafter.parameters())
    memory = trainer_memory(config, num_parameters, settings, count_step(batch, num_steps), "cpu")
    engine.destroy()
    return {"peak": peak, "planned": memory.total, "memory": asdict(memory)}


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
    warm = build(small, 2, settings)
    run(warm, row(small, 64, 0, dtype), 2)
    warm.destroy()
    del warm
    print(json.dumps(measure(spec)), flush=True)
    os._exit(0)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for spec in json.loads(sys.argv[1]):
        measure_alone(spec)


if __name__ == "__main__":
    main()
