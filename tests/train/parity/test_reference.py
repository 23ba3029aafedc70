from pathlib import Path
from typing import Any

import pytest
import torch

from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from eagle31.errors import UserError
from tests.train.drafter.tiny_export import save_target_with_tokenizer, write_tiny_export
from tests.train.parity.mutations import MUTATIONS, mutate
from train.parity.reference import decode_reference, drafter_config, reference_drafter

CPU = torch.device("cpu")
PROMPTS = [[1, 2, 3], [4, 5]]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TargetSpec:
    return save_target_with_tokenizer(tmp_path_factory.mktemp("target"))


def drafts(export: Path, spec: TargetSpec) -> list[list[list[int]]]:
    reference = reference_drafter(export, load_target_parts(spec), CPU, torch.float32)
    limits: dict[str, Any] = {"k": 3, "max_new_tokens": 16, "stop_token_ids": ()}
    return [one.drafts for one in decode_reference(reference, spec, PROMPTS, CPU, **limits)]


@pytest.mark.parametrize("width", [{}, {"hidden_size": 24, "head_dim": 8}], ids=["same width", "projected"])
@pytest.mark.parametrize("mistake", [name for name in MUTATIONS if name != "fc_norm dropped"])
def test_mistake_in_an_export_does_not_affect_the_evaluator(
    tmp_path: Path, spec: TargetSpec, mistake: str, width: dict
) -> None:
    window = {"sliding_window": 3} if mistake == "sliding window dropped" else {}
    write_tiny_export(tmp_path / "good", spec, **width, **window)
    mutated = mutate(tmp_path / "good", tmp_path / "mutated", MUTATIONS[mistake][0])
    assert drafts(mutated, spec) == drafts(tmp_path / "good", spec)


def test_missing_weights_of_the_trained_drafter_are_named(tmp_path: Path, spec: TargetSpec) -> None:
    write_tiny_export(tmp_path / "good", spec)
    mutated = mutate(tmp_path / "good", tmp_path / "mutated", MUTATIONS["fc_norm dropped"][0])
    with pytest.raises(UserError, match=r"fc_norm\.0\.weight.*cannot be rebuilt"):
        drafts(mutated, spec)


def test_checkpoint_without_a_record_is_read_as_it_is(tmp_path: Path, spec: TargetSpec) -> None:
    write_tiny_export(tmp_path / "good", spec, verified=False)
    mutated = mutate(tmp_path / "good", tmp_path / "mutated", MUTATIONS["pre-norm state fed back"][0])
    assert drafter_config(mutated, load_target_parts(spec)).norm_output is False
    assert drafts(mutated, spec) != drafts(tmp_path / "good", spec)
