"""The plot of a search for learning rates."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from train.optim.short_runs import FoundRate
from train.reporting.plots import ACCENT, INK, LIGHT_RAMP, MUTED


def save_rates(found: Sequence[FoundRate], path: Path) -> None:
    """Save a PNG: the final loss over the rate for each setting, and the losses of its short runs."""
    figure = Figure(figsize=(10, 4 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), 2, squeeze=False)
    for one, (final, curves) in zip(found, panels, strict=True):
        ended = [run for run in one.runs if math.isfinite(run.final_loss)]
        final.plot([run.rate for run in ended], [run.final_loss for run in ended], "o-", color=INK)
        final.axvline(one.best, color=MUTED, linestyle=":", label=f"best for the short runs: {one.best:.1e}")
        final.axvline(one.suggested, color=ACCENT, label=f"for the run: {one.suggested:.1e}")
        final.set(
            xscale="log", xlabel=f"optim.{one.name}", ylabel="final loss", title="Final loss of short runs"
        )
        final.set_xticks([run.rate for run in one.runs], [f"{run.rate:.1e}" for run in one.runs])
        final.xaxis.set_minor_formatter(NullFormatter())
        for index, run in enumerate(one.runs):
            color = LIGHT_RAMP(index / max(len(one.runs) - 1, 1))
            curves.plot(range(1, len(run.losses) + 1), run.losses, color=color, label=f"{run.rate:.1e}")
        curves.set(yscale="log", xlabel="step", ylabel="loss", title="Loss of each step")
        for axes in (final, curves):
            axes.legend(frameon=False)
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, facecolor="white")
