"""SpecForge's step with its model class and loss, for `worker.py`."""

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def build(
    spec: dict[str, Any], weights: dict[str, Tensor], rows: list[dict[str, Tensor]], device: torch.device
) -> tuple[nn.Module, Callable[[int], Tensor], dict[str, Any]]:
    """Return the model and its step; on a CPU the plain loss of the same file replaces the Triton one."""
    from specforge.algorithms.eagle3 import model as eagle3
    from specforge.core import loss as losses
    from specforge.modeling.draft import LlamaForCausalLMEagle3
    from specforge.utils import padding
    from transformers import LlamaConfig

    if device.type == "cpu":
        eagle3.LogSoftmaxLoss = PlainLoss(losses)
    shape = spec["shape"]
    drafter_keys: dict[str, Any] = {
        "draft_vocab_size": shape["draft_vocab_size"],
        "target_hidden_size": shape["hidden_size"],
        "fc_norm": True,
        "norm_output": True,
    }
    config = LlamaConfig(**spec["llama_config"], pretraining_tp=1, pad_token_id=None, **drafter_keys)
    drafter = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    drafter = drafter.to(device, getattr(torch, spec["dtype"]))
    load(drafter, weights)
    drafter.freeze_embedding()
    model = eagle3.OnlineEagle3Model(drafter, length=shape["num_steps"], attention_backend="sdpa")
    masks = DocumentMasks(drafter, rows)
    head, norm = weights["target_head"], weights["target_norm"]

    def step(index: int) -> Tensor:
        row = rows[index]
        masks.current = index
        with torch.no_grad():
            # SpecForge's classes lack the target's norm; its trainers pass normalized states, or logits.
            final_states = nn.functional.rms_norm(
                row["final_hidden_states"], norm.shape, norm, 1e-6
            ).unsqueeze(0)
        losses_by_step, *_ = model(
            input_ids=padding(row["input_ids"].unsqueeze(0), left=False),
            attention_mask=(row["document_ids"] >= 0).long().unsqueeze(0),
            target=None,
            loss_mask=row["loss_mask"].long().view(1, -1, 1),
            hidden_states=row["aux_hidden_states"].flatten(1).unsqueeze(0),
            position_ids=row["position_ids"].unsqueeze(0),
            target_hidden_for_compact=padding(final_states, left=False),
            target_head_weight=head,
        )
        loss = sum(shape["step_decay"] ** i * one for i, one in enumerate(losses_by_step))
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss.detach()

    ran = "sdpa backend with an added document mask, compact teacher"
    ran += ", plain loss instead of Triton's" if device.type == "cpu" else ""
    ran += "; it feeds back the state before the norm"
    return model, step, {"version": importlib.metadata.version("specforge"), "ran": ran}


class PlainLoss:
    """Replaces the autograd function of the same file, which launches a Triton kernel."""

    def __init__(self, losses: Any) -> None:
        self.plain = losses._compute_loss

    def apply(self, logits: Tensor, target: Tensor, position_mask: Tensor) -> Tensor:
        loss: Tensor = self.plain(logits, target, position_mask)
        return loss


class DocumentMasks:
    """Adds documents to the causal mask, which handles only padding, because all sides run packed rows."""

    def __init__(self, drafter: Any, rows: list[dict[str, Tensor]]) -> None:
        self.documents = [row["document_ids"] for row in rows]
        self.current = 0
        self.causal = drafter.prepare_decoder_attention_mask
        drafter.prepare_decoder_attention_mask = self

    def __call__(self, **arguments: Any) -> Tensor:
        mask: Tensor = self.causal(**arguments)
        documents = self.documents[self.current]
        return mask.masked_fill(documents[:, None] != documents[None, :], torch.finfo(mask.dtype).min)


@torch.no_grad()
def load(drafter: Any, weights: dict[str, Tensor]) -> None:
    """Load the weights that every side has."""
    state = {
        name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in weights.items()
        if not name.startswith(("target_", "draft_"))
    }
    state["embed_tokens.weight"] = weights["target_embed"]
    state |= {"d2t": weights["draft_d2t"], "t2d": weights["draft_t2d"]}
    missing, unexpected = drafter.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert not missing, missing
