"""The model and loss of SpecForge on our rows. It runs in the environment of SpecForge."""

import importlib.metadata
from typing import Any

import torch
from torch import Tensor, nn


class SpecForgeStep:
    """The forward pass of SpecForge; on a CPU the plain loss of the same file replaces the Triton one.

    Args:
        llama_config: the arguments of transformers' LlamaConfig for its decoder layer.
        ttt_steps, step_decay: speculation steps, and the factor of the loss from one to the next.
    """

    def __init__(
        self,
        llama_config: dict[str, Any],
        draft_vocab_size: int,
        *,
        ttt_steps: int,
        step_decay: float,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        from specforge.algorithms.eagle3 import model as eagle3
        from specforge.core import loss as losses
        from specforge.modeling.draft import LlamaForCausalLMEagle3
        from specforge.utils import padding
        from transformers import LlamaConfig

        if device.type == "cpu":
            eagle3.LogSoftmaxLoss = PlainLoss(losses)
        drafter_keys: dict[str, Any] = {
            "draft_vocab_size": draft_vocab_size,
            "target_hidden_size": llama_config["hidden_size"],
            "fc_norm": True,
            "norm_output": True,
        }
        config = LlamaConfig(**llama_config, pretraining_tp=1, pad_token_id=None, **drafter_keys)
        self.drafter = LlamaForCausalLMEagle3(config, attention_backend="sdpa").to(device, dtype)
        self.drafter.freeze_embedding()
        self.model = eagle3.OnlineEagle3Model(self.drafter, length=ttt_steps, attention_backend="sdpa")
        self.masks = DocumentMasks(self.drafter)
        self.step_decay = step_decay
        self.rms_norm_eps = llama_config["rms_norm_eps"]
        self.padding = padding
        ran = "sdpa backend with an added document mask, compact teacher"
        ran += ", plain loss instead of Triton's" if device.type == "cpu" else ""
        ran += "; it feeds back the state before the norm"
        self.about = {"version": importlib.metadata.version("specforge"), "ran": ran}

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Load the target's tensors, and the drafter's if given."""
        state = {
            name.replace("layers.0.", "midlayer."): tensor
            for name, tensor in weights.items()
            if not name.startswith(("target_", "draft_"))
        }
        given = bool(state)
        state["embed_tokens.weight"] = weights["target_embed"]
        state |= {"d2t": weights["draft_d2t"], "t2d": weights["draft_t2d"]}
        missing, unexpected = self.drafter.load_state_dict(state, strict=False)
        assert not unexpected, unexpected
        assert not given or not missing, missing
        self.head, self.norm = weights["target_head"], weights["target_norm"]

    def inputs(self, row: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the row; the model shifts it."""
        return row

    def loss(self, row: dict[str, Tensor]) -> Tensor:
        self.masks.documents = row["document_ids"]
        with torch.no_grad():
            # SpecForge's classes lack the target's norm; its trainers pass normalized states, or logits.
            final_states = nn.functional.rms_norm(
                row["final_hidden_states"], self.norm.shape, self.norm, self.rms_norm_eps
            ).unsqueeze(0)
        losses_by_step, *_ = self.model(
            input_ids=self.padding(row["input_ids"].unsqueeze(0), left=False),
            attention_mask=(row["document_ids"] >= 0).long().unsqueeze(0),
            target=None,
            loss_mask=row["loss_mask"].long().view(1, -1, 1),
            hidden_states=row["aux_hidden_states"].flatten(1).unsqueeze(0),
            position_ids=row["position_ids"].unsqueeze(0),
            target_hidden_for_compact=self.padding(final_states, left=False),
            target_head_weight=self.head,
        )
        loss = sum(self.step_decay**i * one for i, one in enumerate(losses_by_step))
        assert isinstance(loss, Tensor)
        return loss


class PlainLoss:
    """Replaces the autograd function of the same file, which launches a Triton kernel."""

    def __init__(self, losses: Any) -> None:
        self.plain = losses._compute_loss

    def apply(self, logits: Tensor, target: Tensor, position_mask: Tensor) -> Tensor:
        loss: Tensor = self.plain(logits, target, position_mask)
        return loss


class DocumentMasks:
    """Adds documents to the causal mask, which handles only padding, because all sides run packed rows."""

    def __init__(self, drafter: Any) -> None:
        self.documents: Tensor | None = None  # of the row in use
        self.causal = drafter.prepare_decoder_attention_mask
        drafter.prepare_decoder_attention_mask = self

    def __call__(self, **arguments: Any) -> Tensor:
        mask: Tensor = self.causal(**arguments)
        assert self.documents is not None
        different = self.documents[:, None] != self.documents[None, :]
        return mask.masked_fill(different, torch.finfo(mask.dtype).min)
