"""The recipe's schema for vLLM: which servers, or with which arguments an engine of the run's own starts."""

from dataclasses import dataclass, field
from typing import Any

from eagle31.errors import UserError

MAX_TEMPERATURE = 2.0  # vLLM refuses higher ones
_OWN = ("model", "speculative_config", "kv_transfer_config", "max_model_len")


@dataclass
class VllmConfig:
    servers: list[str] = field(default_factory=list)  # base URLs; none: an engine of the run's own
    max_concurrency: int = 64  # requests under way, per server
    engine_args: dict[str, Any] = field(default_factory=dict)  # vLLM's own: tensor_parallel_size, ...


def check_vllm(vllm: VllmConfig) -> None:
    """Raises UserError for values that no stage could use."""
    if not vllm.max_concurrency > 0:
        raise UserError("vllm.max_concurrency", vllm.max_concurrency, "It must be greater than 0.")
    for name in _OWN:
        if name in vllm.engine_args:
            remedy = "The run itself sets it; leave it out."
            raise UserError(f"vllm.engine_args.{name}", vllm.engine_args[name], remedy)
