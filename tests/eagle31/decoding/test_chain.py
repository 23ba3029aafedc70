"""Drafting with a cache compared with the teacher-forced rollout."""

from typing import Any

import pytest
import torch

from eagle31.decoding.chain import ChainDrafter, top_margin
from eagle31.training.rollout import rollout
from tests.eagle31.tiny import MLA, random_batch, tiny_config, tiny_drafter

NUM_TOKENS = 4


@pytest.mark.parametrize(
    "changes", [{}, {"num_hidden_layers": 2}, {"norm_output": False}, MLA, MLA | {"num_hidden_layers": 2}]
)
@pytest.mark.parametrize("new_positions", [(20,), (7, 1, 12), (1, 1, 1, 17)])
def test_drafts_equal_the_rollout_of_their_tokens(
    changes: dict[str, Any], new_positions: tuple[int, ...]
) -> None:
    config = tiny_config(**changes)
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((sum(new_positions) + NUM_TOKENS,), config, seed=3)
    chain, start = ChainDrafter(drafter, frozen), 0
    with torch.no_grad():
        for num_new in new_positions:
            stop = start + num_new
            draft = chain.draft(
                batch.aux_hidden_states[start:stop],
                batch.input_ids[start + 1 : stop + 1],
                NUM_TOKENS,
                0.0,
                None,
            )
            start = stop
    # The rollout's inputs are the text's tokens, so the drafts become the text.
    batch.input_ids[start + 1 : start + NUM_TOKENS] = torch.tensor(draft.token_ids[:-1])
    rows = torch.tensor([start - 1])
    ids = frozen.draft_target_ids
    assert ids is not None
    expected, margins = [], []
    for normed, _ in rollout(drafter, frozen.embed_tokens, batch, rows, NUM_TOKENS):
        logits = drafter.lm_head(normed)[0].detach()
        expected.append(int(ids[logits.argmax()]))
        margins.append(float(top_margin(logits)))
    assert draft.token_ids == expected
    assert min(margins) > 0
    torch.testing.assert_close(draft.margins, margins, rtol=1e-4, atol=1e-5)


def test_top_margin() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.5], [3.0, 3.0, 0.0]], dtype=torch.bfloat16)
    torch.testing.assert_close(top_margin(logits), torch.tensor([1.5, 0.0]))
    assert top_margin(torch.tensor([[7.0]])).item() == float("inf")
