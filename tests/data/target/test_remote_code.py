import hashlib
import json
from pathlib import Path

import pytest

from data.target.loading import load_config
from data.target.remote_code import announce_remote_code
from data.target.spec import TargetSpec
from data.target.tokenizer import load_tokenizer
from eagle31.errors import UserError

CODE = """
from transformers import PreTrainedConfig
from pathlib import Path
Path({mark!r}).touch()
class OwnConfig(PreTrainedConfig):
    model_type = "own"
"""


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that exists once the checkpoint's code has run."""
    return tmp_path / "code-has-run"


@pytest.fixture
def model(tmp_path: Path, mark: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "configuration_own.py").write_text(CODE.format(mark=str(mark)))
    auto_map = {"AutoConfig": "configuration_own.OwnConfig"}
    (directory / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    return directory


def test_code_of_a_target_runs_only_if_it_is_trusted(model: Path, mark: Path) -> None:
    with pytest.raises(UserError, match="trust_remote_code"):
        load_config(TargetSpec(str(model)))
    with pytest.raises(UserError):
        load_tokenizer(TargetSpec(str(model)))
    assert not mark.exists()


def test_trusted_code_is_named_with_its_hash_before_it_runs(
    model: Path, mark: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("HF_MODULES_CACHE", str(model.parent / "modules"))
    spec, code = TargetSpec(str(model), trust_remote_code=True), model / "configuration_own.py"
    announce_remote_code(spec, model / "config.json")
    assert not mark.exists()
    digest = hashlib.sha256(code.read_bytes()).hexdigest()
    expected = f"target.trust_remote_code: OwnConfig in {code}, sha256 {digest}\n"
    assert capsys.readouterr().err == expected
    announce_remote_code.cache_clear()
    assert type(load_config(spec)).__name__ == "OwnConfig"
    assert mark.exists()
    assert expected in capsys.readouterr().err
