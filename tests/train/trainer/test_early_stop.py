"""When training ends early, and what chooses the best checkpoint."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from data.embedded.target import EmbeddedTarget
from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.json_files import read_jsonl
from tests.train.small_run import MAIN, RECIPE, arguments
from tests.train.torchrun import torchrun
from train.trainer.checkpoints import TrainState
from train.trainer.loop import LoopSettings, stops_early
from train.trainer.validation import choosing_length

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


def test_every_set_has_the_same_weight_whatever_its_size() -> None:
    stats = {
        "held-out prompts": {2: AcceptanceStats(2, 100, (50, 50))},
        "own/plain": {2: AcceptanceStats(2, 4, (4, 4))},
    }
    assert choosing_length(stats, 2) == pytest.approx((2 + 3) / 2)


def test_validation_cells_choose_the_checkpoint_and_end_training(
    small_target: EmbeddedTarget, captured: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(captured, directory, symlinks=True)
    settings = [
        "evaluate.matrix.domains.own.num_prompts=3",
        "evaluate.matrix.templates=[plain]",
        "evaluate.matrix.validation_cells=[own/plain]",
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
    for record in records:
        lengths = [record["acceptance_length"]["4"], record["cells"]["own/plain"]["4"]]
        assert record["mean_acceptance_length"] == pytest.approx(sum(lengths) / 2)
