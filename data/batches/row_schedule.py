"""How many packed rows each optimizer step has: always the same number, or fewer at the start of training."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from eagle31.errors import UserError


@dataclass(frozen=True)
class RowSchedule:
    """The number of rows of each optimizer step, over all ranks and micro-batches.

    It doubles from `start` until it is `final`; the last factor may be smaller. The first `growth_steps` are
    divided into equal phases, one for each number below `final`. It grows by factors because the noise of a
    gradient falls with the square root of the number of rows, so that each phase lessens it equally. Nothing
    depends on what was trained before, so a resumed run is exact.

    Sources: Smith et al., Don't Decay the Learning Rate, Increase the Batch Size (arXiv 1711.00489), and
    McCandlish et al., An Empirical Model of Large-Batch Training (arXiv 1812.06162): the batch size that is
    worth its cost grows during training.
    """

    final: int
    start: int | None = None  # None: `final` rows in every step
    growth_steps: int = 0

    def of_step(self, step: int) -> int:
        """Return the rows of an optimizer step, counted from 0."""
        for rows, _, end in self._phases():
            if step < end:
                return rows
        return self.final

    def before(self, step: int) -> int:
        """Return the rows of all steps before this one."""
        found, last = 0, 0
        for rows, begin, end in self._phases():
            found += rows * (min(step, end) - min(step, begin))
            last = end
        return found + self.final * max(step - last, 0)

    @property
    def grows(self) -> bool:
        """Whether some steps may have fewer rows than others."""
        return any(end > begin for _, begin, end in self._phases())

    def _phases(self) -> Iterator[tuple[int, int, int]]:
        """Yield the rows of each phase with fewer than `final`, its first step, and the step after it."""
        numbers = []
        rows = self.final if self.start is None else self.start
        while rows < self.final:
            numbers.append(rows)
            rows *= 2
        # Rounded up, as a step s is in the phase s * len(numbers) // growth_steps.
        for index, rows in enumerate(numbers):
            begin, end = (-(-n * self.growth_steps // len(numbers)) for n in (index, index + 1))
            yield rows, begin, end


def steps_within(num_rows: int, schedule_of: Callable[[int], RowSchedule], begin: int = 0) -> int:
    """Return the most steps that a run can have without more rows than these from step `begin` on.

    A run with one more step has more rows, also where its schedule is longer: each phase begins at most one
    step later.

    Args:
        num_rows: fewer than 0 give a step before `begin`.
        schedule_of: returns the schedule of a run with that many steps.
    """
    smallest = schedule_of(begin).start or schedule_of(begin).final
    if num_rows < 0:
        return begin + num_rows // smallest

    def rows_of(steps: int) -> int:
        schedule = schedule_of(steps)
        return schedule.before(steps) - schedule.before(begin)

    candidates = range(begin, begin + num_rows // smallest + 1)
    return begin + bisect_right(candidates, num_rows, key=rows_of) - 1


def check_divisible(rows_per_step: int, rows_per_step_start: int | None, world_size: int) -> None:
    """Raise UserError if the rows of some step cannot be divided equally among the ranks.

    Some would then have empty rows, which cost time; a training that is resumed on other ranks may have them.
    """
    # The numbers between the two are multiples of the smaller one.
    rows = {"train.rows_per_step": rows_per_step, "train.rows_per_step_start": rows_per_step_start}
    for key, value in rows.items():
        if value is not None and value % world_size:
            nearest = -(-value // world_size) * world_size
            remedy = f"It must be a multiple of the number of processes, {world_size}, such as {nearest}."
            raise UserError(key, value, remedy)
