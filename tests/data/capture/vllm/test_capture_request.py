import pytest
import torch

from data.capture.vllm.capture_request import PARAMS, CaptureRequest, mask_spans, tokens_sha256

DESTINATION = {"spool": "/spool", "codec": "fp8"}


def test_a_capture_request_survives_its_transfer() -> None:
    mask = torch.tensor([True, False, False, True, True, False, True])
    request = CaptureRequest.of(DESTINATION, "7", [5, 6, 7, 8, 9, 10, 11], mask)
    assert mask_spans(mask) == ((0, 1), (3, 5), (6, 7))
    again = CaptureRequest.from_params(request.to_params()[PARAMS], num_tokens=7)
    assert again == request
    assert again.loss_mask(7).equal(mask)
    assert mask_spans(torch.zeros(3, dtype=torch.bool)) == ()
    assert tokens_sha256([1, 2]) != tokens_sha256([2, 1])


@pytest.mark.parametrize(
    "change",
    [
        {"key": "../7"},
        {"destination": 3},
        {"loss_spans": 3},
        {"loss_spans": [[0, 10**30]]},
        {"loss_spans": [[0, 2]]},
        {"loss_spans": [[-1, 1]]},
    ],
)
def test_what_would_end_the_writer_is_no_capture_request(change: dict) -> None:
    request = CaptureRequest.of(DESTINATION, "7", [1], torch.tensor([True]))
    with pytest.raises((KeyError, TypeError, ValueError)):
        CaptureRequest.from_params(request.to_params()[PARAMS] | change, num_tokens=1)
