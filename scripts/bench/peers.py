"""Other trainers of EAGLE drafters: their environments, and their models, losses and optimizers on our rows.

Each class runs in the environment of its trainer, and takes every default from the trainer's sources.
"""

import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle31.errors import UserError
from eagle31.json_files import write_json
from eagle31.model.config import DrafterConfig

ROOT = Path(__file__).resolve().parents[2]
Json = dict[str, Any]


def find_python(name: str) -> Path:
    """Return the Python of a side's environment.

    Raises:
        UserError: the peer is not installed.
    """
    if name not in PEERS or name == "torchspec":
        if name == "torchspec" and importlib.util.find_spec("torchspec") is None:
            raise UserError("--sides", name, "It is not installed; run scripts/setup/torchspec.")
        return Path(sys.executable)
    setup = [str(ROOT / "scripts/setup/peers"), "--print", name]
    python = Path(subprocess.run(setup, capture_output=True, text=True, check=True).stdout.strip())
    if not (python.parent.parent / ".eagle31-stamp").exists():
        raise UserError("--sides", name, f"It is not installed; run scripts/setup/peers {name}.")
    return python


def drafter_spec(config: DrafterConfig) -> Json:
    """Return the peers' settings of a drafter: transformers' LlamaConfig of its layer, and the rest."""
    names = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    names += ["vocab_size", "max_position_embeddings", "rms_norm_eps"]
    llama = {name: getattr(config, name) for name in names}
    llama |= {"num_hidden_layers": 1, "rope_parameters": dict(config.served_rope)}
    return {
        "llama_config": llama,
        "draft_vocab_size": config.draft_vocab_size,
        "aux_layer_ids": list(config.aux_layer_ids),
    }


class Peer:
    """A peer's model and loss, and its optimizer where it trains.

    Args:
        spec: `drafter_spec`, and for a training `target` and `published_config`. `ttt_steps` and `step_decay`
            replace the defaults of its training, and `rate` multiplies its learning rates.
        weights: the target's tensors, and the drafter's; without these it has random ones.
    """

    model: nn.Module
    version: str
    weighs_tokens = False  # whether the rows of a step count by their tokens, not equally
    autocasts = False  # whether its trainer keeps float32 weights and computes in bfloat16 by autocast

    def __init__(
        self, spec: Json, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> None:
        raise NotImplementedError

    def inputs(self, row: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the arguments of `loss` for a packed row; by default the row, which the model shifts."""
        return row

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def begin(self, steps: int) -> None:
        """Make its optimizer and its schedule for so many steps."""
        raise NotImplementedError

    def update(self) -> None:
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def write_config(self, directory: Path) -> None:
        raise NotImplementedError


def drafter_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if not name.startswith(("target_", "draft_"))}


class Speculators(Peer):
    """EAGLE 3.1 without its defaults norm_before_fc and norm_before_residual.

    On a CPU it has sdpa and the eager loss: flex attention has no backward pass there, and the fused losses
    need Triton. Its teacher covers the draft vocabulary only. A draft head that is not given is the target's
    and frozen. Its trainer packs a step into one sequence; here rows are weighted by their supervised tokens.
    """

    weighs_tokens = True
    autocasts = True
    _MAX_GRAD_NORM = 1.0  # in `train_epoch` of its trainer

    def __init__(
        self, spec: Json, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> None:
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.losses import resolve_loss_config
        from speculators.models.eagle3 import Eagle3SpeculatorConfig
        from speculators.models.eagle3.core import Eagle3DraftModel
        from speculators.proposals.greedy import GreedyTokenProposalConfig
        from speculators.train.config.schema import TrainConfig
        from transformers import LlamaConfig

        self.chosen = TrainConfig()
        chosen, on_gpu = self.chosen.loss, device.type == "cuda"
        ttt_steps = spec.get("ttt_steps", chosen.ttt_steps)
        layer = LlamaConfig(**spec["llama_config"])
        layer._attn_implementation = "simple_flex_attention" if on_gpu else "sdpa"
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=spec["draft_vocab_size"],
            eagle_aux_hidden_state_layer_ids=spec["aux_layer_ids"],
            fc_norm=True,
            norm_output=True,
        )
        if "target" in spec:
            config.speculators_config = SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=ttt_steps)],
                default_proposal_method="greedy",
                verifier=VerifierConfig.from_pretrained(spec["target"]),
            )
        self.model: Any = Eagle3DraftModel(config).to(device, dtype)
        self.arguments = {
            "ttt_steps": ttt_steps,
            "ttt_step_loss_decay": spec.get("step_decay", chosen.ttt_step_loss_decay),
            "loss_config": resolve_loss_config(chosen.loss_fn, "fused" if on_gpu else "eager"),
        }
        self.version, self.rate = importlib.metadata.version("speculators"), spec.get("rate", 1)
        rows = weights["target_head"][weights["draft_target_ids"]]
        state = {"lm_head.weight": rows} | drafter_weights(weights)
        state |= {"embed_tokens.weight": weights["target_embed"], "verifier_lm_head.weight": rows}
        state |= {"verifier_norm.weight": weights["target_norm"]}
        state |= {"d2t": weights["draft_d2t"], "t2d": weights["draft_t2d"]}
        unexpected = self.model.load_state_dict(state, strict=False).unexpected_keys
        assert not unexpected, unexpected

    def inputs(self, row: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return inputs that pair x[t+1] with the state at t within each document, which loses one row."""
        documents = row["document_ids"]
        before = ((documents[1:] == documents[:-1]) & (documents[1:] >= 0)).nonzero().squeeze(1)
        after = before + 1
        inputs = {
            "hidden_states": row["aux_hidden_states"][before].flatten(1),
            "input_ids": row["input_ids"][after],
            "document_ids": documents[before],
            "loss_mask": row["loss_mask"][after],
            "position_ids": row["position_ids"][after],
            "verifier_last_hidden_states": row["final_hidden_states"][after],
        }
        return {name: tensor.unsqueeze(0) for name, tensor in inputs.items()}

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**inputs, **self.arguments)[1]
        return loss

    def begin(self, steps: int) -> None:
        from speculators.train.trainer import Trainer, TrainerConfig

        settings = self.chosen.optimizer.model_dump() | self.chosen.scheduler.model_dump()
        settings |= {key: self.rate * settings[key] for key in ("lr", "muon_lr")}
        # The rest of its trainer needs a GPU.
        trainer = self.trainer = object.__new__(Trainer)
        trainer.model, trainer.train_loader, trainer.resume_from_checkpoint = self.model, [], False
        trainer.config = TrainerConfig(num_epochs=1, save_path="", max_steps=steps, **settings)
        trainer.setup_optimizer()

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self._MAX_GRAD_NORM)
        self.trainer._optimizers_step()
        self.trainer._schedulers_step()
        self.trainer._optimizers_zero_grad()

    def weights(self) -> dict[str, Tensor]:
        ignored = self.model._keys_to_ignore_on_save
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in ignored}

    def write_config(self, directory: Path) -> None:
        self.model.config.save_pretrained(directory)


