"""The inputs of all sides: the same weights, hidden states and masks, in one file."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from data.batches.rows import pack_row
from data.samples import CapturedSample
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.training.batch import PackedBatch
from train.bench.step.documents import Document
from train.bench.step.shapes import Shape

_LOGIT_STD = 3.0  # makes the target's random distribution neither uniform nor one-hot


def random_batch(shape: Shape, row: Sequence[Document], generator: torch.Generator) -> PackedBatch:
    """Return random hidden states for the documents, packed and padded to the shape's row."""
    width, num_aux = shape.hidden_size, len(shape.config().aux_layer_ids)
    # Deeper layers have larger states, which fc_norm normalizes.
    scales = torch.tensor([1.0, 4.0, 20.0])[:, None]
    samples = [
        CapturedSample(
            input_ids=one.input_ids,
            loss_mask=one.loss_mask,
            aux_hidden_states=torch.randn(len(one.input_ids), num_aux, width, generator=generator) * scales,
            final_hidden_states=torch.randn(len(one.input_ids), width, generator=generator),
        )
        for one in row
    ]
    return pack_row(samples, shape.row_tokens)


def random_weights(config: DrafterConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the drafter's weights by name, float32, and the target's with the prefix `target_`.

    The names of the draft vocabulary's tensors begin with `draft_`; d2t and t2d are the peers' form of it.
    """
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
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    ids = t2d.nonzero().squeeze(1)
    return weights | {
        "target_embed": torch.randn(size, generator=generator) * 0.02,
        "target_head": torch.randn(size, generator=generator) * _LOGIT_STD * config.target_hidden_size**-0.5,
        "target_norm": torch.ones(config.target_hidden_size),
        "draft_target_ids": ids,
        "draft_d2t": ids - torch.arange(len(ids)),
        "draft_t2d": t2d,
    }


def write_inputs(
    path: Path, shape: Shape, rows: Sequence[Sequence[Document]], dtype: str, seed: int = 0
) -> list[PackedBatch]:
    """Write the file for `worker.py` with floating point values in `dtype`, and return its rows."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"weights/{name}": value for name, value in random_weights(shape.config(), generator).items()}
    batches = [random_batch(shape, row, generator) for row in rows]
    for index, batch in enumerate(batches):
        for field in fields(batch):
            tensors[f"{index}/{field.name}"] = getattr(batch, field.name).contiguous()
    floating_dtype: torch.dtype = getattr(torch, dtype)
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(floating_dtype) if tensor.is_floating_point() else tensor
    save_file(tensors, path)
    return batches
