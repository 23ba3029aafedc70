"""A split projection compared with the projection of the concatenated inputs."""

import torch
from torch.autograd import gradcheck

from eagle31.kernels.split_linear import SplitLinear, TokenProjection


def linear(width: int, out: int) -> SplitLinear:
    torch.manual_seed(0)
    return SplitLinear(2 * width, out, bias=False, dtype=torch.float64)


def test_the_halves_add_up() -> None:
    projection = linear(6, 5)
    first, second = torch.randn(4, 6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)
    index = torch.tensor([3, 0, 0, 1, 3, 2, 2, 2, 0])
    split = projection(second, TokenProjection(projection(first), index))
    whole = projection(torch.cat((first[index], second), dim=1))
    torch.testing.assert_close(split, whole)


def test_gradients() -> None:
    projection = linear(3, 2)
    first = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    second = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([3, 0, 4, 1])  # the rows of a step read different tokens

    def run(first: torch.Tensor, second: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(
            projection, {"weight": weight}, (second, TokenProjection(projection_of(first, weight), index))
        )

    def projection_of(first: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(projection, {"weight": weight}, (first,))

    assert gradcheck(run, (first, second, projection.weight))
