"""On-policy training data: the target answers the conversations again, turn by turn."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from data.conversations.schemas import Conversation
from data.conversations.tokenize import SAMPLE_SCHEMA, check_refused
from data.file_hashes import hash_files
from data.generation.answers import answers_dataset
from data.generation.dialogue import AnsweredTurn, Dialogue
from eagle31.json_files import expecting, read_json_object, write_json

Answer = Callable[[Sequence[Sequence[int]], Path], list[list[int]]]
Check = Callable[[], None]
AnswerTurns = Callable[[Sequence[Dialogue], Path, Check], Iterator[AnsweredTurn]]
Refusals = list[tuple[str, str]]

# Assistant turns in memory at a time: they keep many GPUs busy, and take a few GB at 8,000 tokens each.
BLOCK_TURNS = 16384
BATCH_SAMPLES = 1024
_MIN_ANSWER_TOKENS = 2  # fewer have no supervised position


@dataclass(frozen=True)
class _Ended:
    """How the conversations of a block ended, where they did not end with their last turn."""

    refused: Refusals  # by the template
    num_at_tools: int  # before recorded results of tools that did not fit


def regenerate(
    conversations: Iterable[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    answer_turns: AnswerTurns,
    *,
    max_tokens: int,
    template_kwargs: dict[str, Any],
    directory: Path,
    on_refused: Callable[[Refusals], None],
    max_samples: int | None = None,
    block_turns: int = BLOCK_TURNS,
    progress: bool = False,
) -> Dataset:
    """Replace the assistant turns one by one; each prompt contains the target's earlier completions.

    Conversations are answered in blocks, whose samples go to disk, so that the memory does not depend on
    their number. The last block ends soon after `max_samples` samples.

    Args:
        answer_turns: has the target answer every turn of some conversations; it is given the path of their
            samples, next to which it keeps the answers, and what checks refused conversations. A
            conversation ends at an empty answer. See `turn_by_turn` and `data.generation.continuous`.
        max_tokens: the limit for prompt and answer together; prompts without room for two tokens are left
            out, and longer answers are cut.
        directory: where each block's answers are written, and its samples, as `block-00000.arrow`. An
            interrupted run resumes from these files, and writes the samples again where a disk has damaged
            them.
        on_refused: called once with (id, reason) of the conversations that the template refuses; they end
            before the refused turn.
        max_samples: the number of samples after which the remaining conversations are left out; None for all.
        block_turns: the number of assistant turns in a block.
        progress: reports the finished blocks on stderr.

    Raises:
        UserError: the template refuses too many conversations.

    Returns:
        One sample per assistant turn with at least two tokens, in the columns of tokenized data, mapped from
        the files in `directory`; the token ids are those that the target generated.
    """
    directory.mkdir(parents=True, exist_ok=True)
    remaining = iter(conversations)
    parts: list[Dataset] = []
    refusals: Refusals = []
    num_samples = num_conversations = num_at_tools = 0
    while max_samples is None or num_samples < max_samples:
        block = _take_turns(remaining, _block_size(num_samples, max_samples, block_turns))
        if not block:
            break
        num_conversations += len(block)
        path = directory / f"block-{len(parts):05d}.arrow"
        ended = _finished(path)
        if ended is None:
            earlier = list(refusals)

            def check(refused: Refusals, earlier: Refusals = earlier, total: int = num_conversations) -> None:
                check_refused([*earlier, *refused], total)

            ended = _answer_block(block, tokenizer, answer_turns, max_tokens, template_kwargs, path, check)
        refusals += ended.refused
        num_at_tools += ended.num_at_tools
        parts.append(Dataset.from_file(str(path)))
        num_samples += len(parts[-1])
        if progress:
            total = "" if max_samples is None else f" of at most {max_samples:,}"
            print(f"regenerate: {num_samples:,}{total} samples", file=sys.stderr, flush=True)
    report_ended_at_tools(num_at_tools)
    if refusals:
        on_refused(refusals)
    return concatenate_datasets(parts) if parts else answers_dataset([], [], [])


def report_ended_at_tools(number: int) -> None:
    """Print how many conversations ended before recorded results of tools that did not fit."""
    if number:
        what = "conversations end where the recorded results of tools do not fit the target's calls"
        print(f"regenerate: {number:,} {what}", file=sys.stderr, flush=True)


def repeated(conversations: Iterable[Conversation], completions: int) -> Iterator[Conversation]:
    """Yield each conversation so many times, the copies with `~1`, `~2` and so on after their id."""
    for conversation in conversations:
        yield conversation
        for copy in range(1, completions):
            yield replace(conversation, id=f"{conversation.id}~{copy}")


def _block_size(num_samples: int, max_samples: int | None, block_turns: int) -> int:
    """Return the number of turns to answer next: at least 1 % of all, because a few use no GPU well."""
    if max_samples is None:
        return block_turns
    return min(block_turns, max(max_samples - num_samples, max_samples // 100))


def _take_turns(conversations: Iterator[Conversation], num_turns: int) -> list[Conversation]:
    """Take conversations until they have at least so many assistant turns."""
    block = []
    while num_turns > 0 and (conversation := next(conversations, None)) is not None:
        block.append(conversation)
        num_turns -= sum(message["role"] == "assistant" for message in conversation.messages)
    return block


def _finished(path: Path) -> _Ended | None:
    """Return how a block's conversations ended; None where its samples are missing or damaged."""
    record = path.with_suffix(".json")
    if not (path.exists() and record.exists()):
        return None
    with expecting(record, "how a block's conversations ended"):
        content = read_json_object(record)
        refused = [(str(id), str(reason)) for id, reason in content["refused"]]
        ended = _Ended(refused, int(content.get("num_ended_at_tools", 0)))
    if content.get("samples") == hash_files([path])[0]:
        return ended
    what = "is damaged; its samples are written again from the answers"
    print(f"regenerate: {path} {what}", file=sys.stderr, flush=True)
    return None


