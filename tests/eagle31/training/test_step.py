"""The training step compared with its plain reference and the naive one: values, sums and every gradient."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.model.shapes import MlaShape
from eagle31.training.batch import PackedBatch
from eagle31.training.reference import reference_loss
from eagle31.training.step import DepthSums, rollout_loss, schedule_batch
from tests.eagle31.naive import naive_loss
from tests.eagle31.tiny import (
    BIASES,
    EAGLE3,
    MLA,
    QK_NORM,
    VOCAB,
    WIDE_MLA,
    random_batch,
    tiny_config,
    tiny_drafter,
)

VARIANTS = {
    "eagle3.1": {},
    "eagle3": EAGLE3,
    "norm_before_residual": {"norm_before_residual": True},
    "three layers, eagle3": {"num_hidden_layers": 3, "fc_norm": False, "norm_output": False},
    "full vocabulary": {"draft_vocab_size": 61},
    "four aux layers": {"aux_layer_ids": (0, 1, 2, 3)},
    "multi-query": {"num_key_value_heads": 1},
    "norms of queries and keys, two layers": QK_NORM | {"attention_bias": True, "num_hidden_layers": 2},
    "norm before fc, biases, eagle3": EAGLE3 | BIASES,
    "mla": MLA,
    "mla, eagle3, two layers": MLA | {"num_hidden_layers": 2, "fc_norm": False, "norm_output": False},
    "mla, values as wide as keys": WIDE_MLA,
    "window of 1": {"sliding_window": 1},
    "window of 2, two layers": {"sliding_window": 2, "num_hidden_layers": 2},
    "window of 3": {"sliding_window": 3, "num_key_value_heads": 4},
    "window of 7, three layers": {"sliding_window": 7, "num_hidden_layers": 3, "norm_output": False},
}


def random_case(seed: int, **changes: Any) -> tuple[Drafter, FrozenParts, PackedBatch, int]:
    """Return a drafter of some shape, a row of some documents, and a number of steps."""
    draw = random.Random(seed)
    shape: dict[str, Any] = {
        "num_hidden_layers": draw.choice([1, 1, 2]),
        "num_key_value_heads": draw.choice([1, 2, 4]),
        "draft_vocab_size": draw.choice([29, 7, VOCAB]),
        "norm_before_residual": draw.random() < 0.3,
    }
    shape |= draw.choice([BIASES, QK_NORM, MLA, WIDE_MLA])
    if not isinstance(shape.get("attention"), MlaShape):
        shape["sliding_window"] = (None, 1, 3, 6, 17, 40)[seed % 6]
    config = tiny_config(**shape | draw.choice([{}, EAGLE3]) | changes)
    drafter, frozen = tiny_drafter(config, seed=seed)
    lengths = tuple(draw.randint(1, 60) for _ in range(draw.randint(1, 5)))
    batch = random_batch(lengths, config, seed=seed, padding=draw.choice([0, 6]))
    return drafter, frozen, batch, draw.randint(1, 7)


def results(function: Any, drafter: Drafter, *args: Any, **settings: Any) -> tuple[Tensor, DepthSums, list]:
    loss, sums = function(drafter, *args, step_decay=0.8, **settings)
    grads = torch.autograd.grad(loss, list(drafter.parameters()), materialize_grads=True)
    return loss.detach(), sums, list(grads)


@pytest.mark.parametrize("seed", range(12))
def test_float64_equals_the_reference(seed: int) -> None:
    drafter, frozen, batch, num_steps = random_case(seed)
    settings: dict[str, Any] = {"num_steps": num_steps}
    expected, expected_sums, expected_grads = results(reference_loss, drafter, frozen, batch, **settings)
    settings["logit_rows"] = (5, 64, 1024)[(seed + seed // 6) % 3]
    if seed % 2 == 0:
        settings["schedule"] = schedule_batch(
            batch,
            num_steps,
            key_reach=drafter.config.key_reach,
            chunk_rows=(3, 20)[seed // 2 % 2],
        )
    found, sums, grads = results(rollout_loss, drafter, frozen, batch, **settings)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(sums.stacked(), expected_sums.stacked(), rtol=1e-9, atol=1e-9)
    for grad, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-9, atol=1e-9 * max(1.0, float(want.abs().max())))


def test_chunks_without_gradients_are_not_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((70, 5, 90), config, seed=3)
    settings: dict[str, Any] = {"num_steps": 5, "step_decay": 0.8}
    settings["schedule"] = schedule_batch(batch, 5, chunk_rows=32)
    expected, expected_sums = rollout_loss(drafter, frozen, batch, **settings)
    monkeypatch.delattr(torch.autograd, "grad")
    with torch.no_grad():
        found, sums = rollout_loss(drafter, frozen, batch, **settings)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(sums.stacked(), expected_sums.stacked(), rtol=1e-12, atol=1e-12)


def test_sampled_rows_have_the_gradients_and_metrics_of_all_on_average() -> None:
    drafter, frozen = tiny_drafter(tiny_config())
    batch = random_batch((9, 20), tiny_config(), seed=3, padding=4)
    expected = results(rollout_loss, drafter, frozen, batch, num_steps=3)
    num_rows = int(expected[1].num_rows[0])
    found = []
    for draw in range(num_rows):
        schedule = schedule_batch(batch, 3, chunk_rows=(None, 4)[draw % 2], max_drafts=7, draw=draw)
        assert sum(len(chunk.steps[0].rows) for chunk in schedule.chunks) == 7 < num_rows
        found.append(results(rollout_loss, drafter, frozen, batch, num_steps=3, schedule=schedule))
    torch.testing.assert_close(torch.stack([one[0] for one in found]).mean(), expected[0])
    sums = torch.stack([one[1].stacked() for one in found]).mean(0)
    torch.testing.assert_close(sums, expected[1].stacked())
    for grads, want in zip(zip(*(one[2] for one in found), strict=True), expected[2], strict=True):
        torch.testing.assert_close(torch.stack(grads).mean(0), want)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1)])
def test_narrow_dtypes_stay_within_bounds(dtype: torch.dtype, bound: float) -> None:
    """Compare each gradient's distance from the exact one with its norm."""
    drafter, frozen, batch, _ = random_case(3, num_hidden_layers=1)
    for parameter in drafter.parameters():
        parameter.data = parameter.data.to(dtype).double()
    head = frozen.target_head
    assert isinstance(head, nn.Linear)
    head.weight.data = head.weight.data.to(dtype).double()
    frozen = replace(frozen, embed_tokens=frozen.embed_tokens.to(dtype).double())
    batch = batch.to(torch.device("cpu"), dtype).to(torch.device("cpu"), torch.float64)
    expected, _, expected_grads = results(reference_loss, drafter, frozen, batch, num_steps=4)
    frozen = replace(frozen, embed_tokens=frozen.embed_tokens.to(dtype), target_head=head.to(dtype))
    batch = batch.to(torch.device("cpu"), dtype)
    found, _, grads = results(rollout_loss, drafter.to(dtype), frozen, batch, num_steps=4)
    assert found.dtype == torch.float32
    assert abs(float(found) - float(expected)) <= bound * float(expected)
    for grad, want in zip(grads, expected_grads, strict=True):
        assert grad.dtype == dtype
        assert (grad.double() - want).norm() <= bound * want.norm()


