"""Drafters and targets that were damaged, or that vLLM has no layers for: refused before the target runs."""

import json
import os
import pickle
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
INDEX = "model.safetensors.index.json"
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


def write(content: bytes) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(content), None)[1]


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


def save_poisoned_pickle(content: dict[str, Tensor], path: Path) -> None:
    path.write_bytes(pickle.dumps({"extra": RunsCode()}))


def evaluate(name: str, prepare: Callable[[Path], None], *says: str) -> Case:
    absent = ("Traceback", "acceptance length")
    return Case(name, EVALUATE, says, prepare=prepare, script="scripts/evaluate", absent=absent)


DRAFTERS = [
    evaluate("no_config", at("drafter/config.json", Path.unlink), "config.json=drafter: It cannot be read"),
    evaluate("weights_cut", at(WEIGHTS, cut), "model.safetensors=drafter: It is damaged"),
    evaluate("weights_flipped", at(WEIGHTS, flip), "checkpoint=drafter", "drafts: found"),
    evaluate("weights_nan", with_value("norm.weight", float("nan")), "norm.weight are not finite"),
    evaluate("tensor_missing", tensors(lambda content: content.pop("norm.weight")), "Missing key", "norm"),
    evaluate("tensor_shape", tensors(lambda c: c.update({"norm.weight": torch.ones(3)})), "size mismatch"),
    evaluate("q_norm", added("midlayer.self_attn.q_norm.weight", 8), "q_norm.weight=[8]", "Qwen3", "vLLM"),
    evaluate("index_cut", published(at(f"drafter/{INDEX}", write(b'{"weight'))), f"{INDEX}=drafter"),
    evaluate("bin_poisoned", pickled(save_poisoned), "pytorch_model.bin", "which is not run"),
    evaluate("bin_poisoned_pickle", pickled(save_poisoned_pickle), "pytorch_model.bin", "which is not run"),
]


@each(DRAFTERS)
def test_a_drafter_is_refused(case: Case, check_case: CheckCase, tmp_path: Path) -> None:
    check_case(case)
    assert not (tmp_path / "executed").exists()


def target(name: str, prepare: Callable[[Path], None], *says: str) -> Case:
    return Case(name, VALIDATE, says, prepare=prepare, script="scripts/validate_export")


def target_nan(path: Path) -> None:
    content = load_file(path)
    content["model.embed_tokens.weight"][3, 0] = float("nan")
    save_file(content, path, {"format": "pt"})


def other_vocabulary(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 999}))


TARGETS = [
    target("no_such_target", lambda path: shutil.rmtree(path / "target"), "target.model=target"),
    target(
        "target_weights_cut", at("target/model.safetensors", cut), "file=target/model.safetensors", "damaged"
    ),
    target("target_nan", at("target/model.safetensors", target_nan), "target.model=target", "not finite"),
    target("target_vocabulary", at("target/config.json", other_vocabulary), "target.model=target", "shape"),
]


@each(TARGETS)
def test_a_target_is_refused(case: Case, check_case: CheckCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # without a network it is asked for a minute
    check_case(case)
