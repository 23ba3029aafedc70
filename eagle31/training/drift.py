"""Drift: how the drafter's attention and the state that it feeds back change from step to step of a draft.

EAGLE 3 was trained for a few speculation steps. At later ones its attention moves from the sink, the first
token of the document, to the keys of the draft itself, and the state that is fed back grows. Both lose
acceptance. EAGLE 3.1's two norms are meant to prevent it. This module measures both on a few rows, all of
which are rolled out over all steps, with attention that builds its scores.

Source: arXiv 2605.09992 for the effect.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31.kernels.elementwise import widened
from eagle31.kernels.plain_attention import LayerKeys, attend_by_run
from eagle31.kernels.query_run import document_starts, query_runs
from eagle31.kernels.transfer import to_device
from eagle31.model.config import DrafterConfig
from eagle31.model.eagle import EagleDrafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch, supervised_drafts
from eagle31.training.rollout import CHUNK_ROWS, prefill_in_parts

NUM_POSITIONS = 64
MIN_STEPS = 8  # rolled out where training and serving take fewer, because drift shows at the later ones


@dataclass(frozen=True)
class DriftRows:
    """The rows on which drift is measured: at each of them all `num_steps` drafts are supervised."""

    batch: PackedBatch  # on the CPU
    rows: Tensor  # int64 [R], ascending, on the CPU
    num_steps: int


def choose_rows(batch: PackedBatch, max_steps: int, max_positions: int = NUM_POSITIONS) -> DriftRows | None:
    """Choose at most `max_positions` rows of a batch on the CPU, evenly among those that have most drafts.

    Steps that no row supervises are left out. None: no draft is supervised.
    """
    supervised = supervised_drafts(batch.loss_mask, batch.document_ids, max_steps)
    num_steps = int(supervised.any(0).sum())  # a step is supervised only where the step before is
    if not num_steps:
        return None
    rows = torch.nonzero(supervised[:, num_steps - 1]).squeeze(1)
    num = min(len(rows), max_positions)
    return DriftRows(batch, rows[torch.arange(num) * len(rows) // num], num_steps)


@dataclass(frozen=True)
class Drift:
    """What was measured on R rows: L layers, K steps. All on the CPU."""

    num_positions: int  # R
    # float64 [K, L, 3], the attention weight on the sink, on the other keys of step 0, and on the keys of
    # later steps, which the drafter made of its own states; means over rows and heads. A sink outside of the
    # window has none.
    attention: Tensor
    state_rms: list[float]  # [K], root mean square of the state that each step feeds back, mean over the rows
    accepted: list[int]  # [K], rows whose drafts up to this step are all the text's tokens

    def record(self) -> dict[str, Any]:
        """Return the numbers for metrics.jsonl, by step ("depth")."""
        reached = [self.num_positions, *self.accepted[:-1]]
        steps = zip(self.attention.tolist(), self.state_rms, self.accepted, reached, strict=True)
        depth = [
            {
                "layers": [dict(zip(("sink", "context", "own"), layer, strict=True)) for layer in layers],
                "state_rms": rms,
                "num_reached": num,
                "conditional_acceptance": accepted / num if num else None,
            }
            for layers, rms, accepted, num in steps
        ]
        return {"num_positions": self.num_positions, "depth": depth}


@torch.no_grad()
def measure_drift(drafter: EagleDrafter, frozen: FrozenParts, chosen: DriftRows) -> Drift:
    """Measure drift. The host waits for the device at the end only."""
    device = frozen.embed_tokens.device
    batch = chosen.batch.to(device, states=False)
    attention = _RecordingAttention(chosen, drafter.config, device)
    rows = attention.rows
    lm_head = frozen.lm_head or drafter.lm_head
    hits, state_rms = [], []
    host_rows = torch.arange(len(batch.input_ids))
    (every_row,) = to_device([host_rows], device)
    state, keys = prefill_in_parts(
        drafter, frozen.embed_tokens, batch, every_row, host_rows, attention.attend_rows, CHUNK_ROWS
    )
    state = state[rows]
    for step in range(chosen.num_steps):
        embeds = F.embedding(batch.input_ids[rows + 1 + step], frozen.embed_tokens)
        rotation = drafter.rotary(batch.position_ids[rows] + step)
        normed, state, keys = drafter.rollout_step(step, state, embeds, rotation, attention.attend, keys)
        greedy = frozen.target_ids(lm_head(normed).argmax(-1))
        hits.append(greedy == batch.input_ids[rows + 2 + step])
        state_rms.append(state.to(widened(state.dtype)).square().mean(-1).sqrt().mean())
    return Drift(
        num_positions=len(rows),
        attention=torch.stack(attention.weights).double().cpu().unflatten(0, (chosen.num_steps, -1)),
        state_rms=torch.stack(state_rms).tolist(),
        accepted=torch.stack(hits).long().cumprod(0).sum(1).tolist(),
    )


class _RecordingAttention:
    """The plain attention, which also sums the weights by kind of key.

    Each layer calls it once a step, in order.
    """

    def __init__(self, chosen: DriftRows, config: DrafterConfig, device: torch.device) -> None:
        self.weights: list[Tensor] = []  # [3] of each call, means over rows and heads
        starts = document_starts(chosen.batch.document_ids)
        (self.rows,) = to_device([chosen.rows], device)
        self._runs = query_runs(chosen.rows, starts)
        self._every_row = query_runs(torch.arange(len(starts)), starts)
        self._plain = partial(attend_by_run, scale=config.attention_scale, window=config.sliding_window)

    def attend_rows(self, query: Tensor, keys: LayerKeys) -> Tensor:
        """Attend from all rows, for layers before the last at step 0."""
        self.attend(query[self.rows], keys)
        return self._plain(query, keys, self._every_row)

    def attend(self, query: Tensor, keys: LayerKeys) -> Tensor:
        """Attend from the chosen rows."""
        sums = []

        def note(weights: Tensor, num_keys: int, has_sink: bool) -> None:
            sizes = [int(has_sink), num_keys - has_sink, weights.shape[-1] - num_keys]
            parts = weights.mean((0, 1)).split(sizes, dim=-1)  # shape: [queries, keys + steps]
            sums.append(torch.stack([part.sum(-1) for part in parts]))

        out = self._plain(query, keys, self._runs, note=note)
        self.weights.append(torch.cat(sums, dim=-1).mean(-1))
        return out
