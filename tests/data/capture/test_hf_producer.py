import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from datasets import Dataset
from torch import Tensor

from data.batches.loader import RowLoader
from data.capture.hf_producer import hf_producer
from data.capture.online import OnlineStates
from data.capture.processes import ProcessProducer
from data.capture.worker import _capture_batch, next_batch
from data.samples import StateShape
from data.transport.protocol import StateRequest
from data.transport.spool import Spool, file_bytes
from eagle31.errors import UserError
from tests.data.capture.delivery import (
    ENCODING,
    REPLAY,
    open_memory,
    random_dataset,
    replaying,
    states_from,
    used_bytes,
    write_store,
)
from tests.data.capture.faulty_worker import DEADLY, HANGING
from tests.data.capture.test_online import assert_batches_equal
from tests.data.target.tiny_target import (
    AUX_LAYER_IDS,
    HIDDEN_SIZE,
    make_capture,
    make_dataset,
    save_target,
)
from tests.data.vllm.targets import make_hostile_directory
from tests.train.torchrun import ROOT

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("preloaded_children")


def _request(key: str, length: int) -> StateRequest:
    return StateRequest(key, torch.arange(length), torch.ones(length, dtype=torch.bool))


def test_a_batch_has_the_oldest_request_and_those_of_similar_length() -> None:
    lengths = [10, 40, 9, 12, 11, 100, 10]
    pending = [_request(str(i), length) for i, length in enumerate(lengths)]
    batches = []
    while pending:
        oldest = pending[0]
        batch = next_batch(pending, batch_tokens=44)
        assert oldest in batch
        batches.append(sorted(len(request.input_ids) for request in batch))
    assert batches == [[9, 10, 10, 11], [40], [12], [100]]
    pending = [_request(str(i), length) for i, length in enumerate([10, 10, 10, 9])]
    batches = []
    while pending:
        batches.append([request.key for request in next_batch(pending, 44, alone={"1", "3"})])
    assert batches == [["0", "2"], ["1"], ["3"]]


