"""The model and loss of TorchSpec on our rows. It runs in the project's environment, to which it is added."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scripts.bench.peers.specforge_step import DocumentMasks


class TorchSpecStep:
    """The forward pass of TorchSpec's trainer, which itself needs CUDA, with its default attention.

    Args:
        llama_config: the arguments of transformers' LlamaConfig for its decoder layer.
        ttt_steps, step_decay: speculation steps, and the factor of the loss from one to the next.
        loss: its `loss_type`.
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
    ) -> None:
        import torchspec
        from torchspec.config.train_config import TrainingConfig
        from torchspec.models import eagle3
        from torchspec.utils.tensor import padding

        keys: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": draft_vocab_size,
            "target_hidden_size": llama_config["hidden_size"],
            "fc_norm": True,
            "norm_output": True,
            "pad_token_id": None,
        }
        chosen = TrainingConfig()
        config = torchspec.AutoDraftModelConfig.from_dict(llama_config | keys)
        drafter = torchspec.AutoEagle3DraftModel.from_config(
            config, attention_backend=chosen.attention_backend, torch_dtype=dtype
        )
        self.drafter = drafter.to(device)
        self.drafter.freeze_embedding()
        self.model = torchspec.Eagle3Model(
            self.drafter,
            length=ttt_steps,
            attention_backend=chosen.attention_backend,
            gradient_checkpointing=chosen.gradient_checkpointing,
            loss_type=loss,
            lk_eta=chosen.lk_eta,
        )
        self.masks = DocumentMasks(self.drafter)
        self.step_decay = step_decay
        self.rms_norm_eps = llama_config["rms_norm_eps"]
        self.eagle3, self.padding = eagle3, padding
        checkout = Path(torchspec.__file__).resolve().parents[1]
        self.about = {
            "version": f"{(checkout / 'version.txt').read_text().strip()} ({checkout.name})",
            "ran": f"{chosen.attention_backend} backend with an added document mask, compiled {loss} loss",
        }

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
        if hasattr(self.drafter, "t2d"):
            state |= {"d2t": weights["draft_d2t"], "t2d": weights["draft_t2d"]}
        missing, unexpected = self.drafter.load_state_dict(state, strict=False)
        assert not unexpected, unexpected
        assert not given or not missing, missing
        self.head, self.norm = weights["target_head"], weights["target_norm"]

    def inputs(self, row: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the row; the trainer shifts it."""
        return row

    def loss(self, row: dict[str, Tensor]) -> Tensor:
        self.masks.documents = row["document_ids"]
        loss_mask = row["loss_mask"].long().unsqueeze(0)
        with torch.no_grad():
            final_states = nn.functional.rms_norm(
                self.padding(row["final_hidden_states"].unsqueeze(0), left=False),
                self.norm.shape,
                self.norm,
                self.rms_norm_eps,
            )
        if hasattr(self.drafter, "t2d"):
            target = self.eagle3.compute_target_p_padded(
                final_states, self.head, self.drafter.t2d, loss_mask, self.model.length
            )
        else:
            target = self.eagle3.compute_lazy_target_padded(final_states, self.head, self.model.length)
        losses_by_step, *_ = self.model(
            input_ids=self.padding(row["input_ids"].unsqueeze(0), left=False),
            attention_mask=(row["document_ids"] >= 0).long().unsqueeze(0),
            target=target,
            loss_mask=loss_mask,
            hidden_states=row["aux_hidden_states"].flatten(1).unsqueeze(0),
            position_ids=row["position_ids"].unsqueeze(0),
        )
        loss = sum(self.step_decay**i * one for i, one in enumerate(losses_by_step))
        assert isinstance(loss, Tensor)
        return loss
