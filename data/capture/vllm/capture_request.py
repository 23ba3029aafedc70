"""The part of a request to vLLM that concerns hidden states: `kv_transfer_params={"eagle31": ...}`."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.capture.transport.protocol import StateRequest
from data.capture.transport.spool import Spool

PARAMS = "eagle31"
_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")  # part of a file's name


@dataclass(frozen=True)
class CaptureRequest:
    """A request for one sample's states.

    destination: where the states go; a spool's `to_json`.
    key: the key in the spool.
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
    def from_params(content: Mapping[str, Any], num_tokens: int) -> "CaptureRequest":
        """Read a request for a prompt of this length from the value of `eagle31`.

        Raises:
            KeyError, TypeError, ValueError: the content is no capture request.
        """
        spans = tuple((start, end) for start, end in content["loss_spans"])
        edges = [edge for span in spans for edge in span]
        if any(type(edge) is not int for edge in edges):
            raise TypeError("the loss spans are no whole numbers")
        if edges != sorted(set(edges)) or not all(0 <= edge <= num_tokens for edge in edges):
            raise ValueError(f"the loss spans are not ascending within the {num_tokens} tokens")
        destination, key = dict(content["destination"]), str(content["key"])
        if not _KEY.fullmatch(key):
            raise ValueError(f"the key {key[:200]!r} may only have 1 to 128 letters, digits, - and _")
        return CaptureRequest(destination, key, str(content["tokens_sha256"]), spans)

    def loss_mask(self, num_tokens: int) -> Tensor:
        """Return the loss mask, bool [T]."""
        mask = torch.zeros(num_tokens, dtype=torch.bool)
        for start, end in self.loss_spans:
            mask[start:end] = True
        return mask


def capture_tasks(spool: Spool) -> Callable[[StateRequest], dict[str, Any]]:
    """Return what a `VllmClient` needs to have a request's states put into the spool.

    Args:
        spool: the servers must reach it under the same path.
    """
    destination = spool.to_json()

    def task(request: StateRequest) -> dict[str, Any]:
        ids = request.input_ids.tolist()
        return CaptureRequest.of(destination, request.key, ids, request.loss_mask).to_params()

    return task


def tokens_sha256(input_ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(input_ids, dtype="<i8").tobytes()).hexdigest()


def mask_spans(mask: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the start and the exclusive end of each span of true values, in order. mask bool [T]."""
    edges = torch.diff(mask.to(torch.int8), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero()
    return tuple((int(start), int(end)) for start, end in edges.view(-1, 2))