def test_a_batch_that_exceeds_memory_is_halved_and_finally_refused(tmp_path: Path) -> None:
    class SmallMemory:
        def capture(self, batch: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
            if sum(len(ids) for ids in batch) > 30:
                raise torch.OutOfMemoryError("30 tokens")
            return [(torch.zeros(len(ids), 2, 4), torch.zeros(len(ids), 4)) for ids in batch]

    spool = Spool(tmp_path, ENCODING)
    batch = [_request(str(i), length) for i, length in enumerate([12, 31, 14, 13])]
    answers = {request.key: refusal for request, refusal in _capture_batch(SmallMemory(), spool, batch)}
    assert answers == {"0": None, "1": "out of memory: 30 tokens", "2": None, "3": None}
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["0", "2", "3"]


def test_a_process_of_the_target_gives_its_states(tmp_path: Path) -> None:
    spec, dataset = save_target(tmp_path), make_dataset()
    capture = make_capture(spec)
    shape = StateShape(len(AUX_LAYER_IDS), HIDDEN_SIZE, torch.float32)

    def sample_bytes(loss_mask: Tensor) -> int:
        return file_bytes(ENCODING, loss_mask, *vars(shape).values())

    with open_memory(f"test-{tmp_path.name}") as spool:
        # One sample at a time, so that sums have the same order as in this process.
        with closing(
            hf_producer(spec, AUX_LAYER_IDS, CPU, spool, batch_tokens=1, num_processes=2)
        ) as producer:
            source = OnlineStates(
                dataset, producer, spool, shape=shape, sample_bytes=sample_bytes, spool_gb=1e-4, name="test"
            )
            order = [*range(len(dataset))] * 2
            source.expect(order)
            samples = source.get_many(order[:3]) + source.get_many(order[3:6])
            for index in order[6:]:
                samples += source.get_many([index])
        assert not list(spool.directory.iterdir())
    for index, sample in zip(order, samples, strict=True):
        assert sample.input_ids.tolist() == dataset[index]["input_ids"]
        [(aux, last)] = capture.capture([sample.input_ids])
        kept = sample.loss_mask[1:-1] & sample.loss_mask[2:]
        assert torch.equal(sample.final_hidden_states[1:-1][kept], last[1:-1][kept])
        drafted = 1 + int(kept.nonzero()[-1]) if kept.any() else 0
        assert torch.equal(sample.aux_hidden_states[:drafted], aux[:drafted])


def test_what_a_process_cannot_open_is_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    # The process finds our packages, though the user's working directory has modules of the same names.
    monkeypatch.chdir(make_hostile_directory(tmp_path / "hostile"))
    with open_memory(f"test-{tmp_path.name}") as spool:
        settings = {"store": str(tmp_path / "store"), "batch_tokens": 1, "transport": spool.to_json()}
        producer = ProcessProducer(REPLAY, settings, spool, num_processes=1)
        with closing(producer), pytest.raises(UserError, match=r"the capture is unfinished") as caught:
            _ = states_from(random_dataset(), producer, spool)[0]
        assert caught.value.field == "capture"


def test_a_process_that_keeps_dying_is_reported_with_its_last_output(tmp_path: Path) -> None:
    with (
        open_memory(f"test-{tmp_path.name}") as spool,
        closing(ProcessProducer("tests.no_such_module", {}, spool, num_processes=1)) as producer,
        pytest.raises(UserError, match=r"ended 3 times without a single sample.*No module named"),
    ):
        _ = states_from(random_dataset(), producer, spool)[0]


def test_a_sample_that_ends_or_hangs_its_process_is_set_aside_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.capture.online._POLL_SECONDS", 0.01)
    clean = random_dataset()
    faults = {4: DEADLY, 9: HANGING}
    ids = [[faults.get(i, row[0]), *row[1:]] for i, row in enumerate(clean["input_ids"])]
    dataset = Dataset.from_dict({"input_ids": ids, "loss_mask": clean["loss_mask"]})
    with open_memory(f"test-{tmp_path.name}") as spool:
        settings = {"batch_tokens": 1000, "transport": spool.to_json()}
        module = "tests.data.capture.faulty_worker"
        producer = ProcessProducer(module, settings, spool, num_processes=1, stall_seconds=1.0)
        with closing(producer):
            source = states_from(dataset, producer, spool)
            order = list(range(len(dataset)))
            source.expect(order)
            samples = source.get_many(order)
    assert "ended 3 times with it, at last with signal 9" in source.refused.pop(4)
    assert (
        "3 times with it, at last after 1.0 s without progress, which capture.stall_minutes"
        in source.refused.pop(9)
    )
    assert source.refused == {}
    assert producer.num_restarts == 5  # they were in one batch, when the first process died
    assert not producer._deaths_with  # nor is anything kept of those that came
    for index, sample in enumerate(samples):
        assert sample.input_ids.tolist() == ([] if index in faults else dataset[index]["input_ids"])


def test_killing_producers_changes_no_batch_and_never_exceeds_the_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset, bound = random_dataset(), 600_000
    store = write_store(tmp_path, dataset)
    options = {"row_tokens": 48, "rows_per_step": 2, "seed": 1, "pad_multiple": 16}
    with replaying(store, dataset, f"test-{tmp_path.name}", bound) as (source, producer, spool):
        stop, most = threading.Event(), [0]

        def watch() -> None:
            while not stop.wait(0.0005):
                most[0] = max(most[0], used_bytes(spool))

        watcher = threading.Thread(target=watch)
        watcher.start()
        online, offline = RowLoader(source, **options), RowLoader(store, **options)
        for step in range(24):
            if step in (8, 16):
                psutil.Process(producer.process_ids[0]).kill()
            assert_batches_equal(online.batches(step), offline.batches(step))
        online.close()
        offline.close()
        stop.set()
        watcher.join()
    assert source.collect_stats().num_restarts == 2
    assert [record.message for record in caplog.records] == [
        f"the producer of hidden states was started again ({i})" for i in (1, 2)
    ]
    assert bound / 2 < most[0] <= bound


def test_processes_end_with_a_trainer_whose_pipes_another_process_holds(tmp_path: Path) -> None:
    store = write_store(tmp_path, random_dataset())
    settings = {"store": str(store.directory), "batch_tokens": 1}
    script = (
        "import json, os, sys, time\n"
        "from pathlib import Path\n"
        "from data.capture.processes import ProcessProducer\n"
        "from data.store.codec import Encoding\n"
        "from data.transport.spool import Spool\n"
        "spool = Spool(Path(sys.argv[1]), Encoding())\n"
        "settings = json.loads(sys.argv[2]) | {'transport': spool.to_json()}\n"
        f"producer = ProcessProducer('{REPLAY}', settings, spool, 1)\n"
        "if forked := os.fork():\n"
        "    print(json.dumps([forked, *producer.process_ids]), flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), json.dumps(settings)]
    trainer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    forked, worker = (psutil.Process(pid) for pid in json.loads(trainer.stdout.readline()))
    try:
        trainer.kill()
        trainer.wait()
        assert not psutil.wait_procs([worker], timeout=30)[1]
    finally:
        forked.kill()
        trainer.stdout.close()
