"""TorchSpec on our rows. It runs in the project's environment, to which it is added."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.bench.peers.peer import Json, LlamaPeer


class TorchSpec(LlamaPeer):
    """The model of TorchSpec's trainer, which itself needs CUDA and FSDP, with its default attention.

    Args:
        llama_config: the arguments of transformers' LlamaConfig for its decoder layer.
        ttt_steps, step_decay: speculation steps, and the factor of the loss from one to the next.
        loss: its `loss_type`.
    """

    def __init__(
        self,
        llama_config: Json,
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
        drafter.to(device)
        drafter.freeze_embedding()
        model = torchspec.Eagle3Model(
            drafter,
            length=ttt_steps,
            attention_backend=chosen.attention_backend,
            gradient_checkpointing=chosen.gradient_checkpointing,
            loss_type=loss,
            lk_eta=chosen.lk_eta,
        )
        super().__init__(drafter, model, padding, llama_config, step_decay)
        self.eagle3 = eagle3
        checkout = Path(torchspec.__file__).resolve().parents[1]
        self.version = f"{(checkout / 'version.txt').read_text().strip()} ({checkout.name})"
        how = f"{chosen.attention_backend} backend with an added document mask, compiled {loss} loss"
        self.ran = {"model": how}

    @staticmethod
    def trainer(spec: Json, weights: dict[str, Tensor], dtype: torch.dtype) -> "TorchSpec":
        """Return it with the optimizer and schedule that it trains with by default."""
        from torchspec.config.train_config import TrainingConfig
        from torchspec.training.optimizer import BF16Optimizer

        chosen, decay = TrainingConfig(), 0.8  # the file that has it imports Mooncake
        loss = "lk_lambda" if spec["peer"] == "torchspec-lk" else chosen.loss_type
        options: Json = {"ttt_steps": chosen.ttt_length, "step_decay": decay, "dtype": dtype, "loss": loss}
        peer = TorchSpec(
            spec["llama_config"], spec["draft_vocab_size"], device=torch.device("cpu"), **options
        )
        peer.load(weights)
        arguments = {
            "lr": chosen.learning_rate,
            "weight_decay": chosen.weight_decay,
            "max_grad_norm": chosen.max_grad_norm,
            "warmup_ratio": chosen.warmup_ratio,
            "decay_style": chosen.lr_decay_style,
            "min_lr": chosen.min_lr,
        }
        peer.defaults = {
            "torchspec/config/train_config.py TrainingConfig": arguments
            | {"ttt_length": chosen.ttt_length, "micro_batch_size": chosen.micro_batch_size},
            "torchspec/training/eagle3_trainer.py _position_decay_weights": {"decay": decay},
        }
        optimizer = BF16Optimizer(peer.drafter, total_steps=spec["steps"], **arguments)
        peer.trains_with(optimizer, spec["published_config"], "EAGLE 3.1")
        return peer

    def teacher(self, row: dict[str, Tensor], final_states: Tensor) -> Json:
        loss_mask = row["loss_mask"].long().unsqueeze(0)
        with torch.no_grad():
            if hasattr(self.drafter, "t2d"):
                target = self.eagle3.compute_target_p_padded(
                    final_states, self.head, self.drafter.t2d, loss_mask, self.model.length
                )
            else:
                target = self.eagle3.compute_lazy_target_padded(final_states, self.head, self.model.length)
        return {"loss_mask": loss_mask, "target": target}
