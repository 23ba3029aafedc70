"""Which kernel attends to the step-0 keys."""

from torch import Tensor

from eagle31.flash import CausalBlock
from eagle31.packed_block import PackedBlock, can_pack
from eagle31.plan import RolloutPlan
from eagle31.tiled_block import FlashKernel, PlainKernel, TiledBlock, Tiles


def causal_blocks(plan: RolloutPlan, head_dim: int, like: Tensor) -> tuple[CausalBlock, list[CausalBlock]]:
    """For all key rows as queries, which layers before the last have at step 0, and for each step's rows.

    Args:
        like: a tensor of the queries' dtype and device.
    """
    if can_pack(like, head_dim):
        first = PackedBlock(plan.steps[0].runs, like.device)
        return PackedBlock(plan.documents, like.device), [first.for_rows(step.first) for step in plan.steps]
    longest = max((run.key_stop - run.key_start for run in plan.documents), default=0)
    tiles = Tiles.for_keys(longest, like)
    kernel = PlainKernel() if like.is_cuda else FlashKernel()
    return TiledBlock(plan.documents, tiles, kernel), [
        TiledBlock(step.runs, tiles, kernel) for step in plan.steps
    ]
