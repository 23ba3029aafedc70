"""The part of a request to vLLM that concerns hidden states: `kv_transfer_params={"eagle31": ...}`."""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.store.codec import Encoding

PARAMS = "eagle31"
_KEY = re.compile(r"[A-Za-z0-9_-]+")
DESCRIBE = {PARAMS: {"describe": True}}


@dataclass(frozen=True)
class CaptureRequest:
    """A request for one sample's states.

    destination: where the states go; from `store_destination` or a transport's `to_json`.
    key: the key in the transport; in a store, the sample id.
    loss_spans: the start and the exclusive end of each assistant span.
    """

    destination: Mapping[str, Any]
    key: str
    tokens_sha256: str
    loss_spans: tuple[tuple[int, int], ...]

    @staticmethod
    def of(
        destination: Mapping[str, Any], key: str, input_ids: Sequence[int], loss_mask: Tensor
    ) -> "CaptureRequest":
        return CaptureRequest(destination, key, tokens_sha256(input_ids), mask_spans(loss_mask))

    def to_params(self) -> dict[str, Any]:
        """Return the request's `kv_transfer_params`."""
        content = {
            "destination": dict(self.destination),
            "key": self.key,
            "tokens_sha256": self.tokens_sha256,
            "loss_spans": [list(span) for span in self.loss_spans],
        }
        return {PARAMS: content}

    @staticmethod
    def from_params(content: Mapping[str, Any]) -> "CaptureRequest":
        """Read a request from the value of `eagle31`.

        Raises:
            KeyError, TypeError, ValueError: the content is no capture request.
        """
        spans = tuple((int(start), int(end)) for start, end in content["loss_spans"])
        destination, key = dict(content["destination"]), str(content["key"])
        if not _KEY.fullmatch(key):
            raise ValueError(f"the key {key!r} may only have letters, digits, - and _")
        if "store" in destination:
            Encoding(**destination["encoding"])
            int(key), int(destination["shard_tokens"])
        return CaptureRequest(destination, key, str(content["tokens_sha256"]), spans)

    def loss_mask(self, num_tokens: int) -> Tensor:
        """Return the loss mask, bool [T]."""
        mask = torch.zeros(num_tokens, dtype=torch.bool)
        for start, end in self.loss_spans:
            mask[start:end] = True
        return mask


def store_destination(directory: Path, encoding: Encoding, shard_tokens: int) -> dict[str, Any]:
    """Return the destination for a store, which the server reaches under the same path."""
    path = str(directory.resolve())
    return {"store": path, "encoding": encoding.to_json(), "shard_tokens": shard_tokens}


def refusal(
    destination: Mapping[str, Any], roots: Sequence[str], mooncake_masters: Sequence[str]
) -> str | None:
    """Return why a server refuses to write to a destination, or None.

    Raises:
        KeyError, TypeError: `destination` is no destination.
    """
    if "mooncake" in destination:
        master = destination["mooncake"]["master"]
        return (
            None
            if master in mooncake_masters
            else f"{master} is not one of the Mooncake stores that the server may use."
        )
    directory = destination["store"] if "store" in destination else destination["spool"]
    if not below(directory, roots):
        return f"{directory} is not below {', '.join(roots)}."
    if "spool" in destination and not os.path.isdir(directory):
        return f"{directory} does not exist on the machine of the server."
    return None


def tokens_sha256(input_ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(input_ids, dtype="<i8").tobytes()).hexdigest()


def mask_spans(mask: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the start and the exclusive end of each span of true values, in order. mask bool [T]."""
    edges = torch.diff(mask.to(torch.int8), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero()
    return tuple((int(start), int(end)) for start, end in edges.view(-1, 2))


def below(directory: str, roots: Sequence[str]) -> bool:
    """Return whether a directory is one of the roots or inside one, after links are resolved."""
    if not os.path.isabs(directory):
        return False
    path = Path(directory).resolve()
    return any(path.is_relative_to(Path(root).resolve()) for root in roots)
