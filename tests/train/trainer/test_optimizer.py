"""Muon's updates compared with their definition in plain PyTorch."""

import torch
from torch import Tensor, nn

from train.trainer.optimizer import Muon

MATRIX_LR, STEPS = 0.02, 3


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return five Newton-Schulz steps of one matrix, as published."""
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


def test_muon_orthogonalizes_the_nesterov_momentum() -> None:
    torch.manual_seed(0)
    tall, wide, norm = (nn.Parameter(torch.randn(shape)) for shape in ((8, 2), (3, 5), (4,)))
    expected = [tall.detach().clone(), wide.detach().clone()]
    optimizer = Muon([tall, wide], [norm], MATRIX_LR, lr=1e-3, device=torch.device("cpu"))
    momentum = [torch.zeros_like(one) for one in expected]
    for _ in range(STEPS):
        for parameter in (tall, wide, norm):
            parameter.grad = torch.randn_like(parameter)
        for index, parameter in enumerate((tall, wide)):
            gradient = parameter.grad
            assert gradient is not None
            momentum[index] = 0.95 * momentum[index] + 0.05 * gradient
            scale = (4**0.5, 1)[index]  # the root of rows per column, where it is above 1
            direction = orthogonalized(0.95 * momentum[index] + 0.05 * gradient)
            expected[index] -= MATRIX_LR * scale * direction
        optimizer.step()
        torch.testing.assert_close([tall.detach(), wide.detach()], expected)
