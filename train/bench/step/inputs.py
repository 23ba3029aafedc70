"""What all sides of a measurement read: the same weights, hidden states and masks, in one file."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from data.batches.loader import pack_row
from data.samples import CapturedSample
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.training.batch import PackedBatch
from train.bench.step.shapes import Shape
from train.bench.step.text import Conversation

_LOGIT_STD = 3.0  # of the target's random logits: neither uniform nor one-hot


def random_batch(shape: Shape, row: Sequence[Conversation], generator: torch.Generator) -> PackedBatch:
    """Random hidden states for the conversations, packed and padded to the shape's row."""
    width, num_aux = shape.hidden_size, len(shape.config().aux_layer_ids)
    # Deeper layers have larger states, which fc_norm is there for.
    scales = torch.tensor([1.0, 4.0, 20.0])[:, None]
    samples = [
        CapturedSample(
            input_ids=chat.input_ids,
            loss_mask=chat.loss_mask,
            aux_hidden_states=torch.randn(len(chat.input_ids), num_aux, width, generator=generator) * scales,
            final_hidden_states=torch.randn(len(chat.input_ids), width, generator=generator),
        )
        for chat in row
    ]
    return pack_row(samples, shape.row_tokens)


def random_weights(config: DrafterConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """The drafter's by their names, float32, and the target's with the prefix `target_`."""
    with torch.device("meta"):
        drafter = Drafter(config)
    weights = {
        name: torch.ones(meta.shape)
        if meta.ndim == 1
        else torch.randn(meta.shape, generator=generator) * meta.shape[1] ** -0.5
        for name, meta in drafter.state_dict().items()
    }
    size = (config.vocab_size, config.target_hidden_size)
    ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
    return weights | {
        "target_embed": torch.randn(size, generator=generator) * 0.02,
        "target_head": torch.randn(size, generator=generator) * _LOGIT_STD * config.target_hidden_size**-0.5,
        "target_norm": torch.ones(config.target_hidden_size),
        "draft_target_ids": ids.sort().values,
    }


def write_inputs(
    path: Path, shape: Shape, rows: Sequence[Sequence[Conversation]], dtype: str, seed: int = 0
) -> list[PackedBatch]:
    """Writes the file for `worker.py`, floating point in `dtype`, and returns its rows."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"weights/{name}": value for name, value in random_weights(shape.config(), generator).items()}
    batches = [random_batch(shape, row, generator) for row in rows]
    for index, batch in enumerate(batches):
        for field in fields(batch):
            tensors[f"{index}/{field.name}"] = getattr(batch, field.name).contiguous()
    wanted: torch.dtype = getattr(torch, dtype)
    save_file({name: t.to(wanted) if t.is_floating_point() else t for name, t in tensors.items()}, path)
    return batches
