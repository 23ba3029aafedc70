"""The encoding of a captured sample: the states' dtype, and which of the states are kept.

The codec `exact` keeps the target's dtype, `bf16` bfloat16, and `fp8` e4m3 with a power of two per token and
layer, which decodes to bfloat16 without another rounding. States that no supervised draft reads are left out,
and decode to zeros.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from data.samples import CapturedSample, StateShape

CODECS = ("exact", "bf16", "fp8")  # each holds less than the one before
STATES = ("aux_hidden_states", "final_hidden_states")
# The index of the number in `Rows` that an encoded tensor has.
ROWS_OF = {"input_ids": 0, "loss_mask": 0} | {
    name + suffix: index for index, name in enumerate(STATES, 1) for suffix in ("", "_exponents")
}
_EXPONENTS = "_exponents"  # suffix of a state's name
_BIAS, _NAN_EXPONENT = 127, 255
_FP8_MANTISSA, _FP8_EXPONENT = 0.875, 9  # of 448, the largest
# All bits but the exponent's highest one, and the difference between the biases of the two formats.
_FP16_BITS, _FP16_SHIFT = ~0x4000, 8
_BLOCK_ELEMENTS = 1 << 20
_PART_VALUES = 1 << 18  # converted to fp8 at a time on a CPU
_TOKEN_BYTES = 5  # input_ids int32, loss_mask bool


class Rows(NamedTuple):
    """The number of rows of each kind that are kept, of one sample or summed over many."""

    tokens: int
    aux: int
    final: int


def supervised_final(loss_mask: Tensor) -> Tensor:
    """Return where a supervised draft is compared with the target's distribution. bool [T] -> bool [T].

    Index j supervises row t = j-1-k at step k when all of x[t+1] .. x[j+1] are the assistant's. Such a t
    exists as soon as x[j] and x[j+1] are and j > 0.
    """
    supervised = torch.zeros_like(loss_mask)
    supervised[1:-1] = loss_mask[1:-1] & loss_mask[2:]
    return supervised


def supervised_aux(supervised: Tensor) -> int:
    """Return how many aux states are read: those up to the last row that is drafted from.

    Args:
        supervised: bool [T], of `supervised_final`.
    """
    indices = torch.nonzero(supervised)
    return int(indices[-1]) if len(indices) else 0


def kept_rows(loss_mask: Tensor) -> Rows:
    """Return the rows that are kept of one sample. loss_mask bool [T]."""
    supervised = supervised_final(loss_mask)
    return Rows(len(loss_mask), supervised_aux(supervised), int(supervised.sum()))


def encoded_bytes(codec: str, rows: Rows, shape: StateShape) -> int:
    """Return the exact size that `encode` gives samples of the target's states with these rows."""
    width = {"exact": shape.dtype.itemsize, "bf16": 2, "fp8": 1}[codec]
    state = shape.hidden_size * width + (codec == "fp8")
    return rows.tokens * _TOKEN_BYTES + (rows.aux * shape.num_aux_layers + rows.final) * state


def encode(
    sample: CapturedSample, codec: str, supervised: Tensor | None = None, first: int = 0
) -> dict[str, Tensor]:
    """Encode a sample, or a slice of consecutive tokens of one, on the device of its states.

    Args:
        supervised: bool, of `supervised_final` of the whole sample, in which the slice begins at `first`.

    Returns:
        input_ids int32 [T], loss_mask bool [T], aux_hidden_states [Ra, A, Ht], final_hidden_states [Rl, Ht];
        with fp8 their `_exponents` uint8 [Ra, A] and [Rl]. Ra and Rl are those of `kept_rows`.
    """
    if supervised is None:
        supervised = supervised_final(sample.loss_mask)
    aux, final = sample.aux_hidden_states, sample.final_hidden_states
    aux = aux[: max(0, supervised_aux(supervised) - first)]
    final = final[supervised[first : first + len(final)].to(final.device)]
    tensors = {"input_ids": sample.input_ids.to(torch.int32), "loss_mask": sample.loss_mask}
    for name, states in zip(STATES, (aux, final), strict=True):
        if codec == "fp8":
            tensors[name], tensors[name + _EXPONENTS] = _to_fp8(states)
        else:
            tensors[name] = states.bfloat16() if codec == "bf16" else states
    return tensors


def decode(tensors: Mapping[str, Tensor]) -> CapturedSample:
    """Return the sample, with zeros where nothing was kept; bfloat16 unless the codec is `exact`."""
    num_tokens, states = len(tensors["loss_mask"]), tensors[STATES[0]]
    dtype = decoded_dtype(tensors)
    sample = CapturedSample(
        torch.empty(num_tokens, dtype=torch.int64),
        torch.empty(num_tokens, dtype=torch.bool),
        torch.empty((num_tokens, *states.shape[1:]), dtype=dtype),
        torch.empty((num_tokens, *tensors[STATES[1]].shape[1:]), dtype=dtype),
    )
    decode_into(tensors, sample)
    return sample


