import os
from pathlib import Path
from typing import Any

import pytest

from data.store.codec import Encoding
from data.transport.mooncake_store import MooncakeSettings
from data.vllm.destinations import MAX_SHARD_BYTES, Accepted, below, refusal, resolved, store_destination

ENCODING = Encoding().to_json()
TOKEN_BYTES = 1000


def accepted(*roots: Path) -> Accepted:
    return Accepted([str(root) for root in roots], ["10.0.0.1:50051"], 2, 8, TOKEN_BYTES)


def test_only_directories_below_a_root_are_written(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "root-other"
    root.mkdir(), other.mkdir()
    (root / "link").symlink_to(other)
    (root / "loop").symlink_to(root / "loop")
    assert below(str(root), [str(root)])
    assert below(str(root / "a" / "b"), [str(other), str(root)])
    for directory in (
        other,
        root / ".." / "root-other",
        root / "link" / "a",
        root / "link" / ".." / "x",
        "a",
    ):
        assert not below(str(directory), [str(root)])
        for kind in ({"spool": str(directory)}, {"store": str(directory), "shard_tokens": 1}):
            assert "is not below" in str(refusal({**kind, "encoding": ENCODING}, accepted(root)))
    spool = {"spool": str(root / "s"), "encoding": ENCODING}
    assert "does not exist on the machine of the server" in str(refusal(spool, accepted(root)))
    (root / "s").mkdir()
    assert refusal(spool, accepted(root)) is None
    # A link that is changed after the check leads nowhere else.
    (root / "moved").symlink_to(root / "s")
    checked = resolved({**spool, "spool": str(root / "moved")})
    assert checked == spool
    assert resolved(store_destination(root / "s", Encoding(), 5))["store"] == str(root / "s")
    with pytest.raises((OSError, RuntimeError, ValueError)):
        refusal({"spool": str(root / "a\0b"), "encoding": ENCODING}, accepted(root))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"encoding": {"codec": "int4"}}, "capture.codec=int4: Choose one of exact, bf16, fp8"),
        ({"encoding": {"bits": 3}}, "bits"),
        ({"encoding": None}, "NoneType"),
        ({"spool": "/"}, "unpack"),
        ({"more": 1}, "A destination of this kind has the fields"),
        ({"shard_tokens": 0}, "from 1 to 16000000, not 0"),
        ({"shard_tokens": MAX_SHARD_BYTES // TOKEN_BYTES + 1}, "from 1 to 16000000, not 16000001"),
        ({"shard_tokens": float("inf")}, "not inf"),
        ({"shard_tokens": True}, "not True"),
        ({"shard_tokens": "9"}, "not '9'"),
    ],
)
def test_what_a_store_may_be_asked_for(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    destination = store_destination(tmp_path, Encoding(), 100)
    assert refusal(destination, accepted(tmp_path)) is None
    try:
        found = str(refusal(destination | change, accepted(tmp_path)))
    except (KeyError, TypeError, ValueError) as error:
        found = str(error)
    assert reason in found
    assert not os.listdir(tmp_path)


def test_what_a_mooncake_store_may_be_asked_for() -> None:
    def ask(**settings: Any) -> str | None:
        master = MooncakeSettings("10.0.0.1:50051").__dict__ | settings
        sizes = {"num_aux_layers": 2, "hidden_size": 8, "dtype": "bfloat16"}
        return refusal({"mooncake": master, **sizes}, accepted())

    assert ask() is None
    assert "not one of the Mooncake stores" in str(ask(master="10.0.0.2:50051"))
    assert "lends no memory" in str(ask(segment_bytes=1 << 40))
