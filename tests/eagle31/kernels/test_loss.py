"""The loss's kernels for GPUs, interpreted, compared with the plain loss in float64."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import tests.eagle31.kernels.interpreted  # noqa: F401  # before the kernels
from eagle31.kernels import loss as kernels
from eagle31.training.reference import plain_alpha, plain_loss
from eagle31.training.teacher import Teacher, full_teacher

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Relative to the largest entry of a row's gradient, which has the dtype of the logits.
BOUNDS = {FP32: 1e-6, FP16: 1e-3, BF16: 8e-3}
WEIGHTS = torch.tensor([1.0, 0.8, 0.64], dtype=torch.float64)
FIRST = 5


class Case(NamedTuple):
    """Rows of three steps, of which the second may have none, that share some teachers."""

    logits: Tensor  # [n, Vd]
    target_logits: Tensor  # [N, V]
    ids: Tensor  # [Vd]
    steps: tuple[int, ...]  # rows of each
    index: Tensor  # [n], teachers

    @property
    def starts(self) -> Tensor:
        return torch.tensor([0, *self.steps]).cumsum(0)

    @property
    def weights(self) -> Tensor:
        return WEIGHTS[: len(self.steps)].repeat_interleave(torch.tensor(self.steps))


def drawn(
    dtype: torch.dtype, size: int, scale: float = 2.0, steps: tuple[int, ...] = (3, 0, 2), seed: int = 0
) -> Case:
    """Return rows with a draft vocabulary of `size`, of which the first is the teacher's."""
    generator = torch.Generator().manual_seed(seed)
    vocab, num_teachers = 2 * size + 1, max(steps)
    logits = (torch.randn(sum(steps), size, generator=generator) * scale).to(dtype)
    target_logits = (torch.randn(num_teachers, vocab, generator=generator) * scale).to(dtype)
    ids = torch.randperm(vocab, generator=generator)[:size].sort().values
    index = torch.cat([torch.arange(num_teachers)[-rows:] for rows in steps if rows])
    logits[0] = target_logits[index[0], ids]
    return Case(logits, target_logits, ids, steps, index)


def expected(case: Case, teacher: Teacher) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each row's loss, greedy hit and alpha, and the gradient of the weighted sum, in float64."""
    logits = case.logits.double().requires_grad_()
    of_rows = teacher.select(case.index)
    loss = plain_loss(logits, of_rows)
    (gradient,) = torch.autograd.grad((loss * case.weights).sum(), logits)
    hits = logits.argmax(-1) == of_rows.greedy
    return loss.detach(), hits, plain_alpha(logits, of_rows).detach(), gradient


def launched(
    case: Case, teacher: tuple[Tensor, Tensor, Tensor | None, Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Return the gradient and the sums, which start from one."""
    gradient, sums = case.logits.clone(), torch.ones(5, len(case.steps), dtype=torch.float64)
    kernels.differentiate(
        gradient,
        *teacher,
        case.index + FIRST,
        FIRST,
        case.starts,
        max(case.steps),
        WEIGHTS[: len(case.steps)],
        sums,
    )
    return gradient, sums


def compare(case: Case, teacher: Teacher, given: tuple, with_mass: bool = True) -> None:
    loss, hits, alpha, gradient = expected(case, teacher)
    found, sums = launched(case, given)
    bound = BOUNDS[case.logits.dtype]
    distance = (found.double() - gradient).abs().amax(-1)
    assert (distance <= bound * gradient.abs().amax(-1) + bound**2).all(), distance
    columns = [torch.ones_like(loss), loss, with_mass * hits, with_mass * alpha, torch.zeros_like(loss)]
    of_steps = [torch.stack([part.sum() for part in x.double().split(case.steps)]) for x in columns]
    torch.testing.assert_close(sums, 1 + torch.stack(of_steps), rtol=2e-5, atol=2e-5)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", 16)
    monkeypatch.setattr(kernels, "_SUM_BLOCK", 2)


@pytest.mark.parametrize(
    ("dtype", "size", "steps"),
    [(FP32, 37, (3, 0, 2)), (BF16, 48, (2, 2)), (FP16, 16, (1,)), (FP32, 1, (1, 1))],
    ids=str,
)
def test_losses_and_gradients_are_the_plain_ones(
    dtype: torch.dtype, size: int, steps: tuple[int, ...]
) -> None:
    case = drawn(dtype, size, steps=steps)
    teacher = full_teacher(case.target_logits.double(), case.ids)
    compare(case, teacher, kernels.read_teacher(case.target_logits, case.ids, True))


def test_the_loss_needs_no_metrics() -> None:
    case = drawn(FP32, 37)
    teacher = full_teacher(case.target_logits.double(), case.ids)
    given = kernels.read_teacher(case.target_logits[:, case.ids], None, False)
    assert given[2] is given[3] is None
    compare(case, teacher, given, with_mass=False)


def test_large_logits() -> None:
    """Float32 itself has the log-sum-exp of logits near 500 to 3e-5 alone, which bfloat16's bound leaves."""
    case = drawn(BF16, 37, scale=200.0)
    case.target_logits[0, case.ids[3]] = float("-inf")
    teacher = full_teacher(case.target_logits.double(), case.ids)
    compare(case, teacher, kernels.read_teacher(case.target_logits, case.ids, True))


@pytest.mark.parametrize("pruned", [True, False])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_teachers_are_the_plain_ones(pruned: bool, dtype: torch.dtype) -> None:
    """Rows of a wider matrix, with equal largest logits, of which the first is the greedy token."""
    case = drawn(dtype, 37, steps=(4,))
    wide = torch.cat((case.target_logits, torch.full((4, 3), 99.0, dtype=dtype)), dim=1)
    logits = wide[:, :-3]
    logits[0, case.ids[2] + torch.tensor([0, 16, 17])] = 30.0  # a program has every 16th together
    ids = case.ids if pruned else None
    plain = full_teacher(logits.double(), ids)
    kept, lse, mass, greedy = kernels.read_teacher(logits, ids, True)
    assert kept.dtype == dtype
    probs = (kept.double() - lse.double()[:, None]).exp()
    torch.testing.assert_close(probs, plain.probs, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(mass, plain.draft_mass.float(), rtol=1e-5, atol=0)
    assert greedy is not None
    assert torch.equal(greedy.long(), plain.greedy)
    assert int(greedy[0]) == (2 if pruned else int(case.ids[2]))
