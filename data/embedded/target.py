"""Building the embedded target once per machine, and finding it in the cache."""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from data.embedded.corpus import ChatExample, Corpus, python_files, read_corpus, standard_library
from data.embedded.tokenizer import save_tokenizer, train_tokenizer
from data.embedded.training import CausalModel, TrainingSettings, encode, evaluate, initialize, pretrain
from data.locks import try_lock

Model = TypeVar("Model", bound=CausalModel)
FORMAT_VERSION = 1  # raise it for changes of corpus, tokenizer or training that do not change the settings


@dataclass(frozen=True)
class TargetSettings:
    """The target's shape and training; every field is part of the cache key.

    In two minutes on two cores, this narrow model sees the corpus twice and learns more than a wider one,
    which does not see all of it.
    """

    vocab_size: int = 4096
    hidden_size: int = 128
    num_layers: int = 8
    num_heads: int = 2
    num_kv_heads: int = 1
    intermediate_size: int = 320
    max_positions: int = 1024
    training: TrainingSettings = field(default_factory=TrainingSettings)


@dataclass(frozen=True)
class EmbeddedTarget:
    """The paths of a finished target."""

    model: Path  # for `from_pretrained`: weights, tokenizer, chat template, and training.json
    train: Path  # JSONL with "id" and "messages"
    held_out: Path  # the same for functions whose bodies are not in the training data


def ensure_embedded_target(
    cache_dir: Path,
    *,
    num_threads: int | None = None,
    progress: bool = True,
    source: Path | None = None,
    settings: TargetSettings | None = None,
) -> EmbeddedTarget:
    """Return the embedded target in `cache_dir`; train it first if needed (about two minutes on two cores).

    An interrupted build resumes where it stopped. If there are several callers, one builds and the others
    wait.

    Args:
        cache_dir: has one directory per fingerprint of Python's version, its library and the settings.
        num_threads: the number of threads for the training; None keeps torch's setting.
        progress: a bar on stderr when that is a terminal.
        source: a directory of Python modules; by default the running Python's standard library.
        settings: the shape and training; None uses the defaults.

    Raises:
        UserError: `source` has too few documented functions.
    """
    source = source or standard_library()
    settings = settings or TargetSettings()
    finished = cache_dir / fingerprint(source, settings)

    def build(partial: Path) -> None:
        _build(partial, source, settings, progress)

    return ensure_built(finished, build, num_threads)


def ensure_built(finished: Path, build: Callable[[Path], None], num_threads: int | None) -> EmbeddedTarget:
    """Return the target in `finished`; call `build` with the directory to build it in if it is missing.

    Args:
        num_threads: the number of threads for `build`; None keeps torch's setting.
    """
    if not finished.is_dir():
        finished.parent.mkdir(parents=True, exist_ok=True)
        with _locked(finished.with_name(f"{finished.name}.lock")), _threads(num_threads):
            if not finished.is_dir():
                partial = finished.with_name(f"{finished.name}.partial")
                build(partial)
                os.replace(partial, finished)
    return EmbeddedTarget(finished / "model", finished / "train.jsonl", finished / "held_out.jsonl")


def fingerprint(source: Path, settings: TargetSettings) -> str:
    """Return the key of what the target depends on; the modules' names and sizes represent their text."""
    modules = [(p.relative_to(source).as_posix(), p.stat().st_size) for p in python_files(source)]
    key = json.dumps([FORMAT_VERSION, sys.version, modules, asdict(settings)])
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _build(directory: Path, source: Path, settings: TargetSettings, progress: bool) -> None:
    build_target(directory, lambda: read_corpus(source), _initial_model, settings, progress)


def build_target(
    directory: Path,
    read: Callable[[], Corpus],
    initial_model: Callable[[PreTrainedTokenizerFast, TargetSettings], CausalModel],
    settings: TargetSettings,
    progress: bool,
) -> None:
    """Build in `directory`; if a checkpoint exists there, corpus and tokenizer are complete too."""
    started = time.monotonic()
    checkpoint = directory / "checkpoint.pt"
    if not checkpoint.exists():
        shutil.rmtree(directory, ignore_errors=True)
        (directory / "model").mkdir(parents=True)
        corpus = read()
        _write_jsonl(directory / "train.jsonl", corpus.train)
        _write_jsonl(directory / "held_out.jsonl", corpus.held_out)
        new_tokenizer = train_tokenizer(corpus.train, settings.vocab_size, settings.max_positions)
        save_tokenizer(new_tokenizer, directory / "model")
    corpus = Corpus(_read_jsonl(directory / "train.jsonl"), _read_jsonl(directory / "held_out.jsonl"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "model")
    model = initial_model(tokenizer, settings)
    training = settings.training
    documents = encode(tokenizer, corpus.train, training.max_document_tokens)
    pretrain(model, documents, training, checkpoint, progress)
    figures = {
        "steps": training.steps,
        "seconds": round(time.monotonic() - started, 1),
        "num_parameters": model.num_parameters(),
        "train_documents": len(corpus.train),
        "train_tokens": sum(len(ids) for ids, _ in documents),
        "held_out_documents": len(corpus.held_out),
        "held_out_loss": evaluate(model, encode(tokenizer, corpus.held_out, training.max_document_tokens)),
    }
    with _bars_of_transformers(progress and sys.stderr.isatty()):
        model.save_pretrained(directory / "model")
    for weights in (directory / "model").glob("*.safetensors"):  # safetensors lets the owner alone read them
        weights.chmod((directory / "model" / "config.json").stat().st_mode)
    (directory / "model" / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
    checkpoint.unlink(missing_ok=True)


def _initial_model(tokenizer: PreTrainedTokenizerFast, settings: TargetSettings) -> LlamaForCausalLM:
    config = LlamaConfig(**model_arguments(tokenizer, settings))
    return initialized(lambda: LlamaForCausalLM(config), tokenizer, settings)


def model_arguments(tokenizer: PreTrainedTokenizerFast, settings: TargetSettings) -> dict[str, Any]:
    """Return the arguments of transformers' configuration of a decoder."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_kv_heads,
        "max_position_embeddings": settings.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }


def initialized(
    make: Callable[[], Model], tokenizer: PreTrainedTokenizerFast, settings: TargetSettings
) -> Model:
    """Return a new float32 model with seeded weights, without changing the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        model = make()
    initialize(model, settings.training.seed)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def _write_jsonl(path: Path, examples: list[ChatExample]) -> None:
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))


def _read_jsonl(path: Path) -> list[ChatExample]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock out other processes, which wait."""
    while (lock := try_lock(path)) is None:
        time.sleep(0.1)
    with lock:
        yield


@contextmanager
def _bars_of_transformers(shown: bool) -> Iterator[None]:
    were_shown = transformers_logging.is_progress_bar_enabled()
    if not shown:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def _threads(num_threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
