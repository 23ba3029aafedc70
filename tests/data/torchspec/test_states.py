import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from data.capture.hf import HiddenStateCapture
from data.capture.online import OnlineStates
from data.samples import StateShape
from data.torchspec.settings import TorchSpecSettings
from data.torchspec.states import TorchSpecStates, before_norm, norm_gain
from data.transport.mooncake import state_bytes
from data.transport.mooncake_store import library_directory
from data.transport.protocol import StateRequest
from eagle31.errors import UserError
from tests.data.target.tiny_target import (
    HIDDEN_SIZE,
    NUM_LAYERS,
    VOCAB_SIZE,
    make_capture,
    make_dataset,
    save_target,
)
from tests.data.torchspec.ray_node import ON_CPU, running_node
from tests.data.transport.mooncake_master import Master, running_master
from tests.torchspec_python import torchspec_python

AUX_LAYER_IDS = (1, 3, NUM_LAYERS)
_TAKE_SECONDS = 60.0


@pytest.mark.parametrize("norm_class", [LlamaRMSNorm, GemmaRMSNorm])
def test_a_state_after_the_final_norm_gives_the_same_logits(norm_class: type[nn.Module]) -> None:
    torch.manual_seed(0)
    norm = norm_class(64, eps=1e-6)
    nn.init.uniform_(norm.get_parameter("weight"), 0.3, 3.0)
    states = 20 * torch.randn(50, 64)
    normed = norm(states).detach()
    gain = norm_gain(norm, 64)
    torch.testing.assert_close(norm(before_norm(normed, gain)), normed, rtol=1e-4, atol=1e-5)
    # In the store's dtype this costs no more than a rounding.
    narrow = norm(before_norm(normed.bfloat16(), gain).float())
    assert ((narrow - normed).norm() / normed.norm()).item() < 2**-7


def test_a_norm_that_cannot_be_undone_is_named() -> None:
    with pytest.raises(UserError, match="LayerNorm cannot be undone"):
        norm_gain(nn.LayerNorm(64), 64)


class Plane:
    """TorchSpec's engine with a real target, and what a rank needs to reach it."""

    def __init__(self, master: Master, address: str, directory: Path) -> None:
        self.address, self.directory = address, directory
        spec = replace(save_target(directory / "target"), dtype="bfloat16")
        self.reference: HiddenStateCapture = make_capture(spec, AUX_LAYER_IDS)
        config = self.reference.model.config
        self.settings = TorchSpecSettings(
            python=torchspec_python(),
            target=str(directory / "target"),
            aux_layer_ids=AUX_LAYER_IDS,
            num_layers=NUM_LAYERS,
            hidden_size=HIDDEN_SIZE,
            max_tokens=64,
            mooncake=replace(master.settings(32 << 20), metadata=master.metadata),
            rope_parameters=config.rope_parameters,
            overrides=("inference.inference_batch_size=4",),
            start_seconds=120.0,
        )

    def join(self, rank: int, run: str = "run") -> TorchSpecStates:
        norm, log = self.reference.modules.final_norm, self.directory / f"bridge-{rank}.log"
        return TorchSpecStates(self.settings, norm, run=run, rank=rank, log=log)

    def check(self, rank: TorchSpecStates, request: StateRequest) -> None:
        """Compare an arrived sample with our own capture of the same target."""
        sample = rank.take(request, _TAKE_SECONDS)
        assert sample is not None
        assert sample.input_ids is request.input_ids
        ((aux, last),) = self.reference.capture([request.input_ids])
        norm = self.reference.modules.final_norm
        assert sample.aux_hidden_states.dtype == torch.bfloat16
        for place in range(len(AUX_LAYER_IDS)):
            assert difference(sample.aux_hidden_states[:, place], aux[:, place]) < 0.01
        assert difference(norm(sample.final_hidden_states), norm(last)) < 0.01


def difference(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def random_request(key: str, seed: int) -> StateRequest:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(
        VOCAB_SIZE, (int(torch.randint(5, 60, (1,), generator=generator)),), generator=generator
    )
    return StateRequest(key, ids, torch.ones(len(ids), dtype=torch.bool))


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    python = torchspec_python()
    directory = tmp_path_factory.mktemp("ts")
    with running_master(directory) as master, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("PYTHONPATH", str(ON_CPU))
        with running_node(python, directory, str(library_directory())) as address:
            patch.setenv("RAY_ADDRESS", address)
            yield Plane(master, address, directory)


def test_torchspecs_engine_feeds_two_ranks_and_survives_kill_9(plane: Plane) -> None:
    leader = plane.join(rank=0)
    other = plane.join(rank=1)
    requests = [random_request(f"first-{seed}", seed) for seed in range(12)]
    for place, request in enumerate(requests):
        (leader, other)[place % 2].request(request)
    for place, request in enumerate(requests):
        plane.check((leader, other)[place % 2], request)
    assert not any(leader.arrived(request.key) for request in requests)

    dataset = make_dataset(8)
    online = OnlineStates(
        dataset,
        leader,
        leader,
        shape=StateShape(len(AUX_LAYER_IDS), HIDDEN_SIZE, torch.bfloat16),
        sample_bytes=lambda mask: state_bytes(len(mask), len(AUX_LAYER_IDS), HIDDEN_SIZE, torch.bfloat16),
        spool_gb=2e-5,  # about four samples
        name="test",
    )
    order = [5, 0, 3, 7, 1]
    online.expect(order)
    for index in order:
        (sample,) = online.get_many([index])
        assert sample.input_ids.tolist() == dataset[index]["input_ids"]

    # A request that the engine fails on does not fail its batch.
    bad = StateRequest("bad", torch.tensor([VOCAB_SIZE + 5]), torch.tensor([True]))
    for request in (requests[0], bad, requests[1]):
        leader.request(request)
    plane.check(leader, requests[0])
    plane.check(leader, requests[1])
    refused: dict[str, str] = {}
    deadline = time.monotonic() + _TAKE_SECONDS
    while not refused and time.monotonic() < deadline:
        time.sleep(0.05)
        refused = leader.refusals()
    assert list(refused) == ["bad"]
    assert "index" in refused["bad"]

    owed = [random_request(f"owed-{seed}", seed) for seed in range(4)]
    for request in owed:
        leader.request(request)
    leader._bridge.kill()
    while leader._bridge.alive:
        time.sleep(0.05)
    assert leader.refusals() == {}
    assert leader.num_restarts == 1
    for request in owed:
        plane.check(leader, request)
    # The engines died with the leader's bridge; the other rank finds the new ones.
    again = random_request("again", 99)
    other.request(again)
    found, deadline = None, time.monotonic() + _TAKE_SECONDS
    while found is None and time.monotonic() < deadline:
        assert other.refusals() == {}
        found = other.take(again, 0.5)
    assert found is not None
    other.close()
    leader.close()


def test_what_torchspec_would_read_wrongly_is_named_before_anything_starts(plane: Plane) -> None:
    rope = {**plane.settings.rope_parameters, "rope_theta": 1234.0}
    wrong = replace(plane.settings, rope_parameters=rope)
    norm, log = plane.reference.modules.final_norm, plane.directory / "wrong.log"
    with pytest.raises(UserError, match=r"reads rope_theta=10000.0 .* the target has 1234.0"):
        TorchSpecStates(wrong, norm, run="wrong", rank=0, log=log)
