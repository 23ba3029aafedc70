"""On-policy training data: the target answers the conversations again, turn by turn."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from data.conversations.prompts import with_missing_answers
from data.conversations.schemas import Conversation, Conversations
from data.conversations.template import TEXT_ARGUMENTS, has_markers
from data.conversations.tokenize import (
    SAMPLE_SCHEMA,
    check_refused,
    print_markers,
    print_refused,
    record_batch,
)
from data.generation.answers import (
    MIN_ANSWER_TOKENS,
    AnswerGenerator,
    Block,
    Turn,
    answer_dialogues,
    joined,
)
from data.generation.dialogue import Regenerated, repeats_itself
from data.refusals import num_allowed
from data.sampling import Sampling
from eagle31.errors import UserError
from eagle31.json_files import read_json, replacing, write_json

Refusals = list[tuple[str, str]]

# The next block begins before the last answers of the one before it, and each driver has its own blocks.
BLOCK_TURNS = 2048
_BATCH_SAMPLES = 1024
_MOST_OVERLONG = 0.1  # of the conversations, whose first prompts have no room
_MEASURED_CONVERSATIONS = 1000
SHORT = "answers have fewer than two tokens, so that they are left out"


def regenerate(
    conversations: Conversations,
    tokenizer: PreTrainedTokenizerBase,
    generator: AnswerGenerator,
    sampling: Sampling,
    *,
    model_fingerprint: str,
    max_tokens: int,
    template_kwargs: dict[str, Any],
    directory: Path,
    wait_for: Callable[[Path], None],
    max_samples: int | None = None,
    block_turns: int = BLOCK_TURNS,
    driver: int = 0,
    num_drivers: int = 1,
    progress: bool = False,
) -> Dataset | None:
    """Write the assistant turns one by one, those that are missing too.

    Each prompt contains the target's earlier completions. Turns whose prompt continues the prompt and the
    completion before it share a sample. Conversations that the template refuses end before the refused turn,
    and are listed.

    Conversations are answered in blocks, whose samples go to disk, so that the memory does not depend on
    their number. A block begins before the last conversations of the one before it have ended.

    Args:
        max_tokens: the limit for prompt and answer together; prompts without room for two tokens are left
            out, and longer answers are cut.
        directory: where each block's answers are written, as `block-00000.jsonl`, and its samples, as
            `block-00000.arrow`. An interrupted run resumes from these files.
        wait_for: blocks until a file exists that another driver writes.
        max_samples: the number of samples after which the remaining conversations are left out; None for all.
        block_turns: the number of assistant turns in a block.
        driver: which of the `num_drivers` processes this is that call this with the same arguments. Each has
            the blocks answered whose number modulo `num_drivers` is its own; the samples do not depend on it.
        progress: reports on stderr how many answers are finished, how fast, and the time left.

    Raises:
        UserError: the template refuses too many conversations, or too many first prompts are longer than
            `max_tokens`.

    Returns:
        Samples of the assistant turns that have at least two tokens and do not repeat themselves, in the
        columns of tokenized data, mapped from the files in `directory`; the token ids are those that the
        target generated. The id is the conversation's and the number of the first turn. None for other
        drivers than the first.
    """
    directory.mkdir(parents=True, exist_ok=True)
    remaining = iter(conversations)
    stops = frozenset(sampling.stop_token_ids)
    num_samples: dict[int, int] = {}  # by the block's number
    elsewhere: dict[int, int] = {}  # the number of conversations, by the number of another driver's block
    refusals: Refusals = []
    ends: Counter[str] = Counter()  # by reason
    notes: Counter[str] = Counter()
    latest: list[Regenerated] = []  # of the block that was taken last
    num_conversations = num_turns_taken = num_with_markers = num_blocks = num_overlong = 0

    def blocks(num_turns: float) -> Iterator[Block]:
        nonlocal num_conversations, num_turns_taken, num_with_markers, num_blocks, latest
        while num_turns > 0 and (some := _take_turns(remaining, min(block_turns, num_turns))):
            num_turns_of_block = sum(map(_num_turns, some))
            num_turns -= num_turns_of_block
            num_turns_taken += num_turns_of_block
            num_with_markers += sum(has_markers(tokenizer, one.messages) for one in some)
            number, num_blocks = num_blocks, num_blocks + 1
            if number % num_drivers != driver:
                elsewhere[number] = len(some)
                continue
            num_conversations += len(some)
            output = block_file(number, ".jsonl")
            if output.with_suffix(".arrow").exists():
                refusals.extend((id, reason) for id, reason in add(number)["refused"])
                continue
            latest = [
                Regenerated(one, tokenizer, template_kwargs, stops, max_tokens, refuse, check_overlong)
                for one in some
            ]
            yield Block(latest, output, number)

    def block_file(number: int, suffix: str) -> Path:
        return directory / f"block-{number:05d}{suffix}"

    def refuse(refusal: tuple[str, str]) -> None:
        refusals.append(refusal)
        check_refused(refusals, num_conversations)

    def check_overlong() -> None:
        nonlocal num_overlong
        num_overlong += 1
        if num_overlong > num_allowed(num_conversations, _MOST_OVERLONG):
            some = latest[:: len(latest) // _MEASURED_CONVERSATIONS + 1]
            lengths = sorted(one.min_tokens() for one in some)
            enough = lengths[math.ceil(len(lengths) * (1 - _MOST_OVERLONG)) - 1]
            remedy = (
                "More than a tenth of the conversations begin with a prompt that leaves no room for an "
                f"answer; data.max_tokens={enough} keeps nine tenths of them."
            )
            raise UserError("data.max_tokens", max_tokens, remedy)

    def finished(block: Block) -> None:
        dialogues = cast("Sequence[Regenerated]", block.dialogues)
        used = (
            one
            for one in block.turns
            if len(one.ids) >= MIN_ANSWER_TOKENS and not repeats_itself(one.ids, stops)
        )
        groups = list(_joined(used))
        found = {
            "num_samples": len(groups),
            "refused": [(one.conversation.id, one.refused) for one in dialogues if one.refused],
            "ends": Counter(one.ended for one in dialogues if one.ended is not None),
            "notes": Counter(
                {
                    SHORT: sum(len(one.ids) < MIN_ANSWER_TOKENS for one in block.turns),
                    TEXT_ARGUMENTS: sum(one.template.has_text_arguments for one in dialogues),
                }
            ),
        }
        write_json(block.output.with_suffix(".json"), found)
        arrow = block.output.with_suffix(".arrow")
        with replacing(arrow) as sink, pa.ipc.new_stream(sink, SAMPLE_SCHEMA) as writer:
            samples = (
                (
                    f"{dialogues[group[0].index].conversation.id}/{group[0].number}",
                    joined([(one.prompt, one.ids[: max_tokens - len(one.prompt)]) for one in group]),
                )
                for group in groups
            )
            while some := list(islice(samples, _BATCH_SAMPLES)):
                writer.write_batch(record_batch(some))
        add(block.number)

    def add(number: int) -> dict[str, Any]:
        """Count the samples of a finished block, and return how its conversations ended."""
        found = read_json(block_file(number, ".json"))
        ends.update(found["ends"])
        notes.update(found["notes"])
        num_samples[number] = found["num_samples"]
        if progress:
            print(
                f"regenerate: {sum(num_samples.values()):,} samples of finished blocks",
                file=sys.stderr,
                flush=True,
            )
        return found

    total = None
    if progress:
        num_answers = sum(map(_num_turns, conversations))
        if max_samples is not None:  # as many conversations; fewer where some have several samples
            num_answers = min(num_answers, math.ceil(num_answers * max_samples / len(conversations)))
        # Each finished block has about as many; a conversation may end before its last turn.
        num_answers -= block_turns * len([*directory.glob("block-*.arrow")])
        total = first_drivers_answers(num_answers, block_turns, num_drivers) or None
    num_taken = -1
    while num_taken < num_blocks:
        num_taken, num_turns = num_blocks, math.inf
        if max_samples is not None:
            # A sample has one turn or more, which the first ones show, and some turns give none. At least 1 %
            # of all follow, because a few use no GPU well.
            num_found = sum(num_samples.values())
            num_missing = max_samples - num_found
            num_turns = num_missing * (num_turns_taken / num_found if num_found else 1)
            num_turns = max(num_turns, max_samples // 100) if num_missing > 0 else 0
        answer_dialogues(
            generator,
            blocks(num_turns),
            sampling,
            model_fingerprint=model_fingerprint,
            finished=finished,
            title="regenerate",
            total=total,
            progress=progress,
        )
        for number, count in elsewhere.items():
            # The first driver removes the samples once it has all of them, and leaves the counts.
            wait_for(block_file(number, ".json" if driver else ".arrow"))
            refusals.extend((id, reason) for id, reason in add(number)["refused"])
            num_conversations += count
        elsewhere.clear()
    if driver:
        return None
    for reason, count in ends.items():
        print(f"regenerate: {count:,} conversations end where {reason}", file=sys.stderr, flush=True)
    for note, count in (+notes).items():
        print(f"regenerate: {count:,} {note}", file=sys.stderr, flush=True)
    print_markers(num_with_markers)
    print_refused(refusals)
    if not num_samples:
        return Dataset(SAMPLE_SCHEMA.empty_table())
    files = (str(block_file(number, ".arrow")) for number in sorted(num_samples))
    return concatenate_datasets([Dataset.from_file(file) for file in files])


def first_drivers_answers(num_answers: int, block_turns: int, num_drivers: int) -> int:
    """Return how many of the answers are in the blocks of the first driver: in every num_drivers-th one."""
    num_blocks = math.ceil(num_answers / block_turns / num_drivers)
    return max(min(num_answers, num_blocks * block_turns), 0)


def _joined(turns: Iterable[Turn]) -> Iterator[list[Turn]]:
    """Group the turns whose prompts continue the prompt and the completion of the one before."""
    group: list[Turn] = []
    for one in sorted(turns, key=lambda one: (one.index, one.number)):
        if group:
            read = [*group[-1].prompt, *group[-1].ids]
            if one.index != group[-1].index or list(one.prompt[: len(read)]) != read:
                yield group
                group = []
        group.append(one)
    if group:
        yield group


def _take_turns(conversations: Iterator[Conversation], num_turns: float) -> list[Conversation]:
    """Take conversations until they have at least so many assistant turns; the longest come first."""
    block = []
    while num_turns > 0 and (conversation := next(conversations, None)) is not None:
        block.append(conversation)
        num_turns -= _num_turns(conversation)
    return sorted(block, key=lambda one: -len(str(one.messages)))


def _num_turns(conversation: Conversation) -> int:
    return sum(message["role"] == "assistant" for message in with_missing_answers(conversation.messages))
