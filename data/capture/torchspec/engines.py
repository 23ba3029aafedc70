"""The engines of TorchSpec that one run has: Ray, the Mooncake store, and one engine after another."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from data.capture.torchspec.mooncake import library_directory, load_mooncake
from data.capture.vllm.server_info import ROOM_TOKENS
from data.capture.vllm.server_process import visible_devices
from data.target.parts import CapturedTarget
from eagle31.errors import UserError

_ADDRESS = "RAY_ADDRESS"
# Ray's local clusters demand a token, which all of a user's processes find in ~/.ray, and set this where they
# are started.
AUTHENTICATION_VARIABLE = "RAY_AUTH_MODE"
_OBJECT_BYTES = 200_000_000  # Ray's own store carries token ids only
_MASTER_ATTEMPTS = 5  # another program may take the port that TorchSpec has chosen
_WATCH_SECONDS, _RESTART_SECONDS = 0.5, 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TorchSpecSettings:
    """What TorchSpec has to know of a run.

    max_tokens: the length of the longest sample.
    extra: further settings in TorchSpec's own form, such as {"inference": {"inference_batch_size": 8}}.

    Raises:
        UserError: `extra` has a setting that the run sets, or its engines do not give one of the layer ids.
    """

    target: CapturedTarget
    engine: str  # hf, vllm or sgl
    num_engines: int
    gpus_per_engine: int
    max_tokens: int
    protocol: str = "tcp"
    device: str = ""  # the RDMA device
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids, most = self.target.aux_layer_ids, self.target.parts.num_layers - 1
        if not all(1 <= layer_id <= most for layer_id in ids):
            remedy = f"TorchSpec's engines give the outputs of decoder layers: give ids from 1 to {most}."
            raise UserError("drafter.aux_layer_ids", list(ids), remedy)
        for section, settings in self._own().items():
            for name in settings.keys() & dict(self.extra.get(section, {})).keys():
                field = f"torchspec.config.{section}.{name}"
                raise UserError(field, self.extra[section][name], "The run sets it; leave it out.")

    def arguments(self) -> Any:
        """Return TorchSpec's arguments, with which it makes one engine.

        Raises:
            UserError: `extra` has a setting that TorchSpec does not know, or a value of another type.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
        from torchspec.config.train_config import config_to_flat_args, load_config

        tensor_size = {"inference": {"sglang": {"tp_size": self.gpus_per_engine}}}
        try:
            config = OmegaConf.merge(tensor_size, dict(self.extra), self._own())
            arguments = config_to_flat_args(load_config(base_config=config))
        except (OmegaConfBaseException, NotImplementedError) as error:
            raise UserError("torchspec.config", dict(self.extra), str(error).splitlines()[0]) from error
        if arguments.vllm_pp_size > 1:
            remedy = "The stages store the states of a sample apart, which is not read; leave it out."
            raise UserError("torchspec.config.inference.vllm.pp_size", arguments.vllm_pp_size, remedy)
        return arguments

    def _own(self) -> dict[str, dict[str, Any]]:
        return {
            "model": {
                "target_model_path": self.target.spec.checkpoint.path,
                "target_model_backend": "sglang" if self.engine == "sgl" else self.engine,
                "trust_remote_code": self.target.spec.trust_remote_code,
            },
            # Without room for a token after it, SGLang cuts the longest sample.
            "training": {"max_seq_length": self.max_tokens + ROOM_TOKENS},
            "inference": {
                "inference_engine_type": self.engine,
                "inference_num_gpus": self.gpus_per_engine,
                "inference_num_gpus_per_engine": self.gpus_per_engine,
                # TorchSpec counts the outputs of layers, from 0.
                "aux_hidden_states_layers": [layer_id - 1 for layer_id in self.target.aux_layer_ids],
            },
            "mooncake": {
                "protocol": self.protocol,
                "device_name": self.device,
                "hidden_dim": self.target.parts.hidden_size,
                # States in the memory of an engine would be lost with it.
                "global_segment_size": 0,
            },
        }


def check_installed() -> None:
    """Raise UserError if TorchSpec, Ray or Mooncake is missing."""
    load_mooncake()
    for name in ("torchspec", "ray"):
        if find_spec(name) is None:
            raise UserError("capture.source", "torchspec", f"No {name} is here: run scripts/setup/torchspec.")


def load_torchspec() -> None:
    """Import Ray and TorchSpec, and have them print less."""
    check_installed()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # At Ray's default of 15, an engine starves next to whatever else takes the cores.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray
    import torchspec.inference.factory  # noqa: F401

    logging.getLogger("TorchSpec").setLevel(logging.WARNING)
    logging.getLogger(ray.__name__).setLevel(logging.ERROR)


