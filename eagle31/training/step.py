"""The training objective: the rollout's drafts held against the target's distribution."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from eagle31.kernels.elementwise import widened
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch
from eagle31.training.fused_loss import one_pass_loss
from eagle31.training.objectives import Objective, Teacher
from eagle31.training.rollout import scheduled_rollout
from eagle31.training.schedule import RolloutSchedule, schedule_rollout
from eagle31.training.supervision import supervised_drafts

# Logits held at once, the teacher's and the drafter's: on the CPU few enough to stay off fresh pages, on a
# GPU enough to fill it.
CHUNK_LOGITS = {"cpu": 2**23, "cuda": 2**28}
MIN_POSITIONS = 32  # below it the products of a chunk are too thin


@dataclass(frozen=True)
class DepthSums:
    """Sums over the counted rows of one micro-batch, per speculation step; divide by `num_rows`."""

    num_rows: Tensor  # [K]
    loss: Tensor  # [K]
    agreement: Tensor  # [K], rows whose greedy draft is the target's greedy token
    expected_acceptance: Tensor  # [K], sum of min(p, q)
    state_norm: Tensor  # [K], L2 norm of the fed-back state

    def stacked(self) -> Tensor:
        """float64 [5, K], ready for one all-reduce."""
        return torch.stack([getattr(self, f.name).double() for f in fields(self)])

    @staticmethod
    def unstack(stacked: Tensor) -> "DepthSums":
        return DepthSums(*stacked.unbind(0))


def schedule_batch(batch: PackedBatch, num_steps: int, device: torch.device | None = None) -> RolloutSchedule:
    """What the step computes of this row. From a batch that is still on the CPU it waits for no device."""
    device = device or batch.input_ids.device
    loss_mask, document_ids = batch.loss_mask.cpu(), batch.document_ids.cpu()
    return schedule_rollout(supervised_drafts(loss_mask, document_ids, num_steps), document_ids, device)


def rollout_loss(
    drafter: Drafter,
    frozen: FrozenParts,
    batch: PackedBatch,
    *,
    num_steps: int,
    step_decay: float,
    objective: Objective | None = None,
    with_metrics: bool = True,
    schedule: RolloutSchedule | None = None,
    activation_checkpointing: bool = False,
    chunk_rows: int | None = None,
) -> tuple[Tensor, DepthSums]:
    """Unnormalised loss of one micro-batch, sum over steps of decay^k times the sum of the rows' losses.

    Row t's step-k teacher is the target's distribution at index t+1+k. Divide by the number of counted rows
    of the whole optimizer step, over all ranks and micro-batches.

    Args:
        objective: cross entropy on the draft vocabulary by default.
        with_metrics: also sum agreement and expected acceptance, which need the target's distribution over its
            full vocabulary; they are zero otherwise.
        schedule: `schedule_batch` of the same batch and steps, when it was made ahead.
        activation_checkpointing: keep only what passes between the steps, and compute the rest again in the
            backward pass.
        chunk_rows: rows of draft logits held at once; None keeps a chunk, the teacher's logits included, near
            `CHUNK_LOGITS` whatever the vocabularies are.

    Returns:
        A scalar, and the sums per step.

    Raises:
        UserError: the loss does not fit the draft vocabulary.
    """
    objective = objective or Objective()
    objective.check(pruned=frozen.draft_target_ids is not None)
    schedule = schedule or schedule_batch(batch, num_steps)
    lm_head = frozen.lm_head or drafter.lm_head
    states, norms = [], []
    for normed, state in scheduled_rollout(
        drafter, frozen.embed_tokens, batch, schedule, activation_checkpointing
    ):
        states.append(normed)
        norms.append(state.detach().norm(dim=-1, dtype=widened(state.dtype)).sum())
    weights = [step_decay**step for step in range(num_steps)]
    whole = with_metrics or objective.compares_whole_target
    total, (num_rows, loss, agreement, expected) = one_pass_loss(
        states,
        lm_head.weight,
        teacher_of(frozen, batch, whole),
        schedule,
        objective,
        weights,
        chunk_rows or _chunk_rows(frozen, lm_head.weight.shape[0], num_steps, whole),
    )
    return total, DepthSums(num_rows, loss, agreement, expected, torch.stack(norms))


def _chunk_rows(frozen: FrozenParts, draft_vocab_size: int, num_steps: int, whole: bool) -> int:
    embedding = frozen.embed_tokens
    positions = chunk_positions(embedding.device.type, len(embedding), draft_vocab_size, num_steps, whole)
    return num_steps * positions


def chunk_positions(device: str, vocab_size: int, draft_vocab_size: int, num_steps: int, whole: bool) -> int:
    """Positions that the loss takes at once.

    Each holds the teacher's logits once and the drafter's `num_steps` times.
    """
    teacher = 2 * vocab_size if whole else draft_vocab_size
    return max(MIN_POSITIONS, CHUNK_LOGITS[device] // (teacher + num_steps * draft_vocab_size))


def teacher_of(frozen: FrozenParts, batch: PackedBatch, whole: bool) -> Callable[[Tensor], Teacher]:
    """The target's distribution by row; `whole` compares it with that over the target's vocabulary too."""

    @torch.no_grad()
    def at(rows: Tensor) -> Teacher:
        hidden = batch.final_hidden_states[rows]
        if not whole:
            return Teacher(_softmax(frozen.draft_logits(hidden)), None, None)
        return whole_teacher(frozen.target_head(hidden), frozen.draft_target_ids)

    return at


def whole_teacher(logits: Tensor, draft_target_ids: Tensor | None) -> Teacher:
    """From the target's logits [N, V]; `draft_target_ids` int64 [Vd], None for the full vocabulary."""
    greedy = logits.argmax(dim=-1)
    if draft_target_ids is None:
        return Teacher(_softmax(logits), logits.new_ones(len(logits), dtype=widened(logits.dtype)), greedy)
    kept = logits[:, draft_target_ids]
    wide = widened(logits.dtype)
    share = (kept.to(wide).logsumexp(-1) - logits.to(wide).logsumexp(-1)).exp()
    draft_ids = torch.full((logits.shape[1],), -1, device=logits.device)
    draft_ids[draft_target_ids] = torch.arange(len(draft_target_ids), device=logits.device)
    return Teacher(_softmax(kept), share, draft_ids[greedy])


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(dim=-1, dtype=widened(logits.dtype))


@torch.no_grad()
def greedy_hits(
    drafter: Drafter,
    frozen: FrozenParts,
    batch: PackedBatch,
    num_steps: int,
    chunk_rows: int = 4096,
) -> tuple[Tensor, Tensor]:
    """Teacher-forced greedy predictions against the text, for replay.

    Returns:
        hits bool [T, K], row t's step-k prediction equals x[t+2+k]; counted bool [T, K].
    """
    counted = supervised_drafts(batch.loss_mask, batch.document_ids, num_steps)
    schedule = schedule_batch(batch, num_steps)
    lm_head = frozen.lm_head or drafter.lm_head
    hits = torch.zeros_like(counted)
    for step, (normed, _) in enumerate(scheduled_rollout(drafter, frozen.embed_tokens, batch, schedule)):
        rows = schedule.steps[step].rows
        greedy = torch.cat([lm_head(part).argmax(dim=-1) for part in normed.split(chunk_rows)])
        if frozen.draft_target_ids is not None:
            greedy = frozen.draft_target_ids[greedy]
        hits[rows, step] = greedy == batch.input_ids[rows + 2 + step]
    return hits, counted
