"""The choice of a target and the options for loading it."""

from dataclasses import dataclass

import torch

from data.target.checkpoint import Checkpoint
from eagle31.errors import UserError


@dataclass(frozen=True)
class TargetSpec:
    """A target and the options for loading it."""

    model: str  # a local directory or a hub id
    revision: str | None = None
    dtype: str = "auto"  # "auto" (the checkpoint's dtype) or the name of a torch dtype
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    device_map: str | None = None  # "auto" spreads the model over all devices with accelerate

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that the target is loaded from."""
        return Checkpoint(self.model, self.revision)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype as a torch dtype; None for "auto"."""
        if self.dtype == "auto":
            return None
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            remedy = "This is not a floating-point torch dtype; use auto, bfloat16, float16 or float32."
            raise UserError("target.dtype", self.dtype, remedy)
        return dtype
