"""One rank trains while its checkpoints are written; test_elastic.py has several ranks."""

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.errors import UserError
from train.distributed import World
from train.stop import Stopped
from train.trainer.checkpoint_files import SavedFragment, write_part
from train.trainer.checkpoints import CheckpointDirectory, HostCopies, TrainState
from train.trainer.learning_rate import LearningRate
from train.trainer.metrics import WindowSums
from train.trainer.settings import LoopSettings
from train.trainer.train import Training, train_loop, validate

WORLD = World(0, 0, 1)


class Engine:
    """What a checkpoint needs of DeepSpeed's engine at ZeRO 0."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.ModuleDict({"drafter": nn.Linear(5, 3)})
        self.module.drafter = self.module["drafter"]
        self.optimizer = self.basic_optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)
        self.basic_optimizer.refused = torch.tensor(False)  # type: ignore[attr-defined]

    def zero_optimization(self) -> bool:
        return False

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            self.module.drafter(rows).square().sum().backward()
            self.basic_optimizer.step()
            self.basic_optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.clone() for name, weight in self.module.drafter.state_dict().items()}


def loop(checkpoints: CheckpointDirectory, state: TrainState, max_steps: int, **changed: Any) -> Training:
    """What the loop trains with: one row of a step, and no validation."""
    rate = LearningRate(0.1, "linear", 0, max_steps, max_steps)
    settings = LoopSettings(max_steps, rate, 1.0, 1, 1, max_steps, 2, 1)
    loader = SimpleNamespace(
        read_ahead=lambda step: None,
        collect_stats=lambda: None,
        position=lambda step: (0, step),
        gave_up=False,
    )
    rows = SimpleNamespace(loader=loader, of_step=lambda step: step, waited_seconds=0.0)
    skipped = SimpleNamespace(
        record=lambda *_: None, collect=lambda wait: [], check=lambda saved: None, num_in_a_row=0
    )
    tracker, nothing = SimpleNamespace(log=lambda record: None), SimpleNamespace()
    given: list[Any] = [rows, nothing, nothing, checkpoints, tracker, skipped, replace(settings, **changed)]
    return Training(Engine(), *given, state, WORLD)  # type: ignore[arg-type]


def run(training: Training, stop_reason: Callable[[], str | None]) -> None:
    """Run the loop with the engine's steps, which validates without measuring."""

    def step(engine: Engine, number: int, *given: Any, stop: bool, **_: Any) -> tuple[Any, Tensor]:
        engine.train(number, number + 1)
        given[2].num_depths = 1
        return SimpleNamespace(read=lambda: [4, int(stop), 0]), torch.tensor(1.0)

    def validate(training: Training, _: WindowSums) -> None:
        training.state.best_step = training.state.validated_step = training.state.step

    with patch.multiple("train.trainer.train", optimizer_step=step, validate=validate):
        train_loop(training, stop_reason)


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Return what the writers wait for."""
    event = Event()

    def write(*given: Any) -> dict[str, int]:
        assert event.wait(60)
        return write_part(*given)

    monkeypatch.setattr("train.trainer.checkpoints.write_part", write)
    return event


def idle(saved: CheckpointDirectory) -> None:
    """Wait until nothing is left to write."""
    saved._writer.submit(int).result()


def test_training_resumes_from_the_weights_at_the_call(tmp_path: Path, may_write: Event) -> None:
    saved, engine, state = CheckpointDirectory(tmp_path, 2, WORLD), Engine(), TrainState(3)
    engine.train(0, 3)
    saved.save(engine, state)  # type: ignore[arg-type]
    state.step = 5
    engine.train(3, 5)
    saved.finish(wait=False)
    assert saved.steps() == []
    may_write.set()
    idle(saved)
    saved.finish(wait=False)
    assert saved.steps() == [3]
    resumed = Engine()
    assert CheckpointDirectory(tmp_path, 2, WORLD).resume(resumed) == TrainState(3)  # type: ignore[arg-type]
    resumed.train(3, 5)
    for name, weight in engine.weights().items():
        assert torch.equal(resumed.weights()[name], weight)


def test_the_newest_and_one_other_are_kept(tmp_path: Path) -> None:
    saved, engine, found = CheckpointDirectory(tmp_path, 2, WORLD), Engine(), []
    saved.always_kept = 2
    for step in range(1, 6):
        engine.train(step - 1, step)
        saved.save(engine, TrainState(step))  # type: ignore[arg-type]
        found.append(saved.steps())
    saved.finish()
    assert [*found, saved.steps()] == [[], [1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5]]
    idle(saved)
    assert len(list(tmp_path.iterdir())) == 3


def best_files(directory: Path) -> list[str]:
    return sorted(path.name[8:] for path in (directory / "best").iterdir())


def test_the_best_weights_of_the_newest_checkpoint_outlive_a_kill(tmp_path: Path) -> None:
    """Two validations after it find better ones, and the training that resumes does not."""
    saved, engine, at_2 = CheckpointDirectory(tmp_path, 2, WORLD), Engine(), {"w": torch.ones(3)}
    saved.save_best(at_2, TrainState(2, best_step=2))
    saved.save(engine, TrainState(2, best_step=2))  # type: ignore[arg-type]
    saved.finish()
    for step in (3, 4):
        saved.save_best({"w": torch.zeros(3)}, TrainState(step, best_step=step))
    names = [f"{step:08d}.{suffix}" for step in (2, 4) for suffix in ("json", "safetensors")]
    assert best_files(tmp_path) == names
    resumed = CheckpointDirectory(tmp_path, 2, WORLD)
    assert resumed.resume(engine).best_step == 2  # type: ignore[arg-type]
    assert torch.equal(resumed.best_weights(2)["w"], at_2["w"])
    (tmp_path / "best" / "drafter-mine.safetensors").touch()  # a user's
    resumed.save(engine, TrainState(5, best_step=2))  # type: ignore[arg-type]
    resumed.finish()
    assert best_files(tmp_path) == [*names[:2], "mine.safetensors"]


def test_the_best_step_is_the_last_with_the_longest_acceptance_and_not_after_skipped_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, state = CheckpointDirectory(tmp_path, 2, WORLD), TrainState()
    hits, validation, diagnosis = iter([20, 30, 25, 30, 29, 40]), SimpleNamespace(), SimpleNamespace()
    validation.run = lambda module: {1: AcceptanceStats(1, 100, (next(hits),))}
    diagnosis.run = lambda module: None
    training = replace(loop(saved, state, 9), validation=validation, diagnosis=diagnosis)
    monkeypatch.setattr(
        "train.trainer.train.full_state", lambda *_, **__: {"w": torch.tensor([float(state.step)])}
    )
    chosen = []
    for state.step in range(6):
        training.skipped.num_in_a_row = int(state.step == 5)
        validate(training, WindowSums(1, WORLD.device))
        chosen.append(state.best_step)
    assert chosen == [0, 1, 1, 3, 3, 3]
    assert state.best_acceptance_length == 1.3
    assert saved.best_weights(3)["w"] == 3


def test_damaged_best_weights_are_named_and_chosen_again(tmp_path: Path) -> None:
    saved, engine = CheckpointDirectory(tmp_path / "checkpoints", 2, WORLD), Engine()
    saved.save_best({"w": torch.ones(3)}, TrainState(2, best_step=2))
    saved.save(engine, TrainState(2, best_step=2))  # type: ignore[arg-type]
    saved.finish()
    file = tmp_path / "checkpoints" / "best" / "drafter-00000002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match=f"{file}.*delete {tmp_path / 'stage.json'}: the run's command then"):
        saved.best_weights(2)
    assert saved.resume(engine).best_step is None  # type: ignore[arg-type]


def fail(path: Path, _: Any) -> dict[str, int]:
    path.write_bytes(b"a part")
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("next_call", ["log", "save", "end"])
def test_a_full_disk_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_call: str) -> None:
    saved, engine = CheckpointDirectory(tmp_path, 1, WORLD), Engine()
    engine.train(0, 1)
    saved.save(engine, TrainState(1))  # type: ignore[arg-type]
    saved.finish()
    monkeypatch.setattr("train.trainer.checkpoints.write_part", fail)
    saved.save(engine, TrainState(2))  # type: ignore[arg-type]
    idle(saved)
    calls: dict[str, Callable[[], None]] = {
        "log": lambda: saved.finish(wait=False),
        "save": lambda: saved.save(engine, TrainState(3)),  # type: ignore[arg-type]
        "end": saved.finish,
    }
    with pytest.raises(OSError, match="No space left on device"):
        calls[next_call]()
    assert CheckpointDirectory(tmp_path, 1, WORLD).resume(Engine()).step == 1  # type: ignore[arg-type]


def test_a_stop_waits_for_both_checkpoints(tmp_path: Path, may_write: Event) -> None:
    saved, state = CheckpointDirectory(tmp_path, 2, WORLD), TrainState(best_step=0)

    def stop_reason() -> str | None:
        if state.step < 2:
            return None
        assert may_write.is_set() or saved.steps() == []
        may_write.set()
        return "SIGTERM"

    with pytest.raises(Stopped):
        run(loop(saved, state, 8), stop_reason)
    assert saved.steps() == [2, 3]


def test_a_stop_saves_and_the_run_that_resumes_validates(tmp_path: Path) -> None:
    saved, state = CheckpointDirectory(tmp_path, 2, WORLD), TrainState(best_step=0, validated_step=0)
    with pytest.raises(Stopped):
        run(loop(saved, state, 8, validate_every=3), lambda: "SIGTERM" if state.step == 2 else None)
    resumed = saved.resume(Engine())  # type: ignore[arg-type]
    assert (resumed.step, resumed.validated_step) == (3, 0)
    with pytest.raises(Stopped):
        run(loop(saved, resumed, 8, validate_every=3), lambda: "SIGTERM")
    assert (resumed.step, resumed.validated_step) == (4, 3)


def test_the_loop_finishes_checkpoints_as_it_logs_and_at_its_end(tmp_path: Path) -> None:
    saved, state, found = CheckpointDirectory(tmp_path, 9, WORLD), TrainState(best_step=0), {}

    def note() -> None:
        found[state.step] = saved.steps()
        idle(saved)

    run(loop(saved, state, 5), note)
    assert found == {0: [], 1: [], 2: [], 3: [2], 4: [2]}
    assert saved.steps() == [2, 4, 5]


def test_copies_use_the_same_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.trainer.checkpoints._PIECE", 4)
    copies, values = HostCopies(), torch.arange(10.0)
    fragments = [SavedFragment("weights", "a", 7, values), SavedFragment("weights", "b", 0, values[:2])]
    first = copies.of(fragments)
    assert [(one.key, one.values.tolist()) for one in first] == [
        ("weights/a/7", [0, 1, 2, 3]),
        ("weights/a/11", [4, 5, 6, 7]),
        ("weights/a/15", [8, 9]),
        ("weights/b/0", [0, 1]),
    ]
    values += 1
    second = copies.of(fragments)
    assert second[1].values.tolist() == [5, 6, 7, 8]
    assert [one.values.data_ptr() for one in first] == [one.values.data_ptr() for one in second]
    # The optimizer has more states.
    longer = copies.of([*fragments, replace(fragments[1], kind="exp_avg")])
    assert [len(one.values) for one in longer] == [4, 4, 2, 2, 2]
