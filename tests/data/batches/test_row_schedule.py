from math import ceil

import pytest

from data.batches.row_schedule import RowSchedule, check_divisible, steps_within
from eagle31.errors import UserError

SCHEDULES = [
    RowSchedule(4),
    RowSchedule(4, 4, 10),
    RowSchedule(8, 2, 6),
    RowSchedule(12, 2, 7),
    RowSchedule(8, 1, 1),
    RowSchedule(8, 3, 0),
]


def test_the_rows_double_in_equal_phases() -> None:
    def rows(schedule: RowSchedule) -> list[int]:
        return [schedule.of_step(step) for step in range(9)]

    assert rows(RowSchedule(8, 2, 6)) == [2, 2, 2, 4, 4, 4, 8, 8, 8]
    assert rows(RowSchedule(12, 2, 7)) == [2, 2, 2, 4, 4, 8, 8, 12, 12]
    # Fewer steps than phases: some phases are left out.
    assert rows(RowSchedule(8, 1, 1)) == [1, *[8] * 8]
    assert rows(RowSchedule(4)) == rows(RowSchedule(4, 4, 10)) == [4] * 9
    assert [schedule.grows for schedule in SCHEDULES] == [False, False, True, True, True, False]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_rows_of_all_steps_before_one_are_their_sum(schedule: RowSchedule) -> None:
    for step in range(20):
        assert schedule.before(step) == sum(schedule.of_step(earlier) for earlier in range(step))


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.99])
@pytest.mark.parametrize(("final", "start"), [(8, None), (8, 1), (12, 2), (7, 3)])
def test_a_run_has_as_many_steps_as_the_rows_allow(final: int, start: int | None, fraction: float) -> None:
    def schedule_of(steps: int) -> RowSchedule:
        return RowSchedule(final, start, ceil(fraction * steps))

    for num_rows in (0, 1, 7, 8, 100, 1001):
        steps = steps_within(num_rows, schedule_of)
        schedule = schedule_of(steps)
        assert schedule.before(steps) <= num_rows < schedule_of(steps + 1).before(steps + 1)
        # A run that resumes finds the same number.
        for begin in range(0, steps + 1, 1 + steps // 7):
            assert steps_within(num_rows - schedule.before(begin), schedule_of, begin) == steps
    assert steps_within(-1, lambda steps: RowSchedule(final), 5) == 4


def test_the_ranks_share_the_rows_of_every_step() -> None:
    check_divisible(12, None, 4)
    check_divisible(12, 4, 4)
    with pytest.raises(UserError, match=r"train\.rows_per_step=12: .* 8, such as 16"):
        check_divisible(12, 8, 8)
    with pytest.raises(UserError, match=r"train\.rows_per_step_start=2: .* 4, such as 4"):
        check_divisible(12, 2, 4)
