"""The teacher of a draft: the target's distribution at the position that the draft is about."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle31.kernels import dispatch
from eagle31.kernels.elementwise import widened
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch, captured_rows
from eagle31.training.schedule import ChunkSchedule


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at N positions. None stands for what was not requested."""

    probs: Tensor  # float32 or wider [N, Vd], renormalised over the draft vocabulary
    draft_mass: Tensor | None  # [N], the probability that the target gives to the draft vocabulary
    greedy: Tensor | None  # int64 [N], draft id of the target's greedy token; -1 outside

    def select(self, index: slice | Tensor) -> "Teacher":
        """Return the teacher at some of the positions."""
        draft_mass = None if self.draft_mass is None else self.draft_mass[index]
        return Teacher(self.probs[index], draft_mass, None if self.greedy is None else self.greedy[index])


class TeacherLogits(NamedTuple):
    """The same distribution as a GPU holds it: the probabilities are exp(logits - lse)."""

    logits: Tensor  # [N, Vd], in the target's dtype
    lse: Tensor  # float32 [N], the log-sum-exp of `logits`
    draft_mass: Tensor | None  # float32 [N]
    greedy: Tensor | None  # int32 [N]


def teacher_of(
    frozen: FrozenParts, batch: PackedBatch, chunk: ChunkSchedule, with_metrics: bool
) -> Callable[[slice], Teacher | TeacherLogits]:
    """Return a function from some of the chunk's teacher rows to the target's distributions there.

    With `with_metrics` they have their mass on the draft vocabulary and the target's greedy tokens too, which
    takes the target's logits over its full vocabulary.
    """

    @torch.no_grad()
    def teacher(part: slice) -> Teacher | TeacherLogits:
        rows, host_rows = chunk.teacher_rows[part], chunk.teacher_rows_host[part]
        hidden = captured_rows(batch.final_hidden_states, rows, host_rows, frozen.embed_tokens.dtype)
        logits = frozen.target_head(hidden) if with_metrics else frozen.draft_logits(hidden)
        ids = frozen.draft_target_ids if with_metrics else None
        if dispatch.has_triton(logits):
            from eagle31.kernels.loss import read_teacher

            return TeacherLogits(*read_teacher(logits, ids, with_metrics))
        return full_teacher(logits, ids) if with_metrics else Teacher(_softmax(logits), None, None)

    return teacher


def full_teacher(logits: Tensor, draft_target_ids: Tensor | None) -> Teacher:
    """Make a teacher of the target's logits.

    Args:
        logits: [N, V].
        draft_target_ids: int64 [Vd]; None for the full vocabulary.
    """
    greedy = logits.argmax(dim=-1)
    if draft_target_ids is None:
        return Teacher(_softmax(logits), logits.new_ones(len(logits), dtype=widened(logits.dtype)), greedy)
    kept = logits[:, draft_target_ids]
    wide = widened(logits.dtype)
    draft_mass = (kept.to(wide).logsumexp(-1) - logits.to(wide).logsumexp(-1)).exp()
    draft_ids = torch.full((logits.shape[1],), -1, device=logits.device)
    draft_ids[draft_target_ids] = torch.arange(len(draft_target_ids), device=logits.device)
    return Teacher(_softmax(kept), draft_mass, draft_ids[greedy])


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(dim=-1, dtype=widened(logits.dtype))
