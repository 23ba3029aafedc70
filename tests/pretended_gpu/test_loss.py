"""The loss on a GPU: what a chunk launches, and what its kernels move."""

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from eagle31.cost.flops import count_step
from eagle31.cost.memory import step_memory
from eagle31.training.fused_loss import one_pass_loss
from eagle31.training.step import schedule_batch
from eagle31.training.teacher import teacher_of
from scripts.bench.pretended_gpu.device import CUDA, PretendedGpu
from tests.eagle31.tiny import random_batch, tiny_config
from tests.pretended_gpu.live_bytes import LiveBytes
from tests.pretended_gpu.steps import GQA, NUM_STEPS, drafter_on_gpu, host_batch, step

# Of every chunk: the target's states, head and statistics; the drafter's head, the loss, and the gradients of
# the head and of the states.
LAUNCHES = {
    "aten.index.Tensor": 1,
    "aten.mm.default": 1,
    "teacher_kernel": 1,
    "aten.cat.default": 2,
    "aten.mm.out": 2,
    "loss_kernel": 1,
    "sum_kernel": 1,
    "aten.addmm.dtype_out": 1,
    "aten._foreach_copy_.default": 1,
}
CONFIG = tiny_config(**GQA, vocab_size=16_384, draft_vocab_size=4096)


def a_step(
    gpu: PretendedGpu, with_metrics: bool, logit_rows: int
) -> tuple[Counter[str], list[tuple[str, Any]]]:
    """Return what the step has launched by name, and the arguments of Triton's kernels."""
    drafter, frozen = drafter_on_gpu(CONFIG, torch.bfloat16)
    frozen = replace(frozen, target_head=frozen.target_head.lm_head)  # type: ignore[attr-defined]
    kernels: list[tuple[str, Any]] = []

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels.append((kernel.fn.__name__, dict(zip(kernel.arg_names, args, strict=False)) | options))

    before = len(gpu.operations)
    with patch.object(JITFunction, "run", launch), patch.object(InterpretedFunction, "run", launch):
        batch = host_batch(CONFIG, torch.bfloat16)
        step(drafter, frozen, batch, with_metrics=with_metrics, logit_rows=logit_rows)
    operations = [op for op in gpu.operations[before:] if not op.is_view and "empty" not in str(op)]
    return Counter(map(str, operations)) + Counter(name for name, _ in kernels), kernels


def moved_bytes(name: str, args: dict[str, Any]) -> int:
    """Return the bytes that a kernel reads and writes, as its docstring says."""
    if name == "teacher_kernel":
        pruned = 2 * args["kept"].nbytes + len(args["logits"]) * args["ids"].nbytes if args["PRUNED"] else 0
        of_rows = [args[key] for key in ("lse", "mass", "greedy")]
        return args["logits"].nbytes + pruned + sum(x.nbytes for x in of_rows if x is not None)
    if name == "loss_kernel":
        teacher = args["teacher"].element_size() * args["logits"].numel()
        return 3 * args["logits"].nbytes + teacher + args["teacher_index"].nbytes + args["found"].nbytes
    return args["found"].nbytes


@pytest.mark.parametrize("pruned", [True, False])
@pytest.mark.parametrize("with_metrics", [True, False])
def test_a_chunk_takes_the_memory_that_the_plan_says(pruned: bool, with_metrics: bool) -> None:
    config = replace(CONFIG, hidden_size=256) if pruned else replace(CONFIG, draft_vocab_size=16_384)
    with PretendedGpu():
        drafter, frozen = drafter_on_gpu(config, torch.bfloat16)
        batch = random_batch((400,), config, dtype=torch.bfloat16)
        counts = count_step(batch, NUM_STEPS, config)
        (chunk,) = schedule_batch(batch, NUM_STEPS, CUDA).chunks
        on_gpu = batch.to(CUDA, torch.bfloat16)
        teacher = teacher_of(frozen, on_gpu, chunk, with_metrics)
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": CUDA, "requires_grad": True}
        states = [torch.empty(rows, config.hidden_size, **options) for rows in counts.rows]
        with LiveBytes() as live:
            one_pass_loss(states, drafter.lm_head.weight, teacher, chunk, [1.0] * NUM_STEPS, 10_000)
    sizes: dict[str, Any] = {"row_tokens": 400, "itemsize": 2, "head_trained": True, "rollout_chunk": None}
    planned = step_memory(config, counts, **sizes, device="cuda", with_metrics=with_metrics)
    expected = planned.loss_chunk + planned.head_gradient + planned.state_gradients
    assert live.peak == pytest.approx(expected, rel=0.03)


@pytest.mark.filterwarnings("ignore:.*matrix products")
@pytest.mark.parametrize("with_metrics", [False, True])
def test_a_chunk_launches_few_kernels_which_move_few_bytes(with_metrics: bool) -> None:
    with PretendedGpu() as gpu:
        a_step(gpu, with_metrics, 4096)  # makes RoPE's tables
        one, kernels = a_step(gpu, with_metrics, 4096)
        two, _ = a_step(gpu, with_metrics, NUM_STEPS * 24)
        assert two - one == Counter(LAUNCHES)
        kernels = [one for one in kernels if one[0] in ("teacher_kernel", "loss_kernel", "sum_kernel")]
        assert len(kernels) == 3
        logits = kernels[1][1]["logits"].numel()
        moved = {name: moved_bytes(name, args) / logits for name, args in kernels}
    print(with_metrics, {name: round(value, 2) for name, value in moved.items()}, "bytes per logit")
    assert moved["loss_kernel"] <= 8.1
    assert sum(moved.values()) <= 12 or with_metrics
