"""The rollout of DSpark: all steps of a draft are queries of one pass."""

from collections.abc import Iterator

from torch import Tensor

from eagle31.kernels.plain_attention import LayerKeys
from eagle31.model.dspark import DSparkDrafter
from eagle31.training.attention import attend_draft, step_blocks
from eagle31.training.batch import PackedBatch
from eagle31.training.schedule import ChunkSchedule


def dspark_rollout(
    drafter: DSparkDrafter,
    embed_tokens: Tensor,
    batch: PackedBatch,
    chunk: ChunkSchedule,
    keys: list[LayerKeys],
    token_ids: Tensor,
) -> Iterator[Tensor]:
    """Draft at the rows of a chunk; row t has the anchor x[t+1], whose context is the rows up to t.

    A query that is not supervised runs too, as it does in serving, because those before it read its key.

    Args:
        keys, token_ids: those of `chunk_rollout`.

    Yields:
        For each step what the head reads, [R_k, H + r].
    """
    first = chunk.steps[0]
    tokens = token_ids.flatten()
    (block,) = step_blocks([(first.runs, None)], chunk.longest_document, drafter.config, embed_tokens)
    states = drafter.draft(
        tokens[first.teacher_index],
        batch.position_ids[first.rows] + 1,
        len(chunk.steps),
        embed_tokens,
        keys,
        attend_draft(block),
    )
    for number, step in enumerate(chunk.steps):
        state = states[:, number]
        if step.first_index is not None:
            state = state[step.first_index]
        yield drafter.with_previous(state, tokens[step.teacher_index])
