import pytest
import torch

from eagle31.errors import UserError
from train.trainer.skipped import MAX_SKIPPED, SkippedSteps


def test_the_newest_step_is_known_one_step_later_and_too_many_in_a_row_end_the_run() -> None:
    skipped = SkippedSteps(0.1, lambda step: [])
    skipped.record(1, torch.tensor(True))
    assert skipped.collect(wait=False) == []
    skipped.record(2, torch.tensor(True))
    assert skipped.collect(wait=False) == [1]
    assert skipped.num_in_a_row == 1
    skipped.record(3, torch.tensor(False))
    assert skipped.collect(wait=True) == [2]
    assert skipped.num_in_a_row == 0
    for step in range(4, 4 + MAX_SKIPPED):
        skipped.check("")
        skipped.record(step, torch.tensor(True))
        assert skipped.collect(wait=True) == [step]
    with pytest.raises(UserError, match=r"optim\.lr=0\.1: .* scripts/inspect_data"):
        skipped.check("")
