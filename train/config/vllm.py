"""The recipe's schema for vLLM: which servers, or the arguments of an engine that the run starts."""

from dataclasses import dataclass, field
from typing import Any

from eagle31.errors import UserError, require_positive

MAX_TEMPERATURE = 2.0  # vLLM refuses higher ones
_SET_BY_RUN = ("model", "speculative_config", "kv_transfer_config", "max_model_len")


@dataclass
class VllmConfig:
    """The vLLM engines of capture.source=vllm and target.engine=vllm."""

    # Base URLs of servers from scripts/serve_target, such as http://host:8000. Empty: the run starts an
    # engine on this machine.
    servers: list[str] = field(default_factory=list)
    max_concurrency: int = 64  # Requests in flight per server.
    # Arguments of `vllm.LLM` for an engine that the run or scripts/serve_target starts, such as
    # {tensor_parallel_size: 8}.
    engine_args: dict[str, Any] = field(default_factory=dict)


def check_vllm(vllm: VllmConfig) -> None:
    """Raise UserError for values that no stage could use."""
    require_positive({"vllm.max_concurrency": vllm.max_concurrency})
    for name in _SET_BY_RUN:
        if name in vllm.engine_args:
            remedy = "The run sets it; leave it out."
            raise UserError(f"vllm.engine_args.{name}", vllm.engine_args[name], remedy)


def check_temperatures(temperatures: dict[str, float]) -> None:
    """Raise UserError for the first temperature, by field, that vLLM does not take."""
    for name, value in temperatures.items():
        if value > MAX_TEMPERATURE:
            remedy = f"vLLM takes at most {MAX_TEMPERATURE}; lower it, or set target.engine=hf."
            raise UserError(name, value, remedy)
