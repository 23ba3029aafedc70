"""A learning rate from short runs, each with another rate."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A run has diverged if it ends above the loss that it began with, as a fraction of it.
DIVERGED = 1.0


@dataclass(frozen=True)
class ShortRun:
    """A run of some steps with a warm-up and a linear decay to 0."""

    rate: float  # its peak
    losses: tuple[float, ...]  # of each step, before its update; NaN where it was not finite

    @property
    def final_loss(self) -> float:
        """The mean loss of the last fifth of the steps; infinite if the run diverged.

        Runs see the same rows in the same steps, so their final losses differ by their rates alone.
        """
        num = max(len(self.losses) // 5, 1)
        first, last = self.losses[0], sum(self.losses[-num:]) / num
        return last if math.isfinite(last) and last < DIVERGED * first else math.inf


@dataclass(frozen=True)
class FoundRate:
    """What the short runs say about one setting."""

    name: str  # of the setting in `optim`
    runs: tuple[ShortRun, ...]  # by ascending rate
    best: float  # for the short runs
    suggested: float  # for the run


def rate_of_step(step: int, peak: float, num_steps: int) -> float:
    """Return the rate of a short run's step: a linear warm-up over a tenth, then linearly to 0."""
    warmup = max(num_steps // 10, 1)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (num_steps - step) / (num_steps - warmup + 1)


def best_rate(runs: Sequence[ShortRun]) -> float | None:
    """Return the rate with the lowest final loss, between the rates that were tried.

    It is the minimum of the parabola through the best run and its two neighbors, over the logarithm of the
    rate. None if the best run is the first or the last one, or its neighbor diverged to the left.
    """
    losses = [run.final_loss for run in runs]
    best = losses.index(min(losses))
    if not 0 < best < len(runs) - 1 or not math.isfinite(losses[best]):
        return None
    below, at, above = losses[best - 1 : best + 2]
    if not math.isfinite(above) or not math.isfinite(below):
        return runs[best].rate
    shift = (below - above) / (2 * (below - 2 * at + above))
    ratio = runs[best + 1].rate / runs[best].rate
    return runs[best].rate * ratio**shift


def scaled_rate(rate: float, num_steps: int, max_steps: int, *, of_matrices: bool = False) -> float:
    """Return the rate for a run of `max_steps`, from the best one for `num_steps`.

    AdamW's best peak falls with the square root of the number of steps, as it does for the subgradient method
    on convex losses, which follows real training closely. Source: Schaipp et al., The Surprising Agreement
    Between Convex Optimization Theory and Learning-Rate Scheduling for Large Model Training (arXiv
    2501.18965).

    That of Muon's matrices fell with the number of steps itself, in runs of 24, 50 and 180 steps on one
    target; docs/optimizers.md has them. Each of its updates moves a matrix by the same distance.
    """
    fraction = min(num_steps / max_steps, 1.0)
    return rate * (fraction if of_matrices else math.sqrt(fraction))


def rounded(rate: float) -> float:
    """Return the rate with two significant digits."""
    return float(f"{rate:.1e}")


def bracketing_runs(
    run: Callable[[float], ShortRun], start: float, *, factor: float, lowest: float, highest: float
) -> list[ShortRun]:
    """Return runs by ascending rate, among which the best has a worse one on either side.

    From `start` the rate is multiplied by `factor`, and if that is worse divided by it, until the final loss
    rises. The best run is the first or the last one only if a limit is reached.
    """
    runs = [run(start)]
    for step in (factor, 1 / factor):
        while True:
            edge = runs[-1] if step > 1 else runs[0]
            rate = edge.rate * step
            if edge.final_loss > min(one.final_loss for one in runs) or not lowest <= rate <= highest:
                break
            runs = sorted([*runs, run(rate)], key=lambda one: one.rate)
    return runs
