"""The step at hidden size 4096: the drafter of Llama 3.1 8B, with GQA and a pruned vocabulary."""

from train.bench.gpu_check.parts.training_step import SMALL, measure
from train.bench.gpu_check.record import Options, Record


def run(options: Options, record: Record) -> None:
    measure("llama3_1_8b", options, record, SMALL, "drafter.draft_vocab_size=2048")
