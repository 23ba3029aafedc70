from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.embedded import target as target_module
from data.embedded.target import EmbeddedTarget
from tests.data.embedded.tiny_embedded import TINY, ensure


def test_a_second_call_neither_reads_nor_trains(
    built: EmbeddedTarget, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_module, "read_corpus", None)
    monkeypatch.setattr(target_module, "pretrain", None)
    assert ensure(built.model.parents[1], library) == built


def test_the_fingerprint_changes_with_settings_and_modules(library: Path, tmp_path: Path) -> None:
    key = target_module.fingerprint(library, TINY)
    assert target_module.fingerprint(library, replace(TINY, num_layers=3)) != key
    (tmp_path / "m.py").write_text("x = 1\n")
    assert target_module.fingerprint(tmp_path, TINY) != key


def test_a_build_that_was_killed_is_made_again_with_the_same_weights(
    built: EmbeddedTarget, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target_module, "pretrain", stop)
        with pytest.raises(KeyboardInterrupt):
            ensure(tmp_path, library)
    assert not any(p.is_dir() and not p.name.endswith(".partial") for p in tmp_path.iterdir())
    expected, actual = (
        load_file(one.model / "model.safetensors") for one in (built, ensure(tmp_path, library))
    )
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
