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

from data.conversations.reading import first_reasons
from data.progress import Progress
from data.sampling import Prompts, Sampling
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
    file = AnswerFile(output, generator.engine, model_fingerprint, sampling)
    answers: dict[int, list[int]] = {}
    for number, line in file.read():
        index = line["index"]
        if index >= len(prompts):
            raise file.of_another_prompt(number, f"prompt {index}")
        file.check_prompt(number, line, prompts[index], f"prompt {index}")
        answers[index] = line["ids"]
    missing = [i for i in range(len(prompts)) if i not in answers]
    bar = Progress("generate", len(missing), "answers", shown=progress)
    with file.appending() as append, bar:

        def on_answers(finished: Mapping[int, list[int]]) -> None:
            append([answer_line(i, prompts[i], ids) for i, ids in finished.items()])
            answers.update(finished)
            bar.update(len(finished))

        refused = generator.generate(prompts, missing, sampling, on_answers) if missing else {}
    report_refused({f"prompt {i}": why for i, why in sorted(refused.items())}, f"{len(prompts):,} prompts")
    return [answers.get(i, []) for i in range(len(prompts))]


def report_refused(reasons: Mapping[str, str], total: str) -> None:
    """Print how many prompts were refused, of what in all, and why."""
    if reasons:
        shown = first_reasons(list(reasons.items()))
        print(f"generate: {len(reasons):,} of {total} were refused:{shown}", file=sys.stderr)


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


def answer_line(index: int, prompt: Sequence[int], ids: Sequence[int], **more: Any) -> dict[str, Any]:
    """Return the line of an answer, with hashes of its prompt and of itself."""
    return {"index": index, **more, "prompt": _hash(prompt), "answer": _hash(ids), "ids": list(ids)}


class AnswerFile:
    """A JSONL file of a header and one line for each answer, in the order in which they were finished.

    Args:
        engine, model_fingerprint, sampling: what the answers depend on, apart from their prompts.
    """

    def __init__(self, path: Path, engine: str, model_fingerprint: str, sampling: Sampling) -> None:
        self.path = path
        self._header = {
            "format": _FORMAT,
            "engine": engine,
            "model": model_fingerprint,
            **sampling.to_json(),
        }

    def read(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the lines with their numbers, and remove a last line that a killed run left incomplete.

        Raises:
            UserError: the file was made with other settings, or is not a file of answers.
        """
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        if len(complete) < len(content):
            os.truncate(self.path, len(complete))
        numbered = enumerate(complete.splitlines(), start=1)
        lines = [(number, _parse(self.path, number, line)) for number, line in numbered]
        if not lines:
            return []
        (_, found), header = lines[0], self._header
        changed = sorted(name for name in found.keys() | header.keys() if found.get(name) != header.get(name))
        if changed:
            remedy = f"It was written with another {', '.join(changed)}; delete it or choose another file."
            raise UserError("output", self.path, remedy)
        return lines[1:]

    def check_prompt(self, number: int, line: Mapping[str, Any], prompt: Sequence[int], name: str) -> None:
        """Raise UserError if a line answers another prompt than this one."""
        if line.get("prompt") != _hash(prompt):
            raise self.of_another_prompt(number, name)

    def of_another_prompt(self, number: int, name: str) -> UserError:
        remedy = "This answer is for a prompt that the data does not have; delete the file or choose another."
        return UserError(f"{self.path}:{number}", name, remedy)

    @contextmanager
    def appending(self) -> Iterator[Callable[[Sequence[dict[str, Any]]], None]]:
        """Open the file for new lines, which are on disk when the yielded function returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as stream:

            def append(lines: Sequence[dict[str, Any]]) -> None:
                stream.writelines(json.dumps(line) + "\n" for line in lines)
                stream.flush()
                os.fsync(stream.fileno())

            if stream.tell() == 0:
                append([self._header])
            yield append


def _hash(ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()[:16]


def _parse(output: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        remedy = "The line is not JSON; delete the file and run again."
        raise UserError(f"{output}:{number}", line[:40], remedy) from error
    if not isinstance(content, dict) or (number > 1 and not _is_answer(content)):
        raise UserError(f"{output}:{number}", line[:40], "It is no answer; delete the file and run again.")
    if number > 1 and content.get("answer") != _hash(content["ids"]):
        remedy = "The answer is damaged; delete this line and those below it, and run the same command again."
        raise UserError(f"{output}:{number}", line[:40], remedy)
    return content


def _is_answer(line: dict[str, Any]) -> bool:
    ids, numbers = line.get("ids"), (line.get("index"), line.get("turn", 0))
    return isinstance(ids, list) and all(type(one) is int and 0 <= one < 2**31 for one in (*numbers, *ids))
