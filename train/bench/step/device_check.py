"""Compares the step on a device with the reference in float64 on the CPU: values and gradients."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from data.target.head import TargetHead
from eagle31.model.config import DrafterConfig, MlaShape
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch
from eagle31.training.reference import reference_loss
from eagle31.training.step import DepthSums, rollout_loss
from train.bench.step.documents import packed_rows
from train.bench.step.inputs import random_batch, random_weights
from train.bench.step.shapes import Shape

VARIANTS = ("eagle3.1", "eagle3", "frozen head", "full vocabulary", "mla", "sliding window")
# Relative to the norm of the reference's gradient; bfloat16 keeps 8 bits of every product and state.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
_SHAPE = Shape(
    "device check",
    "chat",
    row_tokens=384,
    hidden_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    intermediate_size=128,
    vocab_size=512,
    draft_vocab_size=128,
    num_steps=4,
)
_MLA = MlaShape(q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)


@dataclass(frozen=True)
class DeviceCheck:
    """The error of one variant in one dtype against the reference."""

    variant: str
    dtype: str
    loss_error: float  # relative
    gradient_error: float  # of the parameter with the largest error, relative to the norm of its gradient
    parameter: str
    bound: float

    @property
    def passed(self) -> bool:
        return self.loss_error <= self.bound and self.gradient_error <= self.bound


def check_device(device: torch.device) -> Iterator[DeviceCheck]:
    """Check each of `VARIANTS` in float32 and bfloat16."""
    for dtype, bound in BOUNDS.items():
        for variant in VARIANTS:
            config = _config(variant)
            generator = torch.Generator().manual_seed(0)
            rows, _ = packed_rows(_SHAPE, 1, None)
            # Both sides start from inputs in the narrower dtype, so that rounding them is no error.
            batch = random_batch(_SHAPE, rows[0], generator).to(torch.device("cpu"), dtype)
            weights = {
                name: tensor.to(dtype) if tensor.is_floating_point() else tensor
                for name, tensor in random_weights(config, generator).items()
            }
            cpu = torch.device("cpu")
            expected = _run(reference_loss, config, variant, weights, batch, cpu, torch.float64)
            found = _run(rollout_loss, config, variant, weights, batch, device, dtype)
            yield _compare(variant, dtype, bound, expected, found)


def _config(variant: str) -> DrafterConfig:
    config = _SHAPE.config()
    if variant == "eagle3":
        return replace(config, fc_norm=False, norm_output=False)
    if variant == "full vocabulary":
        return replace(config, draft_vocab_size=config.vocab_size)
    if variant == "sliding window":
        return replace(config, sliding_window=40)
    if variant == "mla":
        return replace(config, num_key_value_heads=_SHAPE.num_attention_heads, head_dim=96, mla=_MLA)
    return config


def _run(
    loss_of: Callable[..., tuple[Tensor, DepthSums]],
    config: DrafterConfig,
    variant: str,
    weights: dict[str, Tensor],
    batch: PackedBatch,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the loss per supervised position and all gradients, float64 on the CPU."""
    on_device = {
        name: tensor.to(device, dtype if tensor.is_floating_point() else None)
        for name, tensor in weights.items()
    }
    drafter = Drafter(config, with_head=variant != "frozen head").to(device, dtype)
    drafter.load_state_dict({name: on_device[name] for name in drafter.state_dict()})
    norm = nn.RMSNorm(config.target_hidden_size, eps=config.rms_norm_eps, device=device, dtype=dtype)
    frozen = FrozenParts(
        embed_tokens=on_device["target_embed"],
        target_head=TargetHead(norm, _linear(on_device["target_head"])),
        draft_target_ids=on_device["draft_target_ids"] if config.pruned else None,
        lm_head=_linear(on_device["lm_head.weight"]) if variant == "frozen head" else None,
    )
    total, sums = loss_of(
        drafter,
        frozen,
        batch.to(device, dtype),
        num_steps=_SHAPE.num_steps,
        step_decay=_SHAPE.step_decay,
    )
    loss = total / sums.num_rows[0]
    loss.backward()
    found = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    return {name: t.detach().to("cpu", torch.float64) for name, t in (found | {"loss": loss}).items()}


def _linear(weight: Tensor) -> nn.Linear:
    num_out, num_in = weight.shape
    linear = nn.Linear(num_in, num_out, bias=False, device=weight.device, dtype=weight.dtype)
    linear.load_state_dict({"weight": weight})
    return linear.requires_grad_(False)


def _compare(
    variant: str, dtype: torch.dtype, bound: float, expected: dict[str, Tensor], found: dict[str, Tensor]
) -> DeviceCheck:
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    errors = {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected}
    loss_error = errors.pop("loss")
    worst = max(errors, key=lambda name: errors[name])
    return DeviceCheck(variant, str(dtype).removeprefix("torch."), loss_error, errors[worst], worst, bound)
