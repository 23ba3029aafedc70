"""Packed rows: several samples one after another, and padding."""

from collections.abc import Sequence

import torch
from torch import Tensor

from data.samples import CapturedSample, StateShape
from eagle31.training.batch import PackedBatch


def pack_row(samples: Sequence[CapturedSample], num_tokens: int, *, pin_memory: bool = False) -> PackedBatch:
    """Concatenate the samples and pad them to `num_tokens`.

    Samples without tokens, which replace samples that could not be captured, leave no trace in the row.
    """
    row, places = empty_row(
        [len(sample.input_ids) for sample in samples],
        num_tokens,
        StateShape.of(samples[0].aux_hidden_states),
        pin_memory=pin_memory,
    )
    for sample, place in zip(samples, places, strict=True):
        for name, tensor in vars(place).items():
            tensor.copy_(getattr(sample, name))
    return row


def empty_row(
    lengths: Sequence[int], num_tokens: int, shape: StateShape, *, pin_memory: bool = False
) -> tuple[PackedBatch, list[CapturedSample]]:
    """Return a row for samples of these lengths, and the place of each in it, which has to be filled.

    Args:
        shape: the states' shape and dtype.
    """
    used = sum(lengths)
    with_tokens = [length for length in lengths if length]

    def tensor(dtype: torch.dtype, *row_shape: int, padding: int = 0) -> Tensor:
        made = torch.empty((num_tokens, *row_shape), dtype=dtype, pin_memory=pin_memory)
        made[used:] = padding
        return made

    row = PackedBatch(
        input_ids=tensor(torch.int64),
        loss_mask=tensor(torch.bool),
        document_ids=tensor(torch.int64, padding=-1),
        position_ids=tensor(torch.int64),
        aux_hidden_states=tensor(shape.dtype, shape.num_aux_layers, shape.hidden_size),
        final_hidden_states=tensor(shape.dtype, shape.hidden_size),
    )
    documents = torch.arange(len(with_tokens))
    row.document_ids[:used] = documents.repeat_interleave(torch.tensor(with_tokens, dtype=torch.int64))
    if with_tokens:
        torch.cat([torch.arange(length) for length in with_tokens], out=row.position_ids[:used])
    parts = (row.input_ids, row.loss_mask, row.aux_hidden_states, row.final_hidden_states)
    pieces = (part[:used].split(list(lengths)) for part in parts)
    return row, [CapturedSample(*sample) for sample in zip(*pieces, strict=True)]
