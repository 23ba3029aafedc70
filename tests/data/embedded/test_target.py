import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from data.embedded import target as target_module
from data.embedded import training
from data.embedded.target import EmbeddedTarget, ensure_embedded_target
from tests.data.embedded.tiny_embedded import TINY, body_of, ensure


def _bodies(path: Path) -> list[str]:
    return [body_of(json.loads(line)["messages"][1]["content"]) for line in path.read_text().splitlines()]


def test_the_target_loads_with_its_generation_config(built: EmbeddedTarget) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built.model)
    model = AutoModelForCausalLM.from_pretrained(built.model)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert model.config.bos_token_id is None
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    assert json.loads((built.model / "training.json").read_text())["steps"] == TINY.training.steps


def test_held_out_bodies_are_not_in_the_training_file(built: EmbeddedTarget) -> None:
    train, held_out = _bodies(built.train), _bodies(built.held_out)
    assert train
    assert held_out
    assert not set(train) & set(held_out)


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


def test_a_build_draws_no_bar_if_stderr_is_not_a_terminal(
    library: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    settings = replace(TINY, training=replace(TINY.training, steps=1))
    shown = transformers_logging.is_progress_bar_enabled()
    ensure_embedded_target(tmp_path, num_threads=1, progress=True, source=library, settings=settings)
    assert "%|" not in capfd.readouterr().err
    assert transformers_logging.is_progress_bar_enabled() == shown


def test_resumed_training_gives_the_same_weights(
    built: EmbeddedTarget, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = training.save_checkpoint

    def save_then_stop(path: Path, model: Any, optimizers: Any, next_step: int) -> None:
        save(path, model, optimizers, next_step)
        if next_step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "save_checkpoint", save_then_stop)
        with pytest.raises(KeyboardInterrupt):
            ensure(tmp_path, library)
    assert not any(p.is_dir() and not p.name.endswith(".partial") for p in tmp_path.iterdir())

    resumed_at = []
    monkeypatch.setattr(training, "save_checkpoint", lambda *args: resumed_at.append(args[-1]))
    resumed = ensure(tmp_path, library)
    assert resumed_at == [4, 5, 6]
    expected = load_file(built.model / "model.safetensors")
    actual = load_file(resumed.model / "model.safetensors")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert not (resumed.model.parent / "checkpoint.pt").exists()


def _ensure_and_count(cache: Path, library: Path, started: object) -> None:
    build = target_module._build

    def counting_build(*args: object) -> None:
        (cache / f"built_by_{multiprocessing.current_process().name}").touch()
        build(*args)  # type: ignore[arg-type]

    target_module._build = counting_build  # type: ignore[assignment]
    started.wait()  # type: ignore[attr-defined]
    ensure(cache, library)


@pytest.mark.usefixtures("preloaded_children")
def test_one_of_two_processes_builds_and_the_other_waits(library: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    processes = [
        context.Process(target=_ensure_and_count, args=(tmp_path, library, barrier)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(list(tmp_path.glob("built_by_*"))) == 1
