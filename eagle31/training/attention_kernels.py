"""The choice of the kernel that attends to the step-0 keys."""

from torch import Tensor

from eagle31.kernels.flash_support import flash_obstacle, warn_once
from eagle31.kernels.merged_attention import CausalBlock, NoContext
from eagle31.kernels.packed_attention import PackedBlock
from eagle31.kernels.query_run import context_window
from eagle31.kernels.tiled_attention import FlashKernel, Kernel, PlainKernel, TiledBlock, TileMasks
from eagle31.model.config import DrafterConfig
from eagle31.training.schedule import RolloutSchedule


def causal_blocks(
    schedule: RolloutSchedule, config: DrafterConfig, like: Tensor
) -> tuple[CausalBlock, list[CausalBlock]]:
    """Return the block of all key rows, for step 0 of layers before the last, and the block of each step.

    Args:
        like: a tensor of the queries' dtype and device.
    """
    scale = config.attention_scale
    longest = max((run.num_keys for run in schedule.document_runs), default=0)
    windows = [_effective(config.sliding_window, step, longest) for step in range(len(schedule.steps))]
    on_gpu = like.device.type == "cuda"
    obstacle = flash_obstacle(like.device, like.dtype, config.head_dim) if on_gpu else None
    if on_gpu and obstacle is None:
        first = PackedBlock(schedule.steps[0].runs, like.device, scale)
        every = PackedBlock(schedule.document_runs, like.device, scale)
        return every.for_rows(None, windows[0]), [
            NoContext(scale) if window == 0 else first.for_rows(step.first_index, window)
            for step, window in zip(schedule.steps, windows, strict=True)
        ]
    if obstacle is not None:
        warn_once(like.device, obstacle)
    masks = {window: TileMasks.for_keys(longest, like, window) for window in set(windows) if window != 0}
    # The CPU's flash kernel has one width for keys and values, and is the slower one with padded values.
    narrow = config.value_width < config.head_dim
    kernel: Kernel = PlainKernel(scale) if on_gpu or narrow else FlashKernel(scale)
    return TiledBlock(schedule.document_runs, masks[windows[0]], kernel), [
        NoContext(scale) if window == 0 else TiledBlock(step.runs, masks[window], kernel)
        for step, window in zip(schedule.steps, windows, strict=True)
    ]


def _effective(window: int | None, step: int, longest: int) -> int | None:
    """Return the window of a step, or None where no query has as many keys."""
    context = context_window(window, step)
    return None if context is None or context >= longest else context
