"""The arguments with which vLLM keeps hidden states and hands them to the connector."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from data.vllm.attention_backend import attention_backend
from data.vllm.environment import LOADER
from data.vllm.server_info import ROOM_TOKENS
from eagle31.errors import UserError

_PIPELINE = "pipeline_parallel_size"


@dataclass(frozen=True)
class CaptureEngine:
    """An engine of vLLM that captures one target.

    Args:
        max_tokens: of the longest sample, and of the longest prompt with its answer.
        roots: the directories below which it may write.
        mooncake_masters: the Mooncake stores that it may put into, as host:port.
        extra: further arguments of `vllm.LLM`.

    Raises:
        UserError: `extra` asks for pipeline parallelism, or the target has no such layer id in vLLM.
    """

    target: str
    aux_layer_ids: Sequence[int]
    num_layers: int
    max_tokens: int
    roots: Sequence[str]
    revision: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    target_fingerprint: str | None = None
    mla: bool = False
    mooncake_masters: Sequence[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.extra.get(_PIPELINE, 1) != 1:
            remedy = "Hidden states would be on the last stage only; use tensor_parallel_size."
            raise UserError(f"vllm.engine_args.{_PIPELINE}", self.extra[_PIPELINE], remedy)
        if self.mla and 0 in self.aux_layer_ids:
            remedy = (
                "vLLM gives no embedding output of a target with latent attention, and serves no drafter "
                "that reads it; give ids from 1 on."
            )
            raise UserError("drafter.aux_layer_ids", list(self.aux_layer_ids), remedy)

    def arguments(self) -> dict[str, Any]:
        """Of `vllm.LLM`."""
        settings = {
            "aux_layer_ids": list(self.aux_layer_ids),
            "target_fingerprint": self.target_fingerprint,
            "roots": list(self.roots),
            "mooncake_masters": list(self.mooncake_masters),
        }
        return self.plain_arguments() | {
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": self.layer_ids}},
            },
            "kv_transfer_config": {
                "kv_connector": "HiddenStatesConnector",
                "kv_connector_module_path": LOADER.stem,
                "kv_role": "kv_producer",
                "kv_connector_extra_config": settings,
            },
        }

    def answer_arguments(self) -> dict[str, Any]:
        """One that writes answers only."""
        # On the CPU vLLM 0.32 ends with a prompt that has a seed and is computed in chunks.
        whole = {} if torch.cuda.is_available() else {"enable_chunked_prefill": False}
        return whole | self.plain_arguments()

    def plain_arguments(self) -> dict[str, Any]:
        """The same engine without hidden states: what capture is measured against."""
        own = {
            "model": self.target,
            "dtype": self.dtype,
            "trust_remote_code": self.trust_remote_code,
            "max_model_len": self.max_tokens + ROOM_TOKENS,
            "skip_tokenizer_init": True,  # token ids in, token ids out
            "generation_config": "vllm",  # the model's own has no part in an answer
            # Compiling pays where many short steps are computed; prompts are few and long.
            "enforce_eager": not torch.cuda.is_available(),
        }
        if self.revision is not None:
            own["revision"] = self.revision
        if "attention_config" not in self.extra:  # vLLM takes one of the two
            own |= attention_backend(str(self.extra.get("dtype", self.dtype)))
        return own | dict(self.extra)

    def command_line(self) -> list[str]:
        """Of `python -m vllm.entrypoints.openai.api_server`."""
        line: list[str] = []
        for name, value in self.arguments().items():
            option = name.replace("_", "-")
            if isinstance(value, bool):
                line.append(f"--{option}" if value else f"--no-{option}")
            else:
                line += [f"--{option}", value if isinstance(value, str) else json.dumps(value)]
        return line

    @property
    def layer_ids(self) -> list[int]:
        """What vLLM keeps: the aux layers' inputs and the last layer's output, in rising order."""
        return sorted({*self.aux_layer_ids, self.num_layers})
