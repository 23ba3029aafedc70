"""The target's final norm and lm_head."""

from torch import Tensor, nn


class TargetHead(nn.Module):
    """The target's frozen final norm and lm_head.

    Args:
        softcap: the bound c of logits that the target caps as c * tanh(logits / c).
    """

    def __init__(self, norm: nn.Module, lm_head: nn.Module, softcap: float | None = None) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head = lm_head
        self.softcap = softcap
        self.requires_grad_(False)

    @property
    def weight(self) -> Tensor:
        """The weight of the lm_head, [V, Ht]."""
        return self.lm_head.get_parameter("weight")

    def forward(self, final_hidden: Tensor) -> Tensor:
        """Map final_hidden [..., Ht], before the final norm, to logits [..., V] in the parameters' dtype."""
        logits = self.lm_head(self.norm(final_hidden.to(self.weight.dtype)))
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def rows(self, token_ids: Tensor) -> "TargetHead":
        """Return a head with logits [..., Vd] of some tokens alone; token_ids is int64 [Vd]."""
        ids = token_ids.to(self.weight.device)
        bias = getattr(self.lm_head, "bias", None)
        restricted = nn.Linear(self.weight.shape[1], len(ids), bias=bias is not None, device="meta")
        restricted.weight = nn.Parameter(self.weight[ids], requires_grad=False)
        if bias is not None:
            restricted.bias = nn.Parameter(bias[ids], requires_grad=False)
        return TargetHead(self.norm, restricted, self.softcap)
