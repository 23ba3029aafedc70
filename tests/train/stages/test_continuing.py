"""Trainings that continue: more steps, another schedule, other data, and a warm-down branched off."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data.embedded.target import EmbeddedTarget
from eagle31.json_files import read_json, read_jsonl
from tests.train.small_run import RECIPE, arguments, assert_faithful, depends_on_time
from tests.train.torchrun import torchrun
from train.artifact import Artifact, named_training
from train.config.run import Stage
from train.stages.continuing import begin_training
from train.trainer.checkpoint_files import load_weights

WORKER = "tests/train/stages/runs_worker.py"
TRAIN = "stages=[data,vocab,answers,capture,train]"
EVALUATED = "stages=[data,vocab,answers,capture,train,export,evaluate]"
WARM_DOWN = ["optim.schedule=wsd"]


@dataclass(frozen=True)
class Runs:
    """The directories of the runs, and what each printed by its name."""

    root: Path
    printed: dict[str, str]

    def training(self, run: str, **settings: object) -> Path:
        """Return the directory of the run's training with these inputs."""
        results = (self.root / run / "training").resolve().parent
        [found] = [
            path.parent
            for path in results.glob("train-*/begun.json")
            if _matches(read_json(path)["inputs"], settings)
        ]
        return found

    def metrics(self, run: str, **settings: object) -> list[dict]:
        records = read_jsonl(self.training(run, **settings) / "metrics.jsonl")
        return [{k: v for k, v in one.items() if not depends_on_time(k)} for one in records]

    def steps(self, run: str, **settings: object) -> list[int]:
        """Return the steps of the training's records of losses and validations."""
        return [one["step"] for one in self.metrics(run, **settings) if one["kind"] != "drift"]


def _matches(inputs: dict, settings: dict[str, object]) -> bool:
    return all((inputs["train"] | inputs).get(name) == value for name, value in settings.items())


