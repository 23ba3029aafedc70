"""The recipe's schema for the plan: tokens, steps, memory and time, computed before a run starts."""

from dataclasses import dataclass

from train.config.setting import setting


@dataclass
class PlanConfig:
    """What the plan cannot know. Nothing else depends on it.

    Once the data stage has run, the length of samples and the assistant's part are those that it counted.
    """

    document_tokens: int | None = setting(
        None, "Mean length of a sample in tokens. null: data.max_tokens.", ge=1
    )
    assistant_fraction: float = setting(0.5, "Fraction of the tokens that the assistant wrote.", gt=0, le=1)
    num_nodes: int | None = setting(
        None,
        "Nodes to plan for with stages=[plan], those that run the target included. null: one node, and two "
        "for a target in vLLM.",
        ge=1,
    )
    gpus_per_node: int | None = setting(
        None, "GPUs of a node for stages=[plan]. null: this machine's, or 8.", ge=1, le=1024
    )
    gpu_memory_gb: float | None = setting(
        None, "Memory of one GPU in 10^9 bytes for stages=[plan]. null: that of this machine's GPUs.", gt=0
    )
    gpu_bandwidth_gb: float | None = setting(
        None,
        "Sustained GB/s that one GPU reads from its memory, for the hours of writing completions. null: "
        "unknown, and only their arithmetic is counted.",
        gt=0,
    )
    tflops_per_gpu: float | None = setting(
        None,
        "Sustained TFLOP/s of one GPU, not its peak, for the hours of capture and training. null: unknown.",
        gt=0,
    )
