"""Runs under torchrun: trainings that SIGTERM ends while the last rank waits for states, and resumes.

DIRECTORY/RANK.json gets what came of them.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist
from datasets import Dataset

from data.batches.device_rows import DeviceRows
from data.batches.loader import RowLoader, RowPosition
from data.batches.shared_rows import SharedRows
from data.capture.arriving import ArrivingStates
from data.capture.dispatch import Completions, Prompt
from data.capture.transport.protocol import OpenTransport
from data.capture.transport.spool import Spool, file_bytes, open_spool
from data.samples import StateShape
from eagle31.training.schedule import DraftCosts
from tests.data.capture.transport.putting import put
from tests.train.trainer.tiny_engines import (
    LR,
    MAX_NORM,
    ROW_TOKENS,
    ROWS_PER_STEP,
    new_engine,
    random_source,
)
from train.distributed import World, leave_ranks
from train.stop import Stopped, stop_reasons
from train.tracking import open_tracker
from train.trainer.checkpoints import CheckpointDirectory
from train.trainer.engine import full_state
from train.trainer.learning_rate import LearningRate
from train.trainer.process_groups import ensure_process_group, row_groups
from train.trainer.settings import LoopSettings
from train.trainer.skipped import SkippedSteps
from train.trainer.train import Training, train_loop
from train.trainer.validation import DriftDiagnosis, ReplayValidation

STEPS, ALL = 6, 10**6
SOURCE = random_source()
SHAPE = StateShape.of(SOURCE.samples[0].aux_hidden_states)
DATASET = Dataset.from_list(
    [{"input_ids": one.input_ids.tolist(), "loss_mask": one.loss_mask.tolist()} for one in SOURCE.samples]
)


class Unanswered(Future[Completions]):
    """Calls `waiting` once the answer is awaited for a second."""

    def __init__(self, waiting: Callable[[], None]) -> None:
        super().__init__()
        self.waiting, self.num_polls = waiting, 0

    def done(self) -> bool:
        self.num_polls += 1
        if self.num_polls == 10:
            self.waiting()
        return False


class Engine:
    """Puts the states of the first samples at once, and never answers."""

    num_failures = 0

    def __init__(self, spool: Spool, num_answered: int, waiting: Callable[[], None]) -> None:
        self.spool, self.num_answered, self.waiting = spool, num_answered, waiting

    def submit(self, prompt: Prompt) -> Future[Completions]:
        request = prompt.task
        if int(request.key.rsplit("-")[-1]) < self.num_answered:
            [sample] = [one for one in SOURCE.samples if torch.equal(one.input_ids, request.input_ids)]
            put(self.spool, request, sample.aux_hidden_states, sample.final_hidden_states)
        return Unanswered(self.waiting)


def train(directory: Path, zero_stage: int, shared: bool, num_answered: int, world: World) -> dict:
    """Train up to the last step, or a stop; return at which step, and the weights' sums."""
    groups = row_groups(world.size) if shared else None
    engine = new_engine(zero_stage, False, world, groups=groups)
    checkpoints = CheckpointDirectory(directory / "checkpoints", 2, world)
    state = checkpoints.resume(engine)
    name = f"stopping-{directory.name}-{world.rank}"
    settings = LoopSettings(STEPS, LearningRate(LR, "linear", 0, STEPS, STEPS), MAX_NORM, 3, 1, STEPS, 2, 3)
    held_out, last = (SOURCE, ROW_TOKENS), world.rank == world.size - 1

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with (
        open_spool(None, name, "exact", 10**7) as spool,
        stop_reasons(None) as stop_reason,
        open_tracker(
            name=name, config={}, directory=directory, resume_step=state.step, is_main=world.is_main
        ) as tracker,
    ):
        if shared and num_answered < ALL and not last:
            stop()  # the last rank, which waits, is not asked
        engine_of_states: Any = Engine(
            spool, num_answered if last else ALL, (lambda: None) if shared else stop
        )
        opened = OpenTransport(
            spool,
            SHAPE,
            lambda mask: file_bytes("exact", mask, SHAPE),
            lambda request: request,
        )
        states = ArrivingStates(
            DATASET,
            engine_of_states,
            opened,
            spool_gb=0.01,
            name=name,
            stopping=lambda: stop_reason() is not None,
        )
        loader = RowLoader(
            states,
            row_tokens=ROW_TOKENS,
            rows_per_step=3 if shared else ROWS_PER_STEP,  # the last rank reads the next row
            rank=0 if shared else world.rank,
            world_size=1 if shared else world.size,
            seed=0,
            begin=RowPosition(state.step, state.epoch, state.row),
            state_shape=SHAPE,
            reader=world.rank if shared else 0,
            num_readers=world.size if shared else 1,
        )
        rows = DeviceRows(
            loader,
            num_steps=3,
            device=world.device,
            dtype=torch.float32,
            stop_step=STEPS,
            chunk_rows=7,
            shared=groups and SharedRows(groups.on_host, SHAPE, None, DraftCosts(1.0, 0.01, None)),
            executor=ThreadPoolExecutor(1) if shared else None,  # as on a GPU
        )
        with closing(rows):
            training = Training(
                engine,
                rows,
                ReplayValidation(*held_out, 3, 8, world),
                DriftDiagnosis(*held_out, 3, world),
                checkpoints,
                tracker,
                SkippedSteps(LR, lambda step: []),
                settings,
                state,
                world,
            )
            try:
                train_loop(training, stop_reason)
                stopped = None
            except Stopped as error:
                stopped = error.reason or "another rank"
    weights = full_state(engine, keep=True)
    return {
        "step": state.step,
        "stopped": stopped,
        "positions": state.supervised_positions,
        "weights": {name: one.double().sum().item() for name, one in weights.items()},
    }


def main() -> None:
    directory, world = Path(sys.argv[1]), World.from_environment()
    ensure_process_group()
    results = {}
    with (
        mock.patch.multiple(torch.cuda, Event=mock.MagicMock(), current_stream=mock.MagicMock()),
        mock.patch.object(torch.cuda, "stream", return_value=nullcontext()),
    ):
        for zero_stage, shared, num_answered in ((0, False, 9), (2, False, 9), (3, True, 2)):
            for name, answered in (("whole", [ALL]), ("stopped", [num_answered, ALL])):
                path = directory / f"{name}-{zero_stage}"
                path.mkdir(exist_ok=True)
                runs = [train(path, zero_stage, shared, one, world) for one in answered]
                results[path.name] = runs
                dist.barrier()
    (directory / f"{world.rank}.json").write_text(json.dumps(results))
    leave_ranks(world)


if __name__ == "__main__":
    main()
