"""The target's answers, in any number of turns, in a file from which an interrupted run resumes."""

import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from data.conversations.reading import first_reasons
from data.conversations.tokenize import SAMPLE_SCHEMA
from data.progress import Progress
from data.sampling import Prompts, Sampling
from eagle31.errors import UserError

_MIN_ANSWER_TOKENS = 2  # fewer have no supervised position
_CHECKSUM = b', "crc32": '

Answers = Sequence[tuple[int, list[int]]]  # the index of what was asked, and the token ids


class AnswerGenerator(Protocol):
    """An engine that generates the target's answers."""

    engine: str  # its name in the file's header

    def converse(
        self,
        first: Mapping[int, Sequence[int]],
        sampling: Sampling,
        on_answers: Callable[[Answers], None],
        next_prompt: Callable[[int, list[int]], Sequence[int] | None],
        seed: Callable[[int], tuple[int, ...]],
    ) -> dict[int, str]:
        """Answer conversations, each of which continues when it is answered.

        Args:
            first: each conversation's first prompt, by index; low indices are begun first.
            on_answers: called with finished answers soon after they are. Those that it gets at a time are
                kept or lost together.
            next_prompt: returns the prompt of a conversation after an answer, or None at its end. An error
                that it raises ends the generation.
            seed: returns what the seed of a conversation's next answer is made of.

        Returns:
            The reasons why a conversation's prompt was refused, by index.
        """
        ...


class Dialogue(Protocol):
    """What the target is asked, one prompt after another."""

    name: str
    turn: int  # of the next prompt

    @property
    def num_turns_left(self) -> int:
        """The number of turns that are not answered yet, if no answer ends the dialogue earlier."""
        ...

    def next_prompt(self) -> Sequence[int] | None:
        """Return the token ids up to the next answer, or None at the end."""
        ...

    def add_answer(self, ids: Sequence[int]) -> None:
        """Continue after an answer; an empty one ends the dialogue."""
        ...


@dataclass(frozen=True)
class AnsweredTurn:
    """What the target has written."""

    turn: int  # 0 for the first of the dialogue
    index: int  # of the dialogue
    prompt: Sequence[int]
    ids: Sequence[int]  # up to and including the first stop token


def answer_dialogues(
    generator: AnswerGenerator,
    dialogues: Sequence[Dialogue],
    sampling: Sampling,
    *,
    output: Path,
    model_fingerprint: str,
    number: int = 0,
    title: str = "generate",
    progress: bool = False,
) -> list[AnsweredTurn]:
    """Answer every turn, in an order that does not depend on when each was answered.

    Args:
        dialogues: those whose prompts are long first, so that one that does not fit is refused early.
        output: a JSONL file of a header and the answers in the order in which they were finished. An
            interrupted run resumes from it, and ends with the answers that it would have given without the
            interruption.
        model_fingerprint: written into the header.
        number: makes the seed of each answer, with the index of its dialogue and its turn.

    Raises:
        UserError: `output` was made with other settings or for other prompts, or is damaged.
    """
    turns: list[AnsweredTurn] = []
    waiting: dict[int, Sequence[int]] = {}

    def ask(index: int) -> Sequence[int] | None:
        prompt = dialogues[index].next_prompt()
        if prompt is not None:
            waiting[index] = prompt
        return prompt

    def continued(index: int, ids: list[int]) -> Sequence[int] | None:
        turns.append(AnsweredTurn(dialogues[index].turn, index, waiting.pop(index), ids))
        dialogues[index].add_answer(ids)
        return ask(index)

    for index in range(len(dialogues)):
        ask(index)
    header = asdict(sampling) | {"stop_token_ids": sorted(sampling.stop_token_ids)}
    header |= {"engine": generator.engine, "model": model_fingerprint, "prompts": _checksum(waiting.values())}
    for index, ids in _read(output, header):
        continued(index, ids)
    if waiting:
        num_left = sum(dialogues[index].num_turns_left for index in waiting)
        with (
            _appending(output, header) as append,
            Progress(title, num_left, "answers", shown=progress) as bar,
        ):

            def on_answers(answers: Answers) -> None:
                append({"answers": answers})
                bar.update(len(answers))

            refused = generator.converse(
                dict(waiting), sampling, on_answers, continued, lambda i: (number, i, dialogues[i].turn)
            )
        if refused:
            shown = first_reasons([(dialogues[i].name, why) for i, why in sorted(refused.items())])
            print(f"{title}: {len(refused):,} of {len(dialogues):,} were refused:{shown}", file=sys.stderr)
    return sorted(turns, key=lambda one: (one.turn, one.index))


