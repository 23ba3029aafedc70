"""Compiled memory-bound operations give what they give uncompiled."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle31.kernels import elementwise, merged_attention
from eagle31.kernels.compiled import use_compiled, uses_compiled
from eagle31.training.step import rollout_loss
from tests.eagle31.tiny import MLA, random_batch, tiny_config, tiny_drafter

LENGTHS = (23, 5, 41)


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    use_compiled(None)


def step(
    shape: dict[str, Any],
    dtype: torch.dtype,
    num_steps: int,
    computed_in: torch.dtype | None = None,
    seed: int = 1,
) -> list[Tensor]:
    """Return the loss and all gradients of weights and states that are rounded to `dtype`, in float64."""
    config = tiny_config(**shape)
    drafter, frozen = tiny_drafter(config, dtype, seed=seed)
    batch = random_batch(LENGTHS, config, seed=seed).to(torch.device("cpu"), dtype)
    if computed_in is not None:
        drafter, batch = drafter.to(computed_in), batch.to(torch.device("cpu"), computed_in)
        embedding, head = frozen.embed_tokens.to(computed_in), copy.deepcopy(frozen.target_head)
        frozen = replace(frozen, embed_tokens=embedding, target_head=head.to(computed_in))
    loss, _ = rollout_loss(drafter, frozen, batch, num_steps=num_steps, step_decay=0.8)
    grads = torch.autograd.grad(loss, list(drafter.parameters()), materialize_grads=True)
    return [value.detach().double() for value in (loss, *grads)]


def compiled_step(
    shape: dict[str, Any], dtype: torch.dtype, num_steps: int, backend: str, seed: int = 1
) -> list[Tensor]:
    use_compiled(backend)
    assert uses_compiled()
    counters = torch._dynamo.utils.counters
    found = step(shape, dtype, num_steps, seed=seed)
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    return found


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest error, relative to the largest value of the same tensor."""
    pairs = zip(found, expected, strict=True)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def test_every_compiled_function_can_be_traced() -> None:
    torch.manual_seed(0)
    wide, rows = (torch.randn(5, 4, 6), torch.randn(5, 4, 6), torch.randn(5, 4, 6)), torch.randn(3, 5, 6)
    keys, values, lse = [torch.randn(5, 2, 6)], [torch.randn(5, 2, 6)], torch.randn(5, 4)
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (elementwise._gated, (rows[0], rows[1])),
        (elementwise._gated_backward, (rows[0], rows[1], rows[2])),
        (elementwise._turn, (wide[0], rows[0], rows[1], 1)),
        (merged_attention._merge, (wide[0], lse, wide[1], keys, values, 0.4)),
        (merged_attention._rollout_backward, (*wide[:2], keys, values, wide[2], lse, wide[0], 0.4)),
    ]
    before = copy.deepcopy(cases)
    for function, arguments in cases:
        use_compiled(None)
        expected = function(*arguments)
        use_compiled("aot_eager")
        torch.testing.assert_close(function(*arguments), expected)
    for (_, arguments), (_, kept) in zip(cases, before, strict=True):
        torch.testing.assert_close(arguments, kept, rtol=0, atol=0)  # none is changed


@pytest.mark.full("compiling takes minutes")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [{}, MLA, {"num_hidden_layers": 2}], ids=["gqa", "mla", "two layers"])
def test_the_compiled_step_is_as_exact_as_the_plain_one(shape: dict[str, Any], dtype: torch.dtype) -> None:
    """In bfloat16 one rounding can change which token a step takes, so the median of three draws counts."""
    errors = []
    for seed in (1, 2, 3):
        use_compiled(None)
        exact = step(shape, dtype, 3, torch.float64, seed)
        plain = distance(step(shape, dtype, 3, seed=seed), exact)
        errors.append((plain, distance(compiled_step(shape, dtype, 3, "inductor", seed), exact)))
    plain, compiled = map(median, zip(*errors, strict=True))
    assert compiled <= 1.5 * plain + 1e-12
