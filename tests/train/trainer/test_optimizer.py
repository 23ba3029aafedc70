"""Muon's updates compared with their definition in plain PyTorch."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from train.trainer.optimizer import Muon

MATRIX_LR, STEPS = 0.02, 3
CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}


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
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.7, 0.8)}
    optimizer = Muon([tall, wide], [norm], MATRIX_LR, **CPU, **settings)
    other_norm = nn.Parameter(norm.detach().clone())
    adamw = torch.optim.AdamW([other_norm], **settings)
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
        assert norm.grad is not None
        other_norm.grad = norm.grad.clone()
        optimizer.step()
        adamw.step()
        torch.testing.assert_close([tall.detach(), wide.detach()], expected)
        torch.testing.assert_close(norm, other_norm)


def test_a_refused_step_changes_nothing() -> None:
    weights = [nn.Parameter(torch.randn(shape)) for shape in ((8, 2), (4,))]
    optimizer = Muon(weights[:1], weights[1:], MATRIX_LR, lr=1e-3, **CPU)
    for number in (0.5, math.nan):
        before = copy.deepcopy([weights, optimizer.state_dict()["state"]])
        for weight in weights:
            weight.grad = torch.full_like(weight, number)
        optimizer.found_inf.fill_(math.isnan(number))
        optimizer.step()
    torch.testing.assert_close([weights, optimizer.state_dict()["state"]], before, rtol=0, atol=0)
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].any()
