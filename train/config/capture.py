"""The recipe's schema for capture: which engine runs the target, and how its states reach training."""

from dataclasses import dataclass, field
from enum import Enum

from data.store.codec import Encoding
from eagle31.errors import UserError, require_positive

# Room of a Mooncake store relative to the states that may wait in it: the next state must always fit.
MOONCAKE_ROOM = 1.1


class CaptureSource(Enum):
    hf = "hf"  # transformers, in the run's processes
    vllm = "vllm"  # vLLM: the servers in vllm.servers, or one that the run starts on each node


class CaptureMode(Enum):
    offline = "offline"  # into a store on disk, once for any number of epochs
    online = "online"  # into training directly; the target runs again in every epoch


class TransportKind(Enum):
    auto = "auto"  # the spool
    spool = "spool"  # files in memory, or on a disk that producers and trainers share
    mooncake = "mooncake"  # a Mooncake store


@dataclass
class MooncakeConfig:
    """The Mooncake store, for capture.transport=mooncake."""

    master: str = "127.0.0.1:50051"  # Address of the master, as HOST:PORT.
    metadata: str = "P2PHANDSHAKE"  # URL of a metadata server, or P2PHANDSHAKE for none.
    protocol: str = "tcp"  # Transfer protocol: tcp or rdma.
    device: str = ""  # Name of the RDMA device. Empty: chosen by Mooncake.
    segment_gb: float = 4.5  # Memory that each rank contributes to the store, in 10^9 bytes.


@dataclass
class CaptureConfig:
    """The target's hidden states: which engine captures them, and how they reach training."""

    source: CaptureSource = CaptureSource.hf  # Engine that runs the target.
    mode: CaptureMode = CaptureMode.offline  # Whether states go to disk first.
    # A finished store that training reads, instead of capturing: a directory, or a URL such as
    # s3://bucket/path. It must hold the states of this target for this training data. null: capture.
    store: str | None = None
    read_threads: int = 4  # Threads of a rank that read and decode the samples of a store.
    # Directory on a local disk that keeps samples of the store once they are read, for the next epochs. Give
    # one where the store is on a slow file system or in object storage. null: none are kept.
    cache_dir: str | None = None
    cache_gb: float = 500.0  # Limit of cache_dir on each node, in 10^9 bytes.
    max_samples: int | None = None  # Number of training samples, chosen at random. null: all.
    shard_tokens: int = 65536  # Tokens in one file of the store.
    batch_tokens: int = 8192  # Tokens in one forward pass, padding included, for source=hf.
    # Precision of stored and sent states: exact (the target's dtype), bf16, or fp8 (half the size of bf16).
    codec: str = "exact"
    # Final-layer hidden states that are kept: supervised (where a draft is supervised) or all.
    final_states: str = "supervised"
    # Largest part of the samples that may be refused, such as prompts that end the engine. A small dataset
    # may lack up to 8, and half of it at most.
    max_refused_fraction: float = 0.01
    # Minutes without progress after which an engine or a worker counts as hung, and is started again. Loading
    # the target does not count. It has to be longer than the longest forward pass, with compiling.
    stall_minutes: float = 15.0
    transport: TransportKind = TransportKind.auto  # Path of online states from producer to trainer.
    spool_dir: str | None = None  # Directory of the spool, for mode=online. null: memory (/dev/shm).
    # Limit of the states that wait between producers and trainers, for mode=online, in 10^9 bytes over all
    # ranks of a node.
    spool_gb: float = 4.0
    # Memory of a vLLM server for states that wait to be written, in 10^9 bytes. It is allocated once, pinned
    # with a GPU. null: 2 GiB, or what the longest sample needs.
    max_pending_gb: float | None = None
    processes: int = 1  # Processes per rank that run the target, for mode=online and source=hf.
    mooncake: MooncakeConfig = field(default_factory=MooncakeConfig)


def check_capture(capture: CaptureConfig) -> None:
    """Raise UserError for values that no capture could use."""
    require_positive(
        {
            "capture.shard_tokens": capture.shard_tokens,
            "capture.batch_tokens": capture.batch_tokens,
            "capture.spool_gb": capture.spool_gb,
            "capture.max_pending_gb": capture.max_pending_gb,
            "capture.processes": capture.processes,
            "capture.stall_minutes": capture.stall_minutes,
            "capture.read_threads": capture.read_threads,
            "capture.cache_gb": capture.cache_gb,
            "capture.mooncake.segment_gb": capture.mooncake.segment_gb,
        }
    )
    if capture.max_samples is not None and capture.max_samples < 1:
        raise UserError("capture.max_samples", capture.max_samples, "Give at least 1, or null for all.")
    if not 0 <= capture.max_refused_fraction < 1:
        remedy = "Give a fraction of the samples, at least 0 and less than 1."
        raise UserError("capture.max_refused_fraction", capture.max_refused_fraction, remedy)
    for name in ("store", "cache_dir"):
        value = getattr(capture, name)
        if value is not None and not value.strip():
            raise UserError(f"capture.{name}", repr(value), "It is empty; give null for none.")
        if value is not None and capture.mode is CaptureMode.online:
            remedy = "Online training reads no store; give null, or capture.mode=offline."
            raise UserError(f"capture.{name}", value, remedy)
    Encoding(capture.codec, capture.final_states)
    over_mooncake = capture.mode is CaptureMode.online and capture.transport is TransportKind.mooncake
    if over_mooncake and capture.mooncake.segment_gb < MOONCAKE_ROOM * capture.spool_gb:
        needed = f"at least {MOONCAKE_ROOM} times capture.spool_gb ({capture.spool_gb})"
        remedy = f"It must be {needed}: a full store would block the states that training waits for."
        raise UserError("capture.mooncake.segment_gb", capture.mooncake.segment_gb, remedy)
