from pathlib import Path

import pytest
import torch

from data.capture.transport.protocol import StateRequest
from data.capture.transport.spool import Spool
from data.capture.vllm.capture_request import PARAMS, capture_params, mask_spans, read_request

SPOOL = Spool(Path("/spool"), "fp8")


def test_a_capture_request_survives_its_transfer() -> None:
    mask = torch.tensor([True, False, False, True, True, False, True])
    content = capture_params(SPOOL, StateRequest("7", torch.arange(7), mask))[PARAMS]
    assert content["destination"] == {"spool": "/spool", "codec": "fp8"}
    assert mask_spans(mask) == [[0, 1], [3, 5], [6, 7]]
    again = read_request(content, [5, 6, 7, 8, 9, 10, 11])
    assert (again.key, again.input_ids.tolist()) == ("7", [5, 6, 7, 8, 9, 10, 11])
    assert again.loss_mask.equal(mask)
    assert mask_spans(torch.zeros(3, dtype=torch.bool)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"key": "../7"},
        {"loss_spans": 3},
        {"loss_spans": [[0, 10**30]]},
        {"loss_spans": [[0, 2]]},
        {"loss_spans": [[-1, 1]]},
    ],
)
def test_what_would_end_the_writer_is_no_capture_request(change: dict) -> None:
    content = capture_params(SPOOL, StateRequest("7", torch.tensor([1]), torch.tensor([True])))[PARAMS]
    with pytest.raises((KeyError, TypeError, ValueError)):
        read_request(content | change, [1])
