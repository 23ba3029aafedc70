"""What a rank takes from the store of TorchSpec's engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from data.capture.torchspec.mooncake import MooncakeSettings
from data.capture.torchspec.transport import TorchSpecTransport
from eagle31.errors import UserError
from tests.data.capture.torchspec.mooncake_master import (
    HIDDEN_SIZE,
    Master,
    open_transport,
    put,
    running_master,
    sample,
)
from tests.processes import free_ports

SEGMENT_BYTES = 16 << 20


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    with running_master(tmp_path_factory.mktemp("mooncake")) as one:
        yield one


@pytest.fixture(scope="module")
def transport(master: Master) -> Iterator[TorchSpecTransport]:
    opened = open_transport(master.settings(SEGMENT_BYTES))
    yield opened
    opened.close()


def test_what_an_engine_has_put_is_taken_once(transport: TorchSpecTransport) -> None:
    for index, num_tokens in ((0, 40), (1, 8192), (2, 7)):
        request, aux, final = sample(index, num_tokens)
        put(transport, f"chosen-{index}", aux, request.input_ids, final)
        assert not transport.arrived(request.key)  # the engine has not said so
        transport.announce(request.key, f"chosen-{index}")
        assert transport.arrived(request.key)
        taken = transport.take(request, 10.0)
        assert taken is not None
        assert taken.aux_hidden_states.equal(aux)
        assert taken.final_hidden_states.equal(final)
        assert not transport.arrived(request.key)
        assert transport.take(request, 0.0) is None
    assert transport._store.remove_all(force=True) == 0


def test_of_a_sample_that_is_captured_twice_the_latest_stays(transport: TorchSpecTransport) -> None:
    request, aux, final = sample(0, 40)
    for chosen in ("first", "second"):
        put(transport, chosen, aux, request.input_ids, final)
        transport.announce(request.key, chosen)
    assert transport.take(request, 10.0) is not None
    assert transport._store.remove_all(force=True) == 0


def test_states_after_the_norm_are_divided_by_its_scale(master: Master) -> None:
    scale = torch.linspace(0.0, 2.0, HIDDEN_SIZE)  # the first is 0
    opened = open_transport(master.settings(SEGMENT_BYTES), scale)
    request, aux, final = sample(0, 40)
    put(opened, "normed", aux, request.input_ids, (final.float() * scale).bfloat16())
    opened.announce(request.key, "normed")
    taken = opened.take(request, 10.0)
    opened.close()
    assert taken is not None
    torch.testing.assert_close(taken.final_hidden_states[:, 1:], final[:, 1:], rtol=0.02, atol=0.0)
    assert not taken.final_hidden_states[:, 0].any()


def test_other_tokens_and_other_sizes_are_refused(transport: TorchSpecTransport) -> None:
    (request, aux, final), (other, _, _) = sample(0, 40), sample(1, 40)
    for ids, states, says in (
        (other.input_ids, aux, "other tokens, from position 0"),
        (request.input_ids, aux.float(), r"has \d+ bytes where 3 layers of 64 in torch.bfloat16"),
    ):
        put(transport, "chosen", states, ids, final)
        transport.announce(request.key, "chosen")
        with pytest.raises(UserError, match=says):
            transport.take(request, 1.0)
        transport.discard(request.key)


def test_a_master_that_does_not_answer_is_named_and_one_that_is_started_again_is_found(
    tmp_path: Path,
) -> None:
    (port,) = free_ports(1)
    with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}: The master .* does not answer"):
        open_transport(MooncakeSettings(f"127.0.0.1:{port}", "P2PHANDSHAKE", SEGMENT_BYTES))
    with running_master(tmp_path) as master:
        opened = open_transport(master.settings(SEGMENT_BYTES))
        request, aux, final = sample(0, 40)
        put(opened, "lost", aux, request.input_ids, final)
        opened.announce(request.key, "lost")
        master.kill()
        assert opened.take(request, 0.0) is None
        master.start()
        assert opened.take(request, 0.0) is None
        opened.close()
