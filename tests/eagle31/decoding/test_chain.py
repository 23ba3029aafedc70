"""Drafting with a cache compared with the teacher-forced rollout."""

from typing import Any

import pytest
import torch

from eagle31.decoding.speculative import new_sequence
from eagle31.kernels import plain_attention
from eagle31.training.rollout import rollout
from tests.eagle31.tiny import DFLASH, DSPARK, MLA, random_batch, tiny_config, tiny_drafter

NUM_TOKENS = 4


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 2},
        {"norm_output": False},
        MLA,
        {"sliding_window": 4, "num_hidden_layers": 2},
        {"sliding_window": 1},
        DSPARK,
        DFLASH,
    ],
)
def test_drafts_equal_the_rollout_of_their_tokens(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 4 * 3 * 24  # scores: of three queries with all keys, so that the new positions are several tiles
    monkeypatch.setattr(plain_attention, "MAX_SCORES", most)
    plain, held = plain_attention.attention_weights, [0]

    def counted(*args: Any) -> torch.Tensor:
        weights = plain(*args)
        held.append(weights.numel())
        return weights

    monkeypatch.setattr(plain_attention, "attention_weights", counted)
    config, new_positions = tiny_config(**changes), (7, 1, 12)
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((sum(new_positions) + NUM_TOKENS,), config, seed=3)
    chain, start = new_sequence(drafter, frozen), 0
    with torch.no_grad():
        for num_new in new_positions:
            stop = start + num_new
            draft = chain.draft(
                batch.aux_hidden_states[start:stop],
                batch.input_ids[start + 1 : stop + 1],
                NUM_TOKENS,
            )
            start = stop
    # The rollout's inputs are the text's tokens, so the drafts become the text.
    batch.input_ids[start + 1 : start + NUM_TOKENS] = torch.tensor(draft[:-1])
    rows = torch.tensor([start - 1])
    ids = frozen.draft_target_ids
    assert ids is not None
    expected = []
    for read in rollout(drafter, frozen.embed_tokens, batch, rows, NUM_TOKENS):
        logits = (read[0] @ drafter.head(None).t()).detach()
        expected.append(int(ids[logits.argmax()]))
    assert draft == expected
    assert max(held) <= most
