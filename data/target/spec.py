"""Which target, and how it is loaded."""

from dataclasses import dataclass

import torch

from data.target.checkpoint import Checkpoint
from eagle31.errors import UserError


@dataclass(frozen=True)
class TargetSpec:
    """Which target, and how it is loaded."""

    model: str  # a local directory or a hub id
    revision: str | None = None
    dtype: str = "auto"  # "auto" is the checkpoint's own, else a torch dtype's name
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    device_map: str | None = None  # "auto" spreads it over the devices with accelerate
    layers_path: str | None = None  # module paths, for wrappers whose parts are not found by themselves
    norm_path: str | None = None
    embed_path: str | None = None
    lm_head_path: str | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.model, self.revision)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """None for "auto"."""
        if self.dtype == "auto":
            return None
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            remedy = "No floating-point torch dtype; use auto, bfloat16, float16 or float32."
            raise UserError("target.dtype", self.dtype, remedy)
        return dtype
