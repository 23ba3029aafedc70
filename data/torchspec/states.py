"""TorchSpec as a source of hidden states, which arrive through Mooncake."""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from data.processes.child import Message
from data.processes.parent import ChildProcess
from data.samples import CapturedSample
from data.torchspec.settings import DTYPE, TorchSpecSettings, bridge_command, check_torchspec
from data.transport.mooncake import MooncakeTransport
from data.transport.mooncake_store import library_directory
from data.transport.protocol import StateRequest
from eagle31.errors import UserError

_CLOSE_SECONDS = 20.0
_MAX_DEATHS = 3  # consecutive deaths without an answer between them
_NORM_TOLERANCE = 1e-2


class TorchSpecStates:
    """A trainer rank's side of TorchSpec.

    It is a producer and a transport in one, as TorchSpec chooses Mooncake's keys.

    Args:
        final_norm: a copy of the target's final norm; the hf and sgl engines deliver the final state after
        it. run: a name that is the same on all ranks of the run and unique in the Ray cluster. rank: rank 0
        starts the engines, and the other ranks find them. log: the file that the output of the bridge, Ray
        and TorchSpec is appended to.

    Raises:
        UserError: the environment or the master is not set up as required, or the engines do not start.
    """

    def __init__(
        self, settings: TorchSpecSettings, final_norm: nn.Module, *, run: str, rank: int, log: Path
    ) -> None:
        self.settings = settings
        self._bridge_settings = {
            "leads": rank == 0,
            "namespace": f"eagle31-{run}",
            "torchspec": settings.arguments(),
            "rope": dict(settings.rope_parameters),
            "start_seconds": settings.start_seconds,
        }
        self._log = log
        check_torchspec(settings.python)
        self._store = MooncakeTransport(
            # The engines lend the memory.
            replace(settings.mooncake, segment_bytes=0),
            num_aux_layers=len(settings.aux_layer_ids),
            hidden_size=settings.hidden_size,
            dtype=DTYPE,
        )
        self._changed = threading.Condition()
        self._owed: dict[str, StateRequest] = {}
        self._stored: dict[str, str] = {}  # Mooncake's key by the request's key
        self._refused: dict[str, str] = {}
        self.num_restarts = 0
        self._num_deaths = 0
        self._bridge = self._start()
        prenorm = self._wait_until_ready()["prenorm"]
        self._gain = None if prenorm else norm_gain(final_norm, settings.hidden_size)

    def request(self, request: StateRequest) -> None:
        """Request a sample and return at once. A repeated request is captured again."""
        self.discard(request.key)
        with self._changed:
            self._owed[request.key] = request
        self._send(request)

    def received(self, key: str) -> None:
        """Do nothing: `take` has noted it."""

    def refusals(self) -> dict[str, str]:
        """Return the requests that were refused since the last call: the reasons by key.

        This starts the bridge again where it has died, and repeats the requests that it had not answered.

        Raises:
            UserError: the bridge has died too often.
        """
        if not self._bridge.alive:
            self._restart()
        with self._changed:
            refused, self._refused = self._refused, {}
        return refused

    def take(self, request: StateRequest, timeout: float) -> CapturedSample | None:
        """Remove a sample from Mooncake and return it.

        None where it did not come within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(lambda: request.key in self._stored, timeout)
            stored = self._stored.get(request.key)
        if stored is None:
            return None
        sample = self._store.take(replace(request, key=stored), max(deadline - time.monotonic(), 0.0))
        if sample is None:
            return None
        with self._changed:
            self._stored.pop(request.key, None)
            self._owed.pop(request.key, None)
        if self._gain is None:
            return sample
        return replace(sample, final_hidden_states=before_norm(sample.final_hidden_states, self._gain))

    def arrived(self, key: str) -> bool:
        """Return whether a sample waits under the key."""
        with self._changed:
            stored = self._stored.get(key)
        return stored is not None and self._store.arrived(stored)

    def discard(self, key: str) -> None:
        """Remove the key's sample, now or when it comes."""
        with self._changed:
            self._owed.pop(key, None)
            stored = self._stored.pop(key, None)
        if stored is not None:
            self._store.discard(stored)

    def close(self) -> None:
        """End the bridge; with rank 0's, the engines end as well."""
        self._bridge.close(_CLOSE_SECONDS)
        self._store.close()

    def _start(self) -> ChildProcess:
        paths = [str(library_directory()), os.environ.get("LD_LIBRARY_PATH")]
        return ChildProcess(
            bridge_command(self.settings.python),
            self._bridge_settings,
            environment=os.environ | {"LD_LIBRARY_PATH": ":".join(path for path in paths if path)},
            answered=self._note_answer,
            log=self._log,
            directory=self._log.parent,
        )

    def _wait_until_ready(self) -> Message:
        """Return what the bridge reports once the engines run."""
        if self._bridge.wait_until_ready(self.settings.start_seconds):
            assert self._bridge.ready is not None
            return self._bridge.ready
        self._bridge.close(_CLOSE_SECONDS)
        reason = self._bridge.failure or "the bridge ended, or did not start in time"
        tail = "\n".join(self._bridge.log_tail())
        remedy = f"TorchSpec's engines do not run: {reason}\n{tail}\nThe full log: {self._log}"
        raise UserError("capture.source", "torchspec", remedy)

    def _restart(self) -> None:
        self._num_deaths += 1
        self._bridge.close(_CLOSE_SECONDS)
        if self._num_deaths > _MAX_DEATHS:
            remedy = f"TorchSpec's bridge died {self._num_deaths} times in a row; see {self._log}."
            raise UserError("capture.source", "torchspec", remedy)
        with self._changed:
            # The engines have died with the bridge, and so has the memory that they lent.
            self._stored.clear()
            owed = list(self._owed.values())
        self._bridge = self._start()
        self._wait_until_ready()
        self.num_restarts += 1
        for request in owed:
            self._send(request)

    def _send(self, request: StateRequest) -> None:
        self._bridge.send({"key": request.key, "input_ids": request.input_ids.tolist()})

    def _note_answer(self, answer: Message) -> None:
        """Take an answer of the bridge; called in its thread."""
        key = answer["key"]
        with self._changed:
            expected = key in self._owed and key not in self._stored
            if "refused" in answer:
                if expected:
                    del self._owed[key]
                    self._refused[key] = answer["refused"]
            elif expected:
                self._stored[key] = answer["stored"]
            self._num_deaths = 0
            self._changed.notify_all()
        if not expected and "stored" in answer:
            self._store.discard(answer["stored"])