def decoded_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype of the states that these tensors decode to."""
    return torch.bfloat16 if STATES[0] + _EXPONENTS in tensors else tensors[STATES[0]].dtype


def decode_into(tensors: Mapping[str, Tensor], sample: CapturedSample) -> None:
    """Decode into a sample of the right shapes and dtypes on the CPU, such as a part of a row.

    Memory that was used before is much faster than new memory, which the kernel clears first.
    """
    sample.input_ids.copy_(tensors["input_ids"])
    sample.loss_mask.copy_(tensors["loss_mask"])
    aux, final = (tensors[name] for name in STATES)
    _decode_states(aux, tensors.get(STATES[0] + _EXPONENTS), sample.aux_hidden_states[: len(aux)])
    sample.aux_hidden_states[len(aux) :] = 0
    exponents = tensors.get(STATES[1] + _EXPONENTS)
    kept = torch.nonzero(supervised_final(sample.loss_mask)).flatten()
    first, last = (int(kept[0]), int(kept[-1]) + 1) if len(kept) else (0, 0)
    if last - first == len(kept):  # the usual case: one answer
        sample.final_hidden_states[:first] = 0
        sample.final_hidden_states[last:] = 0
        _decode_states(final, exponents, sample.final_hidden_states[first:last])
        return
    decoded = torch.empty(final.shape, dtype=sample.final_hidden_states.dtype)
    _decode_states(final, exponents, decoded)
    sample.final_hidden_states.zero_().index_copy_(0, kept, decoded)


def _decode_states(states: Tensor, exponents: Tensor | None, out: Tensor) -> None:
    if exponents is None:
        out.copy_(states)
    else:
        _from_fp8(states, exponents, out)


def _to_fp8(states: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 [..., Ht] and biased exponents uint8 [...]; a row that is not finite becomes nan.

    On a CPU this takes a part at a time, whose intermediate values stay in the cache: four times as fast.
    """
    if states.device.type != "cpu":
        return _part_to_fp8(states)
    encoded = states.new_empty(states.shape, dtype=torch.float8_e4m3fn)
    exponents = states.new_empty(states.shape[:-1], dtype=torch.uint8)
    rows = max(1, _PART_VALUES // max(1, states.shape[1:].numel()))
    for part, into, scales in zip(
        states.split(rows), encoded.split(rows), exponents.split(rows), strict=True
    ):
        for found, place in zip(_part_to_fp8(part), (into, scales), strict=True):
            place.copy_(found)
    return encoded, exponents


def _part_to_fp8(states: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `_to_fp8` for all values at once.

    A power of two loses nothing compared with a finer scale, as e4m3 has the same precision at any magnitude.
    """
    wide = states.float()
    largest = wide.abs().amax(dim=-1)
    mantissa, exponents = torch.frexp(largest)
    exponents = (exponents - _FP8_EXPONENT + (mantissa > _FP8_MANTISSA)).clamp(min=1 - _BIAS)
    scaled = wide * torch.ldexp(torch.ones_like(largest), -exponents).unsqueeze(-1)
    biased = torch.where(largest.isfinite(), exponents + _BIAS, _NAN_EXPONENT)
    return scaled.to(torch.float8_e4m3fn), biased.to(torch.uint8)


def _from_fp8(states: Tensor, exponents: Tensor, out: Tensor) -> None:
    """Decode e4m3 [..., Ht] and biased exponents uint8 [...] to bfloat16 [..., Ht].

    bfloat16 holds four significant bits times a power of two exactly. Except for the bias of the exponent,
    e4m3's bits are float16's shifted by seven; PyTorch's conversion on the CPU takes five times as long. The
    blocks use the same memory. With smaller ones, threads that decode at the same time would mostly wait for
    Python's lock.
    """
    hidden_size = states.shape[-1]
    coded, decoded = states.view(torch.int8).reshape(-1, hidden_size), out.view(-1, hidden_size)
    scales = torch.ldexp(
        torch.ones_like(exponents, dtype=torch.float32), exponents.int() - _BIAS + _FP16_SHIFT
    )
    scales[exponents == _NAN_EXPONENT] = torch.nan
    scales = scales.reshape(-1, 1)
    num_rows = max(_BLOCK_ELEMENTS // hidden_size, 1)
    bits = torch.empty(num_rows, hidden_size, dtype=torch.int16)
    wide = torch.empty(num_rows, hidden_size)
    for start in range(0, len(coded), num_rows):
        block = slice(start, min(start + num_rows, len(coded)))
        number = block.stop - start
        bits[:number] = coded[block]
        bits[:number].bitwise_left_shift_(7).bitwise_and_(_FP16_BITS)
        wide[:number] = bits[:number].view(torch.float16)
        decoded[block] = wide[:number].mul_(scales[block])
