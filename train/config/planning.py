"""The recipe's schema for the plan."""

from dataclasses import dataclass


@dataclass
class PlanConfig:
    """What the plan cannot know by itself."""

    num_tokens: int | None = None  # of the training data, as long as it is not tokenised
    document_tokens: int | None = None  # a sample's mean length; null: data.max_tokens
    assistant_fraction: float = 0.5  # of the tokens
    num_gpus: int | None = None  # that train; null: the processes of this run
    target_gpus: int | None = None  # that run the target; null: the ones that train
    gpu_memory_gb: float | None = None  # null: that of this machine's GPU
    tflops_per_gpu: float | None = None  # reached, not the data sheet's; null: what an earlier run measured
