"""States that arrive online, compared with a store of the same states."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from data.batches.loader import RowLoader
from data.capture import arriving
from data.capture.arriving import ArrivingStates
from data.capture.dispatch import Completions, Prompt, Refused
from data.capture.transport.protocol import OpenTransport, StateRequest
from data.capture.transport.spool import Spool, file_bytes, open_spool
from data.samples import CapturedSample, StateShape
from data.store import HiddenStateStore
from data.store.index import write_manifest
from data.store.shards import FinishedShards
from data.store.writer import StoreWriter
from eagle31.errors import UserError
from eagle31.training.batch import PackedBatch
from tests.data.capture.transport.putting import put

SHAPE = StateShape(num_aux_layers=3, hidden_size=256, dtype=torch.float32)
CODEC = "exact"
NUM_SAMPLES = 30


def random_dataset() -> Dataset:
    """Return samples of 5 to 24 tokens, of which the first two are the prompt."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(5, 25, (NUM_SAMPLES,), generator=generator).tolist()
    ids = [torch.randint(100_000, (length,), generator=generator).tolist() for length in lengths]
    masks = [[False, False] + [True] * (length - 2) for length in lengths]
    return Dataset.from_dict({"input_ids": ids, "loss_mask": masks})


def random_states(input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random states that depend on the tokens only."""
    generator = torch.Generator().manual_seed(int(input_ids.sum()))
    aux = torch.randn(len(input_ids), SHAPE.num_aux_layers, SHAPE.hidden_size, generator=generator)
    return aux, torch.randn(len(input_ids), SHAPE.hidden_size, generator=generator)


def write_store(directory: Path, dataset: Dataset) -> HiddenStateStore:
    with StoreWriter(directory, "test", CODEC, shard_tokens=100) as writer:
        for index, row in enumerate(dataset.with_format("torch")):
            states = random_states(row["input_ids"])
            writer.append(index, CapturedSample(row["input_ids"], row["loss_mask"], *states))
    write_manifest(FinishedShards(directory), {"codec": CODEC})
    return HiddenStateStore(directory)


class PromptEngine:
    """A dispatcher in this process that puts requested states at once, or those that `put` selects."""

    def __init__(self, spool: Spool, put: Callable[[StateRequest], bool] = lambda _: True) -> None:
        self.num_failures = 0
        self.spool = spool
        self.put = put
        self.refuses: Callable[[StateRequest], bool] = lambda _: False
        self.requests: list[StateRequest] = []
        self.most_bytes = 0

    def submit(self, prompt: Prompt) -> Future[Completions]:
        self.requests.append(prompt.task)
        if self.refuses(prompt.task):
            prompt.answer.set_exception(Refused("too long"))
            return prompt.answer
        if self.put(prompt.task):
            put(self.spool, prompt.task, *random_states(prompt.task.input_ids))
        self.most_bytes = max(self.most_bytes, used_bytes(self.spool))
        prompt.answer.set_result([])
        return prompt.answer


def used_bytes(spool: Spool) -> int:
    """Return the size of the directory, whose files may disappear in the meantime."""
    total = 0
    for path in spool.directory.iterdir():
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def sample_bytes(loss_mask: torch.Tensor) -> int:
    return file_bytes(CODEC, loss_mask, SHAPE)


def states_from(dataset: Dataset, engine: Any, spool: Spool, spool_bytes: int = 10**8) -> ArrivingStates:
    opened = OpenTransport(spool, SHAPE, sample_bytes, lambda request: request)
    return ArrivingStates(dataset, engine, opened, spool_gb=spool_bytes / 1e9, name="test")


DATASET = random_dataset()
ORDER = [5, 3, 29, 0, 5, 17, 8, 8, 2, 11]
STEP = 2


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    with open_spool(None, f"test-{tmp_path.name}", CODEC, 10**8) as spool:
        yield spool


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(arriving, "_ARRIVAL_SECONDS", 0.02)


def read(source: ArrivingStates, order: list[int]) -> list[CapturedSample]:
    source.expect(order)
    return [
        sample
        for start in range(0, len(order), STEP)
        for sample in source.get_many(order[start : start + STEP])
    ]


def assert_right(samples: list[CapturedSample], order: list[int]) -> None:
    for index, sample in zip(order, samples, strict=True):
        assert sample.input_ids.tolist() == DATASET[index]["input_ids"]
        assert sample.loss_mask.tolist() == DATASET[index]["loss_mask"]
        kept = sample.loss_mask[1:-1] & sample.loss_mask[2:]
        expected = random_states(sample.input_ids)[1][1:-1][kept]
        assert torch.equal(sample.final_hidden_states[1:-1][kept], expected)


def assert_batches_equal(found: list[PackedBatch], expected: list[PackedBatch]) -> None:
    for a, b in zip(found, expected, strict=True):
        for name, value in vars(b).items():
            assert torch.equal(getattr(a, name), value), name


def needed(order: Sequence[int]) -> int:
    return sum(sample_bytes(torch.tensor(DATASET[i]["loss_mask"])) for i in order)


def test_exactly_what_fits_is_requested(spool: Spool) -> None:
    engine = PromptEngine(spool)
    bound = needed(ORDER[:4])
    source = states_from(DATASET, engine, spool, bound)
    source.expect(ORDER)
    assert len(engine.requests) == 4
    for place in range(0, len(ORDER), STEP):
        source.get_many(ORDER[place : place + STEP])
        assert needed(ORDER[place + STEP : len(engine.requests)]) <= bound
    assert len(engine.requests) == len(ORDER)
    assert bound / 2 < engine.most_bytes <= bound


def test_a_bound_below_a_step_is_refused_with_what_it_takes(spool: Spool) -> None:
    order = sorted(ORDER, key=lambda index: -needed([index]))
    bound = needed(order[:STEP]) - 1
    source = states_from(DATASET, PromptEngine(spool), spool, bound)
    source.expect(order)
    with pytest.raises(UserError, match=rf"capture\.spool_gb=.* take {(bound + 1) / 1e9:.3g} GB"):
        source.get_many(order[:STEP])


def test_a_bound_below_the_longest_sample_is_refused_before_anything_is_requested(spool: Spool) -> None:
    bound = max(needed([index]) for index in range(NUM_SAMPLES)) - 1
    with pytest.raises(UserError, match=rf"capture\.spool_gb=.* takes {(bound + 1) / 1e9:.3g} GB"):
        states_from(DATASET, PromptEngine(spool), spool, bound)


def test_what_is_lost_is_requested_again(spool: Spool, impatient: None) -> None:
    seen: set[str] = set()

    def second_time(request: StateRequest) -> bool:
        known = request.key in seen
        seen.add(request.key)
        return known

    source = states_from(DATASET, PromptEngine(spool, second_time), spool)
    assert_right(read(source, ORDER), ORDER)
    stats = source.collect_stats()
    assert stats.starved_seconds > 0
    assert source.collect_stats().starved_seconds == 0


def test_what_takes_an_engine_long_is_requested_once(
    spool: Spool, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, timers = PromptEngine(spool), []

    def submit(prompt: Prompt) -> Future[Completions]:
        # Five times as long as a sample may take to arrive.
        timers.append(threading.Timer(0.1, PromptEngine.submit, (engine, prompt)))
        timers[-1].start()
        return prompt.answer

    monkeypatch.setattr(engine, "submit", submit)
    assert_right(read(states_from(DATASET, engine, spool), [5]), [5])
    timers[0].join()
    assert len(timers) == 1


def test_what_never_arrives_ends_the_run_and_not_the_store(spool: Spool, impatient: None) -> None:
    engine = PromptEngine(spool, lambda _: False)
    with pytest.raises(UserError, match=r"sample 5: It was captured 4 times and did not arrive"):
        read(states_from(DATASET, engine, spool), ORDER)


def test_all_samples_come_the_longest_first_with_the_reasons_of_those_refused(
    spool: Spool, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arriving, "_CHUNK_SAMPLES", 4)

    engine = PromptEngine(spool)
    engine.refuses = lambda request: request.input_ids.tolist() == DATASET[3]["input_ids"]
    found = dict(states_from(DATASET, engine, spool, needed(range(6))).captured(range(11)))
    assert found.pop(3) == "too long"
    lengths = [len(DATASET[index]["input_ids"]) for index in found]
    assert lengths == sorted(lengths, reverse=True)
    assert_right(list(found.values()), list(found))


def test_what_a_restarted_engine_puts_twice_is_removed(spool: Spool) -> None:
    engine = PromptEngine(spool)
    source = states_from(DATASET, engine, spool, needed(ORDER[:6]))
    source.expect(ORDER)
    source.get_many(ORDER[:2])
    engine.num_failures += 1
    # It died before it reported that these were done.
    for request in engine.requests[:6]:
        put(spool, request, *random_states(request.input_ids))
    assert_right(source.get_many(ORDER[2:4]), ORDER[2:4])
    for request in engine.requests[2:4]:
        put(spool, request, *random_states(request.input_ids))
    assert_right(source.get_many(ORDER[4:6]), ORDER[4:6])
    waiting = {path.stem for path in spool.directory.iterdir()}
    assert waiting == {request.key for request in engine.requests[6:]}
    assert source.collect_stats().num_restarts == 1


def test_a_refused_sample_is_left_out_with_one_warning(
    spool: Spool, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    engine = PromptEngine(spool)
    engine.refuses = lambda request: request.input_ids.tolist() == DATASET[3]["input_ids"]
    order = [5, 3, 7, 3]
    with caplog.at_level(logging.WARNING):
        samples = read(states_from(DATASET, engine, spool), order)
    assert [len(sample.input_ids) > 0 for sample in samples] == [True, False, True, False]
    assert samples[1].aux_hidden_states.shape == (0, SHAPE.num_aux_layers, SHAPE.hidden_size)
    assert [record.message for record in caplog.records] == ["sample 3 is left out: too long"]


def test_too_many_refusals_end_the_run_with_the_reason(spool: Spool, impatient: None) -> None:
    engine = PromptEngine(spool)
    engine.refuses = lambda _: True
    with pytest.raises(UserError, match=r"9 of 30 samples refused.* too long"):
        read(states_from(DATASET, engine, spool), list(range(10)))


def test_stop_ends_a_wait(spool: Spool) -> None:
    source = states_from(DATASET, PromptEngine(spool, lambda _: False), spool)
    timer = threading.Timer(0.1, source.stop)
    timer.start()
    [sample] = read(source, [0])
    assert len(sample.input_ids) == 0
    assert source.gave_up
    timer.join()


def test_training_reads_the_same_online_as_from_a_store(tmp_path: Path, spool: Spool) -> None:
    store = write_store(tmp_path, DATASET)
    for rank in range(2):
        arriving_states = states_from(DATASET, PromptEngine(spool), spool, 500_000)
        loaders = [
            RowLoader(
                source,
                row_tokens=48,
                rows_per_step=2,
                rank=rank,
                world_size=2,
                seed=1,
                pad_multiple=16,
            )
            for source in (store, arriving_states)
        ]
        # This goes beyond the end of an epoch.
        for step in range(3, int(2.5 * loaders[0].rows_per_epoch / 2)):
            assert_batches_equal(loaders[1].batches(step), loaders[0].batches(step))
        for loader in loaders:
            loader.close()
