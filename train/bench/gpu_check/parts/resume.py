"""Training whose processes are all killed, and which then resumes from its last checkpoint."""

from pathlib import Path

from train.bench.gpu_check import runs
from train.bench.gpu_check.record import Options, Record

BOUND = 0.02  # of the last loss, relative; on a CPU the two runs are the same to the bit
STAGES = "stages=[data,vocab,answers,capture,train]"


def run(options: Options, record: Record) -> None:
    directory = runs.captured_copy(options, "resume")
    line = runs.command(options, directory, STAGES)
    save_every = 8 if options.dry_run else 60
    killed = runs.kill_after(line, directory, save_every + 2)
    saved = sorted(path.name for path in directory.glob("artifacts/train-*/checkpoints/step-*"))
    record.figure("killed after step", killed)
    record.figure("checkpoints at that time", ", ".join(saved) or "none")
    record.figure("the rest of the training", round(runs.finish(line), 1), "s")
    compare(record, options.directory / runs.QUICKSTART, directory)


def compare(record: Record, whole: Path, resumed: Path) -> None:
    """Compare the losses of the steps that both runs logged last."""
    losses = [{one["step"]: one["loss"] for one in runs.training_records(path)} for path in (whole, resumed)]
    last = max(losses[0])
    record.check("the resumed run reaches the last step", max(losses[1]) == last, f"step {max(losses[1])}")
    one, other = (by_step.get(last, float("nan")) for by_step in losses)
    difference = abs(one - other) / one
    record.figure("difference of the last loss from the uninterrupted run", f"{difference:.1e}")
    detail = f"{one:.5f} without the kill, {other:.5f} with it; bound {BOUND:.0%}"
    record.check("it ends where the uninterrupted run ends", difference <= BOUND, detail)
