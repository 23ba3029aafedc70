"""The training of a run: its validations over steps and time, its drift and its speed."""

from collections.abc import Sequence
from dataclasses import dataclass

from train.reporting.comparison.runs import Run
from train.reporting.drift_plots import shown_drift
from train.reporting.results import describe_speed, read_serving
from train.reporting.speed import training_speed


@dataclass(frozen=True)
class Validation:
    step: int
    seconds: float  # of training up to this step
    acceptance_length: float  # of the longest drafts that training validates with


def validations(run: Run) -> list[Validation]:
    """Return the validations during training."""
    logged = [(one["step"], one["seconds"]) for one in run.metrics if one["kind"] == "train"]
    found = []
    for record in run.metrics:
        if record["kind"] == "validation":
            lengths = {int(k): value for k, value in record["acceptance_length"].items()}
            seconds = sum(seconds for step, seconds in logged if step <= record["step"])
            found.append(Validation(record["step"], seconds, lengths[max(lengths)]))
    return found


def training_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return a header, and rows on training, drift and speed; what no run has is left out."""
    columns = [_training(run) for run in runs]
    names = dict.fromkeys(name for one in columns for name in one)
    rows = [["", *(run.name for run in runs)]]
    return rows + [[name, *(one.get(name, "") for one in columns)] for name in names]


def _training(run: Run) -> dict[str, str]:
    found = {}
    points = validations(run)
    if points:
        best = max(points, key=lambda one: one.acceptance_length)
        found["best validation"] = f"{best.acceptance_length:.2f} at step {best.step:,}"
        found["time to it"] = f"{best.seconds / 60:.1f} min"
    found |= dict(training_speed(run.metrics))
    if drift := shown_drift(run.metrics, run.info["best_step"]):
        first, last = drift["depth"][0], drift["depth"][-1]
        own, token = last["layers"][-1]["own"], len(drift["depth"])
        found[f"attention to own tokens, token {token}"] = f"{100 * own:.1f} %"
        found[f"growth of the state, token 1 to {token}"] = f"{last['state_rms'] / first['state_rms']:.2f}x"
    found["speed-up when decoded"] = describe_speed(run.evaluation["decoding"]["timing"])
    for row in (read_serving(run.directory) or {}).get("rows", []):
        name = f"speed-up in vLLM, {row['concurrency']} users, k = {row['k']}"
        found[name] = f"{row['speedup']['median']:.2f}x"
    return found
