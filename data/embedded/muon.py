"""The Muon optimizer for matrices, which learns more from each token than AdamW."""

import torch

from eagle31.kernels.newton_schulz import orthogonalize


class Muon(torch.optim.Optimizer):
    """An optimizer that replaces each momentum update by the nearest orthogonal matrix.

    torch.optim.Muon computes in bfloat16, which processors without bfloat16 units emulate at a hundredth of
    the speed. This optimizer computes in the parameters' dtype, and updates all parameters of the same shape
    together, as a batch of matrices.

    Source: Keller Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024).
    """

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        assert all(p.ndim == 2 for p in matrices)
        by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for parameter in matrices:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        groups = [{"params": group} for group in by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            directions = []
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                directions.append(parameter.grad.lerp(buffer, group["momentum"]))
            rows, columns = directions[0].shape
            step_size = group["lr"] * max(1.0, rows / columns) ** 0.5
            updates = orthogonalize(torch.stack(directions))
            for parameter, update in zip(group["params"], updates, strict=True):
                parameter.add_(update, alpha=-step_size)
