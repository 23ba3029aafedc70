"""The CPU's loss compared with its definition, and the GPU's, with interpreted kernels, with the CPU's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tests.eagle31.kernels.interpreted  # noqa: F401  # before the kernels
from eagle31.kernels.loss import read_teacher
from eagle31.training import fused_loss
from eagle31.training.batch import supervised_drafts
from eagle31.training.fused_loss import _add_product, _add_wide_product, loss_with_gradient, one_pass_loss
from eagle31.training.reference import plain_alpha, plain_loss
from eagle31.training.schedule import schedule_rollout
from eagle31.training.teacher import Teacher, TeacherLogits, full_teacher

NUM_STEPS, VOCAB, DRAFT_VOCAB, HIDDEN = 3, 43, 21, 8


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return draft logits, the target's logits, and the draft ids."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, DRAFT_VOCAB, generator=generator, dtype=dtype) * 3
    target_logits = torch.randn(7, VOCAB, generator=generator, dtype=dtype) * 3
    return logits, target_logits, torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values


def test_the_closed_form_gradient_is_autograds() -> None:
    logits, target_logits, ids = drawn(torch.float64)
    teacher = full_teacher(target_logits, ids)
    expected = plain_loss(logits.requires_grad_(), teacher)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), logits)
    logits, gradient = logits.detach(), logits.detach().clone()
    value, alpha = loss_with_gradient(gradient, teacher, torch.empty_like(gradient))
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(alpha, plain_alpha(logits, teacher), rtol=1e-12, atol=0)


def test_the_loss_is_finite_where_the_drafter_gives_almost_no_mass() -> None:
    logits, target_logits, ids = drawn(torch.float32)
    gradient = logits * 100
    value, _ = loss_with_gradient(gradient, full_teacher(target_logits, ids), torch.empty_like(gradient))
    assert value.isfinite().all()
    assert gradient.isfinite().all()


def test_the_kernels_loss_is_the_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks, of which the second has fewer positions, and not one for each step's rows."""
    monkeypatch.setattr(fused_loss, "BLOCK_LOGITS", 2 * DRAFT_VOCAB)  # several blocks, on the CPU
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([False, True, True, True, True, True, False, True, True, True, False])
    documents = torch.zeros(len(mask), dtype=torch.long)
    (chunk,) = schedule_rollout(supervised_drafts(mask, documents, NUM_STEPS), documents).chunks
    target_logits = torch.randn(len(chunk.teacher_rows), VOCAB, generator=generator) * 3
    ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    states = [torch.randn(len(step.rows), HIDDEN, generator=generator) for step in chunk.steps]
    weight = torch.randn(DRAFT_VOCAB, HIDDEN, generator=generator)

    def results(teacher: Callable[[slice], Teacher | TeacherLogits]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (weight, *states)]
        total, sums = one_pass_loss(leaves[1:], leaves[0], teacher, chunk, (1.0, 0.8, 0.64), 12)
        return [total.detach(), sums, *torch.autograd.grad(total, leaves)]

    assert len(chunk.teacher_rows) == 6
    found = results(lambda part: TeacherLogits(*read_teacher(target_logits[part], ids, True)))
    expected = results(lambda part: full_teacher(target_logits[part], ids))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert expected[1][[0, 1, 3, 4]].all()


def test_a_wide_product_is_not_rounded_between_chunks() -> None:
    """PyTorch has the operation on CUDA alone; here it is what its documentation says."""

    def addmm(total: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
        assert out_dtype == out.dtype == torch.float32
        return out.copy_(total + left.float() @ right.float())

    generator = torch.Generator().manual_seed(0)
    pairs = [
        [torch.randn(shape, generator=generator).bfloat16() for shape in ((30, 64), (64, 20))]
        for _ in range(8)
    ]
    exact = sum(left.double() @ right.double() for left, right in pairs)
    errors = []
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("addmm.dtype_out", addmm, "CPU")
        for add in (_add_product, _add_wide_product):
            total = torch.zeros(30, 20)
            for left, right in pairs:
                add(total, left, right)
            errors.append(float((total - exact).norm() / exact.norm()))
    rounded, wide = errors
    assert 1e-3 < rounded < 1e-2
    assert wide < 1e-6