def norm_gain(norm: nn.Module, hidden_size: int) -> Tensor:
    """Return the factors of an RMSNorm, float32 [Ht], whatever parameters it stores.

    Raises:
        UserError: it is another kind of norm, which cannot be undone.
    """
    parameter = next(norm.parameters())
    with torch.no_grad():
        gain = (
            norm(torch.ones(1, hidden_size, dtype=parameter.dtype, device=parameter.device))[0].float().cpu()
        )
        probe = torch.randn(8, hidden_size, generator=torch.Generator().manual_seed(0))
        normed = norm(probe.to(parameter)).float().cpu()
        again = norm(before_norm(normed, gain).to(parameter)).float().cpu()
    if not (again - normed).abs().max() <= _NORM_TOLERANCE * normed.abs().max():
        remedy = (
            f"This engine delivers the final state after the final norm, and {type(norm).__name__} cannot be "
            "undone; use inference.inference_engine_type=vllm, which delivers it before."
        )
        raise UserError("capture.torchspec.overrides", "inference.inference_engine_type", remedy)
    return gain


def before_norm(normed: Tensor, gain: Tensor) -> Tensor:
    """Return states whose RMSNorm is `normed`: the original ones up to a factor per token. Both [T, Ht].

    The head only reads their norm, which does not depend on that factor.
    """
    return (normed.float() / gain).to(normed.dtype)
