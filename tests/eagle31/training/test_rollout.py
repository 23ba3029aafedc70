from dataclasses import replace
from typing import Any

import pytest
import torch

from eagle31.training.rollout import rollout
from eagle31.training.step import greedy_hits, rollout_loss
from eagle31.training.supervision import supervised_drafts, supervised_positions
from tests.eagle31.naive import is_counted, naive_loss, naive_states
from tests.eagle31.tiny import MLA, WIDE_MLA, random_batch, tiny_config, tiny_drafter

VARIANTS = {
    "eagle3.1": {},
    "eagle3": {"fc_norm": False, "norm_output": False},
    "norm_before_residual": {"norm_before_residual": True},
    "two layers": {"num_hidden_layers": 2},
    "three layers, eagle3": {"num_hidden_layers": 3, "fc_norm": False, "norm_output": False},
    "full vocabulary": {"draft_vocab_size": 61},
    "one aux layer": {"aux_layer_ids": (3,)},
    "four aux layers": {"aux_layer_ids": (0, 1, 2, 3)},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "mla": MLA,
    "mla, eagle3, two layers": MLA | {"num_hidden_layers": 2, "fc_norm": False, "norm_output": False},
    "mla, values as wide as keys": WIDE_MLA,
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("num_steps", [1, 4])
def test_loss_and_gradients_equal_the_naive_ones(name: str, num_steps: int) -> None:
    config = tiny_config(**VARIANTS[name])
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((17, 5, 23), config, seed=3, padding=4)
    expected = naive_loss(drafter, config, frozen, batch, num_steps, 0.8)
    wanted = torch.autograd.grad(expected, list(drafter.parameters()))
    loss, _ = rollout_loss(drafter, frozen, batch, num_steps=num_steps, step_decay=0.8)
    loss.backward()
    assert expected > 1.0
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    for (parameter_name, parameter), gradient in zip(drafter.named_parameters(), wanted, strict=True):
        assert gradient.abs().max() > 0, parameter_name
        scale = float(gradient.abs().max())
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-9 * scale, msg=parameter_name)


@pytest.mark.parametrize("changes", [{}, MLA])
def test_states_equal_the_naive_ones_at_every_counted_row(changes: dict[str, Any]) -> None:
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


def test_counted_drafts_by_their_definition() -> None:
    config = tiny_config()
    for seed in range(8):
        batch = random_batch((11, 1, 2, 19, 3), config, seed=seed, padding=5)
        counted = supervised_drafts(batch.loss_mask, batch.document_ids, 6)
        expected = [[is_counted(batch, t, k) for k in range(6)] for t in range(len(batch.input_ids))]
        assert counted.tolist() == expected
        assert counted.any()


def test_counted_drafts_with_more_steps_than_tokens() -> None:
    counted = supervised_drafts(torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long), 8)
    assert counted.nonzero().tolist() == [[0, 0]]


@pytest.mark.parametrize("changes", [{}, MLA])
def test_a_later_token_never_changes_an_earlier_row(changes: dict[str, Any]) -> None:
    config = tiny_config(num_hidden_layers=2, **changes)
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((40,), config, seed=1)
    batch = replace(batch, loss_mask=torch.ones(40, dtype=torch.bool))
    at, num_steps = 25, 4
    aux = batch.aux_hidden_states.clone()
    aux[at:] += 1.0
    ids = batch.input_ids.clone()
    ids[at:] = (ids[at:] + 1) % config.vocab_size
    changed = replace(batch, input_ids=ids, aux_hidden_states=aux)
    # Row t's step k reads tokens up to x[t+1+k] and hidden states up to t.
    rows = torch.arange(at - num_steps)
    before = [n for n, _ in rollout(drafter, frozen.embed_tokens, batch, rows, num_steps)]
    after = [n for n, _ in rollout(drafter, frozen.embed_tokens, changed, rows, num_steps)]
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    late = torch.arange(at - 1, at + 1)
    (a, _), (b, _) = (next(rollout(drafter, frozen.embed_tokens, x, late, 1)) for x in (batch, changed))
    assert not torch.allclose(a, b)


def test_packing_does_not_change_the_loss() -> None:
    config = tiny_config()
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((13, 21), config, seed=9)
    whole, sums = rollout_loss(drafter, frozen, batch, num_steps=3, step_decay=0.8)
    parts = []
    for part in (slice(0, 13), slice(13, 34)):
        alone = replace(batch, **{name: getattr(batch, name)[part] for name in vars(batch)})
        parts.append(rollout_loss(drafter, frozen, alone, num_steps=3, step_decay=0.8))
    torch.testing.assert_close(whole, parts[0][0] + parts[1][0], rtol=1e-10, atol=0)
    torch.testing.assert_close(sums.stacked(), parts[0][1].stacked() + parts[1][1].stacked())


def test_chunked_loss_equals_the_whole() -> None:
    config = tiny_config()
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((50,), config, seed=2)
    results = []
    for chunk_rows in (4096, 3):
        drafter.zero_grad()
        loss, sums = rollout_loss(drafter, frozen, batch, num_steps=3, step_decay=0.8, chunk_rows=chunk_rows)
        loss.backward()
        results.append((loss.detach(), sums.stacked(), [p.grad.clone() for p in drafter.parameters()]))
    torch.testing.assert_close(results[0], results[1])


def test_depth_sums_are_what_their_names_say() -> None:
    config = tiny_config()
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((40,), config, seed=4)
    _, sums = rollout_loss(drafter, frozen, batch, num_steps=2, step_decay=0.8)
    teacher = frozen.target_head(batch.final_hidden_states)
    ids = frozen.draft_target_ids
    assert ids is not None
    for step, normed in enumerate(naive_states(drafter, config, frozen, batch, 2)):
        q_draft = drafter.lm_head(normed).softmax(-1)
        q = torch.zeros(len(normed), config.vocab_size, dtype=q_draft.dtype).index_copy(1, ids, q_draft)
        rows = [t for t in range(40) if is_counted(batch, t, step)]
        later = [t + 1 + step for t in rows]
        assert sums.num_rows[step] == len(rows)
        agreement = (q[rows].argmax(-1) == teacher[later].argmax(-1)).sum()
        assert sums.agreement[step] == agreement
        expected = torch.minimum(q[rows], teacher[later].softmax(-1)).sum()
        torch.testing.assert_close(sums.expected_acceptance[step], expected, rtol=1e-6, atol=0)
        norms = normed[rows].norm(dim=-1).sum()
        torch.testing.assert_close(sums.state_norm[step], norms, rtol=1e-5, atol=0, check_dtype=False)


def test_greedy_hits_compare_with_the_text() -> None:
    config = tiny_config()
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((40,), config, seed=6)
    ids = frozen.draft_target_ids
    assert ids is not None
    naive = [ids[drafter.lm_head(n).argmax(-1)] for n in naive_states(drafter, config, frozen, batch, 3)]
    # A text that agrees with the drafter in places, so that hits and misses both occur.
    for t in range(0, 38, 2):
        batch.input_ids[t + 2] = naive[0][t]
    hits, counted = greedy_hits(drafter, frozen, batch, 3)
    states = naive_states(drafter, config, frozen, batch, 3)
    for step in range(3):
        greedy = ids[drafter.lm_head(states[step]).argmax(-1)]
        for t in range(40):
            expected = is_counted(batch, t, step) and bool(greedy[t] == batch.input_ids[t + 2 + step])
            assert bool(hits[t, step]) == expected
            assert bool(counted[t, step]) == is_counted(batch, t, step)
    assert hits.any()
    assert (counted & ~hits).any()
