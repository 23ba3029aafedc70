"""Saved samples that are damaged, tokens that the target lacks, and settings of scripts/evaluate."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from data.capture.hf import HiddenStateCapture, check_head
from data.conversations.saved import load_saved
from data.embedded.target import EmbeddedTarget
from data.target.head import TargetHead
from data.target.loading import load_target
from data.target.modules import locate
from data.target.spec import TargetSpec
from data.target.tokenizer import check_ids
from eagle31.errors import UserError
from tests.bad_input.commands import Case, CheckCase, each
from tests.data.conversations.chat_templates import CHATML, byte_level_tokenizer


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("name", ["data-*.arrow", "state.json", "dataset_info.json"])
@pytest.mark.parametrize("damage", [cut, zeroed, Path.unlink], ids=["cut", "zeroed", "missing"])
def test_saved_samples_that_are_damaged_name_what_to_delete(
    name: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    directory = tmp_path / "data-0" / "train"
    Dataset.from_dict({"input_ids": [[1, 2, 3]] * 100}).save_to_disk(str(directory))
    assert len(load_saved(directory)) == 100
    [path] = directory.glob(name)
    damage(path)
    with pytest.raises(UserError, match="data-0, and the stage makes it again") as caught:
        load_saved(directory)
    assert caught.value.value == directory


def test_a_token_that_the_target_lacks_is_named() -> None:
    tokenizer = byte_level_tokenizer(CHATML)
    check_ids(tokenizer, [], 10)
    check_ids(tokenizer, [3, 9], 10)
    with pytest.raises(UserError, match=r"gives token 11 .* the model has 10 tokens"):
        check_ids(tokenizer, [3, 11], 10)


def test_a_target_with_damaged_weights_is_not_said_to_scale_its_logits(small_target: EmbeddedTarget) -> None:
    spec = TargetSpec(str(small_target.model))
    model = load_target(spec, torch.device("cpu"))
    modules = locate(model, spec)
    head = TargetHead(modules.final_norm, modules.lm_head)
    capture = HiddenStateCapture(model, modules, [1])
    check_head(capture, head)
    modules.layers[0].get_parameter("mlp.up_proj.weight").fill_(torch.nan)
    with pytest.raises(UserError, match="Its logits are not finite"):
        check_head(capture, head)


def evaluated(name: str, *arguments: str, says: str) -> Case:
    given = ("drafter", "--target", "target", "--data", "a.jsonl", *arguments)
    return Case(name, given, ("error: ", says), script="scripts/evaluate")


EVALUATED = [
    evaluated("long_draft", "-k", "5000", says="--draft-tokens=5000: Give at most 64"),
    evaluated("no_draft", "-k", "0", says="--draft-tokens=0: Give at least 1"),
    evaluated("draft_of_words", "-k", "four", says="invalid int value: 'four'"),
    evaluated("temperature_of_nan", "--temperature", "nan", says="--temperature=nan: Give 0"),
    evaluated("huge_temperature", "--temperature", "1e30", says="--temperature=1e+30: Give 0"),
    evaluated("no_prompts", "--num-prompts", "0", says="--num-prompts=0: Give at least 1"),
    evaluated("negative_batch", "--batch-size", "-1", says="--batch-size=-1: Give at least 1"),
    evaluated("plot_without_matrix", "--plot", "a.png", says="--plot=: It needs --matrix"),
]


@each(EVALUATED)
def test_settings_of_an_evaluation_are_checked_first(case: Case, check_case: CheckCase) -> None:
    check_case(case)
