"""Trains drafters of several widths on one target's states, at the rule's learning rates and at multiples."""

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from eagle31.json_files import read_jsonl
from train.compose import composed
from train.config.run import RunConfig
from train.config.training import Optimizer
from train.distributed import World
from train.optim.learning_rates import with_rates
from train.pipeline import run_pipeline
from train.planning.sizes import RunSizes

HEAD_DIM = 64
DRAFT_TOKENS = 2


@dataclass(frozen=True)
class Trial:
    """A drafter's width, its optimizer, and the learning rate by which it is trained."""

    width: int
    optimizer: str
    factor: float  # of the rule's rate: `lr` of AdamW, `matrix_lr` of Muon


@dataclass(frozen=True)
class TrialResult:
    """What a trial reached."""

    rate: float
    acceptance_length: float  # by replay on held-out prompts, after the last step
    loss: float  # mean over the last tenth of the steps


def recipe(trial: Trial, output_dir: Path, num_steps: int) -> RunConfig:
    """Return a short run of the quickstart with a drafter of the trial's width."""
    heads = max(1, trial.width // HEAD_DIM)
    config = composed(
        [
            "recipe=quickstart",
            f"optim={trial.optimizer}",
            f"output_dir={output_dir}",
            "stages=[data,vocab,answers,capture,train]",
            f"drafter.hidden_size={trial.width}",
            f"drafter.intermediate_size={trial.width * 5 // 2}",
            f"drafter.num_attention_heads={heads}",
            f"drafter.num_key_value_heads={max(1, heads // 2)}",
            f"train.ttt_steps={DRAFT_TOKENS}",
            f"evaluate.draft_tokens={DRAFT_TOKENS}",
            "train.row_tokens=512",
            f"train.max_steps={num_steps}",
            f"train.validate_every={num_steps}",
            f"train.save_every={num_steps}",
            "train.log_every=1",
            "train.continue_from=none",
        ]
    )
    optim = with_rates(config.optim, RunSizes(config).drafter)
    assert optim.lr is not None
    assert optim.matrix_lr is not None
    if optim.name is Optimizer.muon:
        return replace(config, optim=replace(optim, matrix_lr=trial.factor * optim.matrix_lr))
    return replace(config, optim=replace(optim, lr=trial.factor * optim.lr))


def run_trial(trial: Trial, output_dir: Path, num_steps: int) -> TrialResult:
    """Train in this process, in `output_dir`, where all trials share the target's states."""
    config = recipe(trial, output_dir, num_steps)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        run_pipeline(config, World(rank=0, local_rank=0, size=1))
    files = output_dir.glob("artifacts/train-*/metrics.jsonl")
    records = read_jsonl(max(files, key=lambda path: path.stat().st_mtime))
    losses = [one["loss"] for one in records if one["kind"] == "train"][-max(1, num_steps // 10) :]
    lengths = [one["acceptance_length"] for one in records if one["kind"] == "validation"]
    rate = config.optim.matrix_lr if config.optim.name is Optimizer.muon else config.optim.lr
    assert rate is not None
    return TrialResult(rate, lengths[-1][str(DRAFT_TOKENS)], sum(losses) / len(losses))
