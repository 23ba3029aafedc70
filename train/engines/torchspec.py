"""The engines of TorchSpec that a run has, and its store, for every rank."""

import base64
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.capture.dispatch import Dispatcher, EngineInfo
from data.capture.torchspec.engines import (
    AUTHENTICATION_VARIABLE,
    EngineGroup,
    TorchSpecSettings,
    join_ray,
    load_torchspec,
    start_ray,
)
from data.capture.torchspec.mooncake import MooncakeSettings
from data.capture.torchspec.transport import DTYPE, TorchSpecTransport, norm_scale, state_bytes
from data.capture.transport.protocol import OpenTransport
from data.samples import StateShape
from data.target.parts import CapturedTarget
from eagle31.errors import UserError
from train.config.capture import TorchSpecEngine
from train.config.run import RunConfig
from train.distributed import World, made_by_main, shared_values, wait_for_ranks
from train.engines.servers import load_seconds
from train.plan.target import longest_prompt

# Room of the store relative to the states that may wait in it: the next state must always fit.
_ROOM = 1.1
_LEAST_BYTES = 32_000_000  # Mooncake takes no segment below 16 MiB


class TorchSpecEngines:
    """The engines that the ranks of a run send prompts to, and the store that they put states into.

    Rank 0 starts them in Ray, and they end with it. Every rank calls `start`, and `close` with `together`.

    Args:
        target: returns the target that they capture.
        log_dir: where they write their logs.
    """

    def __init__(
        self, config: RunConfig, world: World, target: Callable[[], CapturedTarget], log_dir: Path
    ) -> None:
        self._config, self._world, self._target, self._log_dir = config, world, target, log_dir
        self._group: EngineGroup | None = None
        self._store: dict[str, Any] | None = None  # the addresses of the master and of the metadata

    @property
    def patience_seconds(self) -> float:
        """How long all engines may be away at once: those that are started again load the target again."""
        return load_seconds(self._config, self._target())

    def settings(self) -> TorchSpecSettings:
        """Return what TorchSpec has to know of the run.

        Raises:
            UserError: its engines cannot capture this target.
        """
        config, target = self._config, self._target()
        if target.parts.dtype != DTYPE:
            remedy = "TorchSpec runs the target and sends its states in bfloat16; set target.dtype=bfloat16."
            raise UserError("target.dtype", config.target.dtype, remedy)
        return TorchSpecSettings(
            target,
            engine=config.torchspec.engine.value,
            num_engines=config.torchspec.num_engines,
            gpus_per_engine=config.torchspec.gpus_per_engine,
            max_tokens=longest_prompt(config),
            protocol=config.torchspec.protocol,
            device=config.torchspec.device or "",
            extra=config.torchspec.config,
        )

    def start(self) -> None:
        """Start the engines on rank 0, unless they run, and connect to them on the others.

        Raises:
            UserError: TorchSpec is missing, or an engine does not start.
        """
        if self._store is None:
            ray, self._store = made_by_main(self._started, self._world)
            if not self._world.is_main:
                if ray["authentication"]:
                    os.environ[AUTHENTICATION_VARIABLE] = ray["authentication"]  # read where it is imported
                load_torchspec()
                join_ray(address=ray["address"])

    def _started(self) -> tuple[dict[str, str], dict[str, str]]:
        """Start the engines. Return what joins their Ray, and the addresses of their store."""
        load_torchspec()
        settings = self.settings()
        taken, visible = self._world.ranks_per_node, torch.cuda.device_count()
        address = start_ray(settings, range(taken, visible), self._log_dir)
        print(f"torchspec: starting {settings.num_engines} {settings.engine} engines", flush=True)
        group = EngineGroup(settings, _publish, load_seconds(self._config, self._target()))
        self._group = group
        ray = {"address": address, "authentication": os.environ.get(AUTHENTICATION_VARIABLE, "")}
        return ray, {"master": group.master, "metadata": group.metadata}

    @contextmanager
    def connected(self) -> Iterator[tuple[Dispatcher, OpenTransport]]:
        """Connect this rank to the engines and to the store."""
        from data.capture.torchspec.client import TorchSpecClient

        assert self._store is not None, "the engines have not been started"
        settings, target = self.settings(), self._target()
        num_layers, hidden_size = target.num_aux_layers, target.parts.hidden_size
        # vLLM keeps the last layer's output, the others what the head reads.
        after_norm = settings.engine != TorchSpecEngine.vllm.value
        lent_bytes = int(_ROOM * self._config.capture.spool_gb / self._world.ranks_per_node * 1e9)
        transport = TorchSpecTransport(
            MooncakeSettings(
                **self._store,
                protocol=settings.protocol,
                device=settings.device,
                segment_bytes=max(lent_bytes, _LEAST_BYTES),
            ),
            num_aux_layers=num_layers,
            hidden_size=hidden_size,
            norm_scale=norm_scale(target.parts.head.norm, hidden_size) if after_norm else None,
        )
        info = EngineInfo(target.parts.vocab_size, settings.max_tokens)
        batch_size = settings.arguments().inference_batch_size
        clients = [
            TorchSpecClient(f"engine {index}", partial(_found, index), info, transport, batch_size)
            for index in range(settings.num_engines)
        ]
        with (
            closing(transport),
            # The engines were made for this run: there is nothing to check.
            closing(Dispatcher(clients, lambda *_: None, self.patience_seconds)) as dispatcher,
        ):
            shape = StateShape(num_layers, hidden_size, DTYPE)
            yield (
                dispatcher,
                OpenTransport(
                    transport,
                    shape,
                    lambda loss_mask: state_bytes(len(loss_mask), num_layers, hidden_size),
                    lambda _: None,
                ),
            )

    def close(self, together: bool) -> None:
        """End the engines.

        Args:
            together: whether every rank calls. Ray ends a process that is connected while rank 0 leaves.
        """
        if self._store is None:
            return
        import ray

        self._store = None
        if not self._world.is_main:
            ray.shutdown()
        if together:
            wait_for_ranks(self._world)
        if self._group is not None:
            self._group.close()
            self._group = None
            ray.shutdown()


def _publish(index: int, engine: Any) -> None:
    import ray

    pickled = base64.b64encode(ray.cloudpickle.dumps(engine)).decode()
    shared_values().set(f"torchspec/engine/{index}", pickled)


def _found(index: int) -> Any:
    import ray

    return ray.cloudpickle.loads(base64.b64decode(shared_values().get(f"torchspec/engine/{index}")))
