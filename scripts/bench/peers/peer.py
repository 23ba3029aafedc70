"""What the peers have in common: a model and its loss on our rows, and an optimizer where they train.

It runs in the environments of the peers.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle31.json_files import write_json

Json = dict[str, Any]


class Peer:
    """A peer's model and loss.

    `defaults` has each setting of its training with the place in the peer's source, `ran` how it runs here.
    """

    model: nn.Module
    version: str
    ran: Json
    defaults: Json

    def load(self, weights: dict[str, Tensor]) -> None:
        """Load the target's tensors, and the drafter's if given."""
        raise NotImplementedError

    def inputs(self, row: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the arguments of `loss` for a packed row; by default the row, which the model shifts."""
        return row

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def update(self) -> None:
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def write_config(self, directory: Path) -> None:
        raise NotImplementedError


def drafter_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the drafter's part of the weights, none where it starts from random ones."""
    return {name: tensor for name, tensor in weights.items() if not name.startswith(("target_", "draft_"))}


class LlamaPeer(Peer):
    """SpecForge or TorchSpec, which share a model's interface.

    Args:
        drafter, model: the weights, and the module that computes the losses of the speculation steps.
        padding: the function of its trainer that shifts by one token.
        step_decay: the factor of the loss from one step to the next.
    """

    def __init__(
        self, drafter: Any, model: nn.Module, padding: Any, llama_config: Json, step_decay: float
    ) -> None:
        self.drafter, self.model, self.padding, self.step_decay = drafter, model, padding, step_decay
        self.rms_norm_eps = llama_config["rms_norm_eps"]
        self.documents: Tensor | None = None  # of the row in use
        self.causal = drafter.prepare_decoder_attention_mask
        drafter.prepare_decoder_attention_mask = self.document_mask
        self.optimizer: Any = None
        self.published: Json = {}

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        given = drafter_weights(weights)
        state = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in given.items()}
        state["embed_tokens.weight"] = weights["target_embed"]
        if hasattr(self.drafter, "t2d"):
            state |= {"d2t": weights["draft_d2t"], "t2d": weights["draft_t2d"]}
        missing, unexpected = self.drafter.load_state_dict(state, strict=False)
        assert not unexpected, unexpected
        assert not given or not missing, missing
        self.head, self.norm = weights["target_head"], weights["target_norm"]

    def teacher(self, row: dict[str, Tensor], final_states: Tensor) -> Json:
        """Return the arguments for mask and teacher. final_states [1, T, H], shifted and normed."""
        raise NotImplementedError

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        self.documents = inputs["document_ids"]
        with torch.no_grad():
            # Their classes lack the target's norm; their trainers pass normalized states, or logits.
            shifted = self.padding(inputs["final_hidden_states"].unsqueeze(0), left=False)
            normed = nn.functional.rms_norm(shifted, self.norm.shape, self.norm, self.rms_norm_eps)
        losses_by_step, *_ = self.model(
            input_ids=self.padding(inputs["input_ids"].unsqueeze(0), left=False),
            attention_mask=(inputs["document_ids"] >= 0).long().unsqueeze(0),
            hidden_states=inputs["aux_hidden_states"].flatten(1).unsqueeze(0),
            position_ids=inputs["position_ids"].unsqueeze(0),
            **self.teacher(inputs, normed),
        )
        loss = sum(self.step_decay**i * one for i, one in enumerate(losses_by_step))
        assert isinstance(loss, Tensor)
        return loss

    def document_mask(self, **arguments: Any) -> Tensor:
        """Add documents to the causal mask, which handles only padding, because all sides run packed rows."""
        mask: Tensor = self.causal(**arguments)
        assert self.documents is not None
        different = self.documents[:, None] != self.documents[None, :]
        return mask.masked_fill(different, torch.finfo(mask.dtype).min)

    def trains_with(self, optimizer: Any, published: Json, drafter: str) -> None:
        """Note its optimizer, the config.json of what it trains, and which drafter that is."""
        self.optimizer, self.published = optimizer, published
        self.ran |= {
            "optimizers": [type(optimizer.optimizer).__name__],
            "drafter": f"{drafter}; the draft head starts from random weights and is trained",
            "precision": "float32 instead of bfloat16",
            "batch": "the rows of a step are accumulated with equal weights",
        }

    def update(self) -> None:
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return dict(self.drafter.state_dict())

    def write_config(self, directory: Path) -> None:
        write_json(directory / "config.json", self.published)
