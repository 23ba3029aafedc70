from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.embedded import target as target_module
from data.embedded.target import EmbeddedTarget
from tests.data.embedded.tiny_embedded import ensure


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
