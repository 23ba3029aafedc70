"""The training step on the device: against its definition, its time and memory."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import current_flash_attention_impl

from eagle31.cost.flops import count_step, step_flops
from eagle31.model.frozen import FrozenParts
from eagle31.model.shapes import MlaShape
from eagle31.training.rollout import CHUNK_ROWS
from eagle31.training.step import rollout_loss
from tests.eagle31.naive import naive_loss
from tests.eagle31.tiny import DFLASH, DSPARK, EAGLE3, VOCAB, random_batch, tiny_config, tiny_drafter
from tests.gpu.conftest import Figure
from tests.gpu.engine import build_engine, random_row, update
from tests.gpu.runs import Check
from train.config.compose import composed
from train.plan.memory import USABLE_FRACTION, trainer_memory
from train.plan.sizes import RunSizes, trainer_settings
from train.trainer.process_groups import ensure_process_group

# Relative to the norm of the exact gradient; bfloat16 keeps 8 bits of every product and state.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "target_hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}


def mla(num_heads: int, plain_width: int, value_width: int) -> dict[str, Any]:
    ranks = {"q_lora_rank": 48, "kv_lora_rank": 32}
    shape = MlaShape(**ranks, qk_nope_head_dim=plain_width, qk_rope_head_dim=64, v_head_dim=value_width)
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads, "head_dim": shape.head_dim}
    return heads | {"attention": shape}


VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3.1": {},
    "eagle3": EAGLE3,
    "full vocabulary": {"draft_vocab_size": VOCAB},
    # The heads of recipes.
    "llama3_3_70b": {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
    "kimi_k2_6": mla(64, 128, 128),
    "deepseek_v3": mla(128, 128, 128),
    "glm_5_2": mla(64, 192, 256),
    "sliding window": {"sliding_window": 40},
    "dspark": DSPARK,
    "dflash": DFLASH,
}
NUM_STEPS = 4
# What makes a recipe's target small.
SMALL = {
    "llama3_1_8b": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "kimi_k2_6": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    },
}
MEMORY_TOLERANCE = 0.15  # of measured to planned memory, on a GPU


@pytest.mark.at_most(10)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_those_of_the_definition(
    check: Check, figure: Figure, variant: str, dtype: torch.dtype
) -> None:
    config = tiny_config(**SIZES | VARIANTS[variant])
    batch = random_batch((140, 20), config, dtype=dtype)
    expected = gradients(naive_loss, config, batch, torch.device("cpu"), torch.float64, dtype)
    found = gradients(rollout_loss, config, batch, check.device, dtype, dtype)
    assert expected.keys() == found.keys()
    errors = {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected}
    worst = max(errors, key=lambda name: errors[name])
    figure(f"largest error ({worst})", errors[worst])
    if check.device.type == "cuda":
        figure("flash attention", current_flash_attention_impl() or "FA2")
    assert errors[worst] <= BOUNDS[dtype]


def gradients(
    loss_of: Callable[..., Any],
    config: Any,
    batch: Any,
    device: torch.device,
    dtype: torch.dtype,
    rounded_to: torch.dtype,
) -> dict[str, Tensor]:
    """Return the loss and all gradients, float64 on the CPU, from weights that are rounded on both sides."""
    drafter, frozen = tiny_drafter(config, rounded_to)
    for parameter in drafter.parameters():
        if parameter.ndim == 2:  # a random state then keeps its scale
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    drafter = drafter.to(device, dtype)
    head = frozen.target_head
    assert isinstance(head, nn.Linear)
    ids = frozen.draft_target_ids
    moved = FrozenParts(
        frozen.embed_tokens.to(device, dtype),
        head.to(device, dtype),
        None if ids is None else ids.to(device),
        None,
    )
    total, sums = loss_of(drafter, moved, batch.to(device, dtype), num_steps=NUM_STEPS, step_decay=0.8)
    loss = total / sums.num_rows[0]
    loss.backward()
    found = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    return {name: t.detach().to("cpu", torch.float64) for name, t in (found | {"loss": loss}).items()}


@pytest.mark.at_most(90)
@pytest.mark.parametrize("recipe", SMALL)
def test_a_step_takes_the_memory_that_the_plan_says(check: Check, figure: Figure, recipe: str) -> None:
    """In DeepSpeed with ZeRO 1; every token of the row is supervised, which takes most time and memory."""
    sizes, settings, num_steps = sizes_of(check, recipe)
    shape, device = sizes.drafter, check.device
    if not check.small:
        there = torch.cuda.get_device_properties(device).total_memory
        needed = sizes.trainer(1, "cuda").total
        if needed > there * USABLE_FRACTION:
            pytest.skip(f"the plan says {needed / 1e9:.0f} GB; this GPU has {there / 1e9:.0f} GB")
    figure("drafter", f"{sizes.num_parameters / 1e9:.3f} B parameters, row of {settings.row_tokens:,} tokens")
    ensure_process_group()
    before = allocated(device)
    engine = build_engine(shape, settings, num_steps, device)
    update(engine, random_row(shape, 64, 0, torch.bfloat16, device))  # Adam's moments appear here
    batch = random_row(shape, settings.row_tokens, 0, torch.bfloat16, device)
    if not check.small:
        torch.cuda.reset_peak_memory_stats(device)
    update(engine, batch)
    counts = count_step(batch.to(torch.device("cpu")), num_steps, shape)
    if not check.small:
        peak = torch.cuda.max_memory_allocated(device) - before
        memory = trainer_memory(shape, sizes.tensors, settings, counts, "cuda")
        planned = memory.held + max(memory.step.total, memory.update)
        figure("peak memory", peak / 1e9, "GB")
        figure("planned memory", planned / 1e9, "GB")
        assert abs(peak / planned - 1) <= MEMORY_TOLERANCE
        torch.cuda.reset_peak_memory_stats(device)
        settled = allocated(device)
        list(engine.module.hits(batch.to(torch.device("cpu")), settings.draft_tokens, CHUNK_ROWS))
        peak = torch.cuda.max_memory_allocated(device) - settled
        figure("peak memory of validation", peak / 1e9, "GB")
        figure("planned memory of validation", memory.validation / 1e9, "GB")
        assert abs(peak / memory.validation - 1) <= MEMORY_TOLERANCE
    rounds = range(2 if check.small else 5)
    seconds = statistics.median(
        timed(lambda: update(engine, batch, with_metrics=False), device) for _ in rounds
    )
    figure("forward, backward and update", 1000 * seconds, "ms")
    figure("tokens per second", settings.row_tokens / seconds)
    flops = step_flops(shape, counts, head_trained=settings.train_lm_head).total
    figure("rate of the step", flops / seconds / 1e12, "TFLOP/s")
    engine.destroy()


def sizes_of(check: Check, recipe: str) -> tuple[RunSizes, Any, int]:
    """Return a recipe's sizes, its trainer's settings with one row in a step, and its speculation steps."""
    tokens = 320 if check.small else 8192
    overrides = [f"train.row_tokens={tokens}", f"data.max_tokens={tokens}"]
    if check.small:
        overrides += [f"target.architecture.{name}={value}" for name, value in SMALL[recipe].items()]
        overrides += ["drafter.draft_vocab_size=2048"] if recipe == "llama3_1_8b" else []
    config = composed([f"recipe={recipe}", *overrides])
    settings = replace(trainer_settings(config, num_ranks=1), rows_per_step=1, bf16=True, zero_stage=1)
    return RunSizes(config), settings, config.train.ttt_steps


def timed(action: Callable[[], object], device: torch.device) -> float:
    wait(device)
    started = time.perf_counter()
    action()
    wait(device)
    return time.perf_counter() - started


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
