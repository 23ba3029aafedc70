"""The model and loss of speculators on our rows. It runs in the environment of speculators."""

import importlib.metadata
from typing import Any

import torch
from torch import Tensor


class SpeculatorsStep:
    """The forward pass of speculators, with its defaults on a GPU and with sdpa and the eager loss on a CPU.

    On a CPU flex attention has no backward pass, and the fused losses need Triton.

    Args:
        llama_config: the arguments of transformers' LlamaConfig for its decoder layer.
        ttt_steps, step_decay, loss: speculation steps, the factor of the loss from one to the next, and the
            name of the loss.
        config: further arguments of its Eagle3SpeculatorConfig.
    """

    def __init__(
        self,
        llama_config: dict[str, Any],
        draft_vocab_size: int,
        *,
        ttt_steps: int,
        step_decay: float,
        loss: str,
        device: torch.device,
        dtype: torch.dtype,
        config: dict[str, Any],
    ) -> None:
        from speculators.losses import resolve_loss_config
        from speculators.models.eagle3 import Eagle3SpeculatorConfig
        from speculators.models.eagle3.core import Eagle3DraftModel
        from transformers import LlamaConfig

        on_gpu = device.type == "cuda"
        layer = LlamaConfig(**llama_config)
        layer._attn_implementation = "simple_flex_attention" if on_gpu else "sdpa"
        shape = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=draft_vocab_size,
            fc_norm=True,
            norm_output=True,
            **config,
        )
        self.model = Eagle3DraftModel(shape).to(device, dtype)
        self.arguments = {
            "ttt_steps": ttt_steps,
            "ttt_step_loss_decay": step_decay,
            "loss_config": resolve_loss_config(loss, "fused" if on_gpu else "eager"),
        }
        ran = "flex attention, fused losses, compiled" if on_gpu else "sdpa attention, eager loss"
        ran += "; its teacher covers the draft vocabulary only"
        self.about = {"version": importlib.metadata.version("speculators"), "ran": ran}

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Load the target's tensors, the draft vocabulary's rows of its head, and the drafter's if given.

        The draft head that is not given is a copy of the target's rows, which speculators freezes.
        """
        state = {
            name: tensor for name, tensor in weights.items() if not name.startswith(("target_", "draft_"))
        }
        given = bool(state)
        rows = weights["target_head"][weights["draft_target_ids"]]
        state.setdefault("lm_head.weight", rows)
        state["embed_tokens.weight"] = weights["target_embed"]
        state["verifier_lm_head.weight"] = rows
        state["verifier_norm.weight"] = weights["target_norm"]
        state |= {"d2t": weights["draft_d2t"], "t2d": weights["draft_t2d"]}
        missing, unexpected = self.model.load_state_dict(state, strict=False)
        assert not unexpected, unexpected
        assert not given or all("rotary" in name for name in missing), missing

    def inputs(self, row: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the arguments of the model for a packed row."""
        return shifted(row)

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        _, loss, _ = self.model(**inputs, **self.arguments)
        assert isinstance(loss, Tensor)
        return loss


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
