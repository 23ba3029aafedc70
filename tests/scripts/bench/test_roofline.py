"""The roofline's FLOPs, bytes and parts are those of the operations that a step runs."""

from typing import Any

import pytest
import torch

from scripts.bench import recorder as recorded
from scripts.bench.gpu_rates import gpu_rates
from scripts.bench.pretended_gpu.device import CUDA, PretendedGpu
from scripts.bench.recorder import ATTENTION, HEAD, MERGE, MLPS, OPTIMIZER, PROJECTIONS, Operation, Recorder
from scripts.bench.roofline import predict, predicted_seconds
from tests.gpu.test_step import SMALL
from train.config.compose import composed
from train.plan.sizes import RunSizes

aten = torch.ops.aten


def small_sizes(recipe: str) -> RunSizes:
    lengths = ("train.row_tokens=320", "data.max_tokens=320", "plan.document_tokens=120", "train.ttt_steps=2")
    lengths += ("drafter.draft_vocab_size=2048",)
    small = [f"target.architecture.{name}={value}" for name, value in SMALL[recipe].items()]
    return RunSizes(composed([f"recipe={recipe}", *lengths, *small]))


@pytest.mark.parametrize("recipe", SMALL)
def test_a_steps_flops_are_those_of_the_formula(recipe: str) -> None:
    found = predict(small_sizes(recipe))
    step = [one for one in found.operations if one.part != OPTIMIZER]
    # Attention's backward pass computes the scores again, and its values are as wide as its keys.
    products = sum(one.flops for one in step if one.part != ATTENTION)
    assert sum(one.flops for one in step) == pytest.approx(found.formula_flops, rel=0.05)
    assert products < found.formula_flops
    parts = {one.part for one in found.operations}
    assert parts == set(recorded.PARTS)
    assert {one.part for one in step if "flash_attention" in one.name} == {ATTENTION}
    by_part = {part: sum(one.flops for one in step if one.part == part) for part in parts}
    assert min(by_part[part] for part in (PROJECTIONS, MLPS, HEAD, ATTENTION)) > 0
    assert by_part[MERGE] == 0


def recorded_operations(action: Any) -> list[Operation]:
    with PretendedGpu(), Recorder() as recorder:
        inputs = torch.zeros(8, 4, device=CUDA), torch.zeros(2, dtype=torch.long, device=CUDA)
        recorder.operations.clear()
        action(*inputs)
    return recorder.operations


@pytest.mark.parametrize(
    ("action", "num_bytes"),
    [
        (lambda x, _: x.view(4, 8).t()[1:], []),
        (lambda x, _: x.new_empty(3), []),
        (lambda x, _: x + 1, [2 * 128]),
        (lambda x, _: x.mul_(2), [2 * 128]),
        (lambda x, _: x.copy_(x.flip(0)), [2 * 128, 2 * 128]),
        (lambda x, _: x[0].expand(100, 4) + 0, [16 + 1600]),
        (lambda x, index: x.index_select(0, index), [2 * 32 + 16]),
        (lambda x, index: x.index_copy_(0, index, x[:2]), [2 * 32 + 16]),
        (lambda x, _: torch.mm(x.t(), x, out=x.new_empty(4, 4)), [2 * 128 + 64]),
    ],
)
def test_bytes_are_inputs_read_and_outputs_written(action: Any, num_bytes: list[int]) -> None:
    assert [one.num_bytes for one in recorded_operations(action)] == num_bytes


def test_attention_has_the_flops_of_its_visible_pairs() -> None:
    def attend(x: torch.Tensor, _: torch.Tensor) -> None:
        queries, keys = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 3, 6], dtype=torch.int32)
        query, key = x.new_zeros(5, 4, 8), x.new_zeros(6, 2, 8)
        sizes = (queries.to(CUDA), keys.to(CUDA), 3, 3)
        aten._flash_attention_forward(query, key, key, *sizes, 0.0, True, False)
        window = {"window_size_left": 1, "window_size_right": 0}
        aten._flash_attention_forward(query, key, key, *sizes, 0.0, True, False, **window)

    flops = [one.flops for one in recorded_operations(attend) if one.flops]
    # Rows read 2, 3 and 1, 2, 3 keys; with the window at most 2.
    assert flops == [2 * 2 * 8 * 4 * pairs for pairs in (2 + 3 + 1 + 2 + 3, 2 + 2 + 1 + 2 + 2)]


def test_an_operation_takes_the_longest_of_its_limits() -> None:
    rates = gpu_rates("NVIDIA H100 80GB HBM3")
    assert rates is not None
    product, attention = (Operation(name, "", 10**12, 1) for name in ("mm", "aten._flash_attention_forward"))
    assert predicted_seconds(attention, rates) == pytest.approx(2 * predicted_seconds(product, rates))
    assert predicted_seconds(Operation("add", "", 0, 10**9), rates) == pytest.approx(1e9 / rates.bandwidth)
    assert predicted_seconds(Operation("add", "", 0, 8), rates) == rates.launch_seconds
    assert gpu_rates("NVIDIA GeForce RTX 4090") is None
