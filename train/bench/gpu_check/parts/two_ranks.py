"""Training on two ranks: the same rows per step give the losses of one rank."""

from train.bench.gpu_check import runs
from train.bench.gpu_check.parts.resume import STAGES
from train.bench.gpu_check.record import Options, Record

BOUND = 0.02


def run(options: Options, record: Record) -> None:
    directory = runs.captured_copy(options, "two_ranks")
    line = runs.command(options, directory, STAGES, num_processes=2)
    record.figure("the run", round(runs.finish(line), 1), "s")
    one, two = (
        {record["step"]: record["loss"] for record in runs.training_records(path)}
        for path in (options.directory / runs.QUICKSTART, directory)
    )
    common = sorted(one.keys() & two.keys())
    first, last = common[0], common[-1]
    for step in (first, last):
        difference = abs(one[step] - two[step]) / one[step]
        detail = f"one rank {one[step]:.5f}, two ranks {two[step]:.5f}; bound {BOUND:.0%}"
        record.figure(f"difference of the loss at step {step}", f"{difference:.1e}")
        record.check(f"the loss at step {step} is that of one rank", difference <= BOUND, detail)
