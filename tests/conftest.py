"""What the whole suite shares."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from data.vllm.environment import ROOT, find_python
from eagle31.export.read import load_export
from eagle31.export.verification import Difference, read_probe, replay_probe
from train.drafter import export_checks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also the long matrices, whose tables are committed")


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """vLLM's environment, made where it is missing."""
    if "EAGLE31_VLLM_PYTHON" not in os.environ:
        subprocess.run([ROOT / "scripts" / "setup" / "vllm"], check=True, stdout=subprocess.DEVNULL)
    return find_python()


@pytest.fixture
def reload_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh process takes seconds to import: what it finds is the same here."""

    def reload(directory: Path) -> Difference:
        loaded, probe = load_export(directory, torch.device("cpu")), read_probe(directory)
        assert probe is not None
        return replay_probe(probe, loaded.drafter, loaded.embed_tokens)

    monkeypatch.setattr(export_checks, "reload_in_fresh_process", reload)
