"""The engine of a recipe's vLLM servers."""

from pathlib import Path

import pytest

from data.target.parts import load_target_parts
from eagle31.errors import UserError
from tests.data.target.tiny_target import save_target
from train.config.capture import CaptureConfig
from train.inference.target import CapturedTarget
from train.inference.vllm import capture_engine, pending_gb


def test_the_memory_for_waiting_states_must_hold_the_longest_sample(tmp_path: Path) -> None:
    spec = save_target(tmp_path / "target")
    target = CapturedTarget(spec, load_target_parts(spec), (0, 2))

    def settings(gb: float | None) -> dict:
        config = CaptureConfig(max_pending_gb=gb)
        engine = capture_engine(target, config, {}, max_tokens=1000, output_dir=tmp_path)
        return engine.arguments()["kv_transfer_config"]["kv_connector_extra_config"]

    needed = pending_gb(target, 1000)
    assert needed == 1128 * 3 * target.parts.hidden_size * target.parts.embed_tokens.element_size() / 1e9
    assert settings(None)["max_pending_gb"] is None
    assert settings(1.01 * needed)["max_pending_gb"] == 1.01 * needed
    with pytest.raises(UserError, match=r"capture.max_pending_gb=.*The states of 1000 tokens take"):
        settings(0.99 * needed)
