"""Builds the embedded target once per machine and hands out where it lies."""

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

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
from data.embedded.training import TrainingSettings, encode, evaluate, initialize, pretrain

FORMAT_VERSION = 1  # raise it when the corpus, the tokenizer or the training changes in code alone


@dataclass(frozen=True)
class TargetSettings:
    """The target's shape and its training; every field is part of the cache's key.

    For two minutes on two cores this narrow a model, which reads its text twice, comes further than a wider
    one that does not finish it.
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
    """Where a finished target lies."""

    model: Path  # a directory for `from_pretrained`: weights, tokenizer, chat template, training.json
    train: Path  # JSONL of {"id", "messages"}
    held_out: Path  # the same, functions whose bodies the target never saw


def ensure_embedded_target(
    cache_dir: Path,
    *,
    num_threads: int | None = None,
    progress: bool = True,
    source: Path | None = None,
    settings: TargetSettings | None = None,
) -> EmbeddedTarget:
    """Finds the embedded target below `cache_dir`, or trains it there (about two minutes on two cores).

    An interrupted build goes on where it stopped; of several callers one builds and the others wait.

    Args:
        cache_dir: holds one directory per fingerprint of Python's version, its library and the settings.
        num_threads: for the training; None keeps torch's setting.
        progress: a bar on stderr when that is a terminal.
        source: a directory of Python modules, the running Python's standard library by default.
        settings: shape and training, the defaults when None.

    Raises:
        UserError: `source` holds too few documented functions.
    """
    source = source or standard_library()
    settings = settings or TargetSettings()
    finished = cache_dir / fingerprint(source, settings)
    if not finished.is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f"{finished.name}.lock"), _threads(num_threads):
            if not finished.is_dir():
                partial = cache_dir / f"{finished.name}.partial"
                _build(partial, source, settings, progress)
                os.replace(partial, finished)
    return EmbeddedTarget(finished / "model", finished / "train.jsonl", finished / "held_out.jsonl")


def fingerprint(source: Path, settings: TargetSettings) -> str:
    """Key of what the target depends on; names and sizes stand for the modules' text, to be quick."""
    modules = [(p.relative_to(source).as_posix(), p.stat().st_size) for p in python_files(source)]
    key = json.dumps([FORMAT_VERSION, sys.version, modules, asdict(settings)])
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _build(directory: Path, source: Path, settings: TargetSettings, progress: bool) -> None:
    """Fills `directory`; a checkpoint is written after corpus and tokenizer, so it vouches for them."""
    started = time.monotonic()
    checkpoint = directory / "checkpoint.pt"
    if not checkpoint.exists():
        shutil.rmtree(directory, ignore_errors=True)
        (directory / "model").mkdir(parents=True)
        corpus = read_corpus(source)
        _write_jsonl(directory / "train.jsonl", corpus.train)
        _write_jsonl(directory / "held_out.jsonl", corpus.held_out)
        new_tokenizer = train_tokenizer(corpus.train, settings.vocab_size, settings.max_positions)
        save_tokenizer(new_tokenizer, directory / "model")
    corpus = Corpus(_read_jsonl(directory / "train.jsonl"), _read_jsonl(directory / "held_out.jsonl"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "model")
    model = _initial_model(tokenizer, settings)
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
    (directory / "model" / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
    checkpoint.unlink(missing_ok=True)


def _initial_model(tokenizer: PreTrainedTokenizerFast, settings: TargetSettings) -> LlamaForCausalLM:
    """Llama with seeded weights, float32; the caller's random state is left as it was."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        max_position_embeddings=settings.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    initialize(model, settings.training.seed)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def _write_jsonl(path: Path, conversations: list[ChatExample]) -> None:
    path.write_text("".join(json.dumps(c) + "\n" for c in conversations))


def _read_jsonl(path: Path) -> list[ChatExample]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for other processes of this machine; the kernel frees the lock of one that dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
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
