"""The encoding of a captured sample: the states' dtype, and which of the states are kept."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from data.samples import CapturedSample
from eagle31.errors import UserError

CODECS = ("exact", "bf16", "fp8")  # each holds less than the one before
FINAL_STATES = ("all", "supervised")
STATES = ("aux_hidden_states", "final_hidden_states")
# Which of `Rows` an encoded tensor has.
ROWS_OF = {"input_ids": "tokens", "loss_mask": "tokens"} | {
    name + suffix: rows
    for name, rows in zip(STATES, ("aux", "final"), strict=True)
    for suffix in ("", "_exponents")
}
_EXPONENTS = "_exponents"  # suffix of a state's name
_BIAS, _NAN_EXPONENT = 127, 255
_FP8_MANTISSA, _FP8_EXPONENT = 0.875, 9  # of 448, the largest
# All bits but the exponent's highest one, and the difference between the biases of the two formats.
_FP16_BITS, _FP16_SHIFT = ~0x4000, 8
_TOKEN_BYTES = 5  # input_ids int32, loss_mask bool


@dataclass(frozen=True)
class Encoding:
    """What a store keeps of a sample.

    codec: `exact` is the target's dtype; `bf16`; `fp8` is e4m3 with a power of two per token and layer, which
        decodes to bfloat16 without another rounding.
    final_states: `all`; `supervised` leaves out states that no supervised draft reads. They decode to zeros.

    Raises:
        UserError: the codec or the choice of final states is unknown.
    """

    codec: str = "exact"
    final_states: str = "supervised"

    def __post_init__(self) -> None:
        for name, names in (("codec", CODECS), ("final_states", FINAL_STATES)):
            if getattr(self, name) not in names:
                raise UserError(f"capture.{name}", getattr(self, name), f"Choose one of {', '.join(names)}.")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Rows:
    """The number of rows of each kind that are kept, of one sample or summed over many."""

    tokens: int
    aux: int
    final: int

    def __add__(self, other: "Rows") -> "Rows":
        return Rows(self.tokens + other.tokens, self.aux + other.aux, self.final + other.final)


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


def kept_rows(encoding: Encoding, loss_mask: Tensor) -> Rows:
    """Return the rows that are kept of one sample. loss_mask bool [T]."""
    num_tokens = len(loss_mask)
    if encoding.final_states == "all":
        return Rows(num_tokens, num_tokens, num_tokens)
    supervised = supervised_final(loss_mask)
    return Rows(num_tokens, supervised_aux(supervised), int(supervised.sum()))


def encoded_bytes(
    encoding: Encoding, rows: Rows, num_aux_layers: int, hidden_size: int, dtype: torch.dtype
) -> int:
    """Return the exact size that `encode` gives samples with these rows.

    Args:
        dtype: the target's dtype.
    """
    width = {"exact": dtype.itemsize, "bf16": 2, "fp8": 1}[encoding.codec]
    state = hidden_size * width + (encoding.codec == "fp8")
    return rows.tokens * _TOKEN_BYTES + (rows.aux * num_aux_layers + rows.final) * state


def encode(sample: CapturedSample, encoding: Encoding) -> dict[str, Tensor]:
    """Encode a sample, on the device of its states.

    Returns:
        input_ids int32 [T], loss_mask bool [T], aux_hidden_states [Ra, A, Ht], final_hidden_states [Rl, Ht];
        with fp8 their `_exponents` uint8 [Ra, A] and [Rl]. Ra and Rl are those of `kept_rows`.
    """
    aux, final = sample.aux_hidden_states, sample.final_hidden_states
    if encoding.final_states == "supervised":
        supervised = supervised_final(sample.loss_mask)
        aux, final = aux[: supervised_aux(supervised)], final[supervised.to(final.device)]
    tensors = {"input_ids": sample.input_ids.to(torch.int32), "loss_mask": sample.loss_mask}
    for name, states in zip(STATES, (aux, final), strict=True):
        if encoding.codec == "fp8":
            tensors[name], tensors[name + _EXPONENTS] = _to_fp8(states)
        else:
            tensors[name] = states.bfloat16() if encoding.codec == "bf16" else states
    return tensors


def decode(tensors: Mapping[str, Tensor]) -> CapturedSample:
    """Return the sample, with zeros where nothing was kept; bfloat16 unless the codec is `exact`."""
    loss_mask = tensors["loss_mask"]
    aux, final = (_states(tensors, name) for name in STATES)
    num_tokens = len(loss_mask)
    if len(final) < num_tokens:
        kept = supervised_final(loss_mask).to(final.device)
        final = final.new_zeros(num_tokens, *final.shape[1:]).index_put_((kept,), final)
        aux = torch.cat((aux, aux.new_zeros(num_tokens - len(aux), *aux.shape[1:])))
    return CapturedSample(tensors["input_ids"].long(), loss_mask, aux, final)


def _states(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    states, exponents = tensors[name], tensors.get(name + _EXPONENTS)
    return states if exponents is None else _from_fp8(states, exponents)


def _to_fp8(states: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 [..., Ht] and biased exponents uint8 [...]; a row that is not finite becomes nan.

    A power of two loses nothing compared with a finer scale, as e4m3 has the same precision at any magnitude.
    """
    wide = states.float()
    largest = wide.abs().amax(dim=-1)
    mantissa, exponents = torch.frexp(largest)
    exponents = (exponents - _FP8_EXPONENT + (mantissa > _FP8_MANTISSA)).clamp(min=1 - _BIAS)
    scaled = wide * torch.ldexp(torch.ones_like(largest), -exponents).unsqueeze(-1)
    biased = torch.where(largest.isfinite(), exponents + _BIAS, _NAN_EXPONENT)
    return scaled.to(torch.float8_e4m3fn), biased.to(torch.uint8)


def _from_fp8(states: Tensor, exponents: Tensor) -> Tensor:
    """Return bfloat16, which holds four significant bits times a power of two exactly.

    Except for the bias of the exponent, e4m3's bits are float16's shifted by seven. PyTorch's conversion on
    the CPU takes five times as long.
    """
    bits = states.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(_FP16_BITS)
    wide = bits.view(torch.float16).float()
    scales = torch.ldexp(
        torch.ones_like(exponents, dtype=torch.float32), exponents.int() - _BIAS + _FP16_SHIFT
    )
    scales[exponents == _NAN_EXPONENT] = torch.nan
    return wide.mul_(scales.unsqueeze(-1)).bfloat16()
