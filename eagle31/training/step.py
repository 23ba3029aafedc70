"""The training step: the loss of the rollout's drafts against the target's distribution."""

from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from eagle31.kernels.plain_attention import LayerKeys
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch, sampled, supervised_drafts
from eagle31.training.chunks import in_chunks
from eagle31.training.fused_loss import one_pass_loss
from eagle31.training.rollout import chunk_rollout, prefill_schedule
from eagle31.training.schedule import ChunkSchedule, RolloutSchedule, schedule_rollout
from eagle31.training.teacher import teacher_of

# Logits held at once, the teacher's and the drafter's together. On the CPU they are few enough that the
# allocator reuses their pages.
LOGITS_AT_ONCE = {"cpu": 2**23, "cuda": 2**29}
MIN_POSITIONS = 32  # smaller parts of the loss make inefficient matrix products
# On a GPU. Each part reads and writes the head's gradient in float32. At an H100's peak rates that takes as
# long as the product of 1,200 rows, whatever the vocabulary is.
MIN_ROWS = 2**13


@dataclass(frozen=True)
class DepthSums:
    """Sums over the supervised rows of one micro-batch, per speculation step; divide by `num_rows`.

    Where rows are sampled, each counts `RolloutSchedule.weight`, so the sums are estimates of those over all.
    """

    num_rows: Tensor  # [K]
    loss: Tensor  # [K]
    agreement: Tensor  # [K], rows whose greedy draft is the target's greedy token
    expected_acceptance: Tensor  # [K], sum of min(p, q)
    weighted_loss: Tensor  # [K], as it enters the total

    def stacked(self) -> Tensor:
        """Return all sums as float64 [5, K], for one all-reduce."""
        return torch.stack([getattr(self, f.name).double() for f in fields(self)])


def schedule_batch(
    batch: PackedBatch,
    num_steps: int,
    device: torch.device | None = None,
    key_reach: int | None = None,
    chunk_rows: int | None = None,
    max_drafts: int | None = None,
    draw: int = 0,
) -> RolloutSchedule:
    """Schedule the step on this packed row. A batch that is still on the CPU needs no synchronisation.

    Args:
        key_reach: `DrafterConfig.key_reach`. With None, a drafter with a window computes keys that no row
            reads.
        chunk_rows: rows that are rolled out together; None for all.
        max_drafts, draw: of `sampled`.
    """
    device = device or batch.input_ids.device
    loss_mask, document_ids = batch.loss_mask.cpu(), batch.document_ids.cpu()
    supervised = supervised_drafts(loss_mask, document_ids, num_steps)
    kept, weight = sampled(supervised, max_drafts, draw)
    return schedule_rollout(kept, document_ids, device, key_reach, chunk_rows, weight)


def rollout_loss(
    drafter: Drafter,
    frozen: FrozenParts,
    batch: PackedBatch,
    *,
    num_steps: int,
    step_decay: float,
    with_metrics: bool = True,
    schedule: RolloutSchedule | None = None,
    logit_rows: int | None = None,
    row_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, DepthSums]:
    """Return the unnormalised loss of one micro-batch: sum over steps k of the rows' weighted losses.

    Row t's teacher at step k is the target's distribution at index t+1+k. Divide by the number of supervised
    rows of the optimizer step, over all ranks and micro-batches.

    Args:
        step_decay: decay^k is the weight of step k.
        with_metrics: also sum agreement and expected acceptance, which need the target's distribution over
            its full vocabulary; they are zero otherwise.
        schedule: `schedule_batch` of the same batch and number of steps, if it exists already. With
            `chunk_rows` the captured states may be on the CPU, in any dtype.
        logit_rows: rows of draft logits held at once. None keeps them with their teacher's logits near
            `LOGITS_AT_ONCE`, whatever the vocabularies are.
        row_group: the ranks that share the row, each with the schedule of its `RowShare`. Each returns the
            loss of its drafts and has the gradients that it computes; their sums are those of the row.

    Returns:
        The scalar loss, and the sums per step.
    """
    schedule = schedule or schedule_batch(batch, num_steps, key_reach=drafter.config.key_reach)
    head = drafter.head(frozen.lm_head)
    if logit_rows is None:
        sizes = len(frozen.embed_tokens), head.shape[0], num_steps
        logit_rows = num_steps * positions_at_once(head.device.type, *sizes, with_metrics)
    weights = [step_decay**step for step in range(num_steps)]

    def loss_of(chunk: ChunkSchedule, state: Tensor, keys: list[LayerKeys]) -> tuple[Tensor, Tensor]:
        states = list(chunk_rollout(drafter, frozen.embed_tokens, batch, chunk, state, keys))
        teacher = teacher_of(frozen, batch, chunk, with_metrics)
        return one_pass_loss(states, head, teacher, chunk, weights, logit_rows)

    if schedule.chunk_rows is not None:
        total, sums = in_chunks(drafter, frozen.embed_tokens, batch, schedule, loss_of, row_group)
    else:
        (chunk,) = schedule.chunks
        state, keys = prefill_schedule(drafter, frozen.embed_tokens, batch, schedule, None)
        total, sums = loss_of(chunk, state[chunk.query_index], keys)
    return total * schedule.weight, DepthSums(*(sums * schedule.weight))


def positions_at_once(
    device: str, vocab_size: int, draft_vocab_size: int, num_steps: int, with_metrics: bool
) -> int:
    """Return the number of teacher positions in a part of the loss.

    Each position holds the teacher's logits once and the drafter's `num_steps` times.
    """
    teacher = 2 * vocab_size if with_metrics else draft_vocab_size
    fewest = MIN_ROWS // num_steps if device == "cuda" else MIN_POSITIONS
    return max(fewest, LOGITS_AT_ONCE[device] // (teacher + num_steps * draft_vocab_size))