class LlamaPeer(Peer):
    """SpecForge or TorchSpec, which share a model's interface; the draft head is trained.

    Args:
        drafter, model: the weights, and the module that computes the losses of the speculation steps.
        padding: the function of its trainer that shifts by one token.
        step_decay: the factor of the loss from one step to the next.
    """

    def __init__(
        self,
        drafter: Any,
        model: Any,
        padding: Any,
        step_decay: float,
        spec: Json,
        weights: dict[str, Tensor],
    ) -> None:
        self.drafter, self.model, self.padding, self.step_decay = drafter, model, padding, step_decay
        self.eps, self.published = spec["llama_config"]["rms_norm_eps"], spec.get("published_config", {})
        self.documents: Any = None  # of the row in use
        self.causal = drafter.prepare_decoder_attention_mask
        drafter.prepare_decoder_attention_mask = self.document_mask
        self.optimizer: Any = None
        self.rate = spec.get("rate", 1)
        given = drafter_weights(weights)
        state = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in given.items()}
        state["embed_tokens.weight"] = weights["target_embed"]
        if hasattr(drafter, "t2d"):
            state |= {"d2t": weights["draft_d2t"], "t2d": weights["draft_t2d"]}
        unexpected = drafter.load_state_dict(state, strict=False).unexpected_keys
        assert not unexpected, unexpected
        self.head, self.norm = weights["target_head"], weights["target_norm"]

    def teacher(self, row: dict[str, Tensor], final_states: Tensor) -> Json:
        """Return the arguments for mask and teacher. final_states [1, T, H], shifted and normed."""
        raise NotImplementedError

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        self.documents = inputs["document_ids"]
        with torch.no_grad():
            # Their classes lack the target's norm; their trainers pass normalized states, or logits.
            shifted = self.padding(inputs["final_hidden_states"].unsqueeze(0), left=False)
            normed = nn.functional.rms_norm(shifted, self.norm.shape, self.norm, self.eps)
        losses_by_step, *_ = self.model(
            input_ids=self.padding(inputs["input_ids"].unsqueeze(0), left=False),
            attention_mask=(inputs["document_ids"] >= 0).long().unsqueeze(0),
            hidden_states=inputs["aux_hidden_states"].flatten(1).unsqueeze(0),
            position_ids=inputs["position_ids"].unsqueeze(0),
            **self.teacher(inputs, normed),
        )
        decayed = [self.step_decay**i * one for i, one in enumerate(losses_by_step)]
        return torch.stack(decayed).sum()

    def document_mask(self, **arguments: Any) -> Tensor:
        """Add documents to the causal mask, which handles only padding, because all sides run packed rows."""
        mask: Tensor = self.causal(**arguments)
        different = self.documents[:, None] != self.documents[None, :]
        return mask.masked_fill(different, torch.finfo(mask.dtype).min)

    def update(self) -> None:
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return dict(self.drafter.state_dict())

    def write_config(self, directory: Path) -> None:
        write_json(directory / "config.json", self.published)


