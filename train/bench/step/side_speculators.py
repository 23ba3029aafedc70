"""The step of speculators with its model class and loss, for `worker.py`."""

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def build(
    spec: dict[str, Any], weights: dict[str, Tensor], rows: list[dict[str, Tensor]], device: torch.device
) -> tuple[nn.Module, Callable[[int], Tensor], dict[str, Any]]:
    """Return the model and its step, with the defaults on a GPU and with sdpa and the eager loss on a CPU.

    On a CPU flex attention has no backward pass, and the fused losses need Triton.
    """
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from transformers import LlamaConfig

    shape = spec["shape"]
    on_gpu = device.type == "cuda"
    layer = LlamaConfig(**spec["llama_config"])
    layer._attn_implementation = "simple_flex_attention" if on_gpu else "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape["draft_vocab_size"],
        fc_norm=True,
        norm_output=True,
        eagle_aux_hidden_state_layer_ids=list(range(3)),
    )
    model = Eagle3DraftModel(config).to(device, spec_dtype(spec))
    load(model, weights)
    inputs = [shifted(row) for row in rows]
    loss_config = resolve_loss_config("kl_div", "fused" if on_gpu else "eager")

    def step(index: int) -> Tensor:
        _, loss, _ = model(
            **inputs[index],
            ttt_steps=shape["num_steps"],
            ttt_step_loss_decay=shape["step_decay"],
            loss_config=loss_config,
        )
        loss.backward()
        return loss.detach()

    ran = "flex attention, fused losses, compiled" if on_gpu else "sdpa attention, eager loss"
    ran += "; its teacher covers the draft vocabulary only"
    return model, step, {"version": importlib.metadata.version("speculators"), "ran": ran}


def spec_dtype(spec: dict[str, Any]) -> torch.dtype:
    dtype = getattr(torch, spec["dtype"])
    assert isinstance(dtype, torch.dtype)
    return dtype


@torch.no_grad()
def load(model: Any, weights: dict[str, Tensor]) -> None:
    """Load the weights that every side has; of the target's head only the draft vocabulary's rows."""
    state = {name: tensor for name, tensor in weights.items() if not name.startswith(("target_", "draft_"))}
    state["embed_tokens.weight"] = weights["target_embed"]
    state["verifier_lm_head.weight"] = weights["target_head"][weights["draft_target_ids"]]
    state["verifier_norm.weight"] = weights["target_norm"]
    state |= {"d2t": weights["draft_d2t"], "t2d": weights["draft_t2d"]}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert all("rotary" in name for name in missing), missing


def shifted(row: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return inputs that pair x[t+1] with the state at t within each document, which loses one row."""
    documents = row["document_ids"]
    keep = (documents[1:] == documents[:-1]) & (documents[1:] >= 0)
    before, after = keep.nonzero().squeeze(1), keep.nonzero().squeeze(1) + 1
    return {
        "hidden_states": row["aux_hidden_states"][before].flatten(1).unsqueeze(0),
        "input_ids": row["input_ids"][after].unsqueeze(0),
        "document_ids": documents[before].unsqueeze(0),
        "loss_mask": row["loss_mask"][after].unsqueeze(0),
        "position_ids": row["position_ids"][after].unsqueeze(0),
        "verifier_last_hidden_states": row["final_hidden_states"][after].unsqueeze(0),
    }
