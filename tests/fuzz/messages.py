"""Readers of what clients and vLLM servers send each other, as JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from data.store.codec import Encoding
from data.transport.mooncake import MooncakeSettings
from data.vllm.capture_request import CaptureRequest, asks_for_info
from data.vllm.destinations import Accepted, name_of, refusal, resolved, store_destination
from data.vllm.endpoint import Refused, connector_answer
from data.vllm.server_info import ServerInfo
from tests.fuzz.reader import DOCUMENTED, Reader, readers_of

REQUEST_ERRORS = (KeyError, TypeError, ValueError, OSError)  # what the connector answers with the reason
MASTER = "127.0.0.1:50051"
TOKENS = [1, 2, 3]
INFO = ServerInfo("a", "b", None, (1, 2), 4, 8, "bfloat16", "cpu", 100, 10, ("/tmp",))


def message_readers(directory: Path) -> dict[str, Reader]:
    """Return the readers of requests for hidden states, of answers and of server infos."""
    store = store_destination(directory, Encoding(), 100)
    mooncake = {
        "mooncake": vars(MooncakeSettings(master=MASTER)),
        "num_aux_layers": 2,
        "hidden_size": 8,
        "dtype": "bfloat16",
    }
    mask = torch.tensor([False, True, True])
    for name, destination in (("store", store), ("mooncake", mooncake)):
        params = CaptureRequest.of(destination, "7", TOKENS, mask).to_params()
        (directory / f"request_{name}.json").write_text(json.dumps(params))
    (directory / "answer.json").write_text(json.dumps({"eagle31": {"engine": INFO.to_json()}}))
    (directory / "info.json").write_text(json.dumps(INFO.to_json()))
    requests = {
        f"request_{name}": (f"request_{name}.json", _reading(f"request_{name}.json", _request))
        for name in ("store", "mooncake")
    }
    answers = {
        "answer": ("answer.json", _reading("answer.json", connector_answer)),
        "info": ("info.json", _reading("info.json", ServerInfo.from_json)),
    }
    found = readers_of(directory, requests, REQUEST_ERRORS)
    return found | readers_of(directory, answers, (*DOCUMENTED, Refused))


def _reading(file: str, read: Callable[[Any], object]) -> Callable[[Path], object]:
    """Return the call for a message; bytes that are no JSON do not reach our code."""

    def call(directory: Path) -> object:
        try:
            content = json.loads((directory / file).read_bytes())
        except (ValueError, RecursionError):
            raise OSError from None
        return read(content)

    return call


def _request(params: Any) -> object:
    """Check a request as the connector does."""
    if not isinstance(params, dict) or asks_for_info(params):
        raise OSError
    capture = CaptureRequest.from_params(params["eagle31"], len(TOKENS))
    accepted = Accepted(("/tmp",), (MASTER,), 2, 8, 48)
    reason = refusal(capture.destination, accepted)
    if reason is not None:
        raise OSError(reason)
    assert capture.loss_mask(len(TOKENS)).shape == (len(TOKENS),)
    return hash(name_of(resolved(capture.destination)))
