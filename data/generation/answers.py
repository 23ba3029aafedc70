"""The target's answers in a file: what is there is kept, what is missing is written, in whatever order."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from datasets import Dataset, Features, List, Value

from data.progress import Progress
from data.sampling import Prompts, Sampling
from data.text.sources import first_reasons
from eagle31.errors import UserError

_FORMAT = 2


_FEATURES = Features(
    {
        "id": Value("string"),
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("bool")),
        "num_prompt_tokens": Value("int64"),
    }
)


class AnswerGenerator(Protocol):
    """Runs the target."""

    engine: str  # of the header

    def write(
        self,
        prompts: Prompts,
        missing: Sequence[int],
        sampling: Sampling,
        done: Callable[[Mapping[int, list[int]]], None],
    ) -> dict[int, str]:
        """Answers the prompts of these indices.

        Args:
            prompts: all of them, whichever are missing.
            done: takes finished answers by index, as early as can be.

        Returns:
            Why some have no answer, by index.
        """
        ...


def answer_prompts(
    writer: AnswerGenerator,
    prompts: Prompts,
    sampling: Sampling,
    *,
    output: Path,
    model_fingerprint: str,
    progress: bool = False,
) -> list[list[int]]:
    """The answer to each prompt, up to and with the first stop token; empty where the writer has none.

    Answers already in `output` are kept, and new ones appended as they are finished, so that a run that was
    stopped goes on, with the answers that it would have given.

    Args:
        output: JSONL, a header and one line for each answer.
        model_fingerprint: kept in the header.

    Raises:
        UserError: `output` was made with other settings or other prompts, or is not such a file.
    """
    header = {"format": _FORMAT, "engine": writer.engine, "model": model_fingerprint, **asdict(sampling)}
    header["stop_token_ids"] = sorted(sampling.stop_token_ids)
    answers = _read(output, header, prompts)
    missing = [i for i in range(len(prompts)) if i not in answers]
    bar = Progress("generate", len(missing), "answers", shown=progress)
    with _appending(output) as stream, bar:
        if stream.tell() == 0:
            _append(stream, [header])

        def done(written: Mapping[int, list[int]]) -> None:
            lines = [{"index": i, "prompt": _hash(prompts[i]), "ids": ids} for i, ids in written.items()]
            _append(stream, lines)
            answers.update(written)
            bar.update(len(written))

        refused = writer.write(prompts, missing, sampling, done) if missing else {}
    if refused:
        reasons = first_reasons([(f"prompt {i}", why) for i, why in sorted(refused.items())])
        print(
            f"generate: {len(refused):,} of {len(prompts):,} prompts are refused:{reasons}", file=sys.stderr
        )
    return [answers.get(i, []) for i in range(len(prompts))]


def answers_dataset(prompts: Prompts, answers: Prompts, ids: Sequence[str]) -> Dataset:
    """Prompts followed by answers, in the columns of tokenised data; the mask covers the answers."""
    pairs = list(zip(prompts, answers, strict=True))
    columns = {
        "id": list(ids),
        "input_ids": [[*prompt, *answer] for prompt, answer in pairs],
        "loss_mask": [[False] * len(prompt) + [True] * len(answer) for prompt, answer in pairs],
        "num_prompt_tokens": [len(prompt) for prompt in prompts],
    }
    return Dataset.from_dict(columns, features=_FEATURES)


def _hash(ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()[:16]


def _read(output: Path, header: dict[str, Any], prompts: Prompts) -> dict[int, list[int]]:
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
