"""The target's answers, in any number of turns, in a file from which an interrupted run resumes."""

import json
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np

from data.capture.dispatch import Refused
from data.conversations.masks import RenderedConversation
from data.conversations.reading import first_reasons
from data.progress import Progress
from data.sampling import Prompts, Sampling
from eagle31.errors import UserError

MIN_ANSWER_TOKENS = 2  # fewer have no supervised position
_CHECKSUM = b', "crc32": '
_RENDERING_SECONDS = 0.05


@dataclass(frozen=True, eq=False)
class Turn:
    """A prompt of a dialogue, and the target's answer once that is there."""

    block: "Block"
    index: int  # of the dialogue in its block
    number: int  # 0 for the first of the dialogue
    prompt: Sequence[int]
    ids: Sequence[int] = ()  # up to and including the first stop token

    @property
    def seed(self) -> tuple[int, ...]:
        """What the seed of the answer is made of."""
        return self.block.number, self.index, self.number


class AnswerGenerator(Protocol):
    """An engine that generates the target's answers.

    Dialogues of a block whose indices follow each other make a group of at most `group_size`, which is
    answered turn by turn.
    """

    engine: str  # its name in the file's header
    group_size: int
    num_groups: int  # the most under way

    def submit(self, group: Sequence[Turn], sampling: Sampling) -> Future[list[list[int]]]:
        """Have the prompts of a group answered; Refused where one never will be."""
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


class Block:
    """Dialogues whose answers are in one file.

    Args:
        dialogues: those whose prompts are long first, so that one that does not fit is refused early.
        output: a JSONL file of a header and the answers in the order in which they were finished.
        number: makes the seed of each answer, with the index of its dialogue and its turn.
    """

    def __init__(self, dialogues: Sequence[Dialogue], output: Path, number: int = 0) -> None:
        self.dialogues, self.output, self.number = dialogues, output, number
        self.turns: list[Turn] = []  # with answers; at the end sorted
        self.num_open = len(dialogues)
        self.is_asked = False  # whether every dialogue has begun

    def asked(self, header: dict[str, Any], skipped: Callable[[int], None]) -> Iterator[Turn]:
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
                following = self._answer(replace(following, ids=ids))
            if following is not None:
                yield following
        self.is_asked = True

    def answered(self, turns: Sequence[Turn]) -> list[Turn]:
        """Write answers into the file, and return the prompts that follow."""
        self._append({"answers": [(one.index, one.ids, _checksum(one.prompt)) for one in turns]})
        return [one for one in map(self._answer, turns) if one is not None]

    def _ask(self, index: int) -> Turn | None:
        dialogue = self.dialogues[index]
        prompt = dialogue.next_prompt()
        if prompt is None:
            self.num_open -= 1
            return None
        return Turn(self, index, dialogue.turn, prompt)

    def _answer(self, turn: Turn) -> Turn | None:
        self.turns.append(turn)
        self.dialogues[turn.index].add_answer(turn.ids)
        return self._ask(turn.index)

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
    refusals: list[tuple[str, str]] = []
    num_dialogues = num_tokens = 0
    started = time.monotonic()

    def finish(block: Block) -> None:
        if block.is_asked and not block.num_open:
            block.turns.sort(key=lambda one: (one.number, one.index))
            finished(block)

    def asked() -> Iterator[Turn]:
        nonlocal num_dialogues
        for block in blocks:
            num_dialogues += len(block.dialogues)
            yield from block.asked(header, bar.skip)
            finish(block)

    def answered(turns: Sequence[Turn]) -> list[Turn]:
        nonlocal num_tokens
        following: list[Turn] = []
        for block in dict.fromkeys(one.block for one in turns):
            following += block.answered([one for one in turns if one.block is block])
            finish(block)
        num_tokens += sum(len(one.ids) for one in turns)
        bar.update(len(turns))
        return following

    def refused(turn: Turn, reason: str) -> None:
        refusals.append((turn.block.dialogues[turn.index].name, reason))
        turn.block.num_open -= 1
        finish(turn.block)

    with Progress(title, total, "answers", shown=progress) as bar:
        bar.note(lambda: f"{num_tokens / (time.monotonic() - started):,.0f} tokens/s")
        _converse(generator, sampling, asked(), answered, refused)
        bar.complete()  # conversations may end early
    if refusals:
        shown = first_reasons(sorted(refusals))
        print(f"{title}: {len(refusals):,} of {num_dialogues:,} were refused:{shown}", file=sys.stderr)


def _converse(
    generator: AnswerGenerator,
    sampling: Sampling,
    asked: Iterator[Turn],
    answered: Callable[[Sequence[Turn]], list[Turn]],
    refused: Callable[[Turn, str], None],
) -> None:
    """Have dialogues answered, each of which continues when it is answered.

    Args:
        asked: the first prompts, taken when there is room.
        answered: takes finished turns, and returns the prompts that follow. Those that it gets at a time are
            kept or lost together.
        refused: takes a turn whose prompt was refused, and the reason.
    """

    def grouped(turns: Iterable[Turn]) -> Iterator[list[Turn]]:
        groups = groupby(turns, lambda one: (one.block.number, one.index // generator.group_size))
        return (list(group) for _, group in groups)

    first, continued = grouped(asked), deque[list[Turn]]()
    running: dict[Future[list[list[int]]], list[Turn]] = {}
    finished: SimpleQueue[Future[list[list[int]]]] = SimpleQueue()
    while True:
        # Templates take milliseconds, and an answer does not wait long for its next prompt.
        until = time.monotonic() + _RENDERING_SECONDS
        while len(running) < generator.num_groups and (finished.empty() or time.monotonic() < until):
            group = continued.popleft() if continued else next(first, None)
            if group is None:
                break
            answer = generator.submit(group, sampling)
            running[answer] = group
            answer.add_done_callback(finished.put)
        if not running:
            return
        done = [finished.get()]
        while not finished.empty():
            done.append(finished.get())
        turns: list[Turn] = []
        for answer in done:
            group = running.pop(answer)
            try:
                turns += [replace(one, ids=ids) for one, ids in zip(group, answer.result(), strict=True)]
            except Refused as error:
                for one in group:
                    refused(one, str(error))
        continued.extend(grouped(answered(turns)))


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


def joined(turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> RenderedConversation:
    """Return the sample of a dialogue, whose loss mask covers the answers.

    Args:
        turns: pairs of a prompt and an answer. A prompt begins with the prompt and the answer before it.
    """
    ids = [token for part in turns[-1] for token in part]
    mask = [False] * len(ids)
    for prompt, answer in turns:
        mask[len(prompt) : len(prompt) + len(answer)] = [True] * len(answer)
    return RenderedConversation(ids, mask)


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
