"""The quickstart made small: a trained small target in the place of the embedded one, which takes minutes."""

from pathlib import Path

import pytest

from data.embedded.corpus import standard_library
from data.embedded.target import EmbeddedTarget, TargetSettings, fingerprint
from eagle31.json_files import read_json

_SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings")


def small_quickstart(target: EmbeddedTarget, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return overrides of the quickstart for this target; cache and results are in `directory`."""
    monkeypatch.setenv("EAGLE31_CACHE", str(directory / "cache"))
    embedded = directory / "cache" / "embedded"
    embedded.mkdir(parents=True)
    (embedded / fingerprint(standard_library(), TargetSettings())).symlink_to(target.model.parent)
    shape = read_json(target.model / "config.json")
    return [
        *(f"target.architecture.{name}={shape[name]}" for name in _SHAPE),
        "drafter.draft_vocab_size=300",
        "data.max_tokens=192",
        "train.row_tokens=256",
        "evaluate.max_new_tokens=32",
        f"output_dir={directory / 'run'}",
    ]
