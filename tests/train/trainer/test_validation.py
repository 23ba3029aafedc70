"""How held-out rows are distributed over the ranks."""

import pytest
import torch

from data.samples import CapturedSample
from tests.data.batches.memory_source import MemorySource
from train.distributed import World
from train.trainer.validation import ReplayValidation

ROW_TOKENS = 8


def sample(token: int) -> CapturedSample:
    """A sample that fills a row, so that it is recognized by its token."""
    states = torch.zeros(ROW_TOKENS, 2, 4)
    ids = torch.full((ROW_TOKENS,), token)
    return CapturedSample(ids, torch.ones(ROW_TOKENS, dtype=torch.bool), states, states[:, 0])


@pytest.mark.parametrize(("num_rows", "num_ranks"), [(3, 8), (9, 8)])
def test_every_row_is_one_ranks(num_rows: int, num_ranks: int) -> None:
    source = MemorySource([sample(token) for token in range(num_rows)])
    worlds = [World(rank, rank, num_ranks) for rank in range(num_ranks)]
    ranks = [ReplayValidation(source, ROW_TOKENS, 2, 3, world) for world in worlds]
    counted = [int(batch.input_ids[0]) for one in ranks for batch in one.batches]
    assert sorted(counted) == list(range(num_rows))
