from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.capture.transport.mooncake import MooncakeTransport, state_bytes
from data.capture.transport.mooncake_store import MooncakeSettings
from eagle31.errors import UserError
from tests.data.capture.transport.mooncake_master import (
    Master,
    running_master,
    start_producer,
)
from tests.data.capture.transport.mooncake_worker import HIDDEN_SIZE, NUM_AUX_LAYERS, open_transport, sample
from tests.processes import free_ports

SEGMENT_BYTES = 16 << 20
SHORT, LONG = 40, 8192  # tokens; a long sample takes 4 MiB


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    with running_master(tmp_path_factory.mktemp("mooncake")) as one:
        yield one


@pytest.fixture(scope="module")
def trainer(master: Master) -> Iterator[MooncakeTransport]:
    """Open the transport of a rank, which lends the memory."""
    transport = open_transport(master.settings(SEGMENT_BYTES))
    yield transport
    transport.close()


@pytest.fixture(scope="module")
def producer(trainer: MooncakeTransport) -> Iterator[MooncakeTransport]:
    """Open the transport as another process does."""
    transport = MooncakeTransport.from_json(trainer.to_json())
    yield transport
    transport.close()


def check(trainer: MooncakeTransport, index: int, num_tokens: int) -> None:
    request, aux, last = sample(index, num_tokens)
    taken = trainer.take(request, 1000.0)
    assert taken is not None
    assert taken.aux_hidden_states.equal(aux)
    assert taken.final_hidden_states.equal(last)


def test_a_process_feeds_a_rank_through_a_store_that_holds_a_third(
    master: Master, trainer: MooncakeTransport
) -> None:
    with start_producer(master.settings(), 12, LONG) as process:
        for index in range(12):
            check(trainer, index, LONG)
    assert process.returncode == 0
    assert not any(trainer.arrived(f"run-{index}") for index in range(12))


def test_a_full_store_refuses_in_time_and_loses_nothing(
    producer: MooncakeTransport, trainer: MooncakeTransport
) -> None:
    assert producer.settings.segment_bytes == 0
    fitting = SEGMENT_BYTES // state_bytes(LONG, NUM_AUX_LAYERS, HIDDEN_SIZE, torch.bfloat16)
    producer.put_seconds = 0.2
    refused, stored = "", 0
    while not refused:
        try:
            producer.put(*sample(stored, LONG))
            stored += 1
        except UserError as error:
            refused = str(error)
    assert "capture.spool_gb" in refused
    assert 0 < stored <= fitting
    assert not trainer.arrived(f"run-{stored}")
    for index in range(stored):
        check(trainer, index, LONG)
    producer.put_seconds = 1000.0
    producer.put(*sample(stored, LONG))
    trainer.discard(f"run-{stored}")
    assert not trainer.arrived(f"run-{stored}")


def test_what_one_run_left_is_removed_and_no_others(
    producer: MooncakeTransport, trainer: MooncakeTransport
) -> None:
    requests = [
        replace(sample(0, SHORT)[0], key=key) for key in ("a-1-left", "a-1-too", "a-10-kept", "b-a-1-kept")
    ]
    for request in requests:
        producer.put(request, *sample(0, SHORT)[1:])
    trainer.discard_all("a-1-")
    assert [producer.arrived(request.key) for request in requests] == [False, False, True, True]
    trainer.discard_all("a-10-")
    trainer.discard_all("b-")
    assert trainer._store.remove_all(force=True) == 0


def test_what_a_producer_that_died_had_begun_to_put_is_replaced(
    master: Master, producer: MooncakeTransport, trainer: MooncakeTransport
) -> None:
    request, aux, last = sample(0, SHORT)
    begin = producer._store.batch_put_session_start
    assert not any(begin(producer._keys(request.key), producer._sizes(SHORT), producer._pinned))
    with closing(open_transport(master.settings())) as successor:
        successor.put(request, aux, last)
        check(trainer, 0, SHORT)
        assert not trainer.arrived(request.key)


def test_a_restarted_master_is_found_again(tmp_path: Path) -> None:
    with running_master(tmp_path) as master:
        trainer = open_transport(master.settings(SEGMENT_BYTES))
        producer = open_transport(master.settings(), put_seconds=0.2)
        request, aux, last = sample(0, SHORT)
        producer.put(request, aux, last)
        master.kill()
        assert trainer.take(request, 0.0) is None
        with pytest.raises(UserError, match=r"capture\.mooncake\.master"):
            producer.put(request, aux, last)
        master.start()
        assert trainer.take(request, 0.0) is None
        producer.put_seconds = 1000.0
        producer.put(request, aux, last)
        check(trainer, 0, SHORT)
        producer.close()
        trainer.close()


def test_what_was_made_with_other_settings_is_refused(master: Master, trainer: MooncakeTransport) -> None:
    request, aux, last = sample(0, SHORT)
    other, _, _ = sample(1, SHORT)
    trainer.put(type(request)(request.key, other.input_ids, request.loss_mask), aux, last)
    with pytest.raises(UserError, match="other tokens, from position 0"):
        trainer.take(request, 1.0)
    wide = MooncakeTransport(
        master.settings(), num_aux_layers=NUM_AUX_LAYERS, hidden_size=HIDDEN_SIZE, dtype=torch.float32
    )
    wide.put(request, aux, last)
    with pytest.raises(UserError, match=r"has \d+ bytes where 3 layers of 64 torch.bfloat16"):
        trainer.take(request, 1.0)
    taken = wide.take(request, 1.0)
    assert taken is not None
    assert taken.aux_hidden_states.equal(aux.float())
    wide.close()


def test_a_master_that_does_not_answer_is_named_at_the_start(master: Master) -> None:
    (port,) = free_ports(1)
    with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}: No master answers at this address"):
        open_transport(MooncakeSettings(master=f"127.0.0.1:{port}"))
    with pytest.raises(UserError, match="host:port"):
        open_transport(MooncakeSettings(master="127.0.0.1"))
