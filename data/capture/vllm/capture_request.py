"""The part of a request to vLLM that concerns hidden states: `kv_transfer_params={"eagle31": ...}`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from data.capture.transport.protocol import StateRequest
from data.capture.transport.spool import Spool

PARAMS = "eagle31"
_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")  # part of a file's name


def capture_params(spool: Spool, request: StateRequest) -> dict[str, Any]:
    """Return the `kv_transfer_params` that have the states of a request put into the spool.

    Args:
        spool: the server must reach it under the same path.
    """
    content = {
        "destination": {"spool": str(spool.directory), "codec": spool.codec},
        "key": request.key,
        "loss_spans": mask_spans(request.loss_mask),
    }
    return {PARAMS: content}


def read_request(content: Mapping[str, Any], token_ids: Sequence[int]) -> StateRequest:
    """Read a request for the states of a prompt from the value of `eagle31`, apart from its destination.

    Raises:
        KeyError, TypeError, ValueError: the content is no capture request.
    """
    spans, key = [(start, end) for start, end in content["loss_spans"]], str(content["key"])
    edges = [edge for span in spans for edge in span]
    if any(type(edge) is not int for edge in edges):
        raise TypeError("the loss spans are no whole numbers")
    if edges != sorted(set(edges)) or not all(0 <= edge <= len(token_ids) for edge in edges):
        raise ValueError(f"the loss spans are not ascending within the {len(token_ids)} tokens")
    if not _KEY.fullmatch(key):
        raise ValueError(f"the key {key[:200]!r} may only have 1 to 128 letters, digits, - and _")
    loss_mask = torch.zeros(len(token_ids), dtype=torch.bool)
    for start, end in spans:
        loss_mask[start:end] = True
    return StateRequest(key, torch.tensor(token_ids), loss_mask)


def mask_spans(mask: Tensor) -> list[list[int]]:
    """Return the start and the exclusive end of each span of true values, in order. mask bool [T]."""
    edges = torch.diff(mask.to(torch.int8), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero()
    return edges.view(-1, 2).tolist()
