"""How the number of rolled out speculation steps grows."""

import pytest

from eagle31.training.curriculum import rollout_phases, rollout_steps


def test_the_steps_grow_in_equal_phases() -> None:
    assert [rollout_steps(step, 4, 6) for step in range(9)] == [1, 1, 2, 2, 3, 3, 4, 4, 4]
    assert [rollout_steps(step, 7, 0) for step in range(3)] == [7, 7, 7]
    assert [rollout_steps(step, 1, 5) for step in range(6)] == [1] * 6
    # Fewer optimizer steps than phases: some phases are left out.
    assert [rollout_steps(step, 7, 2) for step in range(4)] == [1, 4, 7, 7]


@pytest.mark.parametrize(("num_steps", "fraction"), [(4, 0.3), (7, 0.0), (1, 0.5), (3, 1.0)])
def test_the_phases_are_the_fractions_of_the_steps(num_steps: int, fraction: float) -> None:
    total = 600
    depths = [rollout_steps(step, num_steps, round(fraction * total)) for step in range(total)]
    phases = dict(rollout_phases(num_steps, fraction))
    assert sum(phases.values()) == pytest.approx(1)
    for depth, part in phases.items():
        assert depths.count(depth) == pytest.approx(part * total, abs=1)
