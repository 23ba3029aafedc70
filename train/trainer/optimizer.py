"""Muon under DeepSpeed."""

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from train.trainer.engine_state import flat_matrices
from train.trainer.matrices import WholeMatrices

_MOMENTUM = "momentum_buffer"
MOMENTUM = 0.95  # decay rate of the gradient's moving average, the one of Muon's publication


class Muon(torch.optim.AdamW):
    """Muon for matrices and AdamW for the other weights.

    A step changes nothing if the attribute `found_inf`, float32 [] on the weights' device, is 1, as the fused
    AdamW does. So the host need not know.

    The update of a matrix [R, C] is the orthogonalized Nesterov momentum of its gradient, times
    sqrt(max(1, R / C)), so that its spectral norm fits the widths and the rate holds for every width.

    The momentum is elementwise. DeepSpeed saves and restores it as it does Adam's moments, in the flat tensor
    of each rank. DeepSpeed's own Muon is not used: it changes the gradient itself, so the norm, clipping and
    skipped steps would depend on the orthogonalized gradient.

    Sources: Keller Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024); Yang, Simon
    and Bernstein, A spectral condition for feature learning (2023), for the scale.

    Args:
        matrices: two-dimensional weights.
        others: the weights that AdamW updates.
        matrix_lr: peak learning rate of the matrices; their rate is always this multiple of AdamW's.
        device: where matrices are orthogonalized, even if the optimizer is on the CPU.
        dtype: in which they are.
        settings: of AdamW; `lr` is its peak.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        matrix_lr: float,
        *,
        lr: float,
        device: torch.device,
        dtype: torch.dtype,
        **settings: Any,
    ) -> None:
        assert all(len(getattr(matrix, "ds_shape", matrix.shape)) == 2 for matrix in matrices)
        groups = [
            {"params": list(matrices), "matrices": True, "lr": matrix_lr, "lr_ratio": matrix_lr / lr},
            {"params": list(others), "matrices": False, "lr_ratio": 1.0},
        ]
        super().__init__(groups, lr=lr, fused=True, **settings)
        self.device = device
        self.found_inf = torch.tensor(0.0)
        shapes = [matrix.shape for matrix in matrices]
        self._dtype = dtype
        self._replicated = WholeMatrices(shapes, None, device, self._dtype)
        self._partitioned: dict[Tensor, WholeMatrices] = {}  # by DeepSpeed's flat tensor, with ZeRO

    def attach(self, model_engine: deepspeed.DeepSpeedEngine, matrices: Sequence[nn.Parameter]) -> None:
        """Read where DeepSpeed has put the matrices. Call before the first step. Every rank calls."""
        if model_engine.zero_optimization():
            self._partitioned = {
                one.flat: WholeMatrices(one.shapes, one.fragments, self.device, self._dtype)
                for one in flat_matrices(model_engine, matrices, self.device)
            }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights of the parameter groups at hand; DeepSpeed hands them over one by one."""
        assert closure is None
        groups = self.param_groups
        for group in groups:
            if group["matrices"] and group["params"]:
                self._update_matrices(group["params"], group["lr"])
        self.param_groups = [group for group in groups if not group["matrices"]]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _update_matrices(self, tensors: list[Tensor], lr: float) -> None:
        """Update matrices, or flat tensors that have fragments of them."""
        taken = 1 - self.found_inf
        for tensor in tensors:
            self._set_direction(tensor, taken)
        if not self._partitioned:
            parts = [(tensor.view(-1), _gradient(tensor).flatten()) for tensor in tensors]
            self._apply(self._replicated, parts, lr * taken)
            return
        for tensor in tensors:
            whole = self._partitioned[tensor]
            slices = [slice(one.offset, one.offset + one.length) for one in whole.own_fragments]
            parts = [(tensor[part], _gradient(tensor)[part]) for part in slices]
            self._apply(whole, parts, lr * taken)

    def _set_direction(self, tensor: Tensor, taken: Tensor) -> None:
        """Replace a gradient by its Nesterov momentum, unless the step is not taken."""
        state, gradient = self.state[tensor], _gradient(tensor)
        if _MOMENTUM not in state:
            state[_MOMENTUM] = torch.zeros_like(tensor)
        gradient.masked_fill_(taken == 0, 0)  # it may not be finite
        buffer = state[_MOMENTUM].lerp_(gradient, (1 - MOMENTUM) * taken)
        gradient.lerp_(buffer, MOMENTUM)

    @staticmethod
    def _apply(whole: WholeMatrices, parts: list[tuple[Tensor, Tensor]], step_size: Tensor) -> None:
        """Move each weight, or fragment of one, against its orthogonalized direction."""
        for index, update in whole.orthogonalized([direction for _, direction in parts]):
            weights = parts[index][0]
            rows, columns = whole.shapes[index]
            # In place: a copy would take more memory than orthogonalization does.
            weights.sub_(update.to(weights).mul_(step_size * max(1.0, rows / columns) ** 0.5))


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad
