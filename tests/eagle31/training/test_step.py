"""The training step compared with its definition: values, sums and every gradient."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle31.model.drafter import Drafter
from eagle31.training.step import rollout_loss, schedule_batch
from tests.eagle31.naive import naive_loss
from tests.eagle31.tiny import (
    BIASES,
    DFLASH,
    DSPARK,
    EAGLE3,
    MLA,
    QK_NORM,
    VOCAB,
    WIDE_MLA,
    random_batch,
    tiny_config,
    tiny_drafter,
)

# Changes to the configuration, and rows of a chunk; all variants are computed without chunks, too.
VARIANTS: dict[str, tuple[dict[str, Any], int | None]] = {
    "eagle3.1": ({}, 3),
    "eagle3": (EAGLE3, 20),
    "norm_before_residual": ({"norm_before_residual": True}, None),
    "three layers, eagle3": (EAGLE3 | {"num_hidden_layers": 3}, 3),
    "full vocabulary": ({"draft_vocab_size": VOCAB}, 20),
    "four aux layers": ({"aux_layer_ids": (0, 1, 2, 3)}, None),
    "multi-query": ({"num_key_value_heads": 1}, None),
    "norms of queries and keys, two layers": (
        QK_NORM | {"attention_bias": True, "num_hidden_layers": 2},
        None,
    ),
    "norm before fc, biases, eagle3": (EAGLE3 | BIASES, 3),
    "mla": (MLA, 3),
    "mla, eagle3, two layers": (MLA | EAGLE3 | {"num_hidden_layers": 2}, None),
    "mla, values as wide as keys": (WIDE_MLA, 20),
    "window of 1": ({"sliding_window": 1}, 3),
    "window of 2, two layers": ({"sliding_window": 2, "num_hidden_layers": 2}, 3),
    "window of 3": ({"sliding_window": 3, "num_key_value_heads": 4}, 20),
    "window of 7, three layers": (
        {"sliding_window": 7, "num_hidden_layers": 3, "norm_output": False},
        None,
    ),
    "window of 17": ({"sliding_window": 17}, 20),
    "dspark": (DSPARK, 3),
    "dspark, full vocabulary, a key head for each query's": (
        DSPARK | {"draft_vocab_size": VOCAB, "num_key_value_heads": 4},
        20,
    ),
    "dflash": (DFLASH, 3),
}
LENGTHS = (30, 4, 70)  # of documents, whose rows have drafts of all lengths
SETTINGS: dict[str, Any] = {"num_steps": 4, "step_decay": 0.8}


def results(function: Any, drafter: Drafter, *args: Any, **settings: Any) -> tuple[Tensor, Tensor, list]:
    """Return the loss, the sums and the gradients."""
    loss, sums = function(drafter, *args, **SETTINGS | settings)
    grads = torch.autograd.grad(loss, list(drafter.parameters()), materialize_grads=True)
    return loss.detach(), sums.stacked(), list(grads)


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_sums_and_gradients_are_those_of_the_definition(name: str) -> None:
    changes, chunk_rows = VARIANTS[name]
    config = tiny_config(**changes)
    drafter, frozen = tiny_drafter(config)
    batch = random_batch(LENGTHS, config, seed=8, padding=4)
    loss, sums, gradients = results(naive_loss, drafter, frozen, batch)
    assert sums[[0, 1, 3, 4]].all()
    for rows, logit_rows in ((None, 64), (chunk_rows, 5)):
        schedule = schedule_batch(batch, 4, key_reach=config.key_reach, chunk_rows=rows)
        found = results(rollout_loss, drafter, frozen, batch, schedule=schedule, logit_rows=logit_rows)
        torch.testing.assert_close(found[:2], (loss, sums), rtol=1e-9, atol=1e-9)
        for (parameter, _), one, gradient in zip(
            drafter.named_parameters(), found[2], gradients, strict=True
        ):
            scale = float(gradient.abs().max())
            # A row that reads its own key alone gives it the weight one, whatever the scores are.
            constant = config.sliding_window == 1 and parameter.endswith(("q_proj.weight", "k_proj.weight"))
            assert (scale == 0) == constant, parameter
            torch.testing.assert_close(one, gradient, rtol=1e-9, atol=1e-9 * (scale or 1), msg=parameter)


def test_sampled_rows_have_the_gradients_and_metrics_of_all_on_average() -> None:
    drafter, frozen = tiny_drafter(tiny_config())
    batch = random_batch((9, 20), tiny_config(), seed=3, padding=4)
    expected = results(rollout_loss, drafter, frozen, batch, num_steps=3)
    num_rows = int(expected[1][0, 0])
    found = []
    for draw in range(num_rows):
        schedule = schedule_batch(batch, 3, chunk_rows=(None, 4)[draw % 2], max_drafts=7, draw=draw)
        assert sum(len(chunk.steps[0].rows) for chunk in schedule.chunks) == 7 < num_rows
        found.append(results(rollout_loss, drafter, frozen, batch, num_steps=3, schedule=schedule))
    torch.testing.assert_close(torch.stack([one[0] for one in found]).mean(), expected[0])
    torch.testing.assert_close(torch.stack([one[1] for one in found]).mean(0), expected[1])
    for grads, want in zip(zip(*(one[2] for one in found), strict=True), expected[2], strict=True):
        torch.testing.assert_close(torch.stack(grads).mean(0), want)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1)])
def test_narrow_dtypes_stay_within_bounds(dtype: torch.dtype, bound: float) -> None:
    """Compare each gradient's distance from the exact one with its norm."""
    config = tiny_config()
    drafter, frozen = tiny_drafter(config)
    batch = random_batch(LENGTHS, config, seed=8)
    for parameter in drafter.parameters():
        parameter.data = parameter.data.to(dtype).double()
    head = frozen.target_head
    assert isinstance(head, nn.Linear)
    head.weight.data = head.weight.data.to(dtype).double()
    frozen = replace(frozen, embed_tokens=frozen.embed_tokens.to(dtype).double())
    batch = batch.to(torch.device("cpu"), dtype).to(torch.device("cpu"), torch.float64)
    expected, _, expected_grads = results(naive_loss, drafter, frozen, batch)
    frozen = replace(frozen, embed_tokens=frozen.embed_tokens.to(dtype), target_head=head.to(dtype))
    # The batch stays float64: what the step reads of it is cast.
    found, _, grads = results(rollout_loss, drafter.to(dtype), frozen, batch)
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
    drafter, frozen = tiny_drafter(tiny_config())
    batch = random_batch(LENGTHS, tiny_config(), seed=8)
    loss, _, grads = results(rollout_loss, drafter, frozen, batch)
    cheap, cheap_sums, cheap_grads = results(rollout_loss, drafter, frozen, batch, with_metrics=False)
    torch.testing.assert_close((cheap, cheap_grads), (loss, grads), rtol=1e-10, atol=1e-10)
    assert [bool(of_row.any()) for of_row in cheap_sums] == [True, True, False, False, True]


def test_a_frozen_head_gets_no_gradient() -> None:
    drafter, frozen = tiny_drafter(tiny_config())
    batch = random_batch(LENGTHS, tiny_config(), seed=8)
    head = drafter.lm_head.requires_grad_(False)
    del drafter.lm_head
    frozen = replace(frozen, lm_head=head)
    expected = results(naive_loss, drafter, frozen, batch)
    torch.testing.assert_close(results(rollout_loss, drafter, frozen, batch), expected, rtol=1e-9, atol=1e-9)
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
