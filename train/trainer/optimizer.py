"""AdamW and Muon under DeepSpeed: they clip gradients, and skip the steps that must not be taken."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from eagle31.kernels.newton_schulz import orthogonalization_dtype
from train.trainer.engine_state import flat_matrices
from train.trainer.matrices import WholeMatrices

_EPSILON = 1e-6  # added to the norm, as PyTorch and DeepSpeed do


class ClippedAdamW(torch.optim.AdamW):
    """AdamW that clips the gradient, and changes nothing in a step whose gradient is not finite.

    DeepSpeed checks gradients differently at every ZeRO stage: some stages check nothing,
    and some wait for the device in order to clip. But every stage reduces the gradient,
    computes its norm, and then calls `step` of the optimizer that it wraps, once for each group of weights.
    So clipping and skipping are done here. On a GPU neither waits for the device: the fused kernel reads the
    decision there.

    Args:
        parameters: the weights, or groups of them.
        max_grad_norm: norm to which the gradient of all groups is clipped.
        settings: of AdamW.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        max_grad_norm: float,
        **settings: Any,
    ) -> None:
        super().__init__(parameters, fused=True, **settings)
        self.max_grad_norm = max_grad_norm
        self.reduced_norm: Callable[[], Tensor | float] | None = None  # DeepSpeed's, see `begin_step`
        self.withheld = torch.tensor(False)  # refuses the next step, whatever its gradient is
        self.grad_norm = torch.tensor(0.0)  # of the newest step, before clipping
        self._factor: Tensor | None = None
        self._refused: Tensor | None = None

    @property
    def refused(self) -> Tensor:
        """Whether the newest step was skipped. bool [], on the device."""
        assert self._refused is not None
        return self._refused

    def begin_step(self, norm: Tensor | None) -> None:
        """Call before the model engine's step.

        Args:
            norm: of the reduced gradient. None: `reduced_norm` returns it in the model engine's step.
        """
        self._refused = None
        if norm is not None:
            self._decide(norm)

    def end_step(self) -> None:
        """Call after the model engine's step, which some ZeRO stages skip if the gradient is not finite."""
        if self._refused is None:
            self.grad_norm = torch.tensor(torch.inf)
            self._refused = torch.tensor(True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights of the parameter groups at hand, whose gradients are the reduced ones."""
        assert closure is None
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self._refused is None:
            assert self.reduced_norm is not None
            self._decide(torch.as_tensor(self.reduced_norm()))
        assert self._factor is not None
        assert self._refused is not None
        for gradient in gradients:
            gradient.mul_(self._factor.to(gradient.device, non_blocking=True))
        self.found_inf = self._refused.float()  # the fused kernel then changes nothing
        if self._refused.is_cuda or not self._refused:
            self._update()

    def set_learning_rate(self, lr: float) -> None:
        """Set the rate of the next step."""
        for group in self.param_groups:
            group["lr"] = self._rate(group, lr)

    def release(self) -> None:
        """Free the optimizer's states."""
        self.state.clear()

    def _rate(self, group: dict[str, Any], lr: float) -> float:
        """Return a group's rate at this rate of AdamW."""
        return lr

    def _update(self) -> None:
        """Update the weights of `param_groups` from their clipped gradients."""
        super().step()

    def _decide(self, norm: Tensor) -> None:
        """Set the norm, the factor of the gradient, and whether the step is refused."""
        factor = (self.max_grad_norm / (norm + _EPSILON)).clamp(max=1)
        # DeepSpeed replaces the norm of a gradient that is not finite by -1 at some ZeRO stages.
        refused = ~norm.isfinite() | (norm < 0) | self.withheld.to(norm.device)
        self.grad_norm, self._factor, self._refused = norm, factor, refused


_MOMENTUM = "momentum_buffer"
MOMENTUM = 0.95  # decay rate of the gradient's moving average, the one of Muon's publication


class Muon(ClippedAdamW):
    """Muon for matrices and AdamW for the other weights, with the clipping and skipping of `ClippedAdamW`.

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
        **settings: Any,
    ) -> None:
        assert all(len(getattr(matrix, "ds_shape", matrix.shape)) == 2 for matrix in matrices)
        groups = [{"params": list(matrices), "matrices": True}, {"params": list(others), "matrices": False}]
        super().__init__(groups, lr=lr, **settings)
        self.device = device
        self.matrix_lr_ratio = matrix_lr / lr
        shapes = [matrix.shape for matrix in matrices]
        self._dtype = orthogonalization_dtype(device)
        self._replicated = WholeMatrices(shapes, None, device, self._dtype)
        self._partitioned: dict[Tensor, WholeMatrices] = {}  # by DeepSpeed's flat tensor, with ZeRO

    @property
    def num_orthogonalized(self) -> int:
        """The number of matrices that this rank orthogonalized so far."""
        return sum(one.num_orthogonalized for one in [self._replicated, *self._partitioned.values()])

    def attach(self, model_engine: deepspeed.DeepSpeedEngine, matrices: Sequence[nn.Parameter]) -> None:
        """Read where DeepSpeed has put the matrices. Call before the first step. Every rank calls."""
        if model_engine.zero_optimization():
            self._partitioned = {
                one.flat: WholeMatrices(one.shapes, one.fragments, self.device, self._dtype)
                for one in flat_matrices(model_engine, matrices, self.device)
            }

    def release(self) -> None:
        super().release()
        self._partitioned.clear()

    def _rate(self, group: dict[str, Any], lr: float) -> float:
        return lr * self.matrix_lr_ratio if group["matrices"] else lr

    def _update(self) -> None:
        groups = self.param_groups
        for group in groups:
            if group["matrices"] and group["params"]:
                self._update_matrices(group["params"], group["lr"])
        self.param_groups = [group for group in groups if not group["matrices"]]
        try:
            super()._update()
        finally:
            self.param_groups = groups

    def _update_matrices(self, tensors: list[Tensor], lr: float) -> None:
        """Update matrices, or flat tensors that have fragments of them."""
        assert self._refused is not None
        taken = (~self._refused).to(tensors[0].device, torch.float32)  # 0 on a GPU if the step is refused
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
        """Replace a gradient by its Nesterov momentum, unless the step is refused."""
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
