"""The training step against its plain reference: values, sums and every gradient."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch
from eagle31.training.objectives import Loss, Objective
from eagle31.training.reference import reference_loss, reference_rollout
from eagle31.training.rollout import rollout
from eagle31.training.step import DepthSums, rollout_loss, schedule_batch
from eagle31.training.supervision import supervised_drafts, supervised_positions
from tests.eagle31.tiny import MLA, VOCAB, WIDE_MLA, random_batch, tiny_config, tiny_drafter

EAGLE3 = {"fc_norm": False, "norm_output": False}


def random_case(seed: int, **changes: Any) -> tuple[Drafter, FrozenParts, PackedBatch, int]:
    """A drafter of some shape, a row of some documents, and a number of steps."""
    draw = random.Random(seed)
    shape: dict[str, Any] = {
        "num_hidden_layers": draw.choice([1, 1, 2]),
        "num_key_value_heads": draw.choice([1, 2, 4]),
        "draft_vocab_size": draw.choice([29, 7, VOCAB]),
        "norm_before_residual": draw.random() < 0.3,
    }
    shape |= draw.choice([{}, {}, MLA, WIDE_MLA])
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
@pytest.mark.parametrize("loss", list(Loss))
def test_float64_equals_the_reference(seed: int, loss: Loss) -> None:
    whole = {"draft_vocab_size": VOCAB} if loss is Loss.full_kl else {}
    drafter, frozen, batch, num_steps = random_case(seed, **whole)
    objective = Objective(loss, lk_eta=2.0, count_outside_vocab=seed % 3 != 0)
    settings = {"num_steps": num_steps, "objective": objective}
    expected, wanted_sums, wanted = results(reference_loss, drafter, frozen, batch, **settings)
    settings |= {"chunk_rows": (5, 64, 1024)[seed % 3], "activation_checkpointing": seed % 2 == 0}
    found, sums, grads = results(rollout_loss, drafter, frozen, batch, **settings)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(sums.stacked(), wanted_sums.stacked(), rtol=1e-9, atol=1e-9)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-9, atol=1e-9 * max(1.0, float(want.abs().max())))


def test_the_random_cases_are_not_empty() -> None:
    counts = []
    for seed in range(12):
        _, _, batch, num_steps = random_case(seed)
        counts.append(int(supervised_drafts(batch.loss_mask, batch.document_ids, num_steps).sum()))
    assert sum(count > 20 for count in counts) >= 8


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("loss", [Loss.kl, Loss.lk_lambda])
def test_narrow_dtypes_stay_within_bounds(dtype: torch.dtype, bound: float, loss: Loss) -> None:
    """Each gradient's distance from the exact one, as a part of its length."""
    drafter, frozen, batch, _ = random_case(3, num_hidden_layers=1)
    for parameter in drafter.parameters():
        parameter.data = parameter.data.to(dtype).double()
    head = frozen.target_head
    assert isinstance(head, nn.Linear)
    head.weight.data = head.weight.data.to(dtype).double()
    frozen = replace(frozen, embed_tokens=frozen.embed_tokens.to(dtype).double())
    batch = batch.to(torch.device("cpu"), dtype).to(torch.device("cpu"), torch.float64)
    settings: dict[str, Any] = {"num_steps": 4, "objective": Objective(loss)}
    expected, _, wanted = results(reference_loss, drafter, frozen, batch, **settings)
    frozen = replace(frozen, embed_tokens=frozen.embed_tokens.to(dtype), target_head=head.to(dtype))
    batch = batch.to(torch.device("cpu"), dtype)
    found, _, grads = results(rollout_loss, drafter.to(dtype), frozen, batch, **settings)
    assert found.dtype == torch.float32
    assert abs(float(found) - float(expected)) <= bound * float(expected)
    for grad, want in zip(grads, wanted, strict=True):
        assert grad.dtype == dtype
        assert (grad.double() - want).norm() <= bound * want.norm()


