import pytest
import torch

from eagle31.training.batch import consecutive, sampled, supervised_drafts
from tests.eagle31.naive import is_supervised
from tests.eagle31.tiny import random_batch, tiny_config


def test_supervised_drafts_by_their_definition() -> None:
    config = tiny_config()
    for seed in range(8):
        batch = random_batch((11, 1, 2, 19, 3), config, seed=seed, padding=5)
        supervised = supervised_drafts(batch.loss_mask, batch.document_ids, 6)
        expected = [[is_supervised(batch, t, k) for k in range(6)] for t in range(len(batch.input_ids))]
        assert supervised.tolist() == expected
        assert supervised.any()


def test_supervised_drafts_with_more_steps_than_tokens() -> None:
    supervised = supervised_drafts(torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long), 8)
    assert supervised.nonzero().tolist() == [[0, 0]]


def test_each_row_is_sampled_with_the_same_probability() -> None:
    supervised = torch.rand(500, 3, generator=torch.Generator().manual_seed(0)).sort(descending=True)[0] > 0.4
    num_rows = int(supervised[:, 0].sum())
    for most in (1, 5, 130, num_rows - 1):
        found = [sampled(supervised, most, draw) for draw in range(num_rows)]
        weighted = torch.stack([kept * weight for kept, weight in found])
        assert all(most / 2 < kept[:, 0].sum() <= most for kept, _ in found)
        torch.testing.assert_close(weighted.mean(0), supervised.float())
    for most in (None, num_rows):
        assert sampled(supervised, most, 7) == (supervised, 1.0)


def test_sampled_rows_of_a_long_document_are_few_runs() -> None:
    kept, _ = sampled(torch.ones(60_000, 1, dtype=torch.bool), 20_000, 12_345)
    assert 19_000 < kept.sum() <= 20_000
    assert len(list(consecutive(kept[:, 0].nonzero()[:, 0]))) < 40


@pytest.mark.parametrize("rows", [[], [3], [0, 1, 2], [1, 2, 5, 7, 8]])
def test_consecutive_rows_are_one_slice(rows: list[int]) -> None:
    index, states = torch.tensor(rows, dtype=torch.int64), torch.arange(10)
    found = list(consecutive(index))
    assert torch.equal(torch.cat([index[part] for part, _ in found] or [index]), index)
    assert torch.equal(torch.cat([states[source] for _, source in found] or [index]), index)
    assert len(found) == sum(row - 1 not in rows for row in rows)
