"""A file of the target's answers: existing answers are kept, missing ones are generated in any order."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    """An engine that generates the target's answers."""

    engine: str  # its name in the file's header

    def generate(
        self,
        prompts: Prompts,
        indices: Sequence[int],
        sampling: Sampling,
        on_answers: Callable[[Mapping[int, list[int]]], None],
    ) -> dict[int, str]:
        """Answer the prompts with the given indices.

        Args:
            prompts: all prompts, also those that need no answer.
            on_answers: called with finished answers by index, as early as possible.

        Returns:
            The reasons why prompts were refused, by index.
        """
        ...


def answer_prompts(
    generator: AnswerGenerator,
    prompts: Prompts,
    sampling: Sampling,
    *,
    output: Path,
    model_fingerprint: str,
    progress: bool = False,
) -> list[list[int]]:
    """Return the answer to each prompt, up to and including the first stop token; empty if it was refused.

    Answers in `output` are kept, and new ones are appended when they are finished, so that an interrupted run
    resumes and ends with the answers that it would have given without the interruption.

    Args:
        output: a JSONL file of a header and one line for each answer.
        model_fingerprint: written into the header.

    Raises:
        UserError: `output` was made with other settings or for other prompts, or is not a file of answers.
    """
    header = {"format": _FORMAT, "engine": generator.engine, "model": model_fingerprint, **sampling.to_json()}
    answers = _read(output, header, prompts)
    missing = [i for i in range(len(prompts)) if i not in answers]
    bar = Progress("generate", len(missing), "answers", shown=progress)
    with _appending(output) as stream, bar:
        if stream.tell() == 0:
            _append(stream, [header])

        def on_answers(finished: Mapping[int, list[int]]) -> None:
            lines = [{"index": i, "prompt": _hash(prompts[i]), "ids": ids} for i, ids in finished.items()]
            _append(stream, lines)
            answers.update(finished)
            bar.update(len(finished))

        refused = generator.generate(prompts, missing, sampling, on_answers) if missing else {}
    if refused:
        reasons = first_reasons([(f"prompt {i}", why) for i, why in sorted(refused.items())])
        counts = f"{len(refused):,} of {len(prompts):,} prompts were refused"
        print(f"generate: {counts}:{reasons}", file=sys.stderr)
    return [answers.get(i, []) for i in range(len(prompts))]


def answers_dataset(prompts: Prompts, answers: Prompts, ids: Sequence[str]) -> Dataset:
    """Join prompts and answers into the columns of tokenized data; the loss mask covers the answers."""
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
    """Read the answers by prompt index, and remove a last line that a killed run left incomplete."""
    if not output.exists():
        return {}
    content = output.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        os.truncate(output, len(complete))
    lines = [_parse(output, number, line) for number, line in enumerate(complete.splitlines(), start=1)]
    if not lines:
        return {}
    found = lines[0]
    changed = sorted(name for name in found.keys() | header.keys() if found.get(name) != header.get(name))
    if changed:
        remedy = f"It was written with another {', '.join(changed)}; delete it or choose another file."
        raise UserError("output", output, remedy)
    answers = {}
    for number, line in enumerate(lines[1:], start=2):
        index = line["index"]
        if index >= len(prompts) or line["prompt"] != _hash(prompts[index]):
            remedy = (
                "This answer is for a prompt that the data does not have; delete the file or choose another."
            )
            raise UserError(f"{output}:{number}", f"prompt {index}", remedy)
        answers[index] = line["ids"]
    return answers


def _parse(output: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError as error:
        remedy = "The line is not JSON; delete the file and run again."
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