@pytest.mark.parametrize("changes", [{}, EAGLE3, {"num_hidden_layers": 2}, MLA, WIDE_MLA])
def test_states_equal_the_reference(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((300, 9, 41), config, seed=5)
    rows = supervised_positions(supervised_drafts(batch.loss_mask, batch.document_ids, 5))
    steps = zip(
        rollout(drafter, frozen.embed_tokens, batch, rows, 5),
        reference_rollout(drafter, frozen.embed_tokens, batch, rows, 5),
        strict=True,
    )
    for found, expected in steps:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attention", [{}, MLA])
@pytest.mark.parametrize("layers", [1, 2])
def test_no_gradient_flows_from_a_counted_pair_to_what_comes_later(
    layers: int, attention: dict[str, Any]
) -> None:
    """Row t's step k may read hidden states up to t, whatever the mask and the packing."""
    config = tiny_config(num_hidden_layers=layers, **attention)
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((40, 300), config, seed=1)
    aux = batch.aux_hidden_states.clone().requires_grad_()
    rows = supervised_positions(supervised_drafts(batch.loss_mask, batch.document_ids, 4))
    steps = rollout(drafter, frozen.embed_tokens, replace(batch, aux_hidden_states=aux), rows, 4)
    normed = [normed for normed, _ in steps]
    for at in range(0, len(rows), 7):
        (grad,) = torch.autograd.grad(normed[-1][at].sum(), aux, retain_graph=True)
        touched = grad.abs().sum((1, 2)) > 0
        row = int(rows[at])
        assert bool(touched[row])
        assert not touched[row + 1 :].any()
        assert not touched[batch.document_ids != batch.document_ids[row]].any()


def test_rows_beyond_the_last_draft_of_a_document_are_not_computed() -> None:
    batch = random_batch((30, 20, 10), tiny_config(), seed=2, padding=5)
    mask = torch.zeros_like(batch.loss_mask)
    mask[10:15], mask[35:37] = True, True
    schedule = schedule_batch(replace(batch, loss_mask=mask), 4)
    assert [step.rows.tolist() for step in schedule.steps] == [[9, 10, 11, 12, 34], [9, 10, 11], [9, 10], [9]]
    assert schedule.key_rows.tolist() == [*range(13), *range(30, 35)]
    assert schedule.teacher_rows.tolist() == [10, 11, 12, 13, 35]
    assert schedule.tokens.tolist() == [*range(1, 14), *range(31, 36)]
    assert schedule.tokens[schedule.key_token_index].tolist() == [t + 1 for t in schedule.key_rows.tolist()]
    for k, step in enumerate(schedule.steps):
        assert schedule.tokens[step.token_index].tolist() == [t + 1 + k for t in step.rows.tolist()]
    assert [tuple(run) for run in schedule.steps[0].runs] == [(0, 4, 0, 13), (4, 5, 13, 18)]
    assert [tuple(run) for run in schedule.steps[1].runs] == [(0, 3, 0, 12)]


@pytest.mark.parametrize("attention", [{}, MLA])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_row_without_drafts_trains_nothing_and_runs_every_module(
    layers: int, attention: dict[str, Any]
) -> None:
    config = tiny_config(num_hidden_layers=layers, **attention)
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


def test_what_is_not_measured_is_zero_and_changes_nothing_else() -> None:
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
    expected, _, wanted = results(reference_loss, drafter, frozen, batch, num_steps=3)
    found, _, grads = results(rollout_loss, drafter, frozen, batch, num_steps=3)
    torch.testing.assert_close((found, grads), (expected, wanted), rtol=1e-9, atol=1e-9)
    assert head.weight.grad is None


def test_the_loss_needs_no_more_logits_than_a_chunk() -> None:
    """The largest tensor that autograd keeps is no matrix of logits."""
    config = tiny_config(draft_vocab_size=59)
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((200,), config, seed=2)
    batch = replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
    kept: list[tuple[int, ...]] = []

    def note(x: Tensor) -> Tensor:
        kept.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        rollout_loss(drafter, frozen, batch, num_steps=4, step_decay=0.8, chunk_rows=16)
    assert not any(shape[-1:] == (59,) for shape in kept)
    assert not any(len(shape) > 1 and shape[0] > 100 and shape[1] > 100 for shape in kept)
