"""Answering conversations without waiting for each other: each continues as soon as it is answered."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from data.generation.answers import AnswerFile, answer_line, report_refused
from data.generation.dialogue import AnsweredTurn, Dialogue
from data.generation.regenerate import AnswerTurns, Check
from data.progress import Progress
from data.sampling import Sampling


@runtime_checkable
class ContinuousGenerator(Protocol):
    """An engine whose answer to a prompt does not depend on the other prompts."""

    engine: str

    def converse(
        self,
        first: Mapping[int, Sequence[int]],
        sampling: Sampling,
        on_answers: Callable[[Sequence[tuple[int, list[int]]]], None],
        next_prompt: Callable[[int, list[int]], Sequence[int] | None],
        seed: Callable[[int], tuple[int, ...]],
    ) -> dict[int, str]:
        """See `VllmGenerator.converse`."""
        ...


def continuously(
    generator: ContinuousGenerator, sampling: Sampling, model_fingerprint: str, *, progress: bool = False
) -> AnswerTurns:
    """Return what answers the turns for `regenerate`."""

    def answer_turns(dialogues: Sequence[Dialogue], path: Path, check: Check) -> Iterator[AnsweredTurn]:
        turns = answer_continuously(
            generator,
            dialogues,
            sampling,
            path=path,
            model_fingerprint=model_fingerprint,
            check=check,
            progress=progress,
        )
        yield from turns

    return answer_turns


def answer_continuously(
    generator: ContinuousGenerator,
    dialogues: Sequence[Dialogue],
    sampling: Sampling,
    *,
    path: Path,
    model_fingerprint: str,
    check: Check,
    progress: bool = False,
) -> list[AnsweredTurn]:
    """Answer every turn of a block of conversations.

    Args:
        path: of the block's samples, `block-NUMBER.arrow`. The answers are kept next to it, in
            `block-NUMBER-turns.jsonl`, from which an interrupted run resumes. The number,
            the conversation and the turn make the seed of each answer.
        model_fingerprint: written into the file of answers.
        check: called after conversations were refused by the template; may raise UserError.

    Returns:
        The turns in an order that does not depend on when they were answered.

    Raises:
        UserError: the file of answers was made with other settings or for other conversations; or that of
            `check`.
    """
    block = int(path.stem.rpartition("-")[2])
    output = path.with_name(f"{path.stem}-turns.jsonl")
    turns: list[AnsweredTurn] = []
    file = AnswerFile(output, generator.engine, model_fingerprint, sampling)
    kept = {(line["index"], line["turn"]): (number, line) for number, line in file.read()}
    prompts: dict[int, Sequence[int]] = {}
    num_turns = 0
    for index, dialogue in enumerate(dialogues):
        while (prompt := dialogue.next_prompt()) is not None:
            found = kept.pop((index, dialogue.turn), None)
            if found is None:
                prompts[index] = prompt
                num_turns += dialogue.num_turns_left
                break
            number, line = found
            file.check_prompt(number, line, prompt, f"turn {dialogue.turn} of {dialogue.conversation.id}")
            turns.append(dialogue.answered(index, line["ids"]))
    for number, line in kept.values():
        raise file.of_another_prompt(number, f"turn {line['turn']} of conversation {line['index']}")
    check()

    def next_prompt(index: int, ids: list[int]) -> Sequence[int] | None:
        dialogue = dialogues[index]
        turns.append(dialogue.answered(index, ids))
        prompt = dialogue.next_prompt()
        if dialogue.refusal is not None:
            check()
        return prompt

    with file.appending() as append, Progress("regenerate", num_turns, "turns", shown=progress) as bar:
        written = len(turns)

        def on_answers(answers: Sequence[tuple[int, list[int]]]) -> None:
            nonlocal written
            new = turns[written : written + len(answers)]
            append([answer_line(one.index, one.prompt, one.ids, turn=one.turn) for one in new])
            written += len(new)
            bar.update(len(answers))

        def seed(index: int) -> tuple[int, ...]:
            return block, index, dialogues[index].turn

        refused = {}
        if prompts:
            refused = generator.converse(prompts, sampling, on_answers, next_prompt, seed)
    for index in refused:
        dialogues[index].add_answer([])
    named = {f"conversation {dialogues[index].conversation.id}": why for index, why in refused.items()}
    report_refused(named, f"{len(dialogues):,} conversations")
    return sorted(turns, key=lambda one: (one.turn, one.index))
