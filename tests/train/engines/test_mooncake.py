"""A run whose hidden states would go through a Mooncake store that is not there."""

from pathlib import Path

import pytest

from data.embedded.target import EmbeddedTarget
from eagle31.errors import UserError
from tests.processes import free_ports
from tests.train.small_run import RECIPE, arguments
from tests.train.torchrun import run_here


def test_a_missing_master_is_reported_before_any_stage(
    small_target: EmbeddedTarget, mooncake: Path | None, vllm_python: Path, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    through = ("capture=vllm_online", "capture.transport=mooncake", "capture.spool_gb=0.01")
    master = f"capture.mooncake.master=127.0.0.1:{port}"
    with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}: No master answers at this address"):
        run_here(RECIPE, *arguments(small_target, tmp_path), *through, master)
    assert not list(tmp_path.glob("artifacts/*"))
