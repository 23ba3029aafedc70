from pathlib import Path

import pytest
import torch

from data.store.codec import Encoding
from data.vllm.capture_request import (
    PARAMS,
    CaptureRequest,
    below,
    mask_spans,
    refusal,
    store_destination,
    tokens_sha256,
)


def test_a_capture_request_survives_its_transfer() -> None:
    mask = torch.tensor([True, False, False, True, True, False, True])
    destination = store_destination(Path("/store"), Encoding("fp8"), 100)
    request = CaptureRequest.of(destination, "7", [5, 6, 7, 8, 9, 10, 11], mask)
    assert mask_spans(mask) == ((0, 1), (3, 5), (6, 7))
    again = CaptureRequest.from_params(request.to_params()[PARAMS])
    assert again == request
    assert again.loss_mask(7).equal(mask)
    assert mask_spans(torch.zeros(3, dtype=torch.bool)) == ()
    assert tokens_sha256([1, 2]) != tokens_sha256([2, 1])


@pytest.mark.parametrize(
    "change",
    [{"key": "../7"}, {"key": "a"}, {"destination": {"store": "/store"}}, {"loss_spans": 3}],
)
def test_what_would_end_the_writer_is_no_capture_request(change: dict) -> None:
    request = CaptureRequest.of(
        store_destination(Path("/store"), Encoding(), 100), "7", [1], torch.tensor([True])
    )
    with pytest.raises((KeyError, TypeError, ValueError)):
        CaptureRequest.from_params(request.to_params()[PARAMS] | change)


def test_only_directories_below_a_root_are_written(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "root-other"
    root.mkdir(), other.mkdir()
    (root / "link").symlink_to(other)
    assert below(str(root), [str(root)])
    assert below(str(root / "a" / "b"), [str(other), str(root)])
    for directory in (other, root / ".." / "root-other", root / "link" / "a", Path("a")):
        assert not below(str(directory), [str(root)])
    assert "is not below" in str(refusal({"spool": str(other)}, [str(root)], []))
    assert "does not exist on the machine of the server" in str(
        refusal({"spool": str(root / "s")}, [str(root)], [])
    )
    (root / "s").mkdir()
    assert refusal({"spool": str(root / "s")}, [str(root)], []) is None
    mooncake = {"mooncake": {"master": "10.0.0.1:50051"}}
    assert "not one of the Mooncake stores" in str(refusal(mooncake, [str(root)], ["10.0.0.2:50051"]))
    assert refusal(mooncake, [], ["10.0.0.1:50051"]) is None
