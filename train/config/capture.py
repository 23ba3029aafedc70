"""The recipe's schema for capture: which engine runs the target, and how its states reach training."""

from dataclasses import dataclass
from typing import Any

from data.store.codec import CODECS
from eagle31.choice import Choice
from eagle31.errors import UserError
from train.config.setting import setting


class CaptureSource(Choice):
    hf = "hf", "transformers, in the run's processes"
    vllm = "vllm", "vLLM: the servers in vllm.servers, or one that the run starts on each node"
    torchspec = "torchspec", "TorchSpec: engines that the run starts in Ray"


class CaptureMode(Choice):
    offline = "offline", "into a store on disk, once for any number of epochs"
    online = "online", "into training directly; the target runs again in every epoch"


class TorchSpecEngine(Choice):
    hf = "hf", "transformers"
    vllm = "vllm", "vLLM"
    sgl = "sgl", "SGLang with TorchSpec's patch"


@dataclass
class TorchSpecConfig:
    """The engines of capture.source=torchspec."""

    engine: TorchSpecEngine = setting(TorchSpecEngine.hf, "TorchSpec's engine.")
    num_engines: int = setting(1, "Number of engines.", ge=1)
    gpus_per_engine: int = setting(1, "GPUs of an engine.", ge=1)
    config: dict[str, Any] = setting(
        {},
        "Further settings, in the form of TorchSpec's configuration, such as "
        "{inference: {inference_batch_size: 8}}.",
    )
    protocol: str = setting("tcp", "Transfer protocol of the Mooncake store: tcp or rdma.")
    device: str | None = setting(None, "Name of the RDMA device. null: chosen by Mooncake.")


@dataclass
class CaptureConfig:
    """The target's hidden states: which engine captures them, and how they reach training."""

    source: CaptureSource = setting(CaptureSource.hf, "Engine that runs the target.")
    mode: CaptureMode = setting(CaptureMode.offline, "Whether states go to disk first.")
    store: str | None = setting(
        None,
        "A finished store that training reads, instead of capturing: a directory, or a URL such as "
        "s3://bucket/path. It must hold the states of this target for this training data. null: capture.",
    )
    codec: str = setting(
        "fp8",
        "Precision of stored and sent states: exact (the target's dtype), bf16, or fp8 (half the size of "
        "bf16).",
    )
    spool_dir: str | None = setting(
        None,
        "Directory of the spool. null: memory (/dev/shm), or OUTPUT_DIR/spool with servers on other nodes.",
    )
    spool_gb: float = setting(
        4.0,
        "Limit of the states that wait between vLLM and the run, in 10^9 bytes over all ranks of a node.",
        gt=0,
    )


def check_capture(capture: CaptureConfig) -> None:
    """Raise UserError for values that no capture could use."""
    if capture.store is not None and capture.mode is CaptureMode.online:
        remedy = "Online training reads no store; give null, or capture.mode=offline."
        raise UserError("capture.store", capture.store, remedy)
    if capture.codec not in CODECS:
        raise UserError("capture.codec", capture.codec, f"Choose one of {', '.join(CODECS)}.")
