"""SpecForge on our rows. It runs in its environment, and reads every default from its sources."""

import importlib.metadata
import inspect
from typing import Any

import torch
from torch import Tensor

from scripts.bench.peers.peer import Json, LlamaPeer


class SpecForge(LlamaPeer):
    """SpecForge's model; on a CPU the plain loss of the same file replaces the Triton one.

    Args:
        llama_config: the arguments of transformers' LlamaConfig for its decoder layer.
        ttt_steps, step_decay: speculation steps, and the factor of the loss from one to the next.
    """

    def __init__(
        self,
        llama_config: Json,
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
        drafter = LlamaForCausalLMEagle3(config, attention_backend="sdpa").to(device, dtype)
        drafter.freeze_embedding()
        model = eagle3.OnlineEagle3Model(drafter, length=ttt_steps, attention_backend="sdpa")
        super().__init__(drafter, model, padding, llama_config, step_decay)
        how = "sdpa backend with an added document mask, compact teacher"
        how += ", plain loss instead of Triton's" if device.type == "cpu" else ""
        self.version = importlib.metadata.version("specforge")
        self.ran = {"model": f"{how}; it feeds back the state before the norm"}

    @staticmethod
    def trainer(spec: Json, weights: dict[str, Tensor], dtype: torch.dtype) -> "SpecForge":
        """Return it with the optimizer, schedule and loss that it trains with by default."""
        from specforge.config import TrainingConfig
        from specforge.optimizer import BF16Optimizer
        from specforge.training.strategies.base import Eagle3TrainStrategy

        chosen = TrainingConfig()
        decay = inspect.signature(Eagle3TrainStrategy).parameters["ploss_decay"].default
        options: Json = {"ttt_steps": chosen.ttt_length, "step_decay": decay, "dtype": dtype}
        peer = SpecForge(
            spec["llama_config"], spec["draft_vocab_size"], device=torch.device("cpu"), **options
        )
        peer.load(weights)
        arguments = {
            "lr": chosen.learning_rate,
            "max_grad_norm": chosen.max_grad_norm,
            "warmup_ratio": chosen.warmup_ratio,
            "lr_scheduler": chosen.lr_scheduler,
        }
        optimizer = BF16Optimizer(peer.drafter, total_steps=spec["steps"], **arguments)
        adamw = optimizer.optimizer.param_groups[0]
        names = ("ttt_length", "batch_size", "accumulation_steps", "lk_loss_type")
        peer.defaults = {
            "specforge/config/schema.py TrainingConfig": arguments
            | {name: getattr(chosen, name) for name in names},
            "specforge/optimizer.py BF16Optimizer": {
                "betas": list(adamw["betas"]),
                "weight_decay": adamw["weight_decay"],
            },
            "specforge/training/strategies/base.py Eagle3TrainStrategy": {"ploss_decay": decay},
        }
        # It feeds back the state before the norm.
        published = spec["published_config"] | {"norm_output": False}
        peer.trains_with(optimizer, published, "fc_norm of EAGLE 3.1")
        return peer

    def teacher(self, row: dict[str, Tensor], final_states: Tensor) -> Json:
        return {
            "loss_mask": row["loss_mask"].long().view(1, -1, 1),
            "target": None,
            "target_hidden_for_compact": final_states,
            "target_head_weight": self.head,
        }


class PlainLoss:
    """Replaces the autograd function of the same file, which launches a Triton kernel."""

    def __init__(self, losses: Any) -> None:
        self.plain = losses._compute_loss

    def apply(self, logits: Tensor, target: Tensor, position_mask: Tensor) -> Tensor:
        loss: Tensor = self.plain(logits, target, position_mask)
        return loss
