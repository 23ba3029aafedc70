"""The recipe's schema for capture: who runs the target, and how its states reach training."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


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
class VllmCaptureConfig:
    servers: list[str] = field(default_factory=list)  # base URLs; none: an engine of the run's own
    max_concurrency: int = 64  # requests under way, per server
    engine_args: dict[str, Any] = field(default_factory=dict)  # vLLM's own: tensor_parallel_size, ...


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
    segment_gb: float = 4.0  # memory that each process lends to the store


@dataclass
class CaptureConfig:
    source: CaptureSource = CaptureSource.hf
    mode: CaptureMode = CaptureMode.offline
    max_samples: int | None = None
    shard_tokens: int = 65536
    batch_tokens: int = 8192  # of one forward pass of source hf
    codec: str = "exact"  # exact: the target's dtype; bf16; fp8
    last_states: str = "counted"  # where a counted draft needs them; all
    # online
    transport: TransportKind = TransportKind.spool
    spool_dir: str | None = None  # null: memory (/dev/shm)
    spool_gb: float = 4.0  # the most that waits between producer and trainer, over all ranks of a node
    processes: int = 1  # of source hf, beside each rank
    vllm: VllmCaptureConfig = field(default_factory=VllmCaptureConfig)
    torchspec: TorchSpecConfig = field(default_factory=TorchSpecConfig)
    mooncake: MooncakeConfig = field(default_factory=MooncakeConfig)
