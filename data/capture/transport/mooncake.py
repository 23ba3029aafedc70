"""Mooncake as a transport: states wait in memory that processes lend to a shared store."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from data.capture.transport.mooncake_store import MooncakeSettings, connect, load_mooncake
from data.capture.transport.protocol import StateRequest, Write
from data.samples import CapturedSample
from eagle31.errors import UserError

# The format is that of TorchSpec's `EagleMooncakeStore` (torchspec/transfer/mooncake/eagle_store.py):
# [T, A * Ht], int64 [T] and [T, Ht], bytes only; shapes and dtype are known on both sides.
SUFFIXES = ("_hs", "_ids", "_lhs")

_ALIGNMENT = 64
_POLL_SECONDS = 0.005
_FULL_POLL_SECONDS = 0.05
_NO_SPACE, _NO_MASTER = -200, -900  # NO_AVAILABLE_HANDLE and RPC_FAIL in Mooncake's ErrorCode


def state_bytes(num_tokens: int, num_aux_layers: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Return the size of a sample in the store."""
    return num_tokens * ((num_aux_layers + 1) * hidden_size * dtype.itemsize + torch.int64.itemsize)


class MooncakeTransport:
    """A client of a Mooncake store, for a producer or a trainer rank.

    Samples are pinned, so that a full store holds the producer back: when memory runs out, Mooncake evicts
    what is not pinned, read or unread.

    Args:
        dtype: the dtype of the states in the store, the same on both sides. TorchSpec's is bfloat16.
        put_seconds: how long `put` waits for space or for the master before it gives up.

    Raises:
        UserError: the package or its system libraries are missing, or no master answers.
    """

    def __init__(
        self,
        settings: MooncakeSettings,
        *,
        num_aux_layers: int,
        hidden_size: int,
        dtype: torch.dtype = torch.bfloat16,
        put_seconds: float = 600.0,
    ) -> None:
        self.settings = settings
        self.num_aux_layers = num_aux_layers
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.put_seconds = put_seconds
        library = load_mooncake()
        self._store = connect(library, settings)
        self._pinned = library.ReplicateConfig()
        self._pinned.with_hard_pin = True
        self._outgoing = _Staging(self._store)
        self._incoming = _Staging(self._store)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` needs in a producer's process.

        The producer lends no memory: if it died, the states in that memory would be lost.
        """
        return {
            "mooncake": asdict(replace(self.settings, segment_bytes=0)),
            "num_aux_layers": self.num_aux_layers,
            "hidden_size": self.hidden_size,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "MooncakeTransport":
        return MooncakeTransport(
            MooncakeSettings(**content["mooncake"]),
            num_aux_layers=content["num_aux_layers"],
            hidden_size=content["hidden_size"],
            dtype=getattr(torch, content["dtype"]),
        )

    @contextmanager
    def writing(self, request: StateRequest) -> Iterator[Write]:
        """Store a sample whose states are written at once.

        Slices would need an open put, and the master discards one that is open for half a minute by default.
        """
        yield partial(self.put, request)

    def put(self, request: StateRequest, aux: Tensor, final: Tensor) -> None:
        """Store a sample; this blocks while the store is full. aux [T, A, Ht], final [T, Ht].

        Raises:
            UserError: there was no space, or no master, for `put_seconds`.
        """
        num_tokens = len(request.input_ids)
        assert aux.shape == (num_tokens, self.num_aux_layers, self.hidden_size), tuple(aux.shape)
        assert final.shape == (num_tokens, self.hidden_size), tuple(final.shape)
        keys = self._keys(request.key)
        deadline = time.monotonic() + self.put_seconds
        with self._outgoing.lock:
            parts = self._outgoing.parts(self._sizes(num_tokens))
            for part, tensor in zip(parts, (aux, request.input_ids, final), strict=True):
                part.view(_stored_dtype(tensor, self.dtype)).view_as(tensor).copy_(tensor)
            pointers, sizes = [p.data_ptr() for p in parts], [p.nbytes for p in parts]
            while True:
                # A dead producer may have left a sample in memory that has died with it.
                codes = self._store.batch_remove(keys, force=True)
                # Without a master this would wait for seconds, whatever `put_seconds` says.
                if _NO_MASTER not in codes:
                    # Where a producer died in the middle of a put, the key cannot be removed, and another put
                    # says that it has stored the sample and has not. This replaces what is there.
                    codes = self._store.batch_upsert_from(keys, pointers, sizes, config=self._pinned)
                    # The sample is not looked up afterwards: once taken, it would be put again for nobody.
                    if not any(codes):
                        return
                    self._store.batch_remove(keys, force=True)
                if time.monotonic() >= deadline:
                    raise self._not_stored(codes, sum(sizes))
                time.sleep(_FULL_POLL_SECONDS)

    def take(self, request: StateRequest, timeout: float) -> CapturedSample | None:
        """Remove and return a sample; None where it did not come within `timeout` seconds.

        States that were in the memory of a process that has died count as missing.

        Raises:
            UserError: the key holds other tokens, or another shape or dtype.
        """
        sizes = self._sizes(len(request.input_ids))
        deadline = time.monotonic() + timeout
        while True:
            keys = self._keys(request.key)
            if self._present(keys):
                with self._incoming.lock:
                    parts = self._incoming.parts(sizes)
                    codes = self._store.batch_get_into(keys, [p.data_ptr() for p in parts], sizes)
                    if codes == sizes:
                        sample = self._sample(request, *parts)
                        self.discard(request.key)
                        return sample
                self._check_sizes(keys, sizes)
                self.discard(request.key)
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_SECONDS)

    def arrived(self, key: str) -> bool:
        """Return whether a sample waits under the key."""
        return self._present(self._keys(key))

    def discard(self, key: str) -> None:
        """Remove the key's sample, if there is one."""
        self._store.batch_remove(self._keys(key), force=True)

    def discard_all(self, prefix: str) -> None:
        """Remove everything under keys with this prefix, which has letters, digits, - and _ only."""
        self._store.remove_by_regex(f"^{prefix}", force=True)

    def close(self) -> None:
        """Leave the store. States in the memory that this process lent to it are lost."""
        self._outgoing.release()
        self._incoming.release()
        self._store.close()

    def _keys(self, key: str) -> list[str]:
        return [self._stored_key(key) + suffix for suffix in SUFFIXES]

    def _stored_key(self, key: str) -> str:
        return key

    def _sizes(self, num_tokens: int) -> list[int]:
        state = self.hidden_size * self.dtype.itemsize
        return [
            num_tokens * self.num_aux_layers * state,
            num_tokens * torch.int64.itemsize,
            num_tokens * state,
        ]

    def _present(self, keys: list[str]) -> bool:
        return all(code == 1 for code in self._store.batch_is_exist(keys))

    def _sample(self, request: StateRequest, aux: Tensor, ids: Tensor, final: Tensor) -> CapturedSample:
        num_tokens = len(request.input_ids)
        found = ids.view(torch.int64)
        if not torch.equal(found, request.input_ids):
            first = int((found != request.input_ids).nonzero()[0])
            remedy = (
                f"Its states belong to other tokens, from position {first} on ({int(found[first])} instead "
                f"of {int(request.input_ids[first])}): another run uses this store, or its producer changes "
                "prompts."
            )
            raise UserError("capture.mooncake.master", f"{self.settings.master} {request.key}", remedy)
        shape = (num_tokens, self.num_aux_layers, self.hidden_size)
        return CapturedSample(
            request.input_ids,
            request.loss_mask,
            # The next sample overwrites the staging buffer.
            aux.view(self.dtype).reshape(shape).clone(),
            final.view(self.dtype).reshape(num_tokens, self.hidden_size).clone(),
        )

    def _check_sizes(self, keys: list[str], sizes: list[int]) -> None:
        for key, expected in zip(keys, sizes, strict=True):
            found = self._store.get_size(key)
            if found >= 0 and found != expected:
                remedy = (
                    f"{key} has {found} bytes where {self.num_aux_layers} layers of {self.hidden_size} "
                    f"{self.dtype} make {expected}: the producer has another target, layers or dtype."
                )
                raise UserError("capture.mooncake.master", self.settings.master, remedy)

    def _not_stored(self, codes: Sequence[int], num_bytes: int) -> UserError:
        if _NO_SPACE in codes:
            remedy = (
                f"It had no space for {num_bytes:,} bytes for {self.put_seconds:.0f} seconds: raise "
                "capture.spool_gb, from which its size follows, if the trainer is still running."
            )
            return UserError("capture.mooncake.master", self.settings.master, remedy)
        remedy = f"It stored nothing for {self.put_seconds:.0f} seconds (codes {list(codes)}); see its log."
        return UserError("capture.mooncake.master", self.settings.master, remedy)


class _Staging:
    """A registered buffer that grows to the longest sample; it is used under its lock."""

    def __init__(self, store: Any) -> None:
        self.lock = threading.Lock()
        self._store = store
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def parts(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return consecutive parts of the buffer with the given sizes in bytes."""
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if end > self._buffer.nbytes:
            self.release()
            self._buffer = torch.empty(max(end, 2 * self._buffer.nbytes), dtype=torch.uint8)
            code = self._store.register_buffer(self._buffer.data_ptr(), self._buffer.nbytes)
            assert code == 0, f"Mooncake refused to register {self._buffer.nbytes} bytes: {code}"
        return [self._buffer[start : start + size] for start, size in zip(offsets, sizes, strict=True)]

    def release(self) -> None:
        if self._buffer.nbytes:
            self._store.unregister_buffer(self._buffer.data_ptr())


def _stored_dtype(tensor: Tensor, states: torch.dtype) -> torch.dtype:
    return states if tensor.is_floating_point() else torch.int64
