"""Drift compared with attention's definition, with the fast path, and with drafters whose drift is known."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle31.kernels.plain_attention import LayerKeys
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training import drift
from eagle31.training.batch import PackedBatch
from eagle31.training.drift import DriftRows, choose_rows, measure_drift
from eagle31.training.rollout import rollout
from eagle31.training.teacher_forced import greedy_hits
from tests.eagle31.tiny import EAGLE3, MLA, WIDE_MLA, random_batch, tiny_config, tiny_drafter

NUM_STEPS = 5
SINK, CONTEXT, OWN = range(3)
WINDOW: dict[str, Any] = {"sliding_window": 12, "num_hidden_layers": 2}
SHORT: dict[str, Any] = {"sliding_window": 2}  # shorter than the drafts


def answered(batch: PackedBatch) -> PackedBatch:
    """The batch with long answers, so that rows have all their drafts."""
    return replace(batch, loss_mask=(batch.position_ids >= 4) & (batch.document_ids >= 0))


def small(**changes: Any) -> tuple[Drafter, FrozenParts, DriftRows]:
    config = tiny_config(**changes)
    drafter, frozen = tiny_drafter(config)
    chosen = choose_rows(answered(random_batch((30, 9, 41), config, seed=5, padding=3)), NUM_STEPS, 17)
    assert chosen is not None
    return drafter, frozen, chosen


@pytest.mark.parametrize("changes", [EAGLE3, MLA, WINDOW], ids=str)
def test_states_and_drafts_are_those_of_the_fast_path(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, frozen, chosen = small(**changes)
    # The text of one row is what the drafter drafts there, so that there is something to accept.
    batch = chosen.batch
    assert frozen.draft_target_ids is not None
    normed = next(rollout(drafter, frozen.embed_tokens, batch, chosen.rows[:1], 1))
    ids = batch.input_ids.clone()
    ids[chosen.rows[0] + 2] = frozen.draft_target_ids[drafter.lm_head(normed).argmax()]
    chosen = replace(chosen, batch=(batch := replace(batch, input_ids=ids)))
    found = measure_drift(drafter, frozen, chosen)
    fed_back: list[Tensor] = []
    final_states = drafter.final_states

    def noted(output: Tensor) -> tuple[Tensor, Tensor]:
        fed_back.append(final_states(output)[1])
        return final_states(output)

    monkeypatch.setattr(drafter, "final_states", noted)
    list(rollout(drafter, frozen.embed_tokens, batch, chosen.rows, NUM_STEPS))
    rms = [float((state.detach() ** 2).mean(-1).sqrt().mean()) for state in fed_back]
    assert found.state_rms == pytest.approx(rms, rel=1e-9)
    hits, supervised = greedy_hits(drafter, frozen, batch, NUM_STEPS)
    assert bool(supervised[chosen.rows].all())
    leading = hits[chosen.rows].long().cumprod(1).sum(0).tolist()
    assert found.accepted == leading
    reached = [17, *leading[:-1]]
    depth = found.record()["depth"]
    assert [one["conditional_acceptance"] for one in depth] == [
        accepted / num if num else None for accepted, num in zip(leading, reached, strict=True)
    ]
    assert 0 < leading[0] < found.num_positions == len(chosen.rows) == 17


@pytest.mark.parametrize("changes", [{}, WIDE_MLA, WINDOW, SHORT], ids=str)
def test_attention_equals_a_softmax_over_each_row(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, frozen, chosen = small(**changes)
    calls: list[tuple[Tensor, LayerKeys]] = []
    plain = drift._RecordingAttention.attend

    def recorded(self: Any, query: Tensor, keys: LayerKeys) -> Tensor:
        calls.append((query, keys))
        return plain(self, query, keys)

    monkeypatch.setattr(drift._RecordingAttention, "attend", recorded)
    found = measure_drift(drafter, frozen, chosen)
    num_layers = drafter.config.num_hidden_layers
    assert len(calls) == NUM_STEPS * num_layers
    torch.testing.assert_close(found.attention.sum(2), torch.ones_like(found.attention[:, :, 0]))
    starts = {int(d): int((chosen.batch.document_ids == d).nonzero()[0]) for d in range(3)}
    group = drafter.config.num_attention_heads // drafter.config.num_key_value_heads
    for call, (query, keys) in enumerate(calls):
        step, layer = divmod(call, num_layers)
        expected, num_heads = torch.zeros(3, dtype=torch.float64), drafter.config.num_attention_heads
        for index, row in enumerate(chosen.rows.tolist()):
            start = starts[int(chosen.batch.document_ids[row])]
            for head in range(num_heads):
                own = [key[index, head // group] for key in keys.rollout_keys]
                seen = torch.stack([*keys.keys[start : row + 1, head // group], *own])
                scores = seen @ query[index, head] * drafter.config.attention_scale
                # The query's own key is the last.
                scores[: -(drafter.config.sliding_window or len(seen))] = float("-inf")
                weights = scores.softmax(0)
                num_keys = row + 1 - start
                parts = weights[0], weights[1:num_keys].sum(), weights[num_keys:].sum()
                expected += torch.stack(parts) / len(chosen.rows) / num_heads
        torch.testing.assert_close(found.attention[step, layer], expected, rtol=1e-9, atol=1e-12)


def test_rows_are_spread_and_have_all_their_drafts() -> None:
    config = tiny_config()
    batch = answered(random_batch((30, 9, 41, 6), config, padding=2))
    chosen = choose_rows(batch, 8, 10)
    assert chosen is not None
    assert chosen.num_steps == 8
    assert len(set(chosen.rows.tolist())) == 10
    assert {int(batch.document_ids[row]) for row in chosen.rows} == {0, 2}
    # The third token before the answer is the last one that no draft starts after.
    assert int(batch.position_ids[chosen.rows].min()) >= 3
    short = replace(batch, loss_mask=batch.loss_mask & (batch.position_ids < 9))
    cut = choose_rows(short, 8, 100)
    assert cut is not None
    assert cut.num_steps == 4
    assert [int(batch.position_ids[row]) for row in cut.rows] == [3, 3, 3]
    assert choose_rows(replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)), 8) is None
