"""The target writes the answers itself: what it would serve, to train on and to replay."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel

from eagle31.errors import UserError

_FORMAT = 1
_FEATURES = Features(
    {
        "id": Value("string"),
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("bool")),
        "num_prompt_tokens": Value("int64"),
    }
)


def generate_answers(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    temperature: float,
    seed: int,
    batch_size: int,
    output: Path,
    model_fingerprint: str,
    progress: bool = False,
) -> list[list[int]]:
    """The answer to each prompt, up to and with the first end token.

    Answers already in `output` are kept, and new ones appended as they are finished, so that a run that was
    stopped goes on, with the answers that it would have given. Nothing of the model's own generation settings
    is used: temperature 0 is greedy, any other samples from the whole distribution.

    Args:
        output: JSONL, a header and one line for each answer.
        model_fingerprint: kept in the header.

    Raises:
        UserError: `output` was made with other settings or other prompts, or is not such a file.
    """
    header = {
        "format": _FORMAT,
        "model": model_fingerprint,
        "max_new_tokens": max_new_tokens,
        "eos_token_ids": sorted(eos_token_ids),
        "temperature": temperature,
        "seed": seed,
    }
    answers = _read_answers(output, header, prompts)
    config = _generation_config(max_new_tokens, eos_token_ids, temperature)
    missing = len(prompts) - len(answers)
    shown = progress and sys.stderr.isatty()
    with _appending(output) as stream, tqdm(total=missing, desc="generate", disable=not shown) as bar:
        if stream.tell() == 0:
            _append(stream, [header])
        for batch in _batches_by_length(prompts, batch_size):
            unfinished = [i for i in batch if i not in answers]
            if not unfinished:
                continue
            # The whole batch again: what is drawn for one prompt depends on the others beside it.
            written = _generate(model, [prompts[i] for i in batch], config, seed=(seed, batch[0]))
            by_index = dict(zip(batch, written, strict=True))
            lines = [{"index": i, "prompt": _hash(prompts[i]), "ids": by_index[i]} for i in unfinished]
            _append(stream, lines)
            answers |= {i: by_index[i] for i in unfinished}
            bar.update(len(unfinished))
    return [answers[i] for i in range(len(prompts))]


def answers_dataset(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], ids: Sequence[str]
) -> Dataset:
    """Prompts followed by answers, in the columns of tokenised data; the mask covers the answers."""
    pairs = list(zip(prompts, answers, strict=True))
    columns = {
        "id": list(ids),
        "input_ids": [[*prompt, *answer] for prompt, answer in pairs],
        "loss_mask": [[False] * len(prompt) + [True] * len(answer) for prompt, answer in pairs],
        "num_prompt_tokens": [len(prompt) for prompt in prompts],
    }
    return Dataset.from_dict(columns, features=_FEATURES)


def _generate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], config: GenerationConfig, seed: Sequence[int]
) -> list[list[int]]:
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    attention_mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    generate: Any = model.generate  # typed as a tensor, like any attribute of a module
    with _only(model, config), _seeded(seed, model.device):
        output = generate(
            input_ids.to(model.device),
            attention_mask=attention_mask.to(model.device),
            generation_config=config,
        )
    return [_cut(row[width:].tolist(), config.eos_token_id or []) for row in output]


def _generation_config(
    max_new_tokens: int, eos_token_ids: Sequence[int], temperature: float
) -> GenerationConfig:
    # transformers takes top_k=50 where nothing is said.
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    )
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=eos_token_ids[0] if eos_token_ids else 0,
        **sampling,
    )


def _cut(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Up to and with the first end token."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos_token_ids), len(tokens))
    return tokens[:end]


@contextmanager
def _only(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Without this, `generate` fills what `config` leaves open from the model's generation_config.json."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _seeded(seed: Sequence[int], device: torch.device) -> Iterator[None]:
    """`generate` draws from the global generator; it is put back afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        yield


def _batches_by_length(prompts: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    """Longest first, so that what does not fit into memory fails at once."""
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def _hash(ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()[:16]


def _read_answers(
    output: Path, header: dict[str, Any], prompts: Sequence[Sequence[int]]
) -> dict[int, list[int]]:
    """The answers in the file by prompt index; a last line that was cut off by a kill is removed from it."""
    if not output.exists():
        return {}
    content = output.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(output, len(whole))
    lines = [_parse(output, number, line) for number, line in enumerate(whole.splitlines(), start=1)]
    if not lines:
        return {}
    found = lines[0]
    changed = sorted(name for name in found.keys() | header.keys() if found.get(name) != header.get(name))
    if changed:
        remedy = f"Was written with another {', '.join(changed)}; delete it or choose another file."
        raise UserError("output", output, remedy)
    answers = {}
    for number, line in enumerate(lines[1:], start=2):
        index = line["index"]
        if index >= len(prompts) or line["prompt"] != _hash(prompts[index]):
            remedy = "Answers another prompt than the data has; delete the file or choose another."
            raise UserError(f"{output}:{number}", f"prompt {index}", remedy)
        answers[index] = line["ids"]
    return answers


def _parse(output: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError as error:
        remedy = "Is no JSON; delete the file and run again."
        raise UserError(f"{output}:{number}", line[:40], remedy) from error


@contextmanager
def _appending(output: Path) -> Iterator[Any]:
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", encoding="utf-8") as stream:
        yield stream


def _append(stream: Any, lines: Sequence[dict[str, Any]]) -> None:
    stream.writelines(json.dumps(line) + "\n" for line in lines)
    stream.flush()
    os.fsync(stream.fileno())
