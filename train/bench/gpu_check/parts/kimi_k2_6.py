"""The step at Kimi K2.6's shape: MLA, hidden size 7168, the full vocabulary of 163,840."""

from train.bench.gpu_check.parts.training_step import SMALL, SMALL_MLA, measure
from train.bench.gpu_check.record import Options, Record


def run(options: Options, record: Record) -> None:
    measure("kimi_k2_6", options, record, SMALL | SMALL_MLA)
