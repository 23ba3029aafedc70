"""Drafters and targets that were damaged, or that vLLM has no layers for: refused before the target runs."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.bad_input.commands import Case, CheckCase, each
from tests.bad_input.faults import cut, flip
from tests.train.drafter.tiny_export import make_published, save_target_with_tokenizer, write_tiny_export

WEIGHTS = "drafter/model.safetensors"
VALIDATE = ("drafter", "--target", "target")
EVALUATE = (*VALIDATE, "--data", "prompts.jsonl")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    write_tiny_export(root / "drafter", save_target_with_tokenizer(root / "target"))
    (root / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    return root


@pytest.fixture(autouse=True)
def files(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)


def at(name: str, change: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Return what changes one file of the test's directory."""

    def prepare(directory: Path) -> None:
        change(directory / name)

    return prepare


def published(prepare: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return the change of a checkpoint that eagle31 did not export."""

    def change(directory: Path) -> None:
        make_published(directory / "drafter")
        prepare(directory)

    return change


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    """Return a change of the drafter's weights."""

    def rewrite(path: Path) -> None:
        content = load_file(path)
        change(content)
        save_file(content, path)

    return published(at("drafter/model.safetensors", rewrite))


def with_value(name: str, value: float) -> Callable[[Path], None]:
    return tensors(lambda content: content[name].view(-1)[:1].fill_(value))


def added(name: str, *shape: int) -> Callable[[Path], None]:
    return tensors(lambda content: content.update({name: torch.ones(shape)}))


def pickled(save: Callable[[dict[str, Tensor], Path], Any]) -> Callable[[Path], None]:
    """Return a checkpoint whose weights are in pytorch_model.bin."""

    def change(path: Path) -> None:
        save(load_file(path), path.with_name("pytorch_model.bin"))
        path.unlink()

    return published(at("drafter/model.safetensors", change))


class RunsCode:
    """What writes the file `executed` when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch executed",)


def save_poisoned(content: dict[str, Tensor], path: Path) -> None:
    torch.save({**content, "extra": RunsCode()}, path)


def evaluate(name: str, prepare: Callable[[Path], None], *says: str) -> Case:
    absent = ("Traceback", "acceptance length")
    return Case(name, EVALUATE, says, prepare=prepare, script="scripts/evaluate", absent=absent)


DRAFTERS = [
    evaluate("weights_cut", at(WEIGHTS, cut), "model.safetensors=drafter: It is damaged"),
    evaluate("weights_flipped", at(WEIGHTS, flip), "checkpoint=drafter", "drafts="),
    evaluate("weights_nan", with_value("norm.weight", float("nan")), "norm.weight are not finite"),
    evaluate("tensor_missing", tensors(lambda content: content.pop("norm.weight")), "Missing key", "norm"),
    evaluate("q_norm", added("midlayer.self_attn.q_norm.weight", 8), "Unexpected key", "q_norm"),
    evaluate("bin_poisoned", pickled(save_poisoned), "pytorch_model.bin", "which is not run"),
]


@each(DRAFTERS)
def test_a_drafter_is_refused(case: Case, check_case: CheckCase, tmp_path: Path) -> None:
    check_case(case)
    assert not (tmp_path / "executed").exists()


def target_nan(path: Path) -> None:
    content = load_file(path)
    content["model.embed_tokens.weight"][3, 0] = float("nan")
    save_file(content, path, {"format": "pt"})


@pytest.fixture
def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # else it is asked for a minute


TARGETS = [
    Case(name, VALIDATE, ("target.model=target", says), prepare, "scripts/validate_export")
    for name, prepare, says in (
        ("no_such_target", lambda path: shutil.rmtree(path / "target"), "loaded"),
        ("target_nan", at("target/model.safetensors", target_nan), "not finite"),
    )
]


@each(TARGETS)
@pytest.mark.usefixtures("without_network")
def test_a_target_is_refused(case: Case, check_case: CheckCase) -> None:
    check_case(case)
