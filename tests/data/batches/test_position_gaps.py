import torch

from data.batches.position_gaps import PositionGaps

LENGTH = 20


def test_positions_jump_once_as_often_as_the_probability_says() -> None:
    gaps = PositionGaps(probability=0.4, max_tokens=50, seed=0)
    steps = [
        gaps.position_ids(LENGTH, step, sample=3).diff(prepend=torch.tensor([-1])) for step in range(300)
    ]
    jumps = [int((step > 1).sum()) for step in steps]
    assert set(jumps) == {0, 1}
    assert 90 < sum(jumps) < 150
    longest = [int(step.max()) for step in steps if (step > 1).any()]
    assert 2 <= min(longest) <= 8
    assert 44 <= max(longest) <= 51
    assert all(step[0] == 1 and step.min() == 1 for step in steps)


def test_a_sample_has_the_same_gap_whenever_its_step_is_loaded() -> None:
    gaps = PositionGaps(probability=1.0, max_tokens=50, seed=0)
    found = [gaps.position_ids(LENGTH, step, sample) for step in range(3) for sample in range(3)]
    again = [gaps.position_ids(LENGTH, step, sample) for step in range(3) for sample in range(3)]
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    assert len({tuple(one.tolist()) for one in found}) == 9
    other_seed = PositionGaps(probability=1.0, max_tokens=50, seed=1).position_ids(LENGTH, 0, 0)
    assert not torch.equal(other_seed, found[0])


def test_one_token_has_no_gap() -> None:
    assert PositionGaps(probability=1.0, max_tokens=50, seed=0).position_ids(1, 0, 0).tolist() == [0]
