"""Drift: how the drafter's attention and the state that it feeds back change from step to step of a draft.

EAGLE 3 was trained for a few speculation steps. At later ones its attention moves from the sink, the first
token of the document, to the keys of the draft itself, and the state that is fed back grows. Both lose
acceptance. EAGLE 3.1's two norms are meant to prevent it. This module measures both on a few rows, with the
plain reference of the rollout.

Source: arXiv 2605.09992 for the effect.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eagle31.kernels.elementwise import widened
from eagle31.kernels.plain_attention import LayerKeys, attend_by_run
from eagle31.kernels.query_run import document_starts, query_runs
from eagle31.kernels.transfer import to_device
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch, captured_rows, supervised_drafts
from eagle31.training.reference import reference_rollout

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
    """What was measured on R rows: L layers, K steps, H heads, A captured hidden states. All on the CPU.

    RMS means the root mean square of a state's elements, averaged over the rows.
    """

    num_positions: int  # R
    # float64 [K, L, 3, H], the mean attention weight on the sink, on the other keys of step 0, and on the
    # keys of later steps, which the drafter made of its own states. A sink outside of the window has none.
    attention: Tensor
    fused_rms: float  # of the state that step 0 receives
    state_rms: list[float]  # [K], of the state that each step feeds back
    aux_layer_ids: tuple[int, ...]  # [A]
    captured_rms: list[float]  # [A], of the captured hidden states
    normed_rms: list[float] | None  # [A], of the same after fc_norm; None without it
    # [A], the norm of each captured state's part of the fused state, over the sum of these norms
    share: list[float]
    accepted: list[int]  # [K], rows whose drafts up to this step are all the text's tokens

    def record(self) -> dict[str, Any]:
        """Return the numbers for metrics.jsonl, by captured hidden state and by step ("depth")."""
        reached = [self.num_positions, *self.accepted[:-1]]
        depth = [
            {
                "layers": [_by_key_kind(layer) for layer in attention.unbind(0)],
                "state_rms": rms,
                "num_reached": num,
                "conditional_acceptance": accepted / num if num else None,
            }
            for attention, rms, accepted, num in zip(
                self.attention.unbind(0), self.state_rms, self.accepted, reached, strict=True
            )
        ]
        captured: list[dict[str, Any]] = [
            {"aux_layer_id": layer, "rms": rms, "share": share}
            for layer, rms, share in zip(self.aux_layer_ids, self.captured_rms, self.share, strict=True)
        ]
        for one, normed in zip(captured, self.normed_rms or [], strict=False):
            one["normed_rms"] = normed
        return {
            "num_positions": self.num_positions,
            "fused_rms": self.fused_rms,
            "captured": captured,
            "depth": depth,
        }


@torch.no_grad()
def measure_drift(drafter: Drafter, frozen: FrozenParts, chosen: DriftRows) -> Drift:
    """Measure drift. The host waits for the device at the end only."""
    config, device = drafter.config, frozen.embed_tokens.device
    batch = chosen.batch.to(device, states=False)
    attention = _RecordingAttention(chosen, config, device)
    rows = attention.rows
    captured = captured_rows(batch.aux_hidden_states, rows, chosen.rows, frozen.embed_tokens.dtype)
    normed = drafter.norm_captured(captured).unbind(1)
    parts = [drafter.fc(_alone(normed, index)) for index in range(len(normed))]
    lm_head = frozen.lm_head or drafter.lm_head
    hits, state_rms = [], []
    attends = attention.attend_rows, attention.attend
    steps = reference_rollout(drafter, frozen.embed_tokens, batch, rows, chosen.num_steps, *attends)
    for step, (state, fed_back) in enumerate(steps):
        greedy = frozen.target_ids(lm_head(state).argmax(-1))
        hits.append(greedy == batch.input_ids[rows + 2 + step])
        state_rms.append(_rms(fed_back))
    norms = torch.stack([part.norm(dim=-1, dtype=widened(part.dtype)) for part in parts])  # [A, R]
    share = (norms / norms.sum(0).clamp(min=torch.finfo(norms.dtype).tiny)).mean(1)
    weights = torch.stack(attention.weights).double().cpu()
    return Drift(
        num_positions=len(rows),
        attention=weights.unflatten(0, (chosen.num_steps, -1)),
        fused_rms=float(_rms(drafter.fuse(captured))),
        state_rms=torch.stack(state_rms).tolist(),
        aux_layer_ids=config.aux_layer_ids,
        captured_rms=torch.stack([_rms(one) for one in captured.unbind(1)]).tolist(),
        normed_rms=torch.stack([_rms(one) for one in normed]).tolist() if config.fc_norm else None,
        share=share.tolist(),
        accepted=torch.stack(hits).long().cumprod(0).sum(1).tolist(),
    )


class _RecordingAttention:
    """The plain attention, which also sums each head's weights by kind of key.

    Each layer calls it once a step, in order.
    """

    def __init__(self, chosen: DriftRows, config: DrafterConfig, device: torch.device) -> None:
        self.weights: list[Tensor] = []  # [3, H] of each call, means over the rows
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
            by_head = weights.flatten(0, 1)  # shape: [H, queries, keys + steps]
            sizes = [int(has_sink), num_keys - has_sink, by_head.shape[-1] - num_keys]
            sums.append(torch.stack([part.sum(-1) for part in by_head.split(sizes, dim=-1)]))

        out = self._plain(query, keys, self._runs, note=note)
        self.weights.append(torch.cat(sums, dim=-1).mean(-1))
        return out


def _alone(states: Sequence[Tensor], index: int) -> Tensor:
    """Concatenate the states with all but one replaced by zeros."""
    parts = [state if i == index else torch.zeros_like(state) for i, state in enumerate(states)]
    return torch.cat(parts, dim=-1)


def _rms(states: Tensor) -> Tensor:
    """Return the mean over the rows of the root mean square of their elements. [R, H] -> scalar."""
    return states.to(widened(states.dtype)).square().mean(-1).sqrt().mean()


def _by_key_kind(layer: Tensor) -> dict[str, Any]:
    """Return a layer's attention [3, H] by name, its mean and by head."""
    sink, context, own = layer.mean(-1).tolist()
    heads = {
        name: [round(weight, 4) for weight in weights.tolist()]
        for name, weights in (("sink", layer[0]), ("own", layer[2]))
    }
    return {"sink": sink, "context": context, "own": own, "heads": heads}
