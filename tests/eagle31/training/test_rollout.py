"""Rollouts compared with the naive ones and with the plain reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from eagle31.training.batch import supervised_drafts, supervised_positions
from eagle31.training.reference import reference_rollout
from eagle31.training.rollout import rollout
from tests.eagle31.naive import naive_states
from tests.eagle31.tiny import EAGLE3, MLA, WIDE_MLA, random_batch, tiny_config, tiny_drafter


@pytest.mark.parametrize("changes", [{}, MLA])
def test_states_equal_the_naive_ones_at_every_supervised_row(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((30, 9), config, seed=5)
    rows = supervised_positions(supervised_drafts(batch.loss_mask, batch.document_ids, 5))
    naive = naive_states(drafter, config, frozen, batch, 5)
    for (normed, state), expected in zip(
        rollout(drafter, frozen.embed_tokens, batch, rows, 5), naive, strict=True
    ):
        torch.testing.assert_close(normed, expected[rows], rtol=1e-9, atol=1e-9)
        assert state is normed


@pytest.mark.parametrize("changes", [{}, MLA])
def test_a_later_token_never_changes_an_earlier_row(changes: dict[str, Any]) -> None:
    config = tiny_config(num_hidden_layers=2, **changes)
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((40,), config, seed=1)
    batch = replace(batch, loss_mask=torch.ones(40, dtype=torch.bool))
    changed_from, num_steps = 25, 4
    aux = batch.aux_hidden_states.clone()
    aux[changed_from:] += 1.0
    ids = batch.input_ids.clone()
    ids[changed_from:] = (ids[changed_from:] + 1) % config.vocab_size
    changed = replace(batch, input_ids=ids, aux_hidden_states=aux)
    # Row t's step k reads tokens up to x[t+1+k] and hidden states up to t.
    rows = torch.arange(changed_from - num_steps)
    before = [n for n, _ in rollout(drafter, frozen.embed_tokens, batch, rows, num_steps)]
    after = [n for n, _ in rollout(drafter, frozen.embed_tokens, changed, rows, num_steps)]
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    late = torch.arange(changed_from - 1, changed_from + 1)
    (a, _), (b, _) = (next(rollout(drafter, frozen.embed_tokens, x, late, 1)) for x in (batch, changed))
    assert not torch.allclose(a, b)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        EAGLE3,
        {"num_hidden_layers": 2},
        MLA,
        WIDE_MLA,
        {"sliding_window": 150},
        {"sliding_window": 20, "num_hidden_layers": 2},
        {"sliding_window": 2},
    ],
)
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
def test_no_gradient_flows_to_later_rows(layers: int, attention: dict[str, Any]) -> None:
    """Row t's step k may read hidden states up to t, whatever the mask and the packing."""
    config = tiny_config(num_hidden_layers=layers, **attention)
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((40, 300), config, seed=1)
    aux = batch.aux_hidden_states.clone().requires_grad_()
    rows = supervised_positions(supervised_drafts(batch.loss_mask, batch.document_ids, 4))
    steps = rollout(drafter, frozen.embed_tokens, replace(batch, aux_hidden_states=aux), rows, 4)
    normed = [normed for normed, _ in steps]
    for index in range(0, len(rows), 7):
        (grad,) = torch.autograd.grad(normed[-1][index].sum(), aux, retain_graph=True)
        touched = grad.abs().sum((1, 2)) > 0
        row = int(rows[index])
        assert bool(touched[row])
        assert not touched[row + 1 :].any()
        assert not touched[batch.document_ids != batch.document_ids[row]].any()


@pytest.mark.parametrize("changes", [{}, MLA])
def test_only_a_gap_in_the_positions_changes_states_and_an_offset_of_all_does_not(
    changes: dict[str, Any],
) -> None:
    config = tiny_config(**changes)
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((30,), config, seed=5)
    rows = supervised_positions(supervised_drafts(batch.loss_mask, batch.document_ids, 4))

    def states(position_ids: torch.Tensor) -> torch.Tensor:
        moved = replace(batch, position_ids=position_ids)
        return torch.stack([state for state, _ in rollout(drafter, frozen.embed_tokens, moved, rows, 4)])

    plain = states(batch.position_ids)
    torch.testing.assert_close(states(batch.position_ids + 40), plain, rtol=1e-4, atol=1e-4)
    gap = batch.position_ids + 40 * (torch.arange(30) >= 2)
    assert (states(gap) - plain).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_that_hides_nothing_changes_no_bit(dtype: torch.dtype) -> None:
    """The last query is at the last position plus the steps, so a longer window hides nothing."""
    lengths, num_steps = (300, 9, 41), 4
    found = []
    for window in (None, 300 + num_steps, 300 + num_steps - 1):
        config = tiny_config(num_hidden_layers=2, head_dim=8, sliding_window=window)
        drafter, frozen = tiny_drafter(config, dtype)
        batch = random_batch(lengths, config, seed=5).to(torch.device("cpu"), dtype)
        rows = supervised_positions(supervised_drafts(batch.loss_mask, batch.document_ids, num_steps))
        states = [normed for normed, _ in rollout(drafter, frozen.embed_tokens, batch, rows, num_steps)]
        torch.stack(states).float().square().sum().backward()
        found.append([*states, *(p.grad for p in drafter.parameters() if p.grad is not None)])
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))
    short = tiny_config(num_hidden_layers=2, head_dim=8, sliding_window=200)
    drafter, frozen = tiny_drafter(short, dtype)
    states = [normed for normed, _ in rollout(drafter, frozen.embed_tokens, batch, rows, num_steps)]
    assert not torch.equal(states[0], found[0][0])


@pytest.mark.parametrize(("layers", "window"), [(1, 6), (2, 4), (1, 2)])
def test_a_window_reads_exactly_its_positions(layers: int, window: int) -> None:
    """Step k of row t reads the hidden states at the positions t + k - W + 1 to t, further by each layer."""
    config = tiny_config(num_hidden_layers=layers, sliding_window=window)
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((40, 60), config, seed=1)
    aux = batch.aux_hidden_states.clone().requires_grad_()
    rows = torch.arange(100)
    steps = rollout(drafter, frozen.embed_tokens, replace(batch, aux_hidden_states=aux), rows, 3)
    for step, (normed, _) in enumerate(steps):
        for row in (0, 3, 30, 39, 40, 41, 47, 80, 99):
            (grad,) = torch.autograd.grad(normed[row].sum(), aux, retain_graph=True)
            touched = torch.nonzero(grad.abs().sum((1, 2)) > 0).squeeze(1).tolist()
            first = 40 if row >= 40 else 0
            # The states of earlier steps read further to the left than those of this one.
            assert touched == list(range(max(first, row - layers * (window - 1)), row + 1)), (step, row)
