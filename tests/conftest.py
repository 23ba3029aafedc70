"""What the whole suite shares."""

from pathlib import Path

import pytest
import torch

from eagle31.export import load_export
from eagle31.record import Difference, read_probe, replay_probe
from train import export_checks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also the long matrices, whose tables are committed")


@pytest.fixture
def reload_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh process takes seconds to import: what it finds is the same here."""

    def reload(directory: Path) -> Difference:
        loaded, probe = load_export(directory, torch.device("cpu")), read_probe(directory)
        assert probe is not None
        return replay_probe(probe, loaded.drafter, loaded.embed_tokens)

    monkeypatch.setattr(export_checks, "reload_in_fresh_process", reload)
