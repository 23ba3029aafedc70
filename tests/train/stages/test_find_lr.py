"""Short runs for the learning rate, on the small target's captured states."""

import re
import shutil
from pathlib import Path

from data.embedded.target import EmbeddedTarget
from tests.train.small_run import RECIPE, arguments
from tests.train.torchrun import torchrun
from train.optim.learning_rates import ADAMW_RATE_TIMES_WIDTH, MATRIX_RATE


def test_rates_are_found_for_both_kinds_of_weights(
    small_target: EmbeddedTarget, captured: Path, tmp_path: Path
) -> None:
    shutil.copytree(captured, tmp_path / "run")
    settings = [*arguments(small_target, tmp_path / "run"), "optim=muon", "optim.lr=null"]
    settings += ["train.rows_per_step=1", "train.ttt_steps=1", "train.max_steps=96"]
    printed = torchrun("scripts/find_lr", RECIPE, *settings, "--steps", "24")
    assert "capture: reused" in printed
    found = re.search(r"^optim\.matrix_lr=(\S+) optim\.lr=(\S+)$", printed, flags=re.MULTILINE)
    assert found is not None, printed
    runs = re.findall(r"find_lr: optim\.(\w+)=(\S+): final loss (\S+),", printed)
    losses: dict[str, dict[float, float]] = {"matrix_lr": {}, "lr": {}}
    for name, rate, loss in runs:
        losses[name][float(rate)] = float(loss)
    rule_lr = float(f"{ADAMW_RATE_TIMES_WIDTH / 64:.1e}")  # the hidden size is 64
    assert [next(iter(one)) for one in losses.values()] == [MATRIX_RATE, rule_lr]
    for of_rate, value in zip(losses.values(), found.groups(), strict=True):
        best = min(of_rate, key=of_rate.__getitem__)
        assert min(of_rate) < best < max(of_rate)
        # 96 steps instead of 24: half of the best rate, which is within a factor of the best run's.
        assert best / 2 / 3 < float(value) < best / 2 * 3
    # The matrices keep the rate that was found, although their rate follows `lr` in a training.
    assert max(losses["lr"].values()) < sorted(losses["matrix_lr"].values())[1]
    assert (tmp_path / "run" / "find_lr.png").stat().st_size > 10_000
    assert not list((tmp_path / "run").glob("artifacts/train-*"))
