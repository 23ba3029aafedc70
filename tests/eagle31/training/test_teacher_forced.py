"""Teacher-forced drafts compared with the text, each against a plain computation."""

import pytest
import torch

from eagle31.training.teacher_forced import acceptance_given_text, greedy_hits
from tests.eagle31.naive import is_supervised, naive_states
from tests.eagle31.tiny import random_batch, tiny_config, tiny_drafter


@pytest.mark.parametrize(("window", "chunk_rows"), [(None, 4), (6, 40)])
def test_greedy_hits_compare_with_the_text(window: int | None, chunk_rows: int) -> None:
    config = tiny_config(sliding_window=window)
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((40,), config, seed=6)
    ids = frozen.draft_target_ids
    assert ids is not None
    naive = [ids[drafter.lm_head(n).argmax(-1)] for n in naive_states(drafter, frozen, batch, 3)]
    # The text agrees with the drafter at some positions, so that there are hits and misses.
    for t in range(0, 38, 2):
        batch.input_ids[t + 2] = naive[0][t]
    hits, supervised = greedy_hits(drafter, frozen, batch, 3, chunk_rows)
    states = naive_states(drafter, frozen, batch, 3)
    for step in range(3):
        greedy = ids[drafter.lm_head(states[step]).argmax(-1)]
        for t in range(40):
            expected = is_supervised(batch, t, step) and bool(greedy[t] == batch.input_ids[t + 2 + step])
            assert bool(hits[t, step]) == expected
            assert bool(supervised[t, step]) == is_supervised(batch, t, step)
    assert hits.any()
    assert (supervised & ~hits).any()


@torch.no_grad()
def test_the_probability_that_a_token_of_the_text_was_an_accepted_draft() -> None:
    config, temperature = tiny_config(), 0.7
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((40,), config, seed=6)
    found, supervised = acceptance_given_text(drafter, frozen, batch, 3, temperature, chunk_rows=5)
    ids = frozen.draft_target_ids
    assert ids is not None
    for step, state in enumerate(naive_states(drafter, frozen, batch, 3)):
        for t in range(40):
            expected = 0.0
            if is_supervised(batch, t, step):
                token = batch.input_ids[t + 2 + step]
                q = torch.zeros(config.vocab_size, dtype=torch.float64)
                q[ids] = (drafter.lm_head(state[t]) / temperature).softmax(-1)
                target = frozen.target_head(batch.final_hidden_states[t + 1 + step])
                p = (target / temperature).softmax(-1)
                expected = float(torch.minimum(p, q)[token] / p[token])
            torch.testing.assert_close(float(found[t, step]), expected, rtol=1e-9, atol=0)
            assert bool(supervised[t, step]) == is_supervised(batch, t, step)
    assert (found[supervised] == 0).any()  # a token that the drafter cannot draft
    assert ((found > 0) & (found < 1)).any()
    assert (found == 1).any()
