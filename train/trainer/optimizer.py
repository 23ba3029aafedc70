"""AdamW under DeepSpeed: it clips gradients, and skips the steps that must not be taken."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from train.distributed import sum_over_ranks

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
        on_device: whether the weights that are updated are on a GPU.
        settings: of AdamW.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        max_grad_norm: float,
        on_device: bool,
        **settings: Any,
    ) -> None:
        super().__init__(parameters, fused=True if on_device else None, **settings)
        self.max_grad_norm = max_grad_norm
        self.reduced_norm: Callable[[], Tensor | float] | None = None  # DeepSpeed's, with ZeRO
        self.grad_norm = torch.tensor(0.0)  # of the newest step, before clipping
        self._gradient_scale: Tensor | None = None
        self._factor: Tensor | None = None
        self._refused: Tensor | None = None

    @property
    def refused(self) -> Tensor:
        """Whether the newest step was skipped. bool [], on the device."""
        assert self._refused is not None
        return self._refused

    def begin_step(self, gradient_scale: Tensor | None = None) -> None:
        """Call before the model engine's step.

        Args:
            gradient_scale: [], a factor of the gradient that was not known in the backward pass.
        """
        self._gradient_scale, self._refused = gradient_scale, None

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
            self._decide(gradients)
        assert self._factor is not None
        assert self._refused is not None
        for gradient in gradients:
            gradient.mul_(self._factor.to(gradient.device, non_blocking=True))
        if self.defaults["fused"]:
            self.found_inf = self._refused.float()  # the fused kernel then changes nothing
            self._update()
        elif not self._refused:
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

    def _decide(self, gradients: list[Tensor]) -> None:
        """Set the norm, the factor of the gradient, and whether the step is refused."""
        if self.reduced_norm is None:
            norm = torch.stack([gradient.float().norm() for gradient in gradients]).pow(2).sum().sqrt()
        else:
            norm = torch.as_tensor(self.reduced_norm())
        if self._gradient_scale is not None:
            norm = norm * self._gradient_scale.to(norm.device)
        if self.reduced_norm is None:
            factor = (self.max_grad_norm / (norm + _EPSILON)).clamp(max=1)
        else:
            factor = 1 / ((norm + _EPSILON) / self.max_grad_norm).clamp(min=1)
        if self._gradient_scale is not None:
            factor = factor * self._gradient_scale.to(norm.device)
        # DeepSpeed replaces the norm of a gradient that is not finite by -1 at some ZeRO stages.
        self.grad_norm, self._factor, self._refused = norm, factor, ~norm.isfinite() | (norm < 0)


def divisor_correction(num_supervised: Tensor, counted: Tensor) -> Tensor:
    """Return the factor that makes the number of counted positions the loss's divisor. Every rank calls.

    Which positions the loss counts under `count_outside_vocab=false` is known on the device alone, after the
    forward pass. So the gradient is divided by the number of supervised positions first.

    Args:
        num_supervised: [], supervised positions over all ranks.
        counted: float64 [], the positions that this rank's loss counts.
    """
    return (num_supervised / sum_over_ranks(counted.clone()).clamp(min=1)).float()
