"""Trainings that continue: more steps, another schedule, other data, and a warm-down branched off."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data.embedded.target import EmbeddedTarget
from eagle31.json_files import read_json, read_jsonl
from tests.train.small_run import RECIPE, arguments, assert_faithful, depends_on_time
from tests.train.torchrun import composed, torchrun
from train.config.run import Stage
from train.context import RunContext
from train.distributed import World
from train.pipeline import unfinished_stages
from train.trainer.parts import load_weights

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
        [found] = [
            path.parent
            for path in (self.root / run).glob("artifacts/train-*/begun.json")
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
    for name in ("extended", "whole", "origins"):
        shutil.copytree(captured, root / name)

    def run(name: str, *settings: str) -> list[str]:
        every = ["train.validate_every=4", "train.save_every=4", "optim=adamw"]
        return [f"recipe={RECIPE}", *arguments(small_target, root / name), *every, *settings]

    branch = [f"train.continue_from={root / 'whole'}@8", "train.max_steps=12"]
    few = ["train.ttt_steps=1", "evaluate.draft_tokens=1"]
    longer = [TRAIN, *WARM_DOWN, *few, "train.rows_per_step=1", "train.max_steps=5"]
    steps: dict[str, Any] = {
        "first": run("extended", TRAIN, *WARM_DOWN, "train.max_steps=8"),
        # From the checkpoint at which the rate of the first began to fall.
        "second": run(
            "extended", TRAIN, *WARM_DOWN, "train.max_steps=16", f"train.continue_from={root / 'extended'}@6"
        ),
        "whole": run("whole", TRAIN, *WARM_DOWN, "train.max_steps=16"),
        # The branch needs a directory alone: it finds the results of all earlier stages.
        "branch": run("branch", EVALUATED, *branch, *WARM_DOWN),
        "branch again": run("branch", EVALUATED, *branch, *WARM_DOWN),
        "shorter": run("origins", TRAIN, *WARM_DOWN, "train.max_steps=4"),
        "longer": run("origins", *longer),
        "longer, from none": run("origins", *longer, "train.continue_from=none"),
        "longer again": run("origins", *longer),
        "longer, as named": run("origins", *longer, f"train.continue_from={root / 'origins'}@4"),
        "other data": run(
            "extended", TRAIN, *WARM_DOWN, "train.max_steps=20", "capture.max_samples=60", "optim.lr=1e-3"
        ),
        "as many steps": run("extended", TRAIN, *WARM_DOWN, "train.max_steps=2"),
        "as many steps, other data": run("extended", TRAIN, "train.max_steps=2", "capture.max_samples=50"),
        "another drafter": run("extended", TRAIN, "drafter.num_hidden_layers=2", "train.max_steps=1"),
        "from the first step": run("extended", TRAIN, "train.max_steps=21", "train.continue_from=none"),
        "another drafter, named": run(
            "third", TRAIN, "drafter.num_hidden_layers=2", f"train.continue_from={root / 'whole'}"
        ),
        "no such step": run("third", TRAIN, f"train.continue_from={root / 'whole'}@7", *WARM_DOWN),
        "no training": run("third", TRAIN, f"train.continue_from={root / 'nothing'}"),
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
    assert f"train: continues {first} after step 6" in runs.printed["second"]
    # The weights of step 6 are validated again: those of step 8 have replaced the best ones.
    ours = [
        one for one in runs.metrics("extended", max_steps=16) if one["step"] != 6 or one["kind"] == "train"
    ]
    assert ours == runs.metrics("whole", max_steps=16)
    rates = [record["learning_rate"] for record in ours if record["kind"] == "train"]
    assert rates == pytest.approx([*[3e-3] * 13, 2.25e-3, 1.5e-3, 0.75e-3])
    extended, whole = (_saved(runs.training(name, max_steps=16), 16) for name in ("extended", "whole"))
    assert extended.keys() == whole.keys()
    assert "fc.weight.exp_avg_sq" in extended
    for name, value in extended.items():
        assert torch.equal(value, whole[name]), name
    # The first training's result is as it was.
    assert read_json(first / "stage.json")["facts"]["steps"] == 8
    assert read_json(first / "checkpoints" / "step-00000008" / "state.json")["continued_at"] == 0


def test_the_checkpoint_before_the_decay_is_kept(runs: Runs) -> None:
    steps = sorted(path.name for path in runs.training("whole").glob("checkpoints/step-*"))
    assert steps == ["step-00000008", "step-00000012", "step-00000016"]


def test_a_warm_down_is_branched_off_into_another_directory(runs: Runs) -> None:
    for stage in ("data", "vocab", "answers", "capture"):
        assert f"{stage}: reused" in runs.printed["branch"], stage
    trained, whole = runs.training("branch"), runs.training("whole")
    assert f"train: continues {whole} after step 8" in runs.printed["branch"]
    ours, theirs = (
        [one for one in runs.metrics(name) if one["kind"] == "train"] for name in ("branch", "whole")
    )
    assert ours[:9] == theirs[:9]
    rates = [record["learning_rate"] for record in ours]
    # A fifth of twelve steps, rounded up.
    assert rates[8:] == pytest.approx([3e-3, 3e-3, 2e-3, 1e-3])
    assert read_json(trained / "stage.json")["facts"]["continued_at"] == 8
    assert_faithful(runs.root / "branch")
    assert (runs.root / "branch" / "export" / "model.safetensors").is_file()
    assert "train: reused" in runs.printed["branch again"]
    assert "evaluate: reused" in runs.printed["branch again"]


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


def test_what_is_continued_is_a_part_of_the_result(runs: Runs) -> None:
    found = {}
    for path in (runs.root / "origins").glob("artifacts/train-*/begun.json"):
        inputs = read_json(path)["inputs"]
        if inputs["train"]["max_steps"] == 5:
            found["continued" in inputs] = path.parent
    first = runs.training("origins", max_steps=4)
    continued = read_json(found[True] / "begun.json")["inputs"]["continued"]
    assert continued == {"training": first.name, "step": 4}
    assert f"train: continues {first} after step 4" in runs.printed["longer"]
    assert "continues" not in runs.printed["longer, from none"]
    assert read_json(found[False] / "stage.json")["facts"]["continued_at"] == 0
    # The newest with these settings, and the one that continues what is named.
    assert f"train: reused, {found[False]}" in runs.printed["longer again"]
    assert f"train: reused, {found[True]}" in runs.printed["longer, as named"]


def test_all_ranks_know_that_nothing_is_continued(runs: Runs, small_target: EmbeddedTarget) -> None:
    settings = [*WARM_DOWN, "optim=adamw", "train.max_steps=2"]
    config = composed(RECIPE, *arguments(small_target, runs.root / "origins"), *settings)
    stages = [Stage.data, Stage.vocab, Stage.answers, Stage.capture, Stage.train]
    contexts = [RunContext(config, World(rank, rank, size=2)) for rank in range(2)]
    for context in contexts:
        assert Stage.train in unfinished_stages(context, stages)
        assert context.earlier is not None  # but it has four steps
        assert context.continued is None
    main, other = contexts
    assert other.artifacts[Stage.train].directory == main.artifacts[Stage.train].directory


def test_equal_settings_come_before_a_newer_training_with_others(
    runs: Runs, small_target: EmbeddedTarget
) -> None:
    settings = [*WARM_DOWN, "train.validate_every=4", "optim=adamw", "train.max_steps=30"]
    config = composed(RECIPE, *arguments(small_target, runs.root / "extended"), *settings)
    context = RunContext(config, World(0, 0, size=1))
    unfinished_stages(context, [Stage.data, Stage.vocab])
    assert context.earlier is not None
    assert context.earlier.directory == runs.training("extended", max_steps=2)
    # What differs is named.
    assert "train.max_steps: 8 -> 16" in runs.printed["second"]


def test_what_cannot_be_continued_starts_at_the_first_step(runs: Runs) -> None:
    printed = runs.printed["another drafter"]
    assert "train: starts at the first step: The training in " in printed
    assert "drafter.num_hidden_layers: 1 -> 2" in printed
    assert runs.steps("extended", max_steps=1) == [0, 1, 1]
    printed = runs.printed["as many steps"]
    assert "is at step 16 already" in printed
    assert "train.max_steps: 16 -> 2" in printed
    assert runs.steps("extended", max_steps=2) == [0, 1, 2, 2]
    assert "continues" not in runs.printed["from the first step"]
    assert runs.metrics("extended", max_steps=21)[0]["step"] == 0


def test_what_cannot_be_continued_as_named_is_refused(runs: Runs) -> None:
    refused = runs.printed["another drafter, named"]
    assert "refused: train.continue_from=" in refused
    assert "drafter.num_hidden_layers: 1 -> 2" in refused
    # The draft vocabulary is that of the earlier training, so that nothing else can begin with it.
    refused = runs.printed["as many steps, other data"]
    assert "refused: train.max_steps=2: " in refused
    assert "train.continue_from=none" in refused
    assert "checkpoints there are of steps [8, 12, 16]" in runs.printed["no such step"]
    assert "No training there has a checkpoint" in runs.printed["no training"]
