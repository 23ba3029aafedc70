"""Validation on a GPU takes the memory that the plan says, whatever the length of the row."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from eagle31.cost.memory import validation_memory
from eagle31.model.shapes import MlaShape
from eagle31.training import drift
from eagle31.training.batch import PackedBatch
from eagle31.training.drift import choose_rows, measure_drift
from eagle31.training.teacher_forced import greedy_hits
from tests.eagle31.tiny import MLA, random_batch, tiny_config
from tests.pretended_gpu.device import PretendedGpu
from tests.pretended_gpu.live_bytes import LiveBytes
from tests.pretended_gpu.steps import drafter_on_gpu

# The hidden states of a row are larger than what is kept of it.
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "target_hidden_size": 512}
LATENT = MLA | {"attention": MlaShape(10, 8, 24, 8, 16), "head_dim": 32}
CASES = [LATENT, {"head_dim": 8, "num_hidden_layers": 2}]
CHUNK_ROWS, NUM_STEPS = 32, 4


def written(num_tokens: int, **changes: Any) -> PackedBatch:
    """Return a row of one document that the assistant wrote."""
    batch = random_batch((num_tokens,), tiny_config(**SHAPE | changes), dtype=torch.bfloat16)
    return replace(batch, loss_mask=torch.ones_like(batch.loss_mask))


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_replay_takes_the_memory_that_the_plan_says(changes: dict[str, Any]) -> None:
    config, batch = tiny_config(**SHAPE | changes), written(400, **changes)
    with PretendedGpu():
        drafter, frozen = drafter_on_gpu(config, torch.bfloat16)
        with LiveBytes() as live:
            greedy_hits(drafter, frozen, batch, NUM_STEPS, CHUNK_ROWS)
    sizes: dict[str, Any] = {"row_tokens": 400, "num_steps": NUM_STEPS, "chunk_rows": CHUNK_ROWS}
    planned = validation_memory(config, **sizes, itemsize=2, device="cuda")
    assert live.peak == pytest.approx(planned, rel=0.15)


def test_drift_takes_no_more_of_a_longer_row_than_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "CHUNK_ROWS", CHUNK_ROWS)
    config = tiny_config(**SHAPE, head_dim=8)
    peaks = []
    for num_tokens in (200, 400):
        chosen = choose_rows(written(num_tokens), NUM_STEPS, max_positions=8)
        assert chosen is not None
        with PretendedGpu():
            drafter, frozen = drafter_on_gpu(config, torch.bfloat16)
            with LiveBytes() as live:
                measure_drift(drafter, frozen, chosen)
        peaks.append(live.peak)
    # A row's state, keys and values, token, document and position; of 8 queries the scores of 4 heads.
    of_token = 2 * (config.hidden_size + 2 * 2 * 8) + 5 * 8 + 4 * 8 * 4 * 4
    assert peaks[1] - peaks[0] <= 200 * of_token
