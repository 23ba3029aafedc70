"""The attention of training: which kernel computes it, and what each query reads."""

from collections.abc import Sequence

from torch import Tensor

from eagle31.kernels.merged_attention import merged_attention
from eagle31.kernels.packed_attention import PackedBlock, flash_obstacle, packed_blocks, warn_once
from eagle31.kernels.packed_steps import PackedContext, PackedKeys, packed_attention
from eagle31.kernels.plain_attention import Attend, LayerKeys
from eagle31.kernels.query_run import QueryRun, context_window
from eagle31.kernels.tiled_attention import FlashKernel, PlainKernel, TiledBlock, tile_mask
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.training.schedule import RolloutSchedule


def _no_attention(query: Tensor, keys: LayerKeys) -> Tensor:
    raise AssertionError("each row is prefilled alone")


def attend_draft(block: PackedBlock | TiledBlock) -> Attend:
    """Return the attention of drafts whose tokens are queries of one pass."""
    context = block if isinstance(block, TiledBlock) else PackedContext(block)
    return lambda query, keys: merged_attention(context, query, keys)


def attend_with(block: PackedBlock | TiledBlock, window: int | None) -> Attend:
    def attend(query: Tensor, keys: LayerKeys) -> Tensor:
        if isinstance(block, TiledBlock):
            return merged_attention(block, query, keys.within(window))
        store = keys.packed or PackedKeys(keys.keys, keys.values)
        return packed_attention(block, store, query, *keys.rollout_keys, *keys.rollout_values)

    return attend


def key_attention(schedule: RolloutSchedule, drafter: Drafter, like: Tensor) -> Attend:
    """Return the attention of all key rows, for layers whose output feeds the keys of other layers.

    Args:
        like: a tensor of the queries' dtype and device.
    """
    if drafter.prefills_rows_alone:
        return _no_attention
    config = drafter.config
    longest = schedule.chunks[0].longest_document
    (block,) = step_blocks([(schedule.document_runs, None)], longest, config, like)
    return attend_with(block, config.sliding_window)


def step_blocks(
    steps: Sequence[tuple[Sequence[QueryRun], Tensor | None]],
    longest_document: int,
    config: DrafterConfig,
    like: Tensor,
) -> Sequence[PackedBlock | TiledBlock]:
    """Return the block of each step.

    Args:
        steps: the runs of each step and `StepSchedule.first_index`.
        longest_document, like: those of `ChunkSchedule` and `key_attention`.
    """
    window, scale = config.sliding_window, config.attention_scale
    # None where no query has as many keys.
    windows = [context_window(window, step) for step in range(len(steps))]
    windows = [None if size is None or size >= longest_document else size for size in windows]
    runs, indices = zip(*steps, strict=True)
    if _uses_packed_kernel(config, like):
        first_steps = [0 if window is None else max(0, step - window) for step in range(len(steps))]
        return packed_blocks(runs, indices, windows, first_steps, scale, like.device)
    masks = {size: tile_mask(longest_document, like, size) for size in set(windows) if size != 0}
    # The CPU's flash kernel has one width for keys and values, and is the slower one with padded values.
    plain = like.device.type == "cuda" or config.value_width < config.head_dim
    kernel = PlainKernel(scale) if plain else FlashKernel(scale)
    return [TiledBlock(of, masks.get(size), size, kernel) for of, size in zip(runs, windows, strict=True)]


def _uses_packed_kernel(config: DrafterConfig, like: Tensor) -> bool:
    if like.device.type != "cuda":
        return False
    obstacle = flash_obstacle(like.device, like.dtype, config.head_dim)
    if obstacle is not None:
        warn_once(like.device, obstacle)
    return obstacle is None
