"""Every loss compared with its definition, and its closed-form gradient with autograd's."""

import pytest
import torch
from torch import Tensor

from eagle31.training.objectives import LK_ETA, Loss, Teacher, loss_with_gradient, plain_loss

ROWS, VOCAB, DRAFT_VOCAB = 7, 40, 13


def drawn(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Teacher]:
    """Return draft logits, the target's distribution, the draft ids, and the teacher of the two."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, DRAFT_VOCAB, generator=generator, dtype=dtype) * 3
    target = (torch.randn(ROWS, VOCAB, generator=generator, dtype=dtype) * 3).softmax(-1)
    ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    draft_mass = target[:, ids].sum(-1)
    return logits, target, ids, Teacher(target[:, ids] / draft_mass[:, None], draft_mass, None)


def padded_draft(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the drafter's distribution over the target's vocabulary."""
    return logits.new_zeros(ROWS, VOCAB).index_copy(1, ids, logits.softmax(-1))


def test_losses_equal_their_definitions_over_the_target_vocabulary() -> None:
    logits, target, ids, teacher = drawn(0)
    draft = padded_draft(logits, ids)
    distance = 0.5 * (target - draft).abs().sum(-1)
    kept = target[:, ids] / target[:, ids].sum(-1, keepdim=True)
    divergence = (kept * (kept / logits.softmax(-1)).log()).sum(-1)
    weight = torch.exp(-LK_ETA * (1 - distance))
    torch.testing.assert_close(
        plain_loss(Loss.lk_lambda, logits, teacher),
        weight * divergence + (1 - weight) * distance,
    )
    entropy = -(kept * kept.log()).sum(-1)
    torch.testing.assert_close(plain_loss(Loss.kl, logits, teacher), divergence + entropy)


@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.parametrize("seed", range(3))
def test_closed_form_gradients_equal_autograd(loss: Loss, seed: int) -> None:
    logits, target, ids, teacher = drawn(seed)
    logits.requires_grad_()
    expected = plain_loss(loss, logits, teacher)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), logits)
    gradient = logits.detach().clone()
    entropy, scratch = teacher.entropy(), torch.empty_like(gradient)
    value, alpha = loss_with_gradient(loss, gradient, teacher, entropy, scratch)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-13)
    assert alpha is not None
    overlap = torch.minimum(padded_draft(logits.detach(), ids), target).sum(-1)
    torch.testing.assert_close(alpha, overlap, rtol=1e-12, atol=0)
    assert expected_gradient.abs().max() > 1e-3


@pytest.mark.parametrize("loss", list(Loss))
def test_losses_are_finite_where_the_drafter_gives_almost_no_mass(loss: Loss) -> None:
    logits, _, _, teacher = drawn(0, torch.float32)
    logits = logits * 100
    gradient = logits.clone()
    value, _ = loss_with_gradient(loss, gradient, teacher, teacher.entropy(), torch.empty_like(gradient))
    assert value.isfinite().all()
    assert gradient.isfinite().all()
