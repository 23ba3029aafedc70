"""The recipe's schema for capture: who runs the target, and how its states reach training."""

from dataclasses import dataclass, field
from enum import Enum

from data.store.codec import Encoding
from eagle31.errors import UserError
from train.config.vllm import VllmConfig

# What a full Mooncake store needs above what may wait in it: the state that is waited for must always fit.
MOONCAKE_ROOM = 1.1


class CaptureSource(Enum):
    hf = "hf"  # transformers, in the run's own processes
    vllm = "vllm"  # vLLM: an engine on this machine, or any number of servers
    torchspec = "torchspec"  # TorchSpec's inference engines, over Mooncake


class CaptureMode(Enum):
    offline = "offline"  # into a store on disk, for any number of epochs
    online = "online"  # straight into training


class TransportKind(Enum):
    spool = "spool"  # a directory with a bound: memory, or a disk that producer and trainer share
    mooncake = "mooncake"  # a Mooncake store


@dataclass
class TorchSpecConfig:
    python: str | None = None  # of the environment that TorchSpec is installed in
    overrides: list[str] = field(default_factory=list)  # TorchSpec's own settings, key=value


@dataclass
class MooncakeConfig:
    master: str = "127.0.0.1:50051"
    metadata: str = "P2PHANDSHAKE"  # or the URL of a metadata server
    protocol: str = "tcp"  # or rdma
    device: str = ""  # the RDMA device
    segment_gb: float = 4.5  # memory that each rank lends to the store


@dataclass
class CaptureConfig:
    source: CaptureSource = CaptureSource.hf
    mode: CaptureMode = CaptureMode.offline
    max_samples: int | None = None
    shard_tokens: int = 65536
    batch_tokens: int = 8192  # of one forward pass of source hf
    codec: str = "exact"  # exact: the target's dtype; bf16; fp8
    final_states: str = "supervised"  # where a counted draft needs them; all
    # online
    transport: TransportKind = TransportKind.spool
    spool_dir: str | None = None  # null: memory (/dev/shm)
    spool_gb: float = 4.0  # the most that waits between producer and trainer, over all ranks of a node
    processes: int = 1  # of source hf, beside each rank
    torchspec: TorchSpecConfig = field(default_factory=TorchSpecConfig)
    mooncake: MooncakeConfig = field(default_factory=MooncakeConfig)


def check_capture(capture: CaptureConfig) -> None:
    """Refuses values that no capture could use, before any work.

    Raises:
        UserError: names the key, the value and the remedy.
    """
    positive = {
        "shard_tokens": capture.shard_tokens,
        "batch_tokens": capture.batch_tokens,
        "spool_gb": capture.spool_gb,
        "processes": capture.processes,
        "mooncake.segment_gb": capture.mooncake.segment_gb,
    }
    for name, value in positive.items():
        if not value > 0:
            raise UserError(f"capture.{name}", value, "It must be greater than 0.")
    if capture.max_samples is not None and capture.max_samples < 1:
        raise UserError("capture.max_samples", capture.max_samples, "Give at least 1, or null for all.")
    Encoding(capture.codec, capture.final_states)
    torchspec = capture.source is CaptureSource.torchspec
    if torchspec and capture.torchspec.python is None:
        remedy = "Give the Python of the environment that TorchSpec is installed in."
        raise UserError("capture.torchspec.python", None, remedy)
    over_mooncake = torchspec or (
        capture.mode is CaptureMode.online and capture.transport is TransportKind.mooncake
    )
    if over_mooncake and capture.mooncake.segment_gb < MOONCAKE_ROOM * capture.spool_gb:
        needed = f"at least {MOONCAKE_ROOM} times capture.spool_gb ({capture.spool_gb})"
        remedy = f"Must be {needed}: a full store would keep out the states that training waits for."
        raise UserError("capture.mooncake.segment_gb", capture.mooncake.segment_gb, remedy)


def check_ranks(capture: CaptureConfig, vllm: VllmConfig, num_ranks: int) -> None:
    """Raises UserError where an engine of the run's own would be started by each of several ranks."""
    online_vllm = capture.mode is CaptureMode.online and capture.source is CaptureSource.vllm
    if online_vllm and num_ranks > 1 and not vllm.servers:
        remedy = "Several ranks need servers: start some with scripts/serve_target, and name them here."
        raise UserError("vllm.servers", [], remedy)
