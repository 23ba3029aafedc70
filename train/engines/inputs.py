"""What the target's hidden states and completions depend on apart from the data: weights, code, engine."""

from collections.abc import Mapping
from typing import Any

from data.target.parts import TargetParts
from train.config.capture import TorchSpecConfig
from train.config.target import TargetConfig, TargetEngine

# Arguments of vLLM that say where the target runs, how fast, or who may use it. They change its numbers by
# rounding at most, so that a run can resume on other GPUs. Every other argument counts, whatever it is.
_UNCOUNTED = frozenset(
    {
        "tensor_parallel_size",
        "data_parallel_size",
        "data_parallel_size_local",
        "data_parallel_rank",
        "data_parallel_start_rank",
        "data_parallel_address",
        "data_parallel_rpc_port",
        "data_parallel_backend",
        "data_parallel_hybrid_lb",
        "data_parallel_external_lb",
        "enable_expert_parallel",
        "enable_eplb",
        "eplb_config",
        "expert_placement_strategy",
        "all2all_backend",
        "distributed_executor_backend",
        "distributed_timeout_seconds",
        "cpu_distributed_timeout_seconds",
        "master_addr",
        "master_port",
        "nnodes",
        "node_rank",
        "device_ids",
        "numa_bind",
        "numa_bind_nodes",
        "numa_bind_cpus",
        "disable_custom_all_reduce",
        "max_parallel_loading_workers",
        "download_dir",
        "safetensors_load_strategy",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
        "cpu_offload_gb",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enforce_eager",
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
        "disable_log_stats",
        "served_model_name",
        "hf_token",
    }
)


def completion_inputs(
    target: TargetConfig, parts: TargetParts, engine_args: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the target's completions depend on apart from the prompts and the sampling settings.

    Args:
        engine_args: of vLLM.
    """
    in_vllm = target.engine is TargetEngine.vllm
    return (
        target_inputs(target, parts)
        | {"engine": target.engine.value}
        | (vllm_inputs(engine_args) if in_vllm else transformers_inputs(target))
    )


def target_inputs(target: TargetConfig, parts: TargetParts) -> dict[str, Any]:
    """Return the inputs that are the same for every engine."""
    return {
        "target": parts.fingerprint,
        "dtype": parts.dtype_name,
        "trust_remote_code": target.trust_remote_code,
    }


def transformers_inputs(target: TargetConfig) -> dict[str, Any]:
    """Return the inputs of what transformers computes."""
    return {"attn_implementation": target.attn_implementation}


def torchspec_inputs(torchspec: TorchSpecConfig) -> dict[str, Any]:
    """Return the inputs of what TorchSpec's engines compute."""
    return {"torchspec": {"engine": torchspec.engine.value, "config": dict(torchspec.config)}}


def vllm_inputs(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of what vLLM computes: its arguments without those of placement and speed."""
    return {"engine_args": {name: value for name, value in engine_args.items() if name not in _UNCOUNTED}}
