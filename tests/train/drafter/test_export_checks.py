"""Common mistakes in exports, each made in a good one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data.target.spec import TargetSpec
from eagle31.errors import UserError
from eagle31.export.layouts import Layout
from tests.data.conversations.chat_templates import sentencepiece_tokenizer
from tests.data.target.tiny_target import save_target
from tests.eagle31.tiny import MLA
from tests.runs.here import run_command
from tests.train.drafter.tiny_export import (
    edit_config,
    edit_tensors,
    make_published,
    save_target_with_tokenizer,
    write_tiny_export,
)
from train.drafter.published import validate_export

POSITIONS = {"max_position_embeddings": 2048}  # those of the target
IDS = "eagle_aux_hidden_state_layer_ids"
LATENT_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
    **{"mscale": 1.0, "mscale_all_dim": 1.0},
}
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TargetSpec:
    return save_target_with_tokenizer(tmp_path_factory.mktemp("target") / "t")


@pytest.fixture(scope="module")
def good(spec: TargetSpec, tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, Path]:
    root = tmp_path_factory.mktemp("good")
    for layout in Layout:
        write_tiny_export(root / layout.value, spec, layout=layout, num_hidden_layers=2, **POSITIONS)
    return {layout: root / layout.value for layout in Layout}


@pytest.fixture
def export(good: dict[Layout, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(good[Layout.vllm], tmp_path / "export"))


def refusal(export: Path, spec: TargetSpec) -> str:
    with pytest.raises(UserError) as raised:
        validate_export(export, spec)
    return str(raised.value)


@pytest.mark.parametrize("layout", list(Layout))
def test_a_good_export_is_valid(good: dict[Layout, Path], spec: TargetSpec, layout: Layout) -> None:
    assert validate_export(good[layout], spec) == ()


def off_by_one(raw: dict[str, Any]) -> None:
    raw[IDS] = raw["eagle_config"][IDS] = [1, 3, 4]


def without_ids(raw: dict[str, Any]) -> None:
    del raw[IDS], raw["eagle_config"], raw["num_aux_hidden_states"]


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (off_by_one, "drafts"),
        (without_ids, "aux_layer_ids"),
        (lambda raw: raw.update({IDS: [0, 2, 6], "eagle_config": {IDS: [0, 2, 6]}}), IDS),
        (lambda raw: raw.update(norm_output=False), "drafts"),
        (lambda raw: raw.update(fc_norm=False), "fc_norm.0.weight"),
        (lambda raw: raw.update(rope_scaling=None), "drafts"),
        (lambda raw: raw.update(architectures=["Qwen3ForCausalLM"]), "architectures"),
    ],
)
def test_a_mistake_in_config_json_is_named(export: Path, spec: TargetSpec, edit: Edit, expected: str) -> None:
    edit_config(export, edit)
    assert expected in refusal(export, spec)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        # RoPE's table stays the same, because it depends on the ratio of the two.
        (lambda raw: raw["rope_scaling"].update(mscale=2.0, mscale_all_dim=2.0), "drafts"),
        (lambda raw: raw.update(v_head_dim=5), "self_attn.kv_b_proj.weight"),
    ],
)
def test_a_mistake_in_the_config_of_mla_is_named(
    tmp_path: Path, spec: TargetSpec, edit: Edit, expected: str
) -> None:
    write_tiny_export(tmp_path / "e", spec, **MLA, rope_parameters=LATENT_YARN)
    edit_config(tmp_path / "e", edit)
    assert expected in refusal(tmp_path / "e", spec)


def absolute_ids(tensors: dict[str, Any]) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def twice(tensors: dict[str, Any]) -> None:
    tensors["d2t"][7] = tensors["d2t"][6] - 1


def random_embedding(tensors: dict[str, Any]) -> None:
    torch.manual_seed(1)
    tensors["embed_tokens.weight"] = torch.randn_like(tensors["embed_tokens.weight"])


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (absolute_ids, "d2t"),
        (twice, "d2t="),
        (lambda tensors: tensors["d2t"].zero_(), "t2d=differs"),
        (random_embedding, "drafts"),
        (lambda tensors: tensors.pop("fc_norm.1.weight"), "fc_norm.1.weight"),
        (lambda tensors: tensors["norm.weight"].fill_(float("nan")), "norm.weight"),
        (lambda tensors: tensors["lm_head.weight"][3].add_(0.1), "drafts"),
    ],
)
def test_a_mistake_in_the_weights_is_named(export: Path, spec: TargetSpec, edit: Edit, expected: str) -> None:
    edit_tensors(export, edit)
    assert expected in refusal(export, spec)


def test_a_missing_file_is_named(export: Path, spec: TargetSpec) -> None:
    (export / "model.safetensors").unlink()
    assert refusal(export, spec).startswith("model.safetensors=")


def test_another_target_is_named(export: Path, spec: TargetSpec, tmp_path: Path) -> None:
    other = save_target(tmp_path / "other", "qwen3")
    for file in Path(spec.model).glob("tokenizer*"):
        shutil.copy(file, other.model)
    assert refusal(export, other).startswith("target_fingerprint=")


def test_a_published_checkpoint_may_leave_out_what_vllm_has(tmp_path: Path, spec: TargetSpec) -> None:
    write_tiny_export(tmp_path / "e", spec, **POSITIONS)
    make_published(tmp_path / "e")
    edit_config(tmp_path / "e", lambda raw: raw.pop("norm_before_residual"))
    edit_tensors(tmp_path / "e", lambda tensors: tensors.pop("embed_tokens.weight"))
    assert validate_export(tmp_path / "e", spec) == ()
    edit_tensors(tmp_path / "e", absolute_ids)
    assert refusal(tmp_path / "e", spec).startswith("d2t=")


def test_fewer_positions_than_the_target_has_are_named(tmp_path: Path, spec: TargetSpec) -> None:
    write_tiny_export(tmp_path / "e", spec, max_position_embeddings=512)
    [note] = validate_export(tmp_path / "e", spec)
    assert note.startswith("max_position_embeddings=512, but the target has 2,048")


def test_the_command_prints_what_it_finds(export: Path, spec: TargetSpec) -> None:
    done = run_command("scripts/validate_export", export, "--target", spec.model)
    assert (done.status, done.out) == (0, "valid\n")
    edit_config(export, lambda raw: raw.update(fc_norm=False))
    done = run_command("scripts/validate_export", export, "--target", spec.model)
    assert done.status == 2
    assert "fc_norm.0.weight" in done.err


def test_a_window_that_is_lost_or_changed_is_named(tmp_path: Path, spec: TargetSpec) -> None:
    export = tmp_path / "e"
    write_tiny_export(export, spec, sliding_window=5)
    raw = json.loads((export / "config.json").read_text())
    without_types = {"layer_types": None}  # vLLM then ignores the width
    for changes in (without_types, without_types | {"sliding_window": None}, {"sliding_window": 6}):
        (export / "config.json").write_text(json.dumps(raw | changes))
        assert "drafts" in refusal(export, spec)


def test_a_wrong_tokenizer_is_named(export: Path, spec: TargetSpec, tmp_path: Path) -> None:
    other = Path(shutil.copytree(spec.model, tmp_path / "other"))
    for file in other.glob("tokenizer*"):
        file.unlink()
    sentencepiece_tokenizer("").save_pretrained(other)
    assert refusal(export, TargetSpec(str(other))).startswith("tokenizer_fingerprint=")
