import pytest
import torch
from torch import Tensor

from eagle31.model.frozen import project_width


def embedding_rows(dtype: torch.dtype = torch.float32) -> Tensor:
    """Return correlated columns of different scales with a common mean, as in embeddings, [200, 12]."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.logspace(0, -2, 12)[:, None] * torch.randn(12, 12, generator=generator)
    return (torch.randn(200, 12, generator=generator) @ mixing + 0.3).to(dtype)


def test_the_same_width_is_the_same_rows() -> None:
    rows = embedding_rows(torch.bfloat16)
    assert project_width(rows, 12) is rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wider_one_pads_with_zeros_and_keeps_inner_products(dtype: torch.dtype) -> None:
    rows = embedding_rows(dtype)
    wide = project_width(rows, 20)
    assert (wide.shape, wide.dtype) == ((200, 20), dtype)
    assert torch.equal(wide[:, :12], rows)
    assert not wide[:, 12:].any()


@pytest.mark.parametrize("width", [1, 5, 11])
def test_a_narrower_one_keeps_inner_products_as_well_as_possible(width: int) -> None:
    rows = embedding_rows().double()
    narrow = project_width(rows.float(), width).double()
    assert narrow.shape == (200, width)
    error = torch.linalg.matrix_norm(rows @ rows.T - narrow @ narrow.T)
    # Eckart and Young: the best approximation leaves the Gram matrix's smaller eigenvalues.
    singular = torch.linalg.svdvals(rows)
    best = singular[width:].pow(4).sum().sqrt()
    torch.testing.assert_close(error, best, rtol=1e-3, atol=1e-4 * float(singular[0] ** 2))
