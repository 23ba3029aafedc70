"""The expected number of accepted drafts, its gradient, and the weights of the steps."""

import pytest
import torch
from torch import Tensor

from eagle31.errors import UserError
from eagle31.training.acceptance_chain import reach_of, remaining_of, smoothed
from eagle31.training.objectives import Loss, Objective
from eagle31.training.step import rollout_loss
from tests.eagle31.naive import is_supervised, naive_states
from tests.eagle31.tiny import random_batch, tiny_config, tiny_drafter


def expected_drafts(alphas: Tensor) -> Tensor:
    """Sum over the number of accepted drafts of the number times its probability. [K] -> []."""
    num_steps = len(alphas)
    total = torch.zeros((), dtype=alphas.dtype)
    for accepted in range(num_steps + 1):
        stops = 1 - alphas[accepted] if accepted < num_steps else 1
        total = total + accepted * alphas[:accepted].prod() * stops
    return total


@pytest.mark.parametrize("alphas", [[0.9, 0.5, 0.8, 0.3], [0.4, 0.0, 0.7], [1.0, 1.0], [0.2]])
def test_the_weights_are_the_gradient_of_the_expected_number_of_accepted_drafts(alphas: list[float]) -> None:
    given = torch.tensor(alphas, dtype=torch.float64, requires_grad=True)
    expected = expected_drafts(given)
    (gradient,) = torch.autograd.grad(expected, given)
    table = given.detach().unsqueeze(1)
    torch.testing.assert_close((reach_of(table) * remaining_of(table)).squeeze(1), gradient)
    torch.testing.assert_close(table.cumprod(0).sum(), expected.detach())
    # A chain that ends early has zeros in the table.
    longer = torch.cat((table, table.new_zeros(2, 1)))
    torch.testing.assert_close((reach_of(longer) * remaining_of(longer))[: len(alphas)].squeeze(1), gradient)


def test_smoothing_moves_the_reach_from_the_product_to_one() -> None:
    alphas = torch.tensor([[0.5], [0.2], [0.9]])
    assert reach_of(smoothed(alphas, 0.0)).squeeze(1).tolist() == pytest.approx([1, 0.5, 0.1])
    assert reach_of(smoothed(alphas, 0.5)).squeeze(1).tolist() == pytest.approx([1, 0.75, 0.75 * 0.6])
    assert reach_of(smoothed(alphas, 1.0)).squeeze(1).tolist() == [1, 1, 1]


def test_without_kl_the_loss_is_what_the_expected_number_lacks_of_all_drafts() -> None:
    """Compare with the drafts of each row in turn; the documents' last rows have shorter chains."""
    config = tiny_config()
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((9, 14), config, seed=5)
    ids = frozen.draft_target_ids
    assert ids is not None
    target = frozen.target_head(batch.final_hidden_states).softmax(-1)[:, ids]
    drafts = [drafter.lm_head(x).softmax(-1) for x in naive_states(drafter, config, frozen, batch, 3)]
    expected, lengths = [], []
    for t in range(len(batch.input_ids)):
        chain = [step for step in range(3) if is_supervised(batch, t, step)]
        alphas = [torch.minimum(drafts[step][t], target[t + 1 + step]).sum() for step in chain]
        if chain:
            expected.append(len(chain) - expected_drafts(torch.stack(alphas)))
        lengths.append(len(chain))
    objective = Objective(Loss.acceptance_length, lk_eta=1e9)
    for chunk_rows in (6, 1000):
        loss, sums = rollout_loss(
            drafter, frozen, batch, num_steps=3, step_decay=0.8, objective=objective, chunk_rows=chunk_rows
        )
        torch.testing.assert_close(loss, torch.stack(expected).sum(), rtol=1e-9, atol=0)
        torch.testing.assert_close(sums.loss, sums.weighted_loss)
    assert {1, 2, 3} <= set(lengths)


def test_the_loss_has_no_gaps() -> None:
    with pytest.raises(UserError, match=r"train\.count_outside_vocab=False"):
        Objective(Loss.acceptance_length, count_outside_vocab=False).check(pruned=True)
