import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from data.target.loading import load_cached_config, load_config, load_target
from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from data.target.tokenizer import load_tokenizer
from eagle31.errors import UserError
from tests.data.target.small_configs import HIDDEN, SMALL
from tests.data.target.tiny_target import save_target

CPU = torch.device("cpu")


def test_the_target_is_frozen_and_in_eval_mode(tmp_path: Path) -> None:
    model = load_target(save_target(tmp_path), CPU)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("model", ["/no/such/directory", "./nowhere", "no-such-org/no-such-model"])
def test_a_missing_model_is_a_user_error(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    loaders: list[Callable[[TargetSpec], Any]] = [
        load_target_parts,
        load_tokenizer,
        lambda spec: spec.checkpoint.fingerprint(),
        lambda spec: load_target(spec, CPU),
    ]
    for load in loaders:
        with pytest.raises(UserError, match=f"target.model={model}"):
            load(TargetSpec(model))


@pytest.mark.parametrize(
    ("stored", "given", "instructions", "expected"),
    [
        ("bfloat16", "auto", ("avx512_bf16",), torch.bfloat16),
        ("bfloat16", "auto", ("bf16", "avx2"), torch.bfloat16),
        ("bfloat16", "auto", ("avx512_f", "avx512_fp16"), torch.float32),
        ("float16", "auto", ("avx512_bf16",), torch.float32),
        ("float32", "auto", (), torch.float32),
        ("bfloat16", "bfloat16", (), torch.bfloat16),
        ("float32", "bfloat16", (), torch.bfloat16),
    ],
)
def test_a_cpu_computes_in_float32_what_it_would_emulate(
    stored: str,
    given: str,
    instructions: tuple[str, ...],
    expected: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: dict.fromkeys(instructions, True))
    model = load_target(save_target(tmp_path), CPU).to(getattr(torch, stored))
    model.save_pretrained(tmp_path)
    spec = TargetSpec(str(tmp_path), dtype=given)
    assert load_target(spec, CPU).dtype == load_target_parts(spec).dtype == expected


def test_a_cached_config_is_loaded_and_a_missing_one_is_none(tmp_path: Path) -> None:
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    found = load_cached_config(TargetSpec(str(tmp_path)))
    assert found is not None
    assert found.hidden_size == HIDDEN
    assert load_cached_config(TargetSpec("no-such-org/no-such-model")) is None


CODE = """
from transformers import PreTrainedConfig
from pathlib import Path
Path({mark!r}).touch()
class OwnConfig(PreTrainedConfig):
    model_type = "own"
"""


def test_code_of_a_target_runs_only_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    model, mark = tmp_path / "model", tmp_path / "code-has-run"
    model.mkdir()
    (model / "configuration_own.py").write_text(CODE.format(mark=str(mark)))
    auto_map = {"AutoConfig": "configuration_own.OwnConfig"}
    (model / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    with pytest.raises(UserError, match="trust_remote_code"):
        load_config(TargetSpec(str(model)))
    with pytest.raises(UserError):
        load_tokenizer(TargetSpec(str(model)))
    assert not mark.exists()
    assert type(load_config(TargetSpec(str(model), trust_remote_code=True))).__name__ == "OwnConfig"
    assert mark.exists()
