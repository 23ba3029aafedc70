import pytest
import torch

from data.embedded.muon import orthogonalize


@pytest.mark.parametrize("shape", [(3, 8, 24), (2, 24, 8), (1, 16, 16)])
def test_orthogonalize_keeps_directions_and_equalizes_their_scale(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    in_its_basis = u.mT @ orthogonalize(matrices, iterations=8) @ v.mT
    scales = in_its_basis.diagonal(dim1=1, dim2=2)
    assert scales.min() > 0.6
    assert scales.max() < 1.3
    torch.testing.assert_close(in_its_basis, torch.diag_embed(scales), rtol=0, atol=1e-6)
