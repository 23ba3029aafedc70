"""The recipe's schema for the plan: tokens, steps, memory and time, computed before a run starts."""

from dataclasses import dataclass

from eagle31.errors import UserError, require_positive


@dataclass
class PlanConfig:
    """Assumptions of the plan that a run prints first; only the plan and its memory check depend on them."""

    # Tokens in the training data, before the data stage has counted them. null: estimated from
    # capture.max_samples, if that is set.
    num_tokens: int | None = None
    document_tokens: int | None = None  # Mean length of a sample in tokens. null: data.max_tokens.
    assistant_fraction: float = 0.5  # Fraction of the tokens that the assistant wrote, in (0, 1].
    # Nodes to plan for, those that run the target included. null: the nodes of this run; with stages=[plan]
    # alone and a target in vLLM on several GPUs, 1, 2 and 4 nodes.
    num_nodes: int | None = None
    gpus_per_node: int | None = None  # GPUs of a node, on a machine without GPUs. null: 8.
    # Memory of one GPU in 10^9 bytes, on a machine without GPUs. null: unknown.
    gpu_memory_gb: float | None = None
    # Refuse a run whose training or target needs more memory than this machine's GPUs have, by the estimate.
    check_memory: bool = True
    # Sustained TFLOP/s of one GPU, not its peak, for the hours of capture and training. For training, the
    # speed that an earlier run in the same output_dir measured takes precedence. null: unknown.
    tflops_per_gpu: float | None = None
    # Tokens per second that the target generates on one GPU, over all requests, for the hours of
    # data.regenerate. null: unknown; the plan gives the hours of the same FLOPs at plan.tflops_per_gpu, which
    # generation does not reach.
    decode_tokens_per_second_per_gpu: float | None = None


def check_plan(plan: PlanConfig) -> None:
    """Raise UserError for assumptions that no plan could use."""
    require_positive({f"plan.{name}": value for name, value in vars(plan).items() if name != "check_memory"})
    if plan.assistant_fraction > 1:
        raise UserError("plan.assistant_fraction", plan.assistant_fraction, "It must be at most 1.")