@pytest.mark.parametrize("attention", [{}, MLA])
def test_a_row_without_drafts_trains_nothing_and_runs_every_module(attention: dict[str, Any]) -> None:
    config = tiny_config(num_hidden_layers=2, **attention)
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((12,), config)
    batch = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    calls: dict[str, int] = {}
    for name, module in drafter.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.update({name: calls.get(name, 0) + 1}))
    loss, sums = rollout_loss(drafter, frozen, batch, num_steps=3, step_decay=0.8)
    loss.backward()
    assert loss == 0
    assert not sums.stacked().any()
    assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())
    assert calls["layers.0.mlp.down_proj"] == 3


def test_metrics_are_zero_without_them_and_change_nothing_else() -> None:
    drafter, frozen, batch, _ = random_case(3, draft_vocab_size=29)
    loss, sums, grads = results(rollout_loss, drafter, frozen, batch, num_steps=3)
    cheap, cheap_sums, cheap_grads = results(
        rollout_loss, drafter, frozen, batch, num_steps=3, with_metrics=False
    )
    torch.testing.assert_close((cheap, cheap_grads), (loss, grads), rtol=1e-10, atol=1e-10)
    assert sums.expected_acceptance.all()
    assert not cheap_sums.expected_acceptance.any()
    assert not cheap_sums.agreement.any()


def test_a_frozen_head_gets_no_gradient() -> None:
    drafter, frozen, batch, _ = random_case(3)
    head = drafter.lm_head.requires_grad_(False)
    del drafter.lm_head
    frozen = replace(frozen, lm_head=head)
    expected, _, expected_grads = results(reference_loss, drafter, frozen, batch, num_steps=3)
    found, _, grads = results(rollout_loss, drafter, frozen, batch, num_steps=3)
    torch.testing.assert_close((found, grads), (expected, expected_grads), rtol=1e-9, atol=1e-9)
    assert head.weight.grad is None


def test_the_loss_keeps_no_more_logits_than_a_chunk() -> None:
    """Autograd keeps no matrix of logits."""
    config = tiny_config(draft_vocab_size=59)
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((200,), config, seed=2)
    batch = replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
    kept: list[tuple[int, ...]] = []

    def note(x: Tensor) -> Tensor:
        kept.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        rollout_loss(drafter, frozen, batch, num_steps=4, step_decay=0.8, logit_rows=16)
    assert not any(shape[-1:] == (59,) for shape in kept)
    assert not any(len(shape) > 1 and shape[0] > 100 and shape[1] > 100 for shape in kept)


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_equal_the_naive_ones(name: str) -> None:
    num_steps, config = 4, tiny_config(**VARIANTS[name])
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((17, 5, 23), config, seed=3, padding=4)
    expected = naive_loss(drafter, config, frozen, batch, num_steps, 0.8)
    expected_grads = torch.autograd.grad(expected, list(drafter.parameters()))
    loss, _ = rollout_loss(drafter, frozen, batch, num_steps=num_steps, step_decay=0.8)
    loss.backward()
    assert expected > 1.0
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    for (parameter_name, parameter), gradient in zip(drafter.named_parameters(), expected_grads, strict=True):
        scale = float(gradient.abs().max())
        # A row that reads its own key alone gives it the weight one, whatever the scores are.
        constant = config.sliding_window == 1 and parameter_name.endswith(("q_proj.weight", "k_proj.weight"))
        assert (scale == 0) == constant, parameter_name
        torch.testing.assert_close(
            parameter.grad, gradient, rtol=1e-9, atol=1e-9 * (scale or 1), msg=parameter_name
        )
