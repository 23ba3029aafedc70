"""The stages that make results, each with its functions and the files that later stages read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.config.run import Stage
from train.context import RunContext
from train.stages.answers import answers_inputs, run_answers
from train.stages.capture import capture_inputs, run_capture
from train.stages.data import data_inputs, run_data
from train.stages.evaluate import evaluate_inputs, run_evaluate
from train.stages.export import export_inputs, run_export
from train.stages.train import run_train, train_inputs
from train.stages.vocab import run_vocab, vocab_inputs


@dataclass(frozen=True)
class StageRun:
    """The functions of a stage."""

    inputs: Callable[[RunContext], dict[str, Any]]  # returns everything that the result depends on
    run: Callable[[RunContext, Path], dict[str, Any]]  # fills the directory and returns a summary
    files: tuple[str, ...] = ()  # patterns of the files that later stages read
    every_rank: bool = False  # otherwise rank 0 runs it and the others wait


# Shards are checked when they are read.
_STORES = ("*/manifest.json", "*/index.safetensors", "*/capture.json")
METRICS, BEST = "metrics.jsonl", "checkpoints/best/*"
STAGES = {
    Stage.data: StageRun(data_inputs, run_data, ("train/*", "held_out.json")),
    Stage.vocab: StageRun(vocab_inputs, run_vocab, ("vocab.json", "vocab.safetensors")),
    Stage.answers: StageRun(answers_inputs, run_answers, ("validation/*", "test/*")),
    Stage.capture: StageRun(capture_inputs, run_capture, _STORES, every_rank=True),
    Stage.train: StageRun(train_inputs, run_train, (METRICS, BEST), every_rank=True),
    Stage.export: StageRun(
        # Not README.md, which the report writes again.
        export_inputs,
        run_export,
        ("checkpoint/config.json", "checkpoint/*.safetensors"),
    ),
    Stage.evaluate: StageRun(evaluate_inputs, run_evaluate, ("evaluation.json",)),
}
