"""When training ends early."""

import shutil
from dataclasses import replace
from pathlib import Path

from data.embedded.target import EmbeddedTarget
from eagle31.json_files import read_jsonl
from tests.train.small_run import MAIN, RECIPE, arguments
from tests.train.torchrun import torchrun
from train.trainer.checkpoints import TrainState
from train.trainer.loop import LoopSettings, stops_early

SETTINGS = LoopSettings(
    max_steps=100,
    warmup_steps=0,
    peak_lr=1e-3,
    min_lr_fraction=0.0,
    schedule="constant",
    num_depths=1,
    log_every=1,
    validate_every=1,
    save_every=1,
    keep_weights_every=None,
    draft_tokens=2,
)


def test_training_ends_after_so_many_validations_that_are_not_better() -> None:
    for count, expected in ((0, False), (1, False), (2, True), (3, True)):
        state = TrainState(step=50, validations_since_best=count)
        assert stops_early(state, replace(SETTINGS, early_stop_validations=2)) == expected
        assert not stops_early(state, SETTINGS)


def test_validations_that_are_not_better_end_a_run(
    small_target: EmbeddedTarget, captured: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(captured, directory, symlinks=True)
    settings = [
        "train.early_stop_validations=1",
        "train.diagnose_every=0",
        "optim.lr=1e-12",  # changes nothing, so that no validation is better than the first
        "optim.matrix_lr=1e-12",
    ]
    shared = arguments(small_target, directory)
    printed = torchrun(MAIN, f"recipe={RECIPE}", *shared, *settings, "stages=[train]")
    assert "train: stopped after step 8 of 24: the last 1 validations were not better" in printed
    [path] = directory.glob("artifacts/train-*/metrics.jsonl")
    records = [one for one in read_jsonl(path) if one["kind"] == "validation"]
    assert [one["step"] for one in records] == [0, 8]
