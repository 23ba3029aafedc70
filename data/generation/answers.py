"""The target's answers, in any number of turns, in a file from which an interrupted run resumes."""

import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from data.conversations.reading import first_reasons
from data.conversations.tokenize import SAMPLE_SCHEMA
from data.progress import Progress
from data.sampling import Prompts, Sampling
from eagle31.errors import UserError

MIN_ANSWER_TOKENS = 2  # fewer have no supervised position
_CHECKSUM = b', "crc32": '
_MOST_DIALOGUES = 1 << 20  # of a block; makes indices of all blocks

Answers = Sequence[tuple[int, list[int]]]  # the index of what was asked, and the token ids


@dataclass(frozen=True)
class Asked:
    """A prompt of a conversation."""

    index: int
    prompt: Sequence[int]
    seed: tuple[int, ...]  # what the seed of its answer is made of


class AnswerGenerator(Protocol):
    """An engine that generates the target's answers."""

    engine: str  # its name in the file's header

    def converse(
        self,
        asked: Iterator[Asked],
        sampling: Sampling,
        answered: Callable[[Answers], list[Asked]],
        refused: Callable[[int, str], None],
    ) -> None:
        """Answer conversations, each of which continues when it is answered.

        No two of the functions run at the same time. An error that one raises ends the generation.

        Args:
            asked: each conversation's first prompt, taken when there is room for it; low indices come first.
            answered: takes finished answers, and returns the prompts that follow. Those that it gets at a
                time are kept or lost together.
            refused: takes the index of a conversation whose prompt was refused, and the reason.
        """
        ...


class Dialogue(Protocol):
    """What the target is asked, one prompt after another."""

    name: str
    turn: int  # of the next prompt

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


class Block:
    """Dialogues whose answers are in one file.

    Args:
        dialogues: those whose prompts are long first, so that one that does not fit is refused early.
        output: a JSONL file of a header and the answers in the order in which they were finished.
        number: makes the seed of each answer, with the index of its dialogue and its turn.
    """

    def __init__(self, dialogues: Sequence[Dialogue], output: Path, number: int = 0) -> None:
        self.dialogues, self.output, self.number = dialogues, output, number
        self.turns: list[AnsweredTurn] = []  # in an order that does not depend on when each was answered
        self.num_open = len(dialogues)
        self._waiting: dict[int, Sequence[int]] = {}

    def asked(self, header: dict[str, Any], skipped: Callable[[int], None]) -> Iterator[Asked]:
        """Yield the prompt of each dialogue that the answers in the file leave open, and write the header.

        Args:
            skipped: called with the number of answers in the file.
        """
        recorded: dict[int, list[tuple[list[int], int]]] = {}
        for index, ids, prompt in _read(self.output, header):
            recorded.setdefault(index, []).append((ids, prompt))
        skipped(sum(map(len, recorded.values())))
        if not self.output.exists() or not self.output.stat().st_size:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self._append(header)
        for index in range(len(self.dialogues)):
            following = self._ask(index)
            for ids, prompt in recorded.get(index, []):
                if following is None or _checksum(following.prompt) != prompt:
                    name = self.dialogues[index].name
                    remedy = f"Its answers to {name} belong to other prompts than the template writes now; "
                    raise UserError("output", self.output, remedy + "delete it.")
                following = self._answer(index, ids)
            if following is not None:
                yield following

    def answered(self, answers: Answers) -> list[Asked]:
        """Write answers into the file, and return the prompts that follow."""
        self._append({"answers": [(*one, _checksum(self._waiting[one[0]])) for one in answers]})
        following = [self._answer(index, ids) for index, ids in answers]
        return [one for one in following if one is not None]

    def _ask(self, index: int) -> Asked | None:
        prompt = self.dialogues[index].next_prompt()
        if prompt is None:
            self.num_open -= 1
            return None
        self._waiting[index] = prompt
        return Asked(index, prompt, (self.number, index, self.dialogues[index].turn))

    def _answer(self, index: int, ids: list[int]) -> Asked | None:
        dialogue = self.dialogues[index]
        self.turns.append(AnsweredTurn(dialogue.turn, index, self._waiting.pop(index), ids))
        dialogue.add_answer(ids)
        return self._ask(index)

    def _append(self, record: dict[str, Any]) -> None:
        """Write a line, which is on disk when this returns."""
        with self.output.open("ab") as stream:
            stream.write(_line(record))
            stream.flush()
            os.fsync(stream.fileno())


