"""The attention backend that an engine on a CPU is given."""

import torch

# AMX kernels of vLLM take bfloat16 only.
_AMX_DTYPES = ("auto", "bfloat16")


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
