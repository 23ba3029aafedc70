"""Which servers have their states probed before the first stage."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.train.small_run import RECIPE
from tests.train.torchrun import composed
from train.config.run import Stage
from train.stages import servers


@pytest.mark.parametrize("captures", [True, False])
def test_only_servers_that_capture_have_their_states_probed(
    captures: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[Any] = []
    monkeypatch.setattr(servers, "check_servers", lambda _, __, transport, key: probed.append(transport))
    source = "vllm" if captures else "hf"
    context: Any = SimpleNamespace(
        config=composed(
            RECIPE,
            *("target.engine=vllm", f"capture.source={source}"),
            *("target.model=some", "data.train=some.jsonl", f"output_dir={tmp_path}"),
        ),
        output_dir=tmp_path,
        world=SimpleNamespace(is_main=True, leads_node=True, rank=0),
        servers=SimpleNamespace(clients=lambda everywhere: []),
        captured_target=SimpleNamespace(expected_states=lambda: None),
        capture_engine=lambda: SimpleNamespace(max_tokens=1),
    )
    servers._check(context, [Stage.capture], captures)
    assert [transport is not None for transport in probed] == [captures]
