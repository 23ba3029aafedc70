"""The arguments that make vLLM keep hidden states and hand them to the connector."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig

from data.capture.vllm.environment import LOADER
from data.capture.vllm.server_info import ROOM_TOKENS
from data.target.architecture import has_latent_attention, has_residual_streams
from data.target.parts import CapturedTarget
from eagle31.errors import UserError

# The rank that writes would have a part of the states only.
_UNDIVIDED = {
    "pipeline_parallel_size": "Only the last stage would have the hidden states",
    "decode_context_parallel_size": "A rank would have the hidden states of a part of the tokens only",
    "prefill_context_parallel_size": "A rank would have the hidden states of a part of the tokens only",
}
# AMX kernels of vLLM take bfloat16 only.
_AMX_DTYPES = ("auto", "bfloat16")


@dataclass(frozen=True)
class CaptureEngine:
    """A vLLM engine that captures one target, and writes its completions.

    Args:
        max_tokens: the length of the longest sample, and of the longest prompt with its completion.
        roots: the directories below which the engine may write.
        extra: further arguments of `vllm.LLM`, such as the recipe's `vllm.engine_args`.

    Raises:
        UserError: `extra` divides the states among ranks or changes them, or vLLM cannot capture one of the
            layer ids.
    """

    target: CapturedTarget
    max_tokens: int
    roots: Sequence[str]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, reason in _UNDIVIDED.items():
            if self.extra.get(name, 1) != 1:
                remedy = f"{reason}; use tensor_parallel_size."
                raise UserError(f"vllm.engine_args.{name}", self.extra[name], remedy)
        if self.extra.get("async_scheduling"):
            remedy = (
                "Leave it out: with it, an engine that captures may repeat tokens of an answer (vllm#56417)."
            )
            raise UserError("vllm.engine_args.async_scheduling", True, remedy)
        if has_latent_attention(self.target.parts.config) and 0 in self.target.aux_layer_ids:
            remedy = (
                "vLLM gives no embedding output of a target with latent attention, and serves no drafter "
                "that reads it; give ids from 1 on."
            )
            raise UserError("drafter.aux_layer_ids", list(self.target.aux_layer_ids), remedy)

    def arguments(self, captures: bool = True) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM`, for capture or for completions alone."""
        if not captures:
            # On the CPU, a prompt with a seed that is prefilled in chunks ends vLLM 0.32.
            unchunked = {} if torch.cuda.is_available() else {"enable_chunked_prefill": False}
            return unchunked | self._plain_arguments()
        parts, aux_layer_ids = self.target.parts, self.target.aux_layer_ids
        settings = {
            "aux_layer_ids": list(aux_layer_ids),
            "target_fingerprint": parts.fingerprint,
            "roots": list(self.roots),
        }
        # The aux layers' inputs and the last one's output.
        kept = sorted({*aux_layer_ids, parts.num_layers})
        return self._plain_arguments() | {
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": kept}},
            },
            # With it, answers of this engine may repeat tokens: vllm#56417.
            "async_scheduling": False,
            "kv_transfer_config": {
                "kv_connector": "HiddenStatesConnector",
                "kv_connector_module_path": LOADER.stem,
                "kv_role": "kv_producer",
                "kv_connector_extra_config": settings,
            },
        }

    def _plain_arguments(self) -> dict[str, Any]:
        spec, dtype = self.target.spec, self.target.parts.dtype_name
        arguments = {
            "model": spec.checkpoint.path,
            "dtype": dtype,
            "trust_remote_code": spec.trust_remote_code,
            "max_model_len": self.max_tokens + ROOM_TOKENS,
            "skip_tokenizer_init": True,  # token ids in, token ids out
            "language_model_only": True,  # the processor of a multimodal target needs its tokenizer
            "generation_config": "vllm",  # the model's own settings do not affect a completion
            # Compilation pays for many short steps. Prompts are few and long.
            "enforce_eager": not torch.cuda.is_available(),
        }
        if spec.revision is not None:
            arguments["revision"] = spec.revision
        if "attention_config" not in self.extra:  # vLLM takes one of the two
            arguments |= attention_backend(str(self.extra.get("dtype", dtype)))
        return arguments | dict(self.extra)

    def command_line(self, captures: bool = True) -> list[str]:
        """Return the arguments of a server; as for `arguments`."""
        line: list[str] = []
        for name, value in self.arguments(captures).items():
            option = name.replace("_", "-")
            if isinstance(value, bool):
                line.append(f"--{option}" if value else f"--no-{option}")
            else:
                line += [f"--{option}", value if isinstance(value, str) else json.dumps(value)]
        return line


def check_final_states(config: PreTrainedConfig) -> None:
    """Raise UserError for a target whose final states vLLM does not capture as its head reads them."""
    if has_residual_streams(config):
        remedy = (
            "vLLM keeps the mean of the target's residual streams, which is not what its head reads; set "
            "capture=hf or capture=hf_online."
        )
        raise UserError("capture.source", "vllm", remedy)


def attention_backend(dtype: str) -> dict[str, str]:
    """Return the arguments of `vllm.LLM` or of its `speculative_config` that choose the attention backend.

    On a CPU with AMX, vLLM 0.32 prefers its AMX_MLA backend for latent attention whatever the dtype, and
    AMX_MLA fails on weights other than bfloat16. CPU_MLA takes every dtype. vLLM ignores the choice for a
    model without latent attention, so the caller need not know the model. On other devices vLLM chooses.

    Args:
        dtype: the engine's `dtype` argument.
    """
    if torch.cuda.is_available() or dtype in _AMX_DTYPES:
        return {}
    return {"attention_backend": "CPU_MLA"}
