"""speculators on our rows. It runs in its environment, and reads every default from its sources."""

import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.bench.peers.peer import Json, Peer, drafter_weights

_MAX_GRAD_NORM = 1.0  # in `train_epoch` of its trainer


class Speculators(Peer):
    """speculators' model, with its defaults on a GPU and with sdpa and the eager loss on a CPU.

    On a CPU flex attention has no backward pass, and the fused losses need Triton.

    Args:
        llama_config: the arguments of transformers' LlamaConfig for its decoder layer.
        ttt_steps, step_decay, loss: speculation steps, the factor of the loss from one to the next, and the
            name of the loss.
        config: further arguments of its Eagle3SpeculatorConfig.
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
        config: Json,
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
        self.drafter = self.model = Eagle3DraftModel(shape).to(device, dtype)
        self.optimizing: Any = None  # its trainer
        self.arguments = {
            "ttt_steps": ttt_steps,
            "ttt_step_loss_decay": step_decay,
            "loss_config": resolve_loss_config(loss, "fused" if on_gpu else "eager"),
        }
        how = "flex attention, fused losses, compiled" if on_gpu else "sdpa attention, eager loss"
        self.version = importlib.metadata.version("speculators")
        self.ran = {"model": f"{how}; its teacher covers the draft vocabulary only"}

    @staticmethod
    def trainer(spec: Json, weights: dict[str, Tensor], dtype: torch.dtype) -> "Speculators":
        """Return it with the optimizers and schedules of its Trainer, which needs a GPU for the rest."""
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
        peer = Speculators(
            spec["llama_config"],
            spec["draft_vocab_size"],
            ttt_steps=loss.ttt_steps,
            step_decay=loss.ttt_step_loss_decay,
            loss=loss.loss_fn,
            device=torch.device("cpu"),
            dtype=dtype,
            config={"eagle_aux_hidden_state_layer_ids": spec["aux_layer_ids"], "speculators_config": served},
        )
        peer.load(weights)
        trainer = object.__new__(Trainer)
        trainer.model, trainer.train_loader, trainer.resume_from_checkpoint = peer.drafter, [], False
        trainer.config = TrainerConfig(
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
        trainer.setup_optimizer()
        peer.optimizing = trainer
        peer.defaults = {
            "speculators/train/config/schema.py OptimizerArgs": chosen.model_dump(),
            "speculators/train/config/schema.py SchedulerArgs": schedule.model_dump(),
            "speculators/train/config/schema.py LossArgs": loss.model_dump(),
            "speculators/train/trainer.py _resolve_scheduler_steps": "1 % of the steps are warm-up",
            "speculators/train/trainer.py train_epoch": {"clip_grad_norm_": _MAX_GRAD_NORM},
        }
        peer.ran |= {
            "optimizers": [type(one).__name__ for one in trainer.optimizers],
            "drafter": "fc_norm and norm_output of EAGLE 3.1, without its defaults norm_before_fc and "
            "norm_before_residual; the draft head is the target's and frozen",
            "precision": "float32 instead of bfloat16 autocast",
            "batch": "the rows of a step one after the other, weighted by their supervised tokens, instead "
            "of one packed sequence",
        }
        return peer

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Load the weights; a draft head that is not given is a copy of the target's rows, and frozen."""
        state = drafter_weights(weights)
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

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        _, loss, _ = self.model(**inputs, **self.arguments)
        assert isinstance(loss, Tensor)
        return loss

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_GRAD_NORM)
        self.optimizing._optimizers_step()
        self.optimizing._schedulers_step()
        self.optimizing._optimizers_zero_grad()

    def weights(self) -> dict[str, Tensor]:
        ignored = self.drafter._keys_to_ignore_on_save
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in ignored}

    def write_config(self, directory: Path) -> None:
        self.drafter.config.save_pretrained(directory)
