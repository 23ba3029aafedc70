"""Packed attention compared with attention by its definition, and where the flash kernel is taken."""

import tests.eagle31.kernels.interpreted  # noqa: F401 - before the kernels

# ruff: isort: split
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from eagle31.kernels import packed_attention as packed
from eagle31.kernels import packed_steps
from eagle31.kernels.packed_attention import (
    flash_obstacle,
    packed_blocks,
    padded_value_dim,
    take_flash_attention_3,
)
from eagle31.kernels.packed_steps import PackedKeys, packed_attention
from eagle31.kernels.query_run import context_window
from eagle31.training.schedule import schedule_rollout
from tests.eagle31.kernels import test_merged_attention as merged
from tests.eagle31.kernels.cuda_kernel import CudaKernel

BF16 = torch.bfloat16
CUDA = torch.device("cuda", 0)


def card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    properties = SimpleNamespace(major=capability[0], minor=capability[1], name="a card")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)


# Widths of values in a head and in the kernel, rows between runs that are computed too, sliding window.
@pytest.mark.parametrize(
    ("value_width", "kernel_width", "largest_gap", "window"),
    [(5, 8, 8, None), (5, 8, 8, 2), (5, 5, 0, 5)],
)
def test_the_steps_of_a_chunk_are_those_of_the_definition(
    value_width: int, kernel_width: int, largest_gap: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step's keys have gradients from all later steps, and step 0's from all."""
    monkeypatch.setattr(packed, "kernels", CudaKernel())
    monkeypatch.setattr(packed_steps, "padded_value_dim", lambda *_: kernel_width)
    monkeypatch.setattr(packed, "LARGEST_GAP", largest_gap)
    document_ids = torch.tensor([0] * 11 + [1] * 5)
    supervised = merged.random_supervised(len(document_ids), document_ids, seed=4)
    schedule = schedule_rollout(supervised, document_ids)
    steps = schedule.chunks[0].steps
    numbers = range(len(steps))
    blocks = packed_blocks(
        [step.runs for step in steps],
        [step.first_index for step in steps],
        [context_window(window, step) for step in numbers],
        [0 if window is None else max(0, step - window) for step in numbers],
        merged.SCALE,
        torch.device("cpu"),
    )
    _, keys, values, *rollout = merged.random_tensors(schedule, len(steps) - 1, value_width)
    queries = [merged.random_tensors(schedule, step, value_width)[0] for step in numbers]
    leaves = [*queries, keys, values, *rollout]
    exact = [x.detach().requires_grad_() for x in leaves]
    narrow = [x.detach().float().requires_grad_() for x in leaves]

    def split(tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        later = len(steps) - 1
        queries, rest = tensors[: len(steps)], tensors[len(steps) :]
        return queries, rest[:2], rest[2 : 2 + later], rest[2 + later :]

    of_queries, first, of_keys, of_values = split(exact)
    expected = [
        merged.reference(
            [of_queries[step], *first, *of_keys[:step], *of_values[:step]],
            schedule,
            step,
            document_ids,
            window,
        )
        for step in numbers
    ]
    of_queries, first, of_keys, of_values = split(narrow)
    store = PackedKeys(*first, len(steps) - 1, len(steps[0].rows))
    found = [
        packed_attention(
            blocks[step], store, of_queries[step], *of_keys[step - 1 : step], *of_values[step - 1 : step]
        )
        for step in numbers
    ]
    grads = [torch.randn_like(x) for x in expected]
    of_exact = torch.autograd.grad(expected, exact, grads)
    of_narrow = torch.autograd.grad(found, narrow, [x.float() for x in grads])
    for one, other in zip([*found, *of_narrow], [*expected, *of_exact], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "reason"),
    [
        ((9, 0), BF16, 256, None),
        ((8, 9), BF16, 256, None),
        ((7, 5), torch.float16, 128, "compute capability 8.0"),
        ((9, 0), torch.float32, 128, "not in float32"),
        ((9, 0), BF16, 288, "at most 256"),
        ((8, 9), BF16, 224, "heads of 224"),
        ((12, 0), BF16, 200, "heads of 200"),
    ],
)
def test_the_kernel_is_taken_where_the_card_has_it(
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card(monkeypatch, capability)
    found = flash_obstacle(CUDA, dtype, head_dim)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_flash_attention_3_is_taken_on_hopper_where_it_is_installed(
    installed: bool, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    active: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(packed, "find_spec", lambda _: object() if installed else None)
    monkeypatch.setattr(packed, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(packed, "current_flash_attention_impl", lambda: active[-1] if active else None)
    take_flash_attention_3(CUDA)
    taken = installed and capability == (9, 0)
    assert active == (["FA3"] if taken else [])
    assert padded_value_dim(192, 128) == (128 if taken else 192)
    assert padded_value_dim(100, 100) == padded_value_dim(104, 64) == 104
