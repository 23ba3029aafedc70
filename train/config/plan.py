"""The recipe's schema for the plan: tokens, steps, memory and time, computed before a run starts."""

from dataclasses import dataclass

from train.config.setting import setting


@dataclass
class PlanConfig:
    """Assumptions of the plan that a run prints first; only the plan and its memory check depend on them."""

    num_tokens: int | None = setting(
        None,
        "Tokens in the training data, before the data stage has counted them. null: estimated from "
        "capture.max_samples, if that is set.",
        ge=1,
    )
    document_tokens: int | None = setting(
        None, "Mean length of a sample in tokens. null: data.max_tokens.", ge=1
    )
    assistant_fraction: float = setting(0.5, "Fraction of the tokens that the assistant wrote.", gt=0, le=1)
    num_nodes: int | None = setting(
        None,
        "Nodes to plan for, those that run the target included. null: the nodes of this run; with "
        "stages=[plan] alone and a target in vLLM on several GPUs, 1, 2 and 4 nodes.",
        ge=1,
    )
    gpus_per_node: int | None = setting(
        None, "GPUs of a node, on a machine without GPUs. null: 8.", ge=1, le=1024
    )
    gpu_memory_gb: float | None = setting(
        None, "Memory of one GPU in 10^9 bytes, on a machine without GPUs. null: unknown.", gt=0
    )
    check_memory: bool = setting(
        True,
        "Refuse a run whose training or target needs more memory than this machine's GPUs have, by the "
        "estimate.",
    )
    tflops_per_gpu: float | None = setting(
        None,
        "Sustained TFLOP/s of one GPU, not its peak, for the hours of capture and training. For training, "
        "the speed that an earlier run in the same output_dir measured takes precedence. null: unknown.",
        gt=0,
    )
    decode_tokens_per_second_per_gpu: float | None = setting(
        None,
        "Tokens per second that the target generates on one GPU, over all requests, for the hours of "
        "data.regenerate. null: unknown; the plan gives the hours of the same FLOPs at "
        "plan.tflops_per_gpu, which generation does not reach.",
        gt=0,
    )
