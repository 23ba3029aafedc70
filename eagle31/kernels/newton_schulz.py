"""Orthogonalizing matrices by a Newton-Schulz iteration, which the Muon optimizer does with its updates."""

import torch
from torch import Tensor

ITERATIONS = 5
_BF16_CAPABILITY = (8, 0)  # the first NVIDIA cards with bfloat16 units


def orthogonalize(matrices: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """Bring the singular values of matrices near 1 by a quintic Newton-Schulz iteration.

    With 5 iterations, singular values above 0.002 of the Frobenius norm end between 0.68 and 1.21. The
    coefficients raise small ones fast, but do not converge to 1.

    Args:
        matrices: N matrices, float [N, R, C].

    Source: Keller Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024).
    """
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT  # [N, r, r] with r = min(R, C)
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x if wide else x.mT


def orthogonalization_dtype(device: torch.device, step_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which Muon orthogonalizes.

    It is bfloat16 on a GPU, but float32 on one that only emulates bfloat16, and on a CPU that of the step.
    """
    if device.type != "cuda":
        return step_dtype
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= _BF16_CAPABILITY else torch.float32


def orthogonalization_flops(rows: int, columns: int, iterations: int = ITERATIONS) -> int:
    """Return the FLOPs of orthogonalizing one matrix; a multiplication and an addition are two."""
    short, long = sorted((rows, columns))
    return iterations * (4 * short**2 * long + 2 * short**3)


def orthogonalization_elements(rows: int, columns: int) -> int:
    """Return the peak number of elements that orthogonalizing one matrix holds, without the input.

    They are the iterate and the next one, the Gram matrix and its polynomial.
    """
    short, long = sorted((rows, columns))
    return 2 * short * long + 2 * short**2