@pytest.fixture(scope="module")
def runs(small_target: EmbeddedTarget, captured: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("continuing")
    for name in ("extended", "whole"):
        shutil.copytree(captured, root / name)

    def run(name: str, *settings: str) -> list[str]:
        every = ["train.validate_every=4", "train.save_every=4", "optim=adamw"]
        return [f"recipe={RECIPE}", *arguments(small_target, root / name), *every, *settings]

    def continued(name: str, *settings: str) -> list[str]:
        return [*WARM_DOWN, f"train.continue_from={root / name}", *settings]

    branch = run("branch", EVALUATED, *continued("whole@8"), "train.max_steps=12")
    other_data = ["train.max_steps=20", "data.max_samples=60", "optim.lr=1e-3"]
    steps: dict[str, Any] = {
        "first": run("extended", TRAIN, *WARM_DOWN, "train.max_steps=8"),
        # From the checkpoint at which the rate of the first began to fall.
        "second": run("extended", TRAIN, *continued("extended@6"), "train.max_steps=16"),
        "whole": run("whole", TRAIN, *WARM_DOWN, "train.max_steps=16"),
        # The branch needs a directory alone: it finds the results of all earlier stages.
        "branch": branch,
        "branch again": branch,
        "other data": run("extended", TRAIN, *continued("extended"), *other_data),
        "other data again": run("extended", TRAIN, *continued("extended"), *other_data),
        "not continued": run("extended", TRAIN, "train.max_steps=1"),
        "in one directory": run(
            "other", TRAIN, f"artifacts_dir={root / 'whole/artifacts'}", "train.max_steps=1"
        ),
        "no step left": run("third", TRAIN, *continued("whole"), "train.max_steps=16"),
        "another drafter": run("third", TRAIN, *continued("whole"), "drafter.num_hidden_layers=2"),
        "no such step": run("third", TRAIN, *continued("whole@7")),
        "no training": run("third", TRAIN, *continued("nothing")),
    }
    (root / "runs.json").write_text(json.dumps(steps))
    output = torchrun(WORKER, str(root / "runs.json"))
    parts = re.split(r"^=== (.+)\n", output, flags=re.MULTILINE)
    return Runs(root, dict(zip(parts[1::2], parts[2::2], strict=True)))


def _saved(training: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint: weights and optimizer states."""
    checkpoint = training / f"checkpoints/step-{step:08d}"
    kinds = ("weights", "exp_avg", "exp_avg_sq")
    return {f"{name}.{kind}": one for kind in kinds for name, one in load_weights(checkpoint, kind).items()}


def test_an_extended_training_equals_one_that_was_longer_from_the_start(runs: Runs) -> None:
    first = runs.training("extended", max_steps=8)
    assert f"train: continues {first} after step 6 (" in runs.printed["second"]
    assert "train.max_steps: 8 -> 16" in runs.printed["second"]
    # The weights of step 6 are validated again: those of step 8 have replaced the best ones.
    ours = [
        one for one in runs.metrics("extended", max_steps=16) if one["step"] != 6 or one["kind"] == "train"
    ]
    assert ours == runs.metrics("whole", max_steps=16)
    last = [one for one in ours if one["kind"] == "validation"][-1]
    length = f"step 16, acceptance length {last['acceptance_length']['4']:.2f} at k = 4"
    assert length in runs.printed["second"]
    rates = [record["learning_rate"] for record in ours if record["kind"] == "train"]
    assert rates == pytest.approx([*[3e-3] * 13, 2.25e-3, 1.5e-3, 0.75e-3])
    extended, whole = (_saved(runs.training(name, max_steps=16), 16) for name in ("extended", "whole"))
    assert extended.keys() == whole.keys()
    assert "fc.weight.exp_avg_sq" in extended
    for name, value in extended.items():
        assert torch.equal(value, whole[name]), name
    # The first training's result is as it was.
    assert read_json(first / "stage.json")["summary"]["steps"] == 8
    assert read_json(first / "checkpoints" / "step-00000008" / "state.json")["continued_at"] == 0


def test_a_warm_down_is_branched_off_into_another_directory(runs: Runs) -> None:
    for stage in ("data", "answers", "capture"):
        assert f"{stage}: reused" in runs.printed["branch"], stage
    trained, whole = runs.training("branch", max_steps=12), runs.training("whole", max_steps=16)
    assert f"train: continues {whole} after step 8" in runs.printed["branch"]
    ours, theirs = (
        [one for one in runs.metrics(name, max_steps=steps) if one["kind"] == "train"]
        for name, steps in (("branch", 12), ("whole", 16))
    )
    assert ours[:9] == theirs[:9]
    rates = [record["learning_rate"] for record in ours]
    # A fifth of twelve steps, rounded up.
    assert rates[8:] == pytest.approx([3e-3, 3e-3, 2e-3, 1e-3])
    assert read_json(trained / "stage.json")["summary"]["continued_at"] == 8
    assert_faithful(runs.root / "branch")
    assert (runs.root / "branch" / "export" / "model.safetensors").is_file()


def test_runs_with_one_directory_of_results_have_one_capture(runs: Runs) -> None:
    for stage in ("data", "vocab", "answers", "capture"):
        assert f"{stage}: reused, {runs.root}/whole/artifacts/" in runs.printed["in one directory"], stage
    assert runs.training("other", max_steps=1).parent == runs.root / "whole" / "artifacts"
    assert not (runs.root / "other" / "artifacts").exists()


def test_other_data_continues_the_drafter_with_a_new_epoch(runs: Runs) -> None:
    trained = runs.training("extended", max_steps=20)
    before = runs.training("extended", max_steps=16)
    assert f"train: continues {before} after step 16" in runs.printed["other data"]
    records = runs.metrics("extended", max_steps=20)
    steps = [record["step"] for record in records if record["kind"] == "train"]
    assert steps == list(range(1, 21))
    # Optimizer states and weights continue: the loss does not jump back to that of the first steps.
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert losses[16] < 0.9 * losses[0]
    # The draft head keeps the tokens that it was trained for.
    kept = [load_file(path / "vocab.safetensors")["d2t"] for path in (trained, before)]
    assert torch.equal(*kept)
    assert (
        read_json(trained / "begun.json")["inputs"]["vocab"]
        != read_json(before / "begun.json")["inputs"]["vocab"]
    )
    state = read_json(trained / "checkpoints" / "step-00000020" / "state.json")
    assert state["first_epoch"] == 1
    assert (state["epoch"], state["row"]) > (1, 0)


def test_the_same_command_finds_its_training_again(runs: Runs) -> None:
    for name, run, steps in (("branch", "branch", 12), ("other data", "extended", 20)):
        assert f"train: reused, {runs.training(run, max_steps=steps)}" in runs.printed[f"{name} again"]
    assert "evaluate: reused" in runs.printed["branch again"]


@pytest.mark.parametrize(
    ("run", "field", "remedy"),
    [
        ("no step left", "train.max_steps=16", "is at step 16 already"),
        ("another drafter", "train.continue_from=", "drafter.num_hidden_layers: 1 -> 2"),
        ("no such step", "train.continue_from=", "checkpoints there are of steps [8, 12, 16]"),
        ("no training", "train.continue_from=", "No training there has a checkpoint"),
    ],
)
def test_what_cannot_be_continued_is_refused(runs: Runs, run: str, field: str, remedy: str) -> None:
    assert f"refused: {field}" in runs.printed[run]
    assert remedy in runs.printed[run]
    assert not (runs.root / "third" / "training").exists()


def test_a_training_that_starts_again_names_the_newest_other_one_and_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def begin(validate_every: int) -> Path:
        inputs = {"capture": "capture-1", "train": {"validate_every": validate_every, "max_steps": 9}}
        artifact = Artifact.locate(tmp_path / "artifacts", "train", inputs)
        settings = SimpleNamespace(train=SimpleNamespace(continue_from=None))
        context = SimpleNamespace(artifacts={Stage.train: artifact}, config=settings, output_dir=tmp_path)
        begin_training(context)
        return artifact.directory

    first = begin(200)
    assert capsys.readouterr().out == ""
    (first / "checkpoints" / "step-00000008").mkdir(parents=True)
    begin(60)
    printed = capsys.readouterr().out
    assert f"The training in {first}, which is at step 8" in printed
    assert "other settings: train.validate_every: 200 -> 60. " in printed
    assert f"train.continue_from={tmp_path} continues it" in printed
    begin(200)
    assert capsys.readouterr().out == ""  # it resumes


def test_an_output_directory_may_end_as_a_step_does(tmp_path: Path) -> None:
    (tmp_path / "run@2").mkdir()
    assert named_training(f"{tmp_path}/run@2") == (tmp_path / "run@2", None)
    assert named_training(f"{tmp_path}/run@3") == (tmp_path / "run", 3)
