"""How the peers train by default: their optimizers, schedules and losses, built by their own code.

It runs in the environments of the peers, and reads every default from their sources.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from eagle31.json_files import write_json
from scripts.bench.peers.specforge_step import SpecForgeStep
from scripts.bench.peers.speculators_step import SpeculatorsStep
from scripts.bench.peers.torchspec_step import TorchSpecStep

Json = dict[str, Any]


class PeerTrainer(Protocol):
    """One peer's model with its optimizer.

    `defaults` has each setting with the place in the peer's source, `ran` how it runs here.
    """

    model: nn.Module
    defaults: Json
    ran: Json

    def inputs(self, row: dict[str, Tensor]) -> Any: ...
    def loss(self, inputs: Any) -> Tensor: ...
    def update(self) -> None: ...
    def weights(self) -> dict[str, Tensor]: ...
    def write_config(self, directory: Path) -> None: ...


class SpeculatorsTrainer:
    """speculators with the optimizers and schedules of its Trainer."""

    def __init__(self, spec: Json, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig
        from speculators.train.config.schema import TrainConfig
        from speculators.train.trainer import Trainer, TrainerConfig

        arguments = TrainConfig()
        chosen, schedule, loss = arguments.optimizer, arguments.scheduler, arguments.loss
        served = SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=loss.ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(spec["target"]),
        )
        step = SpeculatorsStep(
            spec["llama_config"],
            spec["draft_vocab_size"],
            ttt_steps=loss.ttt_steps,
            step_decay=loss.ttt_step_loss_decay,
            loss=loss.loss_fn,
            device=torch.device("cpu"),
            dtype=dtype,
            config={"eagle_aux_hidden_state_layer_ids": spec["aux_layer_ids"], "speculators_config": served},
        )
        step.load(weights)
        self.step, self.model = step, step.model
        # Its Trainer needs a GPU for the rest.
        self.trainer = object.__new__(Trainer)
        self.trainer.model, self.trainer.train_loader = step.model, []
        self.trainer.resume_from_checkpoint = False
        self.trainer.config = TrainerConfig(
            lr=chosen.lr,
            num_epochs=1,
            save_path="",
            optimizer=chosen.optimizer,
            weight_decay=chosen.weight_decay,
            muon_lr=chosen.muon_lr,
            muon_momentum=chosen.muon_momentum,
            muon_weight_decay=chosen.muon_weight_decay,
            muon_ns_steps=chosen.muon_ns_steps,
            muon_adjust_lr_fn=chosen.muon_adjust_lr_fn,
            scheduler_type=schedule.scheduler_type,
            scheduler_warmup_steps=schedule.scheduler_warmup_steps,
            scheduler_warmup_ratio=schedule.scheduler_warmup_ratio,
            scheduler_total_steps=schedule.scheduler_total_steps,
            scheduler_num_cosine_cycles=schedule.scheduler_num_cosine_cycles,
            max_steps=spec["steps"],
        )
        self.trainer.setup_optimizer()
        self.max_grad_norm = 1.0
        self.defaults = {
            "speculators/train/config/schema.py OptimizerArgs": chosen.model_dump(),
            "speculators/train/config/schema.py SchedulerArgs": schedule.model_dump(),
            "speculators/train/config/schema.py LossArgs": loss.model_dump(),
            "speculators/train/config/schema.py DataArgs": {"total_seq_len": arguments.data.total_seq_len},
            "speculators/train/trainer.py _resolve_scheduler_steps": "1 % of the steps are warm-up",
            "speculators/train/trainer.py train_epoch": {"clip_grad_norm_": self.max_grad_norm},
        }
        self.ran = step.about | {
            "optimizers": [type(one).__name__ for one in self.trainer.optimizers],
            "drafter": "fc_norm and norm_output of EAGLE 3.1, without its defaults norm_before_fc and "
            "norm_before_residual; the draft head is the target's and frozen",
            "precision": "float32 instead of bfloat16 autocast",
            "batch": "the rows of a step one after the other, weighted by their supervised tokens, instead "
            "of one packed sequence",
        }

    def inputs(self, row: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.step.inputs(row)

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.step.loss(inputs)

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.trainer._optimizers_step()
        self.trainer._schedulers_step()
        self.trainer._optimizers_zero_grad()

    def weights(self) -> dict[str, Tensor]:
        ignored = self.model._keys_to_ignore_on_save
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in ignored}

    def write_config(self, directory: Path) -> None:
        self.model.config.save_pretrained(directory)


class SpecForgeTrainer:
    """SpecForge with its optimizer and schedule."""

    def __init__(self, spec: Json, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        from specforge.config import TrainingConfig
        from specforge.optimizer import BF16Optimizer
        from specforge.training.strategies.base import Eagle3TrainStrategy

        chosen = TrainingConfig()
        decay = inspect.signature(Eagle3TrainStrategy).parameters["ploss_decay"].default
        step = SpecForgeStep(
            spec["llama_config"],
            spec["draft_vocab_size"],
            ttt_steps=chosen.ttt_length,
            step_decay=decay,
            device=torch.device("cpu"),
            dtype=dtype,
        )
        step.load(weights)
        self.step, self.model = step, step.model
        self.published = spec["published_config"]
        arguments = {
            "lr": chosen.learning_rate,
            "max_grad_norm": chosen.max_grad_norm,
            "warmup_ratio": chosen.warmup_ratio,
            "lr_scheduler": chosen.lr_scheduler,
        }
        self.optimizer = BF16Optimizer(step.drafter, total_steps=spec["steps"], **arguments)
        adamw = self.optimizer.optimizer.param_groups[0]
        self.defaults = {
            "specforge/config/schema.py TrainingConfig": arguments
            | {
                name: getattr(chosen, name)
                for name in ("ttt_length", "batch_size", "accumulation_steps", "lk_loss_type")
            },
            "specforge/optimizer.py BF16Optimizer": {
                "optimizer": type(self.optimizer.optimizer).__name__,
                "betas": list(adamw["betas"]),
                "weight_decay": adamw["weight_decay"],
            },
            "specforge/training/strategies/base.py Eagle3TrainStrategy": {"ploss_decay": decay},
        }
        self.ran = step.about | {
            "optimizers": [type(self.optimizer.optimizer).__name__],
            "drafter": "fc_norm of EAGLE 3.1; the draft head starts from random weights and is trained",
            "precision": "float32 instead of bfloat16",
            "batch": "the rows of a step are accumulated with equal weights",
        }

    def inputs(self, row: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.step.inputs(row)

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.step.loss(inputs)

    def update(self) -> None:
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return dict(self.step.drafter.state_dict())

    def write_config(self, directory: Path) -> None:
        """Write the config.json that describes what it trains: it feeds back the state before the norm."""
        write_json(directory / "config.json", self.published | {"norm_output": False})


class TorchSpecTrainer:
    """TorchSpec with the optimizer and schedule of its trainer, which itself needs CUDA and FSDP."""

    def __init__(self, spec: Json, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        from torchspec.config.train_config import TrainingConfig
        from torchspec.training.optimizer import BF16Optimizer

        chosen, decay = TrainingConfig(), 0.8  # the file that has it imports Mooncake
        loss = "lk_lambda" if spec["peer"] == "torchspec-lk" else chosen.loss_type
        step = TorchSpecStep(
            spec["llama_config"],
            spec["draft_vocab_size"],
            ttt_steps=chosen.ttt_length,
            step_decay=decay,
            loss=loss,
            device=torch.device("cpu"),
            dtype=dtype,
        )
        step.load(weights)
        self.step, self.model = step, step.model
        self.published = spec["published_config"]
        arguments = {
            "lr": chosen.learning_rate,
            "weight_decay": chosen.weight_decay,
            "max_grad_norm": chosen.max_grad_norm,
            "warmup_ratio": chosen.warmup_ratio,
            "decay_style": chosen.lr_decay_style,
            "min_lr": chosen.min_lr,
        }
        self.optimizer = BF16Optimizer(step.drafter, total_steps=spec["steps"], **arguments)
        self.defaults = {
            "torchspec/config/train_config.py TrainingConfig": arguments
            | {"ttt_length": chosen.ttt_length, "micro_batch_size": chosen.micro_batch_size},
            "torchspec/training/eagle3_trainer.py _position_decay_weights": {"decay": decay},
        }
        self.ran = step.about | {
            "optimizers": [type(self.optimizer.optimizer).__name__],
            "drafter": "EAGLE 3.1; the draft head starts from random weights and is trained",
            "precision": "float32 instead of bfloat16",
            "batch": "the rows of a step are accumulated with equal weights",
        }

    def inputs(self, row: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.step.inputs(row)

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.step.loss(inputs)

    def update(self) -> None:
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return dict(self.step.drafter.state_dict())

    def write_config(self, directory: Path) -> None:
        write_json(directory / "config.json", self.published)


TRAINERS: dict[str, Callable[[Json, dict[str, Tensor], torch.dtype], PeerTrainer]] = {
    "speculators": SpeculatorsTrainer,
    "specforge": SpecForgeTrainer,
    "torchspec": TorchSpecTrainer,
    "torchspec-lk": TorchSpecTrainer,
}


def row_weights(peer: str, supervised: list[int]) -> list[float]:
    """Return the weight of each row's mean loss in that of a step.

    speculators takes the mean over a packed sequence, the others that over their micro-batches.
    """
    if peer == "speculators":
        total = max(sum(supervised), 1)
        return [count / total for count in supervised]
    return [1 / len(supervised)] * len(supervised)
