"""Which kernel attends to the step-0 keys."""

from torch import Tensor

from eagle31.kernels.merged_attention import CausalBlock
from eagle31.kernels.packed_attention import PackedBlock, can_pack
from eagle31.kernels.tiled_attention import FlashKernel, Kernel, PlainKernel, TiledBlock, Tiles
from eagle31.model.config import DrafterConfig
from eagle31.training.schedule import RolloutSchedule


def causal_blocks(
    schedule: RolloutSchedule, config: DrafterConfig, like: Tensor
) -> tuple[CausalBlock, list[CausalBlock]]:
    """For all key rows as queries, which layers before the last have at step 0, and for each step's rows.

    Args:
        like: a tensor of the queries' dtype and device.
    """
    scale = config.attention_scale
    if can_pack(like, config.head_dim):
        first = PackedBlock(schedule.steps[0].runs, like.device, scale)
        every = PackedBlock(schedule.documents, like.device, scale)
        return every, [first.for_rows(step.first) for step in schedule.steps]
    longest = max((run.key_stop - run.key_start for run in schedule.documents), default=0)
    tiles = Tiles.for_keys(longest, like)
    # The CPU's flash kernel has one width for keys and values: with padded values it is the slower one.
    narrow = config.value_width < config.head_dim
    kernel: Kernel = PlainKernel(scale) if like.is_cuda or narrow else FlashKernel(scale)
    return TiledBlock(schedule.documents, tiles, kernel), [
        TiledBlock(step.runs, tiles, kernel) for step in schedule.steps
    ]
