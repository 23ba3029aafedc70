"""A step of each recipe's drafter takes the memory on a GPU that the plan says.

The row is the plan's worst one, which the assistant wrote entirely.
"""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from eagle31.cost.flops import count_step
from eagle31.cost.memory import step_memory
from tests.pretended_gpu.backward import backward, grad
from tests.pretended_gpu.device import CUDA, PretendedGpu
from tests.pretended_gpu.live_bytes import LiveBytes
from tests.pretended_gpu.recipe_steps import RowStep, typical_row
from tests.train.torchrun import composed
from train.plan.sizes import RunSizes, trainer_settings

IN_EVERY_RUN = ("glm_5_2", "kimi_k2_6", "llama3_1_8b", "qwen3_8b drafter=dspark")
OTHERS = sorted(
    {path.stem for path in Path("recipes/recipe").glob("*.yaml")}
    - {*IN_EVERY_RUN, "adapt", "any_target", "quickstart"}
)


def freed(weight: Tensor) -> None:
    """Drop a gradient, as DeepSpeed does once it has added it to its own."""
    weight.grad = None


@pytest.mark.parametrize(
    "recipe",
    [*IN_EVERY_RUN, *(pytest.param(name, marks=pytest.mark.full("a few seconds each")) for name in OTHERS)],
)
def test_a_step_takes_the_memory_that_the_plan_says(recipe: str) -> None:
    sizes = RunSizes(composed(*recipe.split(), "plan.assistant_fraction=1.0"))
    settings, train = trainer_settings(sizes.config, num_ranks=1), sizes.config.train
    with PretendedGpu(), patch("torch.autograd.grad", grad):
        step = RowStep(sizes, CUDA)
        for weight in step.drafter.parameters():
            weight.register_post_accumulate_grad_hook(freed)
        assert step.frozen.draft_logits, "the plan has its weights among the frozen ones"
        # What a node of the graph has read is freed, as autograd's engine frees it.
        with LiveBytes() as live, saved_tensors_hooks(lambda x: [x], list.pop):
            step.run(backward)
    row = typical_row(sizes, torch.bfloat16, torch.device("meta"))
    counts = count_step(row, train.ttt_steps, sizes.drafter, train.max_drafts_per_row)
    planned = step_memory(
        sizes.drafter,
        counts,
        row_tokens=train.row_tokens,
        itemsize=settings.itemsize,
        head_trained=settings.train_lm_head,
        rollout_chunk=train.rollout_chunk,
        device="cuda",
        with_metrics=False,
    )
    # A row in chunks adds up its gradients in float32.
    gradients = 0 if train.rollout_chunk is None else 4 * sizes.num_parameters
    assert 0.999 < (planned.total - planned.batch + gradients) / live.peak < 1.06
