"""Building the embedded target once per machine, and finding it in the cache."""

import hashlib
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.cache import build_once
from data.embedded.corpus import Corpus, python_files, read_corpus, standard_library
from data.embedded.tokenizer import save_tokenizer, train_tokenizer
from data.embedded.training import TrainingSettings, encode, initialize, pretrain

FORMAT_VERSION = 3  # raise it for changes of corpus, tokenizer or training that do not change the settings


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

    model: Path  # for `from_pretrained`: weights, tokenizer and chat template
    train: Path  # JSONL with "id" and "messages"
    held_out: Path  # the same for functions whose bodies are not in the training data


def ensure_embedded_target(
    cache_dir: Path,
    *,
    progress: bool = True,
    source: Path | None = None,
    settings: TargetSettings | None = None,
) -> EmbeddedTarget:
    """Return the embedded target in `cache_dir`; train it first if needed (about two minutes on two cores).

    Args:
        cache_dir: has one directory per fingerprint of Python's version, its library and the settings.
        progress: a bar on stderr when that is a terminal.
        source: a directory of Python modules; by default the running Python's standard library.
        settings: the shape and training; None uses the defaults.

    Raises:
        UserError: `source` has too few documented functions.
    """
    source, settings = source or standard_library(), settings or TargetSettings()
    finished = cache_dir / fingerprint(source, settings)
    build_once(finished, lambda partial: _build(partial, read_corpus(source), settings, progress))
    return EmbeddedTarget(finished / "model", finished / "train.jsonl", finished / "held_out.jsonl")


def fingerprint(source: Path, settings: TargetSettings) -> str:
    """Return the key of what the target depends on; the modules' names and sizes represent their text."""
    modules = [(p.relative_to(source).as_posix(), p.stat().st_size) for p in python_files(source)]
    key = json.dumps([FORMAT_VERSION, sys.version, modules, asdict(settings)])
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _build(directory: Path, corpus: Corpus, settings: TargetSettings, progress: bool) -> None:
    """Write the corpus, the tokenizer and the trained model."""
    for name, examples in (("train", corpus.train), ("held_out", corpus.held_out)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in examples))
    path = directory / "model"
    path.mkdir()
    save_tokenizer(train_tokenizer(corpus.train, settings.vocab_size, settings.max_positions), path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays
        model = LlamaForCausalLM(_config(settings, tokenizer))
    initialize(model, seed=0)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    documents = encode(tokenizer, corpus.train, settings.training.max_document_tokens)
    pretrain(model, documents, settings.training, progress)
    model.save_pretrained(path)
    for weights in path.glob("*.safetensors"):  # safetensors lets the owner alone read them
        weights.chmod((path / "config.json").stat().st_mode)


def _config(settings: TargetSettings, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
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