def start_ray(settings: TorchSpecSettings, devices: Sequence[int], log_dir: Path) -> str:
    """Connect to the cluster in RAY_ADDRESS, or start one on this machine; return its address.

    Args:
        devices: the GPUs of this machine that engines may have, if the cluster is started here.
        log_dir: where the engines write their logs.
    """
    libraries = [str(library_directory()), os.environ.get("LD_LIBRARY_PATH", "")]
    os.environ["TORCHSPEC_LOG_DIR"] = str(log_dir.absolute())
    # TorchSpec looks for mooncake_master there.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {
        "PATH": os.environ["PATH"],
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        "MC_LOG_LEVEL": os.environ["MC_LOG_LEVEL"],
    }
    environment: dict[str, Any] = {"env_vars": variables}
    if not torch.cuda.is_available():
        environment["worker_process_setup_hook"] = _cpu_hook()
    given, visible = os.environ.get(_ADDRESS), os.environ.get("CUDA_VISIBLE_DEVICES")
    if given:
        join_ray(address=given, runtime_env=environment)
    else:
        num_gpus = settings.num_engines * settings.gpus_per_engine
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible_devices(devices))
        join_ray(
            address="local",
            num_gpus=num_gpus,
            num_cpus=num_gpus + 1,
            object_store_memory=_OBJECT_BYTES,
            include_dashboard=False,
            runtime_env=environment,
        )
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
    import ray

    return ray.get_runtime_context().gcs_address


def join_ray(**arguments: Any) -> None:
    """Connect this process to a cluster, by the arguments of `ray.init`, or start one."""
    import ray

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **arguments)
    except (ConnectionError, RuntimeError, ValueError) as error:
        remedy = f"No Ray cluster answers there or starts here: {error}"
        raise UserError(_ADDRESS, arguments["address"], remedy) from error
    finally:
        # Ray ends a process at once where this run saves a checkpoint.
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _cpu_hook() -> Callable[[], None]:
    """Return what lets TorchSpec's transformers engine, which moves everything to a GPU, run without one.

    Ray sends a function within a function as its code: its workers need not find this module.
    """

    def compute_on_cpu() -> None:
        empty = torch.empty
        torch.cuda.set_device = lambda device: None
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
        torch.empty = lambda *sizes, pin_memory=False, **options: empty(*sizes, **options)

    return compute_on_cpu


class EngineGroup:
    """The engines of a run and its store; they end with the process that has made this.

    An engine that dies is made again, and `published` gets the new one.

    Args:
        published: called with an engine's index and its handle whenever there is a new one.
        limit_seconds: how long an engine may take to load the target.

    Raises:
        UserError: an engine does not start.
    """

    def __init__(
        self, settings: TorchSpecSettings, published: Callable[[int, Any], None], limit_seconds: float
    ) -> None:
        import ray
        from torchspec.config.mooncake_config import MooncakeConfig
        from torchspec.ray.placement_group import create_placement_groups

        self._settings, self._published, self._limit_seconds = settings, published, limit_seconds
        arguments = settings.arguments()
        arguments.inference_num_gpus *= settings.num_engines
        self._placement = create_placement_groups(arguments, roles={"inference"})["inference"]
        self._master = _launch_master(arguments)
        self._mooncake = MooncakeConfig.from_flat_args(arguments)
        self.master, self.metadata = self._mooncake.master_server_address, self._mooncake.metadata_server
        starting = [self._make(index) for index in range(settings.num_engines)]
        self._engines = []
        try:
            for index, (engine, ready) in enumerate(starting):
                ray.get(ready, timeout=limit_seconds)
                self._engines.append(engine)
                published(index, engine)
        except ray.exceptions.RayError as error:
            remedy = f"It did not start: {error}"
            raise UserError("torchspec.engine", settings.engine, remedy) from error
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="torchspec-engines", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """End the engines and the store."""
        import ray

        self._closing.set()
        self._watcher.join()
        for actor in (*self._engines, self._master):
            ray.kill(actor)

    def _make(self, index: int) -> tuple[Any, list[Any]]:
        """Return an engine on its part of the GPUs, and what is ready when it is."""
        from torchspec.inference.factory import prepare_inference_engines

        group, bundles, devices = self._placement
        size = self._settings.gpus_per_engine
        part = slice(index * size, (index + 1) * size)
        arguments = self._settings.arguments()
        placement = (group, bundles[part], devices[part])
        [engine], ready = prepare_inference_engines(arguments, placement, self._mooncake, engine_group=index)
        return engine, ready

    def _watch(self) -> None:
        """Make engines again that have died."""
        import ray

        # Each is answered when the engine is free, and fails as soon as it dies.
        asked = [engine.health_check.remote() for engine in self._engines]
        while not self._closing.wait(_WATCH_SECONDS):
            for index, question in enumerate(asked):
                if not ray.wait([question], timeout=0)[0]:
                    continue
                reason: object = "it did not load the target"
                try:
                    healthy = ray.get(question)
                except ray.exceptions.RayError as error:
                    healthy, reason = False, error
                try:
                    if not healthy:
                        logger.warning("an engine of TorchSpec ended, and is started again: %s", reason)
                        self._closing.wait(_RESTART_SECONDS)
                        ray.kill(self._engines[index])
                        self._engines[index], _ = self._make(index)
                        self._published(index, self._engines[index])
                    asked[index] = self._engines[index].health_check.remote()
                except Exception:  # Ray may be short of something; the run ends if this lasts.
                    logger.exception("engine %d of TorchSpec did not start; it is tried again", index)


def _launch_master(arguments: Any) -> Any:
    """Start the store's master, and write its address into TorchSpec's arguments."""
    from torchspec.transfer.mooncake.utils import launch_mooncake_master

    for _ in range(_MASTER_ATTEMPTS):
        arguments.mooncake_master_server_address = arguments.mooncake_metadata_port = None
        master = launch_mooncake_master(arguments)
        if master is not None:
            return master
    remedy = "mooncake_master did not start; see Ray's logs in /tmp/ray/session_latest/logs."
    raise UserError("capture.source", "torchspec", remedy)
