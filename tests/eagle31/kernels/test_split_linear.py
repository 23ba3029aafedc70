"""A split projection compared with the projection of the concatenated inputs."""

import torch

from eagle31.kernels.split_linear import ProductSums, SplitLinear, TokenProjection


def test_values_and_gradients_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    projection = SplitLinear(12, 5, bias=False, dtype=torch.float64)
    first = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    second = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([3, 0, 4, 1])  # the rows of a step read different tokens
    sums = ProductSums()
    split = projection(second, TokenProjection(projection(first, sums), index, sums))
    whole = projection(torch.cat((first[index], second), dim=1))
    torch.testing.assert_close(split, whole)
    inputs, grad = (first, second, projection.weight), torch.randn_like(whole)
    found, expected = (torch.autograd.grad(x, inputs, grad) for x in (split, whole))
    torch.testing.assert_close(found, expected)
