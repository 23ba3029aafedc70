import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from eagle31.kernels.newton_schulz import (
    orthogonalization_elements,
    orthogonalization_flops,
    orthogonalize,
)
from tests.pretended_gpu.device import CUDA, PretendedGpu
from tests.pretended_gpu.live_bytes import LiveBytes


@pytest.mark.parametrize("shape", [(3, 8, 24), (2, 24, 8)])
def test_orthogonalize_keeps_directions_and_equalizes_their_scale(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    in_its_basis = u.mT @ orthogonalize(matrices, iterations=8) @ v.mT
    scales = in_its_basis.diagonal(dim1=1, dim2=2)
    assert scales.min() > 0.6
    assert scales.max() < 1.3
    torch.testing.assert_close(in_its_basis, torch.diag_embed(scales), rtol=0, atol=1e-6)


def test_five_iterations_equalize_singular_values_of_very_different_scales() -> None:
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(48, 48, generator=generator, dtype=torch.float64))[0] for _ in "uv")
    scales = torch.logspace(0, -3, 48, dtype=torch.float64)
    result = orthogonalize(((u * scales) @ v).unsqueeze(0))[0]
    found = (u.mT @ result @ v.mT).diagonal()
    promised = scales > 0.002 * scales.norm()
    assert 30 < promised.sum() < 48
    assert 0.68 < found[promised].min() < found[promised].max() < 1.21


def test_a_zero_matrix_stays_zero() -> None:
    assert not orthogonalize(torch.zeros(1, 4, 8)).any()


@pytest.mark.parametrize("shape", [(24, 8), (8, 40)])
def test_flops_and_memory_are_those_of_the_formulas(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(1, *shape))
    assert counter.get_total_flops() == orthogonalization_flops(*shape)
    with PretendedGpu():
        matrices = torch.randn(1, *shape, device=CUDA)
        with LiveBytes() as live:
            orthogonalize(matrices)
    assert live.peak == pytest.approx(4 * orthogonalization_elements(*shape), rel=0.01)
