"""The recipe's schema for vLLM: the servers of a run, and where those that it starts are placed."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from eagle31.errors import UserError, require_positive

MAX_TEMPERATURE = 2.0  # vLLM refuses higher ones
_SET_BY_RUN = ("model", "speculative_config", "kv_transfer_config", "max_model_len")


class Placement(Enum):
    auto = "auto"  # chosen by the plan
    shared = "shared"  # on the GPUs that train
    split = "split"  # on other GPUs of the nodes that train
    apart = "apart"  # on other nodes: vllm.servers, or launcher.capture_nodes


@dataclass
class VllmConfig:
    """The vLLM servers of capture.source=vllm and target.engine=vllm."""

    # Base URLs of servers from scripts/serve_target, such as http://host:8000. Empty: the first process of
    # each node that trains starts one server there.
    servers: list[str] = field(default_factory=list)
    placement: Placement = Placement.auto  # GPUs that run the target in vLLM.
    # Fraction of each GPU's memory for vLLM, in (0, 1), where the run starts the servers. null: chosen by the
    # plan.
    gpu_memory_fraction: float | None = None
    start_minutes: float | None = None  # Time limit of a server's start. null: from the size of the weights.
    max_concurrency: int = 64  # Requests in flight per server.
    # Arguments of `vllm.LLM` for servers that the run or scripts/serve_target starts, such as
    # {tensor_parallel_size: 8}.
    engine_args: dict[str, Any] = field(default_factory=dict)


def check_vllm(vllm: VllmConfig) -> None:
    """Raise UserError for values that no stage could use."""
    require_positive({f"vllm.{name}": getattr(vllm, name) for name in ("max_concurrency", "start_minutes")})
    for name in _SET_BY_RUN:
        if name in vllm.engine_args:
            remedy = "The run sets it; leave it out."
            raise UserError(f"vllm.engine_args.{name}", vllm.engine_args[name], remedy)
    for url in vllm.servers:
        _check_url(url)
    _check_fraction(vllm)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is no number from 0 to 65535
        good = False
    if not good:
        remedy = "Give the server's address, such as http://127.0.0.1:8000."
        raise UserError("vllm.servers", url, remedy)


def _check_fraction(vllm: VllmConfig) -> None:
    fraction = vllm.gpu_memory_fraction
    if fraction is None:
        return
    if not 0 < fraction < 1:
        raise UserError("vllm.gpu_memory_fraction", fraction, "It must be in (0, 1), or null.")
    if "gpu_memory_utilization" in vllm.engine_args:
        remedy = "Leave out vllm.engine_args.gpu_memory_utilization, which means the same."
        raise UserError("vllm.gpu_memory_fraction", fraction, remedy)


def check_temperatures(temperatures: dict[str, float]) -> None:
    """Raise UserError for the first temperature, by field, that vLLM does not take."""
    for name, value in temperatures.items():
        if value > MAX_TEMPERATURE:
            remedy = f"vLLM takes at most {MAX_TEMPERATURE}; lower it, or set target.engine=hf."
            raise UserError(name, value, remedy)