class _Prompt:
    """A dialogue of one turn."""

    def __init__(self, name: str, ids: Sequence[int]) -> None:
        self.name, self._ids, self.turn = name, ids, 0

    @property
    def num_turns_left(self) -> int:
        return 1 - self.turn

    def next_prompt(self) -> Sequence[int] | None:
        return None if self.turn else self._ids

    def add_answer(self, ids: Sequence[int]) -> None:
        self.turn = 1


def answer_prompts(
    generator: AnswerGenerator, prompts: Prompts, sampling: Sampling, **settings: Any
) -> list[list[int]]:
    """Return the answer to each prompt; empty if it was refused.

    Args:
        settings: of `answer_dialogues`.
    """
    by_length = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    dialogues = [_Prompt(f"prompt {i}", prompts[i]) for i in by_length]
    answers: list[list[int]] = [[] for _ in prompts]
    for turn in answer_dialogues(generator, dialogues, sampling, **settings):
        answers[by_length[turn.index]] = list(turn.ids)
    return answers


def record_batch(
    samples: Iterable[tuple[str, Sequence[int], Sequence[int]]], max_tokens: int | None = None
) -> pa.RecordBatch:
    """Join (id, prompt, answer) into the columns of tokenized data; the loss mask covers the answers.

    Samples are cut to `max_tokens`; those whose answers have fewer than two tokens are left out.
    """
    columns: dict[str, list[Any]] = {name: [] for name in SAMPLE_SCHEMA.names}
    for id, prompt, answer in samples:
        ids = np.concatenate([np.asarray(prompt, np.int32), np.asarray(answer, np.int32)])[:max_tokens]
        if len(ids) < len(prompt) + _MIN_ANSWER_TOKENS:
            continue
        columns["id"].append(id)
        columns["input_ids"].append(ids)
        columns["loss_mask"].append(np.arange(len(ids)) >= len(prompt))
        columns["num_prompt_tokens"].append(len(prompt))
    return pa.RecordBatch.from_pydict(columns, schema=SAMPLE_SCHEMA)


def _checksum(prompts: Iterable[Sequence[int]]) -> int:
    checksum = 0
    for prompt in prompts:
        checksum = zlib.crc32(np.asarray([len(prompt), *prompt], dtype="<i8").tobytes(), checksum)
    return checksum


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record).encode()[:-1]
    return text + _CHECKSUM + b"%d}\n" % zlib.crc32(text)


def _read(path: Path, header: dict[str, Any]) -> Iterator[tuple[int, list[int]]]:
    """Yield the answers of a file, and remove a last line that a killed run left incomplete."""
    if not path.exists():
        return
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        os.truncate(path, len(complete))
    for number, line in enumerate(complete.splitlines(), start=1):
        text, _, checksum = line.rpartition(_CHECKSUM)
        if checksum != b"%d}" % zlib.crc32(text):
            remedy = "The line is damaged; delete it and those below it, and run the same command again."
            raise UserError(f"{path}:{number}", line[:40], remedy)
        record = json.loads(text + b"}")
        if number > 1:
            yield from record["answers"]
        elif changed := sorted(name for name in header if record.get(name) != header[name]):
            remedy = f"It was written with another {', '.join(changed)}; delete it or choose another file."
            raise UserError("output", path, remedy)


@contextmanager
def _appending(path: Path, header: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Open the file for new lines, each of which is on disk when the yielded function returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as stream:

        def append(record: dict[str, Any]) -> None:
            stream.write(_line(record))
            stream.flush()
            os.fsync(stream.fileno())

        if stream.tell() == 0:
            append(header)
        yield append
