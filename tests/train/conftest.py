"""A real target of a few thousand parameters with tokenizer and conversations, trained once a session."""

import pytest

from data.embedded.corpus import standard_library
from data.embedded.target import EmbeddedTarget, TargetSettings, ensure_embedded_target
from data.embedded.training import TrainingSettings

SETTINGS = TargetSettings(
    vocab_size=512,
    hidden_size=64,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=128,
    max_positions=512,
    training=TrainingSettings(steps=80, batch_tokens=1024, max_document_tokens=256),
)


@pytest.fixture(scope="session")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> EmbeddedTarget:
    directory = tmp_path_factory.mktemp("target")
    source = standard_library() / "email"
    return ensure_embedded_target(directory, source=source, settings=SETTINGS, progress=False)
