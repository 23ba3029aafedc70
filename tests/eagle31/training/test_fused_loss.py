"""The loss as a GPU computes it, with interpreted kernels, compared with the CPU's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tests.eagle31.kernels.interpreted  # noqa: F401  # before the kernels
from eagle31.kernels.loss import teacher_rows
from eagle31.training.batch import supervised_drafts
from eagle31.training.fused_loss import _add_product, _add_wide_product, one_pass_loss
from eagle31.training.objectives import Loss, Teacher, TeacherLogits
from eagle31.training.schedule import schedule_rollout
from eagle31.training.step import full_teacher

NUM_STEPS, VOCAB, DRAFT_VOCAB, HIDDEN = 3, 43, 21, 8


@pytest.mark.parametrize("objective", list(Loss))
def test_the_kernels_loss_is_the_plain_operations(objective: Loss) -> None:
    """Two chunks, of which the second has fewer positions, and not one for each step's rows."""
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
        total, sums = one_pass_loss(leaves[1:], leaves[0], teacher, chunk, objective, (1.0, 0.8, 0.64), 12)
        return [total.detach(), sums, *torch.autograd.grad(total, leaves)]

    assert len(chunk.teacher_rows) == 6
    found = results(lambda part: TeacherLogits(*teacher_rows(target_logits[part], ids, True)))
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
