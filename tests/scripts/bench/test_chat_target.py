import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from data.embedded.training import TrainingSettings
from scripts.bench.chat_target import ChatTargetSettings, ensure_chat_target

TINY = ChatTargetSettings(
    vocab_size=300,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=32,
    max_positions=256,
    training=TrainingSettings(steps=2, batch_tokens=256, warmup_steps=1),
)


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    rows = [{"question": f"What is {i} plus {i}?", "answer": f"It is {2 * i}."} for i in range(60)]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    return path


def test_a_small_qwen3_is_trained_once(conversations: Path, tmp_path: Path) -> None:
    built = ensure_chat_target(tmp_path / "cache", conversations, settings=TINY)
    model = AutoModelForCausalLM.from_pretrained(built.model)
    assert model.config.model_type == "qwen3"
    assert model.config.head_dim == 8
    train, held_out = (
        {json.loads(line)["messages"][0]["content"] for line in path.read_text().splitlines()}
        for path in (built.train, built.held_out)
    )
    assert len(train) + len(held_out) == 60
    assert not train & held_out
    written = (built.model / "model.safetensors").stat().st_mtime_ns
    assert ensure_chat_target(tmp_path / "cache", conversations, settings=TINY) == built
    assert (built.model / "model.safetensors").stat().st_mtime_ns == written