def answer_dialogues(
    generator: AnswerGenerator,
    blocks: Iterable[Block],
    sampling: Sampling,
    *,
    model_fingerprint: str,
    finished: Callable[[Block], None],
    title: str = "generate",
    total: int | None = None,
    progress: bool = False,
) -> None:
    """Answer every turn. The next block begins before the last dialogues of the one before it have ended.

    An interrupted run resumes from the files of its blocks, and ends with the answers that it would have
    given without the interruption.

    Args:
        blocks: taken when there is room for another dialogue.
        model_fingerprint: written into the header of the files.
        finished: called with each block that has all answers.
        total: the number of answers, if it is known.

    Raises:
        UserError: a file was made with other settings or for other prompts, or is damaged.
    """
    header = asdict(sampling) | {"stop_token_ids": sorted(sampling.stop_token_ids)}
    header |= {"engine": generator.engine, "model": model_fingerprint}
    opened: dict[int, Block] = {}
    refusals: list[tuple[str, str]] = []
    num_dialogues = num_tokens = 0
    started = time.monotonic()
    complete: set[int] = set()  # blocks that have asked all dialogues

    def finish(number: int) -> None:
        if number in complete and not opened[number].num_open:
            block = opened.pop(number)
            block.turns.sort(key=lambda one: (one.turn, one.index))
            finished(block)

    def asked() -> Iterator[Asked]:
        nonlocal num_dialogues
        for block in blocks:
            num_dialogues += len(block.dialogues)
            opened[block.number] = block
            for one in block.asked(header, bar.skip):
                yield replace(one, index=block.number * _MOST_DIALOGUES + one.index)
            complete.add(block.number)
            finish(block.number)

    def answered(answers: Answers) -> list[Asked]:
        nonlocal num_tokens
        following: list[Asked] = []
        by_block: dict[int, list[tuple[int, list[int]]]] = {}
        for index, ids in answers:
            number, index = divmod(index, _MOST_DIALOGUES)
            by_block.setdefault(number, []).append((index, ids))
        for number, some in by_block.items():
            for one in opened[number].answered(some):
                following.append(replace(one, index=number * _MOST_DIALOGUES + one.index))
            finish(number)
        num_tokens += sum(len(ids) for _, ids in answers)
        bar.update(len(answers))
        return following

    def refused(index: int, reason: str) -> None:
        number, index = divmod(index, _MOST_DIALOGUES)
        refusals.append((opened[number].dialogues[index].name, reason))
        opened[number].num_open -= 1
        finish(number)

    with Progress(title, total, "answers", shown=progress) as bar:
        bar.note(lambda: f"{num_tokens / (time.monotonic() - started):,.0f} tokens/s")
        generator.converse(asked(), sampling, answered, refused)
        bar.complete()  # conversations may end early
    if refusals:
        shown = first_reasons(sorted(refusals))
        print(f"{title}: {len(refusals):,} of {num_dialogues:,} were refused:{shown}", file=sys.stderr)


class _Prompt:
    """A dialogue of one turn."""

    def __init__(self, name: str, ids: Sequence[int]) -> None:
        self.name, self._ids, self.turn = name, ids, 0

    def next_prompt(self) -> Sequence[int] | None:
        return None if self.turn else self._ids

    def add_answer(self, ids: Sequence[int]) -> None:
        self.turn = 1


def answer_prompts(
    generator: AnswerGenerator, prompts: Prompts, sampling: Sampling, *, output: Path, **settings: Any
) -> list[list[int]]:
    """Return the answer to each prompt; empty if it was refused.

    Args:
        output: of their block.
        settings: of `answer_dialogues`.
    """
    by_length = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    block = Block([_Prompt(f"prompt {i}", prompts[i]) for i in by_length], output)
    answers: list[list[int]] = [[] for _ in prompts]

    def finished(block: Block) -> None:
        for turn in block.turns:
            answers[by_length[turn.index]] = list(turn.ids)

    answer_dialogues(generator, [block], sampling, finished=finished, total=len(prompts), **settings)
    return answers


def record_batch(
    samples: Iterable[tuple[str, Sequence[tuple[Sequence[int], Sequence[int]]]]],
) -> pa.RecordBatch:
    """Join (id, turns) into the columns of tokenized data; the loss mask covers the answers.

    Args:
        samples: their turns are pairs of a prompt and an answer of at least two tokens. A prompt begins with
            the prompt and the answer before it.
    """
    columns: dict[str, list[Any]] = {name: [] for name in SAMPLE_SCHEMA.names}
    for id, turns in samples:
        prompt, answer = turns[-1]
        ids = np.concatenate([np.asarray(prompt, np.int32), np.asarray(answer, np.int32)])
        mask = np.zeros(len(ids), bool)
        for prompt, answer in turns:
            mask[len(prompt) : len(prompt) + len(answer)] = True
        columns["id"].append(id)
        columns["input_ids"].append(ids)
        columns["loss_mask"].append(mask)
        columns["num_prompt_tokens"].append(len(turns[0][0]))
    return pa.RecordBatch.from_pydict(columns, schema=SAMPLE_SCHEMA)


def _checksum(prompt: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(prompt, "<i4").tobytes())


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record).encode()[:-1]
    return text + _CHECKSUM + b"%d}\n" % zlib.crc32(text)


def _read(path: Path, header: dict[str, Any]) -> Iterator[tuple[int, list[int], int]]:
    """Yield (index, answer, checksum of its prompt), and remove a line that a killed run left incomplete."""
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