class SpecForge(LlamaPeer):
    """fc_norm of EAGLE 3.1: it feeds back the state before the norm.

    On a CPU it has sdpa in place of flex attention, and the plain loss of the same file in place of Triton's.
    """

    def __init__(
        self, spec: Json, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> None:
        from specforge.algorithms.eagle3 import model as eagle3
        from specforge.config import TrainingConfig
        from specforge.core import loss as losses
        from specforge.modeling.draft import LlamaForCausalLMEagle3
        from specforge.training.strategies.base import Eagle3TrainStrategy
        from specforge.utils import padding
        from transformers import LlamaConfig

        self.chosen = TrainingConfig()
        backend = self.chosen.attention_backend
        if device.type == "cpu":
            eagle3.LogSoftmaxLoss, backend = PlainLoss(losses), "sdpa"
        width, vocab_size = spec["llama_config"]["hidden_size"], spec["draft_vocab_size"]
        keys: Json = {"target_hidden_size": width, "draft_vocab_size": vocab_size}
        keys |= {"fc_norm": True, "norm_output": True, "pretraining_tp": 1, "pad_token_id": None}
        drafter = LlamaForCausalLMEagle3(
            LlamaConfig(**spec["llama_config"], **keys), attention_backend=backend
        )
        drafter.to(device, dtype).freeze_embedding()
        length = spec.get("ttt_steps", self.chosen.ttt_length)
        model = eagle3.OnlineEagle3Model(drafter, length=length, attention_backend=backend)
        decay = inspect.signature(Eagle3TrainStrategy).parameters["ploss_decay"].default
        super().__init__(drafter, model, padding, spec.get("step_decay", decay), spec, weights)
        self.published = self.published | {"norm_output": False}
        self.version = importlib.metadata.version("specforge")

    def begin(self, steps: int) -> None:
        from specforge.optimizer import BF16Optimizer

        chosen = self.chosen
        self.optimizer = BF16Optimizer(
            self.drafter,
            lr=self.rate * chosen.learning_rate,
            max_grad_norm=chosen.max_grad_norm,
            warmup_ratio=chosen.warmup_ratio,
            lr_scheduler=chosen.lr_scheduler,
            total_steps=steps,
        )

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
        self.apply = losses._compute_loss


class TorchSpec(LlamaPeer):
    """The model of TorchSpec's trainer, which needs CUDA and FSDP, with its default attention and loss."""

    def __init__(
        self, spec: Json, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> None:
        import torchspec
        from torchspec.config.train_config import TrainingConfig
        from torchspec.models import eagle3
        from torchspec.utils.tensor import padding

        self.eagle3, self.chosen = eagle3, TrainingConfig()
        backend, width = self.chosen.attention_backend, spec["llama_config"]["hidden_size"]
        keys: Json = {"architectures": ["LlamaForCausalLMEagle3"], "pad_token_id": None}
        keys |= {"draft_vocab_size": spec["draft_vocab_size"], "target_hidden_size": width}
        keys |= {"fc_norm": True, "norm_output": True}
        config = torchspec.AutoDraftModelConfig.from_dict(spec["llama_config"] | keys)
        drafter = torchspec.AutoEagle3DraftModel.from_config(
            config, attention_backend=backend, torch_dtype=dtype
        )
        drafter.to(device).freeze_embedding()
        model = torchspec.Eagle3Model(
            drafter,
            length=spec.get("ttt_steps", self.chosen.ttt_length),
            attention_backend=backend,
            gradient_checkpointing=self.chosen.gradient_checkpointing,
            loss_type=self.chosen.loss_type,
        )
        decay = 0.8  # the file that has it imports Mooncake
        super().__init__(drafter, model, padding, spec.get("step_decay", decay), spec, weights)
        checkout = Path(torchspec.__file__).resolve().parents[1]
        self.version = f"{(checkout / 'version.txt').read_text().strip()} ({checkout.name})"

    def begin(self, steps: int) -> None:
        from torchspec.training.optimizer import BF16Optimizer

        chosen = self.chosen
        self.optimizer = BF16Optimizer(
            self.drafter,
            lr=self.rate * chosen.learning_rate,
            weight_decay=chosen.weight_decay,
            max_grad_norm=chosen.max_grad_norm,
            warmup_ratio=chosen.warmup_ratio,
            decay_style=chosen.lr_decay_style,
            min_lr=chosen.min_lr,
            total_steps=steps,
        )

    def teacher(self, row: dict[str, Tensor], final_states: Tensor) -> Json:
        loss_mask, length = row["loss_mask"].long().unsqueeze(0), self.model.length
        with torch.no_grad():
            if hasattr(self.drafter, "t2d"):
                t2d = self.drafter.t2d
                target = self.eagle3.compute_target_p_padded(final_states, self.head, t2d, loss_mask, length)
            else:
                target = self.eagle3.compute_lazy_target_padded(final_states, self.head, length)
        return {"loss_mask": loss_mask, "target": target}


PEERS: dict[str, type[Peer]] = {"speculators": Speculators, "specforge": SpecForge, "torchspec": TorchSpec}
