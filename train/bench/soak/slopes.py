"""How what a process holds changes with time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_NORMAL_975 = 1.96


@dataclass(frozen=True)
class Slope:
    """A line through values at times, by least squares.

    Attributes:
        per_hour: the change in an hour.
        low, high: of its 95 % interval.
        r_squared: the part of the variance that the line explains.
    """

    mean: float
    per_hour: float
    low: float
    high: float
    r_squared: float


def slope_of(seconds: Sequence[float], values: Sequence[float], num_blocks: int = 20) -> Slope:
    """Fit a line to the means of blocks of time, whose residuals are nearly independent.

    Raises:
        ValueError: there are fewer than four values.
    """
    if len(values) < 4:
        raise ValueError(f"{len(values)} values have no slope with an interval")
    blocks = np.array_split(np.arange(len(values)), min(num_blocks, len(values)))
    hours = np.array([np.mean(np.asarray(seconds)[block]) for block in blocks]) / 3600
    means = np.array([np.mean(np.asarray(values)[block]) for block in blocks])
    centred = hours - hours.mean()
    deviations = means - means.mean()
    slope = float(centred @ deviations / (centred @ centred))
    residuals = deviations - slope * centred
    error = float(np.sqrt(residuals @ residuals / (len(blocks) - 2) / (centred @ centred)))
    variance = float(deviations @ deviations)
    explained = 1.0 - float(residuals @ residuals) / variance if variance > 0 else 0.0
    half = _NORMAL_975 * error
    return Slope(float(np.mean(values)), slope, slope - half, slope + half, explained)
