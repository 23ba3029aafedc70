"""Building the embedded target once per machine, and finding it in the cache."""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
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

from data.embedded.corpus import Corpus, python_files, read_corpus, standard_library
from data.embedded.tokenizer import save_tokenizer, train_tokenizer
from data.embedded.training import CausalModel, TrainingSettings, encode, evaluate, initialize, pretrain
from data.locks import try_lock

Model = TypeVar("Model", bound=CausalModel)
FORMAT_VERSION = 2  # raise it for changes of corpus, tokenizer or training that do not change the settings


@dataclass(frozen=True)
class TargetSettings:
    """The target's shape and training; every field is part of the cache key.

    It is deep and narrow: a pass takes many small operations, as that of a large target takes much time, so
    that a draft of one layer is cheap next to it. In two minutes on two cores it sees the corpus twice.
    """

    vocab_size: int = 4096
    hidden_size: int = 128
    num_layers: int = 14
    num_heads: int = 2
    num_kv_heads: int = 1
    intermediate_size: int = 192
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

    Args:
        cache_dir: has one directory per fingerprint of Python's version, its library and the settings.
        num_threads: the number of threads for the training; None keeps torch's setting.
        progress: a bar on stderr when that is a terminal.
        source: a directory of Python modules; by default the running Python's standard library.
        settings: the shape and training; None uses the defaults.

    Raises:
        UserError: `source` has too few documented functions.
    """
    source, settings = source or standard_library(), settings or TargetSettings()

    def build(partial: Path) -> None:
        build_target(partial, read_corpus(source), _initial_model, settings, progress)

    return ensure_built(cache_dir / fingerprint(source, settings), build, num_threads)


def ensure_built(finished: Path, build: Callable[[Path], None], num_threads: int | None) -> EmbeddedTarget:
    """Return the target in `finished`; call `build` with an empty directory to build it in if it is missing.

    If there are several callers, one builds and the others wait.
    """
    if not finished.is_dir():
        finished.parent.mkdir(parents=True, exist_ok=True)
        threads = torch.get_num_threads()
        while (lock := try_lock(finished.with_name(f"{finished.name}.lock"))) is None:
            time.sleep(0.1)
        with lock:
            if not finished.is_dir():
                partial = finished.with_name(f"{finished.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)  # what a process that died has left
                (partial / "model").mkdir(parents=True)
                torch.set_num_threads(num_threads or threads)
                try:
                    build(partial)
                finally:
                    torch.set_num_threads(threads)
                os.replace(partial, finished)
    return EmbeddedTarget(finished / "model", finished / "train.jsonl", finished / "held_out.jsonl")


def fingerprint(source: Path, settings: TargetSettings) -> str:
    """Return the key of what the target depends on; the modules' names and sizes represent their text."""
    modules = [(p.relative_to(source).as_posix(), p.stat().st_size) for p in python_files(source)]
    key = json.dumps([FORMAT_VERSION, sys.version, modules, asdict(settings)])
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def build_target(
    directory: Path,
    corpus: Corpus,
    initial_model: Callable[[PreTrainedTokenizerFast, TargetSettings], CausalModel],
    settings: TargetSettings,
    progress: bool,
) -> None:
    """Write the corpus, the tokenizer and the trained model."""
    started = time.monotonic()
    for name, examples in (("train", corpus.train), ("held_out", corpus.held_out)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in examples))
    save_tokenizer(
        train_tokenizer(corpus.train, settings.vocab_size, settings.max_positions), directory / "model"
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "model")
    training = settings.training
    documents = encode(tokenizer, corpus.train, training.max_document_tokens)
    model = initial_model(tokenizer, settings)
    pretrain(model, documents, training, progress)
    figures = {
        "steps": training.steps,
        "seconds": round(time.monotonic() - started, 1),
        "num_parameters": model.num_parameters(),
        "train_documents": len(corpus.train),
        "train_tokens": sum(len(ids) for ids, _ in documents),
        "held_out_documents": len(corpus.held_out),
        "held_out_loss": evaluate(model, encode(tokenizer, corpus.held_out, training.max_document_tokens)),
    }
    bars_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    model.save_pretrained(directory / "model")
    if bars_shown:
        transformers_logging.enable_progress_bar()
    for weights in (directory / "model").glob("*.safetensors"):  # safetensors lets the owner alone read them
        weights.chmod((directory / "model" / "config.json").stat().st_mode)
    (directory / "model" / "training.json").write_text(json.dumps(figures, indent=2) + "\n")


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
