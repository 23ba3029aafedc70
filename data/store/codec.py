"""How a captured sample is laid down in bytes: the states' dtype, and which of them are kept."""

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
    for name, rows in zip(STATES, ("aux", "last"), strict=True)
    for suffix in ("", "_exponents")
}
_EXPONENTS = "_exponents"  # behind a state's name
_BIAS, _NAN_EXPONENT = 127, 255
_FP8_MANTISSA, _FP8_EXPONENT = 0.875, 9  # of 448, the largest
_FP16_BITS, _FP16_SHIFT = (
    ~0x4000,
    8,
)  # all but the exponent's highest bit; what the biases of the two differ by
_TOKEN_BYTES = 5  # input_ids int32, loss_mask bool


@dataclass(frozen=True)
class Encoding:
    """What is kept of a sample.

    codec: `exact` the target's dtype; `bf16`; `fp8`, e4m3 with a power of two for each token and layer, from
        which bfloat16 comes back without another rounding.
    final_states: `all`; `supervised` leaves out states that no supervised draft reads (zeros are read back).

    Raises:
        UserError: a name that is none of these.
    """

    codec: str = "exact"
    final_states: str = "supervised"

    def __post_init__(self) -> None:
        for name, names in (("codec", CODECS), ("final_states", FINAL_STATES)):
            if getattr(self, name) not in names:
                raise UserError(f"capture.{name}", getattr(self, name), f"Is one of {', '.join(names)}.")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Rows:
    """How many rows of each kind are kept; of one sample, or summed over many."""

    tokens: int
    aux: int
    last: int

    def __add__(self, other: "Rows") -> "Rows":
        return Rows(self.tokens + other.tokens, self.aux + other.aux, self.last + other.last)


def supervised_final(loss_mask: Tensor) -> Tensor:
    """Where a draft that counts is held against the target's distribution. bool [T] -> bool [T].

    Index j teaches the row t = j-1-k at step k when all of x[t+1] .. x[j+1] is the assistant's; there is such
    a t as soon as x[j] and x[j+1] are and j > 0.
    """
    counted = torch.zeros_like(loss_mask)
    counted[1:-1] = loss_mask[1:-1] & loss_mask[2:]
    return counted


def supervised_aux(counted: Tensor) -> int:
    """How many aux states are read: up to the last row that is drafted from, whose keys are all before it."""
    places = torch.nonzero(counted)
    return int(places[-1]) if len(places) else 0


def kept_rows(encoding: Encoding, loss_mask: Tensor) -> Rows:
    """Of one sample, loss_mask bool [T]."""
    num_tokens = len(loss_mask)
    if encoding.final_states == "all":
        return Rows(num_tokens, num_tokens, num_tokens)
    counted = supervised_final(loss_mask)
    return Rows(num_tokens, supervised_aux(counted), int(counted.sum()))


def encoded_bytes(
    encoding: Encoding, rows: Rows, num_aux_layers: int, hidden_size: int, dtype: torch.dtype
) -> int:
    """What `encode` makes of samples with these rows, to the byte.

    Args:
        dtype: the target's.
    """
    width = {"exact": dtype.itemsize, "bf16": 2, "fp8": 1}[encoding.codec]
    state = hidden_size * width + (encoding.codec == "fp8")
    return rows.tokens * _TOKEN_BYTES + (rows.aux * num_aux_layers + rows.last) * state


def encode(sample: CapturedSample, encoding: Encoding) -> dict[str, Tensor]:
    """Runs where the sample's states are.

    Returns:
        input_ids int32 [T], loss_mask bool [T], aux_hidden_states [Ra, A, Ht], final_hidden_states [Rl, Ht];
        with fp8 their `_exponents` uint8 [Ra, A] and [Rl]. Ra and Rl are those of `kept_rows`.
    """
    aux, last = sample.aux_hidden_states, sample.final_hidden_states
    if encoding.final_states == "supervised":
        counted = supervised_final(sample.loss_mask)
        aux, last = aux[: supervised_aux(counted)], last[counted.to(last.device)]
    tensors = {"input_ids": sample.input_ids.to(torch.int32), "loss_mask": sample.loss_mask}
    for name, states in zip(STATES, (aux, last), strict=True):
        if encoding.codec == "fp8":
            tensors[name], tensors[name + _EXPONENTS] = _to_fp8(states)
        else:
            tensors[name] = states.bfloat16() if encoding.codec == "bf16" else states
    return tensors


def decode(tensors: Mapping[str, Tensor]) -> CapturedSample:
    """The sample that was encoded, zeros where nothing was kept; bfloat16 unless the codec is `exact`."""
    loss_mask = tensors["loss_mask"]
    aux, last = (_states(tensors, name) for name in STATES)
    num_tokens = len(loss_mask)
    if len(last) < num_tokens:
        kept = supervised_final(loss_mask).to(last.device)
        last = last.new_zeros(num_tokens, *last.shape[1:]).index_put_((kept,), last)
        aux = torch.cat((aux, aux.new_zeros(num_tokens - len(aux), *aux.shape[1:])))
    return CapturedSample(tensors["input_ids"].long(), loss_mask, aux, last)


def _states(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    states, exponents = tensors[name], tensors.get(name + _EXPONENTS)
    return states if exponents is None else _from_fp8(states, exponents)


def _to_fp8(states: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [..., Ht] and the biased exponents uint8 [...]; a row with anything not finite in it becomes nan.

    A power of two loses nothing against a finer scale, as e4m3 is as precise at any magnitude.
    """
    wide = states.float()
    largest = wide.abs().amax(dim=-1)
    mantissa, exponents = torch.frexp(largest)
    exponents = (exponents - _FP8_EXPONENT + (mantissa > _FP8_MANTISSA)).clamp(min=1 - _BIAS)
    scaled = wide * torch.ldexp(torch.ones_like(largest), -exponents).unsqueeze(-1)
    biased = torch.where(largest.isfinite(), exponents + _BIAS, _NAN_EXPONENT)
    return scaled.to(torch.float8_e4m3fn), biased.to(torch.uint8)


def _from_fp8(states: Tensor, exponents: Tensor) -> Tensor:
    """bfloat16, exactly: four significant bits times a power of two.

    e4m3's bits are float16's moved by seven, but for the bias of the exponent. The CPU's own conversion takes
    five times as long.
    """
    bits = states.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(_FP16_BITS)
    wide = bits.view(torch.float16).float()
    scales = torch.ldexp(
        torch.ones_like(exponents, dtype=torch.float32), exponents.int() - _BIAS + _FP16_SHIFT
    )
    scales[exponents == _NAN_EXPONENT] = torch.nan
    return wide.mul_(scales.unsqueeze(-1)).bfloat16()
