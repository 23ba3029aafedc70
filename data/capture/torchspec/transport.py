"""TorchSpec's store as a transport: states wait in memory that the ranks lend to Mooncake."""

import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from data.capture.torchspec.mooncake import MooncakeSettings, connect, load_mooncake
from data.capture.transport.protocol import StateRequest
from data.samples import CapturedSample
from eagle31.errors import UserError

DTYPE = torch.bfloat16  # of all states in the store
# TorchSpec's `EagleMooncakeStore` (torchspec/transfer/mooncake/eagle_store.py) puts [T, A * Ht], int64 [T]
# and [T, Ht] under these, bytes only; the shapes are known here.
SUFFIXES = ("_hs", "_ids", "_lhs")

_ALIGNMENT = 64
_POLL_SECONDS = 0.005


def state_bytes(num_tokens: int, num_aux_layers: int, hidden_size: int) -> int:
    """Return the size of a sample in the store."""
    return sum(_sizes(num_tokens, num_aux_layers, hidden_size))


class TorchSpecTransport:
    """The trainer's side of a store into which TorchSpec's engines put states, under keys that they choose.

    Args:
        norm_scale: the weight [Ht] of the target's final norm, if the engines put final states after it; None
            if they put them before it. Such states are divided by it. The norm of the result is the state
            that was put, and the norm is what every reader of a final state computes first.

    Raises:
        UserError: Mooncake or its system libraries are missing, or no master answers.
    """

    def __init__(
        self, settings: MooncakeSettings, *, num_aux_layers: int, hidden_size: int, norm_scale: Tensor | None
    ) -> None:
        self._num_aux_layers, self._hidden_size = num_aux_layers, hidden_size
        self._scale = norm_scale
        self._store = connect(load_mooncake(), settings)
        self._lock = threading.Lock()  # guards the buffer, which grows to the longest sample
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._chosen: dict[str, str] = {}  # the engines' keys by ours

    def announce(self, key: str, chosen: str) -> None:
        """Note the key under which an engine has put a sample."""
        if key in self._chosen:  # captured twice
            self.discard(key)
        self._chosen[key] = chosen

    def take(self, request: StateRequest, timeout: float) -> CapturedSample | None:
        """Remove and return a sample; None where it did not come within `timeout` seconds.

        States that were in the memory of a process that has died count as missing.

        Raises:
            UserError: the key holds other tokens, or another size.
        """
        sizes = _sizes(len(request.input_ids), self._num_aux_layers, self._hidden_size)
        deadline = time.monotonic() + timeout
        while True:
            if self.arrived(request.key):
                keys = self._keys(request.key)
                with self._lock:
                    parts = self._parts(sizes)
                    codes = self._store.batch_get_into(keys, [p.data_ptr() for p in parts], sizes)
                    sample = self._sample(request, *parts) if codes == sizes else None
                if sample is None:
                    self._check_sizes(keys, sizes)
                self.discard(request.key)
                if sample is not None:
                    return sample
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_SECONDS)

    def arrived(self, key: str) -> bool:
        """Return whether a sample waits under the key."""
        return key in self._chosen and all(one == 1 for one in self._store.batch_is_exist(self._keys(key)))

    def discard(self, key: str) -> None:
        """Remove the key's sample, if there is one."""
        if key in self._chosen:
            self._store.batch_remove(self._keys(key), force=True)
            self._chosen.pop(key, None)

    def close(self) -> None:
        """Leave the store. States in the memory that this process lent to it are lost."""
        self._release()
        self._store.close()

    def _keys(self, key: str) -> list[str]:
        return [self._chosen.get(key, key) + suffix for suffix in SUFFIXES]

    def _sample(self, request: StateRequest, aux: Tensor, ids: Tensor, final: Tensor) -> CapturedSample:
        num_tokens, found = len(request.input_ids), ids.view(torch.int64)
        if not torch.equal(found, request.input_ids):
            first = int((found != request.input_ids).nonzero()[0])
            remedy = (
                f"Its states belong to other tokens, from position {first} on ({int(found[first])} instead "
                f"of {int(request.input_ids[first])}): its engine changes prompts."
            )
            raise UserError("torchspec.engine", request.key, remedy)
        final = final.view(DTYPE).reshape(num_tokens, self._hidden_size)
        if self._scale is not None:
            # A weight of 0 leaves nothing to divide, and nothing of what is divided.
            final = (final.float() / self._scale).nan_to_num(0.0, 0.0, 0.0).to(DTYPE)
        # The next sample overwrites the buffer.
        states = aux.view(DTYPE).reshape(num_tokens, self._num_aux_layers, self._hidden_size).clone()
        return CapturedSample(request.input_ids, request.loss_mask, states, final.clone())

    def _check_sizes(self, keys: list[str], sizes: list[int]) -> None:
        for key, expected in zip(keys, sizes, strict=True):
            found = self._store.get_size(key)
            if found >= 0 and found != expected:
                remedy = (
                    f"{key} has {found} bytes where {self._num_aux_layers} layers of {self._hidden_size} in "
                    f"{DTYPE} make {expected}: the engine has another target, layers or dtype."
                )
                raise UserError("torchspec.engine", key, remedy)

    def _parts(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return consecutive parts of the buffer, which Mooncake knows, with these sizes in bytes."""
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if end > self._buffer.nbytes:
            self._release()
            self._buffer = torch.empty(max(end, 2 * self._buffer.nbytes), dtype=torch.uint8)
            code = self._store.register_buffer(self._buffer.data_ptr(), self._buffer.nbytes)
            assert code == 0, f"Mooncake refused to register {self._buffer.nbytes} bytes: {code}"
        return [self._buffer[start : start + size] for start, size in zip(offsets, sizes, strict=True)]

    def _release(self) -> None:
        if self._buffer.nbytes:
            self._store.unregister_buffer(self._buffer.data_ptr())


def _sizes(num_tokens: int, num_aux_layers: int, hidden_size: int) -> list[int]:
    state = num_tokens * hidden_size * DTYPE.itemsize
    return [num_aux_layers * state, num_tokens * torch.int64.itemsize, state]


def norm_scale(norm: nn.Module, hidden_size: int) -> Tensor:
    """Return the scale of an RMSNorm, float32 [Ht], whatever it makes of its weight.

    Raises:
        UserError: it is another norm.
    """
    dtype = next(norm.parameters()).dtype
    states = torch.randn(2, hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        scale = norm(torch.ones(1, hidden_size, dtype=dtype))[0].float().clone()
        found, rms = norm(states).float(), states.float().pow(2).mean(-1, keepdim=True).sqrt()
    if not torch.allclose(found, states.float() / rms * scale, rtol=0.05, atol=0.05):
        remedy = "The engine gives states after the target's final norm, which is no RMSNorm; set vllm."
        raise UserError("torchspec.engine", "hf or sgl", remedy)
    return scale
