"""The recipe's schema for vLLM: the servers of a run."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from data.addresses import is_loopback
from eagle31.errors import UserError
from train.config.setting import setting

# What the plan computes with; vLLM checks the other arguments.
_SIZES = (
    "tensor_parallel_size",
    "data_parallel_size",
    "data_parallel_size_local",
    "pipeline_parallel_size",
)
_FRACTION = "gpu_memory_utilization"
_SET_BY_RUN = ("model", "speculative_config", "kv_transfer_config", "max_model_len")


@dataclass
class VllmConfig:
    """The vLLM servers of capture.source=vllm and target.engine=vllm."""

    servers: list[str] = setting(
        [],
        "Base URLs of servers from scripts/serve_target, such as http://host:8000. Empty: the first "
        "process of each node that trains starts one server there.",
    )
    engine_args: dict[str, Any] = setting(
        {},
        "Arguments of `vllm.LLM` for servers that the run or scripts/serve_target starts, such as "
        "{tensor_parallel_size: 8}. The plan chooses gpu_memory_utilization where it is not given; a given "
        "one holds for the evaluation in vLLM too.",
    )

    @property
    def remote_servers(self) -> list[str]:
        """The servers that are on other machines."""
        return [url for url in self.servers if not is_loopback(urlsplit(url).hostname)]


def check_vllm(vllm: VllmConfig) -> None:
    """Raise UserError for values that no stage could use."""
    for name in _SET_BY_RUN:
        if name in vllm.engine_args:
            remedy = "The run sets it; leave it out."
            raise UserError(f"vllm.engine_args.{name}", vllm.engine_args[name], remedy)
    for name in _SIZES:
        size = vllm.engine_args.get(name, 1)
        if type(size) is not int or size < 1:
            raise UserError(f"vllm.engine_args.{name}", size, "Give a whole number of at least 1.")
    fraction = vllm.engine_args.get(_FRACTION, 1)
    if type(fraction) not in (int, float) or not 0 < fraction <= 1:
        raise UserError(f"vllm.engine_args.{_FRACTION}", fraction, "Give a number above 0 and at most 1.")
    for url in vllm.servers:
        _check_url(url)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is no number from 0 to 65535
        good = False
    if not good:
        remedy = "Give the server's address, such as http://127.0.0.1:8000."
        raise UserError("vllm.servers", url, remedy)
