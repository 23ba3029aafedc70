"""The rows of each step on the device: the loader's, in its order, one row ahead, without waiting."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from data.batches import device_rows
from data.batches.device_rows import DeviceRows, tensors_in
from data.batches.loader import RowLoader
from data.samples import CapturedSample
from eagle31.errors import UserError
from eagle31.training.batch import PackedBatch, supervised_drafts
from eagle31.training.step import schedule_batch
from tests.data.batches.memory_source import MemorySource, random_sample
from tests.pretended_gpu.device import CUDA, PretendedGpu, pinned

ROW_TOKENS, NUM_STEPS, NUM_ROWS = 32, 3, 2


def random_samples() -> MemorySource:
    return MemorySource([random_sample(9 + seed, seed) for seed in range(20)])


class Now(Executor):
    """Runs a task at once, in the caller's thread: the pretended GPU is there alone."""

    def __init__(self) -> None:
        self.num_tasks = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.num_tasks += 1
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class ReadRows:
    """A loader whose rows are read already, because its thread is not on the pretended GPU."""

    def __init__(self) -> None:
        with closing(loader_of()) as loader:
            self.rows = [loader.batches(step) for step in range(4)]

    def batches(self, step: int) -> list[PackedBatch]:
        return self.rows[step]


def loader_of(rows_per_step: int = NUM_ROWS) -> RowLoader:
    return RowLoader(
        random_samples(), row_tokens=ROW_TOKENS, rows_per_step=rows_per_step, seed=0, pad_multiple=8
    )


def rows_of(loader: Any, device: torch.device, **changes: Any) -> DeviceRows:
    settings: dict[str, Any] = {"dtype": torch.float32, "stop_step": 4} | changes
    return DeviceRows(loader, num_steps=NUM_STEPS, device=device, **settings)


def test_rows_and_counts_are_those_of_the_loader() -> None:
    with closing(loader_of()) as loader, closing(loader_of()) as same:
        rows = rows_of(loader, torch.device("cpu"))
        for step in (0, 1, 2, 3):
            expected = same.batches(step)
            step_rows = rows.of_step(step)
            supervised = [supervised_drafts(b.loss_mask, b.document_ids, 1).sum() for b in expected]
            assert step_rows.counts.num_supervised == sum(supervised) > 0
            assert step_rows.counts.num_tokens == sum(int((b.document_ids != -1).sum()) for b in expected)
            for row, batch in zip(step_rows.rows, expected, strict=True):
                assert torch.equal(row.batch.input_ids, batch.input_ids)
                assert row.batch.aux_hidden_states.dtype == torch.float32
                scheduled = tensors_in(schedule_batch(batch, NUM_STEPS))
                for ours, theirs in zip(tensors_in(row.schedule), scheduled, strict=True):
                    assert torch.equal(ours, theirs)


def test_sampled_rows_are_the_same_on_any_number_of_ranks_and_differ_between_steps() -> None:
    def drafted(rank: int, world_size: int, step: int) -> dict[int, list[list[int]]]:
        loader = RowLoader(
            MemorySource([random_sample(30, seed) for seed in range(4)]),
            row_tokens=ROW_TOKENS,
            rows_per_step=4,
            rank=rank,
            world_size=world_size,
            seed=0,
        )
        with closing(loader):
            rows = rows_of(loader, torch.device("cpu"), max_drafts=3).of_step(step)
            assert rows.counts.num_supervised > 3 * rows.num_rows  # of all, sampled or not
            return {
                int(row.batch.input_ids.sum()): [one.rows.tolist() for one in row.schedule.chunks[0].steps]
                for row in rows.rows
            }

    steps = [drafted(0, 1, step) for step in range(4)]
    assert all(len(rows[0]) == 3 for of_step in steps for rows in of_step.values())
    assert any(steps[0][row] != steps[step][row] for row in steps[0] for step in (1, 2, 3))
    assert drafted(0, 2, 3) | drafted(1, 2, 3) == steps[3]


def test_a_gpu_gets_rows_from_pinned_memory_without_waiting() -> None:
    loader, now = ReadRows(), Now()
    with PretendedGpu() as gpu:
        loader.rows = [[pinned(batch) for batch in batches] for batches in loader.rows]
        rows = rows_of(loader, CUDA, executor=now)
        found = []
        for step in range(4):
            for row in rows.of_step(step).rows:
                found.append(row)
                # The next row is copied already, but none after the last step.
                assert now.num_tasks == min(len(found) + 1, 4 * NUM_ROWS)
        assert len(found) == 4 * NUM_ROWS
        assert {tensor.device for tensor in vars(found[0].batch).values()} == {CUDA}
        assert not gpu.waits
        # The memory of a row, which belongs to the second stream, is kept until the first has used it.
        recorded = gpu.operations.count(torch.ops.aten.record_stream.default)
        assert recorded == sum(tensor.is_cuda for row in found for tensor in tensors_in(row))


@pytest.fixture
def in_background(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    """A thread for the rows of a device whose streams and events do nothing, as the CPU's would."""
    for name in ("Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_an_error_in_the_background_reaches_the_loop(in_background: ThreadPoolExecutor) -> None:
    loader = loader_of()
    read = loader.source.get_many
    steps = iter([read, lambda _: (_ for _ in ()).throw(UserError("store", "x", "damaged"))])
    loader.source.get_many = lambda indices: next(steps)(indices)  # type: ignore[method-assign]
    rows = rows_of(loader, torch.device("cpu"), executor=in_background)
    assert len(list(rows.of_step(0).rows)) == NUM_ROWS
    with pytest.raises(UserError, match="damaged"):
        rows.of_step(1)
    loader.close()
    rows.close()


def test_a_wait_for_the_device_is_no_wait_for_data(
    in_background: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [0.0]

    def passes(by: float) -> None:
        seconds[0] += by

    monkeypatch.setattr(device_rows.time, "perf_counter", lambda: seconds[0])
    busy = torch.cuda.Event.return_value
    busy.query.return_value = False
    busy.synchronize.side_effect = lambda: passes(100.0)
    loader = loader_of()
    read = loader.source.get_many
    loader.source.get_many = lambda indices: (passes(1.0), read(indices))[1]  # type: ignore[method-assign]
    rows = rows_of(loader, torch.device("cpu"), executor=in_background, stop_step=1)
    loader.steps_ahead = 1
    assert len(list(rows.of_step(0).rows)) == NUM_ROWS
    assert seconds[0] >= 100
    assert 1 <= rows.waited_seconds < 100
    loader.close()
    rows.close()


def test_closing_ends_the_wait_of_the_background_thread(in_background: ThreadPoolExecutor) -> None:
    """The next row is awaited in the background, although the loop ends after this one."""
    loader, arriving, waits = loader_of(), threading.Event(), threading.Event()
    read, first = loader.source.get_many, iter([True])

    def get_many(indices: Sequence[int]) -> list[CapturedSample]:
        if not next(first, False):
            waits.set()
            assert arriving.wait(30)
        return read(indices)

    loader.source.get_many = get_many  # type: ignore[method-assign]
    rows = rows_of(loader, torch.device("cpu"), executor=in_background)
    assert len(list(rows.of_step(0).rows)) == NUM_ROWS
    assert waits.wait(30)
    closing_loader = threading.Thread(target=loader.close)
    closing_loader.start()
    arriving.set()
    closing_loader.join(30)
    rows.close()
    assert not closing_loader.is_alive()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before
