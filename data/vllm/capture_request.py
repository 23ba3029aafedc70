"""The part of a request to vLLM that concerns hidden states: `kv_transfer_params={"eagle31": ...}`."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

PARAMS = "eagle31"
_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")  # part of a file's name
_SAMPLE_ID = re.compile(r"[0-9]{1,18}")  # an int64


@dataclass(frozen=True)
class CaptureRequest:
    """A request for one sample's states.

    destination: where the states go; from `store_destination` or a transport's `to_json`.
    key: the key in the transport; in a store, the sample id.
    loss_spans: the start and the exclusive end of each assistant span.
    client: who sends it. A destination that failed stays failed for the clients that used it.
    """

    destination: Mapping[str, Any]
    key: str
    tokens_sha256: str
    loss_spans: tuple[tuple[int, int], ...]
    client: str = ""

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
            "client": self.client,
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
        if "store" in destination and not _SAMPLE_ID.fullmatch(key):
            raise ValueError(f"in a store the key is a sample id of at most 18 digits, not {key!r}")
        client = str(content.get("client", ""))
        return CaptureRequest(destination, key, str(content["tokens_sha256"]), spans, client)

    def loss_mask(self, num_tokens: int) -> Tensor:
        """Return the loss mask, bool [T]."""
        mask = torch.zeros(num_tokens, dtype=torch.bool)
        for start, end in self.loss_spans:
            mask[start:end] = True
        return mask


def describe_params(client: str = "", flush: bool = False) -> dict[str, Any]:
    """Return the parameters of a request for the server info.

    Args:
        client: also report the destinations of this client that failed.
        flush: also close the open shards, so that everything that was captured is seen.
    """
    return {PARAMS: {"describe": True, "client": client, "flush": flush}}


def asks_for_info(params: Mapping[str, Any]) -> bool:
    """Return whether these are parameters of `describe_params`."""
    return bool(params.get(PARAMS, {}).get("describe"))


def with_client(params: Mapping[str, Any], client: str) -> dict[str, Any]:
    """Return the parameters of a capture request as sent by this client."""
    return {name: {**content, "client": client} for name, content in params.items()}


def tokens_sha256(input_ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(input_ids, dtype="<i8").tobytes()).hexdigest()


def mask_spans(mask: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the start and the exclusive end of each span of true values, in order. mask bool [T]."""
    edges = torch.diff(mask.to(torch.int8), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero()
    return tuple((int(start), int(end)) for start, end in edges.view(-1, 2))
