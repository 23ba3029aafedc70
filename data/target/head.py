"""The target's final norm and lm_head, and what its code does to the logits after them."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from data.target.modules import TargetModules
from eagle31.errors import UserError

_LARGEST_LOGIT = 10.0  # that `logit_scale` tries: of larger ones, tanh has little precision


class TargetHead(nn.Module):
    """The target's frozen final norm and lm_head.

    Args:
        softcap: the bound c of logits that the target caps as c * tanh(logits / c).
        scale: what the target multiplies the logits by.
    """

    def __init__(
        self, norm: nn.Module, lm_head: nn.Module, softcap: float | None = None, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head = lm_head
        self.softcap, self.scale = softcap, scale
        self.requires_grad_(False)

    @property
    def weight(self) -> Tensor:
        """The weight of the lm_head, [V, Ht]."""
        return self.lm_head.get_parameter("weight")

    def forward(self, final_hidden: Tensor) -> Tensor:
        """Map final_hidden [..., Ht], before the final norm, to logits [..., V] in the parameters' dtype."""
        logits = self.lm_head(self.norm(final_hidden.to(self.weight.dtype)))
        if self.scale != 1.0:
            logits.mul_(self.scale)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def rows(self, token_ids: Tensor) -> "TargetHead":
        """Return a head with logits [..., Vd] of some tokens alone; token_ids is int64 [Vd]."""
        ids = token_ids.to(self.weight.device)
        bias = getattr(self.lm_head, "bias", None)
        restricted = nn.Linear(self.weight.shape[1], len(ids), bias=bias is not None, device="meta")
        restricted.weight = nn.Parameter(self.weight[ids], requires_grad=False)
        if bias is not None:
            restricted.bias = nn.Parameter(bias[ids], requires_grad=False)
        return TargetHead(self.norm, restricted, self.softcap, self.scale)


def logit_scale(model: PreTrainedModel, modules: TargetModules, softcap: float | None) -> float:
    """Return what a model multiplies its logits by after the lm_head, or its states before, such as 1/8.

    The keys of config.json that say so differ from family to family, and in two the same key divides or
    multiplies. So this runs the code after the decoder on given states, with a given head.

    Args:
        model: on the meta device.
        softcap: as for `TargetHead`.

    Raises:
        UserError: the code does something else to the logits, or cannot be run so.
    """
    owner, child = _around(model, modules)
    states = torch.tensor([0.5, 1.0], dtype=torch.float64)[:, None]
    ramp = torch.linspace(-_LARGEST_LOGIT, _LARGEST_LOGIT, len(modules.lm_head.get_parameter("weight")))
    width = modules.embed_tokens.get_parameter("weight").shape[1]
    for module in (child, modules.decoder):  # OPT calls the decoder past its child
        module.forward = lambda *_, **__: _Output(last_hidden_state=states.expand(2, width)[None])
    modules.lm_head.forward = lambda states: states[..., :1] * ramp.double()
    try:
        with torch.no_grad():
            found = owner(input_ids=torch.zeros(1, 2, dtype=torch.int64, device="meta")).logits[0].double()
    except Exception as error:  # of the model's code
        raise _other_head(model, f"cannot be tried without weights: {error!r}"[:300]) from error
    finally:
        for module in {child, modules.decoder, modules.lm_head}:
            del module.forward
    if softcap is not None:
        found = (found / softcap).atanh() * softcap
    given = states * ramp.double()
    scale = float((found[:, -1] / given[:, -1]).mean())
    if found.shape != given.shape or not torch.allclose(found, given * scale, rtol=1e-5):
        raise _other_head(model, "does more to its logits than to scale or cap them")
    return float(f"{scale:.7g}")


def _around(model: nn.Module, modules: TargetModules) -> tuple[nn.Module, nn.Module]:
    """Return the module that calls the lm_head, and the child of it that gives the states."""
    for owner in model.modules():
        for child in owner.children():
            parts = set(child.modules())
            if modules.decoder in parts and modules.lm_head not in parts:
                return owner, child
    raise AssertionError("the decoder does not own the lm_head")


def _other_head(model: PreTrainedModel, what: str) -> UserError:
    remedy = f"The code of {type(model).__name__} {what}, so its logits are unknown; choose another target."
    return UserError("target.model", model.config._name_or_path, remedy)


class _Output(BaseModelOutputWithPast):
    """The output of any decoder: what this one does not have is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None
