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
from tests.fuzz.damage import cut, flip, junk
from tests.train.drafter.tiny_export import make_published, save_target_with_tokenizer, write_tiny_export

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
WEIGHTS = "drafter/model.safetensors"
INDEX, BIN_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
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


def config(**changes: Any) -> Callable[[Path], None]:
    """Return a change of the drafter's config.json; None removes a key."""

    def change(path: Path) -> None:
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return at("drafter/config.json", change)


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


def save_index(_: dict[str, Tensor], path: Path) -> None:
    path.with_name(BIN_INDEX).write_text('{"weight_map": {"a": "x.bin"}}')


def index(name: str, **weight_map: str) -> Callable[[Path], None]:
    content = json.dumps({"weight_map": weight_map}).encode()
    return published(at(f"drafter/{name}", write(content)))


def evaluate(name: str, prepare: Callable[[Path], None], *says: str) -> Case:
    absent = ("Traceback", "acceptance length")
    return Case(name, EVALUATE, says, prepare=prepare, script="scripts/evaluate", absent=absent)


DRAFTERS = [
    evaluate(
        "no_such_directory", lambda path: shutil.rmtree(path / "drafter"), "checkpoint=drafter: No such"
    ),
    evaluate("no_config", at("drafter/config.json", Path.unlink), "config.json=drafter: It cannot be read"),
    evaluate("config_cut", at("drafter/config.json", cut), "config.json=drafter", "This is not JSON"),
    evaluate("weights_cut", at(WEIGHTS, cut), "model.safetensors=drafter: It is damaged"),
    evaluate("weights_junk", at(WEIGHTS, junk), "model.safetensors", "It is damaged"),
    evaluate("weights_flipped", at(WEIGHTS, flip), "checkpoint=drafter", "drafts: found"),
    evaluate("config_edited", config(rms_norm_eps=0.5), "checkpoint=drafter", "drafts: found"),
    evaluate("weights_nan", with_value("norm.weight", float("nan")), "norm.weight are not finite"),
    evaluate("tensor_missing", tensors(lambda content: content.pop("norm.weight")), "Missing key", "norm"),
    evaluate("tensor_unknown", added("extra.weight", 3), "Unexpected key", "extra.weight"),
    evaluate("tensor_shape", tensors(lambda c: c.update({"norm.weight": torch.ones(3)})), "size mismatch"),
    evaluate("q_norm", added("midlayer.self_attn.q_norm.weight", 8), "q_norm.weight=[8]", "Qwen3", "vLLM"),
    evaluate("attention_bias", published(config(attention_bias=True)), "attention_bias=True"),
    evaluate("d2t_missing", tensors(lambda content: content.pop("d2t")), "d2t=None: It is missing"),
    evaluate("index_cut", published(at(f"drafter/{INDEX}", write(b'{"weight'))), f"{INDEX}=drafter"),
    evaluate("index_shard_missing", index(INDEX, a="b.safetensors"), "b.safetensors=drafter: It cannot be"),
    evaluate("bin_poisoned", pickled(save_poisoned), "pytorch_model.bin", "holds code, which is not run"),
    evaluate("bin_poisoned_pickle", pickled(save_poisoned_pickle), "pytorch_model.bin", "which is not run"),
    evaluate(
        "bin_cut", pickled(lambda c, path: (torch.save(c, path), cut(path))), "pytorch_model.bin=drafter"
    ),
    evaluate(
        "bin_pointer", pickled(lambda _, path: path.write_bytes(LFS)), "pytorch_model.bin", "git lfs pull"
    ),
]


@each(DRAFTERS)
def test_a_drafter_is_refused(case: Case, check_case: CheckCase, tmp_path: Path) -> None:
    check_case(case)
    assert not (tmp_path / "executed").exists()


def target(name: str, prepare: Callable[[Path], None], *says: str) -> Case:
    return Case(name, VALIDATE, says, prepare=prepare, script="scripts/validate_export")


def target_config(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return at("target/config.json", change)


def target_nan(path: Path) -> None:
    content = load_file(path)
    content["model.embed_tokens.weight"][3, 0] = float("nan")
    save_file(content, path, {"format": "pt"})


TARGET_WEIGHTS = "target/model.safetensors"
TARGETS = [
    target("no_such_target", lambda path: shutil.rmtree(path / "target"), "target"),
    target("target_weights_missing", at(TARGET_WEIGHTS, Path.unlink), "target.model=target", "safetensors"),
    target("target_weights_cut", at(TARGET_WEIGHTS, cut), "file=target/model.safetensors", "It is damaged"),
    target("target_weights_junk", at(TARGET_WEIGHTS, junk), "model.safetensors", "It is damaged"),
    target(
        "target_nan",
        at(TARGET_WEIGHTS, target_nan),
        "target.model=target",
        "embedding are not finite",
        "download",
    ),
    target(
        "target_vocabulary",
        target_config(vocab_size=999),
        "target.model=target",
        "shape [100, 32]",
        "means [999, 32]",
    ),
    target(
        "target_width",
        target_config(hidden_size=64),
        "target.model=target",
        "shape [100, 32]",
        "different models",
    ),
    target("target_type", target_config(model_type="no_such"), "target.model=target", "cannot be loaded"),
    target("target_index_cut", at(f"target/{INDEX}", write(b'{"weight')), f"target/{INDEX}", "truncated"),
    target(
        "target_shard_missing",
        at(f"target/{INDEX}", write(b'{"weight_map": {"model.embed_tokens.weight": "b.safetensors"}}')),
        "target.model=target",
    ),
]


@each(TARGETS)
def test_a_target_is_refused(case: Case, check_case: CheckCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # without a network it is asked for a minute
    check_case(case)
