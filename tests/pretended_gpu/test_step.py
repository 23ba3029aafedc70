"""The training step on a GPU: it runs, its gradients have their shapes, and the host waits for nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from eagle31.training.batch import captured_rows
from eagle31.training.drift import choose_rows, measure_drift
from eagle31.training.teacher_forced import greedy_hits
from tests.pretended_gpu.device import CUDA, PretendedGpu, pinned
from tests.pretended_gpu.steps import NUM_STEPS, configuration, drafter_on_gpu, host_batch, step

aten = torch.ops.aten
BF16, FP32 = torch.bfloat16, torch.float32
# attention, dtype, pruned, layers, window, metrics, rows of a chunk
CASES = [
    ("gqa", BF16, True, 1, 7, False, None),
    ("gqa", FP32, True, 2, None, True, 40),
    ("mla", BF16, False, 1, None, False, 30),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.filterwarnings("ignore:.*matrix products")
def test_a_step_never_waits(case: tuple[Any, ...]) -> None:
    attention, dtype, pruned, num_layers, window, metrics, chunk_rows = case
    config = configuration(attention, pruned=pruned, num_layers=num_layers, window=window)
    with PretendedGpu() as gpu:
        drafter, frozen = drafter_on_gpu(config, dtype)
        batch = host_batch(config, dtype)
        with gpu.no_waiting():
            sums = step(drafter, frozen, batch, chunk_rows, with_metrics=metrics)
        assert sums.stacked().shape == (5, NUM_STEPS)
        for name, parameter in drafter.named_parameters():
            assert parameter.grad is not None, name
            assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, dtype), name
        flash = [op for op in gpu.operations if "_flash_attention" in str(op)]
        assert bool(flash) == (dtype is BF16)
        # The head's gradient is added up without rounding the products.
        assert (aten.addmm.dtype_out in gpu.operations) == (dtype is BF16)
        atomic = {aten.index_add_.default, aten.scatter_add_.default} & set(gpu.operations)
        assert not atomic, "the order of atomic additions changes from run to run"


def test_replay_waits_for_the_result_alone() -> None:
    config = configuration("gqa")
    with PretendedGpu() as gpu:
        drafter, frozen = drafter_on_gpu(config, BF16)
        batch = host_batch(config, BF16)
        with gpu.no_waiting(allowed=1):
            hits, supervised = greedy_hits(drafter, frozen, batch, NUM_STEPS, chunk_rows=9)
    assert hits.shape == supervised.shape == (len(batch.input_ids), NUM_STEPS)
    assert hits.device.type == supervised.device.type == "cpu"


def test_drift_waits_for_its_results_alone() -> None:
    config = configuration("gqa", window=6)
    with PretendedGpu() as gpu:
        drafter, frozen = drafter_on_gpu(config, BF16)
        batch = host_batch(config, BF16)
        chosen = choose_rows(batch, 5)
        assert chosen is not None
        with gpu.no_waiting(allowed=3):
            measure_drift(drafter, frozen, chosen)


def test_a_step_without_rows_runs_no_attention() -> None:
    config = configuration("gqa")
    calls = []
    for num_steps in (2, 3):  # answers of three tokens have no third draft
        with PretendedGpu() as gpu:
            drafter, frozen = drafter_on_gpu(config, BF16)
            batch = host_batch(config, BF16)
            mask = (batch.position_ids % 15 >= 12) & (batch.document_ids >= 0)
            step(drafter, frozen, pinned(replace(batch, loss_mask=mask)), num_steps=num_steps)
        calls.append(gpu.operations.count(aten._flash_attention_forward.default))
    assert calls[0] == calls[1] > 0


def test_pinned_states_are_copied_without_the_host() -> None:
    rows = torch.tensor([3, 4, 5, 20, 21, 40])
    with PretendedGpu() as gpu:
        states = host_batch(configuration("gqa"), BF16).aux_hidden_states
        on_gpu, pinned_before = rows.to(CUDA), len(gpu._pinned)
        with gpu.no_waiting():
            found = captured_rows(states, on_gpu, rows, BF16)
    assert found.shape == (6, *states.shape[1:])
    assert len(gpu._pinned) == pinned_before