def _answer_block(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    answer_turns: AnswerTurns,
    max_tokens: int,
    template_kwargs: dict[str, Any],
    path: Path,
    check: Callable[[Refusals], None],
) -> _Ended:
    """Answer the turns of some conversations, and write the samples as an Arrow stream.

    Args:
        check: called now and then with the conversations that the template has refused.
    """
    dialogues = [Dialogue(one, tokenizer, template_kwargs, max_tokens) for one in conversations]

    def check_dialogues() -> None:
        check([one.refusal for one in dialogues if one.refusal is not None])

    turns = answer_turns(dialogues, path, check_dialogues)
    partial = path.with_suffix(".partial")
    with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_stream(sink, SAMPLE_SCHEMA) as writer:
        while batch := list(islice(turns, BATCH_SAMPLES)):
            named = [(f"{conversations[one.index].id}/{one.turn}", one.prompt, one.ids) for one in batch]
            writer.write_batch(record_batch(named, max_tokens))
    return _finish_block(path, dialogues)


def turn_by_turn(answer: Answer) -> AnswerTurns:
    """Answer a turn of all conversations before the next turn, for engines whose answers depend on the batch.

    Args:
        answer: maps prompts, and a file to resume from, to the token ids of each answer.
    """

    def answer_turns(dialogues: Sequence[Dialogue], path: Path, check: Check) -> Iterator[AnsweredTurn]:
        turn = 0
        while True:
            prompted = [
                (index, prompt)
                for index, one in enumerate(dialogues)
                if (prompt := one.next_prompt()) is not None
            ]
            check()
            if not prompted:
                break
            output = path.with_name(f"{path.stem}-turn-{turn:03d}.jsonl")
            answers = answer([prompt for _, prompt in prompted], output)
            for (index, _), ids in zip(prompted, answers, strict=True):
                yield dialogues[index].answered(index, ids)
            turn += 1

    return answer_turns


def _finish_block(path: Path, dialogues: Sequence[Dialogue]) -> _Ended:
    """Write how the conversations of a block ended, whose samples are in the partial file."""
    partial = path.with_suffix(".partial")
    refused = [one.refusal for one in dialogues if one.refusal is not None]
    ended = _Ended(refused, sum(one.ended_at_tools for one in dialogues))
    content = {"refused": ended.refused, "num_ended_at_tools": ended.num_at_tools}
    write_json(path.with_suffix(".json"), content | {"samples": hash_files([partial])[0]})
    partial.replace(path)
    return ended


def record_batch(
    samples: Iterable[tuple[str, Sequence[int], Sequence[int]]], max_tokens: int
) -> pa.RecordBatch:
    """Join (id, prompt, answer) into the columns of tokenized data; the loss mask covers the answers."""
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
