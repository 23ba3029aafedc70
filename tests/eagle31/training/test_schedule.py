from dataclasses import replace

import pytest
import torch

from eagle31.training.schedule import DraftCosts, row_shares
from eagle31.training.step import schedule_batch
from tests.eagle31.tiny import random_batch, tiny_config


def test_rows_after_the_last_draft_of_a_document_are_not_computed() -> None:
    batch = random_batch((30, 20, 10), tiny_config(), seed=2, padding=5)
    mask = torch.zeros_like(batch.loss_mask)
    mask[10:15], mask[35:37] = True, True
    schedule = schedule_batch(replace(batch, loss_mask=mask), 4)
    (chunk,) = schedule.chunks
    assert [step.rows.tolist() for step in chunk.steps] == [[9, 10, 11, 12, 34], [9, 10, 11], [9, 10], [9]]
    assert schedule.key_rows.tolist() == [*range(13), *range(30, 35)]
    assert chunk.teacher_rows.tolist() == [10, 11, 12, 13, 35]
    for k, step in enumerate(chunk.steps):
        assert chunk.teacher_rows[step.teacher_index].tolist() == [t + 1 + k for t in step.rows.tolist()]
    assert [tuple(run) for run in chunk.steps[0].runs] == [(0, 4, 0, 13), (4, 5, 13, 18)]
    assert [tuple(run) for run in chunk.steps[1].runs] == [(0, 3, 0, 12)]


def test_a_window_leaves_out_the_keys_that_no_row_reaches() -> None:
    batch = random_batch((30, 20, 10), tiny_config(), seed=2, padding=5)
    mask = torch.zeros_like(batch.loss_mask)
    mask[10:15], mask[25:27], mask[32:34] = True, True, True
    batch = replace(batch, loss_mask=mask)
    schedule = schedule_batch(batch, 4, key_reach=tiny_config(sliding_window=4).key_reach)
    whole = schedule_batch(batch, 4)
    (chunk,), (of_whole,) = schedule.chunks, whole.chunks
    assert [step.rows.tolist() for step in chunk.steps] == [step.rows.tolist() for step in of_whole.steps]
    # Two turns of a document are two segments; the next document starts within the reach.
    assert schedule.key_rows.tolist() == [*range(6, 13), *range(21, 25), *range(30, 32)]
    assert [tuple(run) for run in schedule.document_runs] == [(0, 7, 0, 7), (7, 11, 7, 11), (11, 13, 11, 13)]
    assert [tuple(run) for run in chunk.steps[0].runs] == [(0, 4, 0, 7), (4, 5, 7, 11), (5, 6, 11, 13)]


@pytest.mark.parametrize("window", [None, 30])
def test_ranks_that_share_a_row_have_drafts_of_the_same_cost(window: int | None) -> None:
    depths = torch.cat([torch.arange(n) + 1 for n in (300, 200)])
    documents = (torch.arange(500) >= 300).long()
    shares = row_shares(
        torch.ones(500, 1, dtype=torch.bool), documents, None, DraftCosts(5.0, 1.0, window), 4
    )
    pieces = [share.drafts for share in shares]
    assert torch.equal(torch.cat([torch.arange(500)[piece] for piece in pieces]), torch.arange(500))
    costs = 5.0 + depths.clamp(max=window or 500)
    spent = [float(costs[piece].sum()) for piece in pieces]
    assert max(spent) - min(spent) <= 2 * float(costs.max())
