"""Drafting with a cache compared with the teacher-forced rollout."""

from typing import Any

import pytest
import torch

from eagle31.decoding.chain import ChainDrafter, rounding_bound, top_magnitude, top_margin
from eagle31.training.rollout import rollout
from tests.eagle31.tiny import MLA, random_batch, tiny_config, tiny_drafter

NUM_TOKENS = 4


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 2},
        {"norm_output": False},
        MLA,
        {"sliding_window": 4, "num_hidden_layers": 2},
        {"sliding_window": 1},
    ],
)
def test_drafts_equal_the_rollout_of_their_tokens(changes: dict[str, Any]) -> None:
    config, new_positions = tiny_config(**changes), (7, 1, 12)
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


def test_rounding_in_bf16_stays_within_the_bound() -> None:
    """The margins of one product, computed from terms that are rounded in two orders."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(200, 512), torch.randn(64, 512) / 16
    exact = hidden.double() @ weight.double().T
    rounded = (hidden.bfloat16() @ weight.bfloat16().T).float()
    order = torch.randperm(512)
    halves = [(hidden[:, part].bfloat16() @ weight[:, part].bfloat16().T) for part in order.chunk(2)]
    summed = (halves[0] + halves[1]).float()
    top = exact.topk(2).indices
    gaps = [x.gather(1, top).diff(dim=1).squeeze(1) for x in (rounded, summed)]
    assert (gaps[0] != gaps[1]).any()
    bound = rounding_bound(top_magnitude(rounded), torch.bfloat16)
    assert ((gaps[0] - gaps[1]).abs() <= bound).all()
