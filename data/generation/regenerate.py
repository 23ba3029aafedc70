"""On-policy training data: the target answers the conversations again, turn by turn."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from data.conversations.prompts import with_missing_answers
from data.conversations.schemas import Conversation, Conversations
from data.conversations.template import has_markers
from data.conversations.tokenize import SAMPLE_SCHEMA, check_refused, print_markers
from data.generation.answers import AnswerGenerator, Block, answer_dialogues, record_batch
from data.generation.dialogue import Regenerated, repeats_itself
from data.sampling import Sampling
from eagle31.json_files import read_json, replacing, write_json

Refusals = list[tuple[str, str]]

# Assistant turns in memory at a time: they keep many GPUs busy, and take a few GB at 8,000 tokens each.
BLOCK_TURNS = 16384
_BATCH_SAMPLES = 1024


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
    on_refused: Callable[[Refusals], None],
    max_samples: int | None = None,
    block_turns: int = BLOCK_TURNS,
    progress: bool = False,
) -> Dataset:
    """Write the assistant turns one by one, those that are missing too.

    Each prompt contains the target's earlier completions.

    Conversations are answered in blocks, whose samples go to disk, so that the memory does not depend on
    their number. A block begins before the last conversations of the one before it have ended.

    Args:
        max_tokens: the limit for prompt and answer together; prompts without room for two tokens are left
            out, and longer answers are cut.
        directory: where each block's answers are written, as `block-00000.jsonl`, and its samples, as
            `block-00000.arrow`. An interrupted run resumes from these files.
        on_refused: called once with (id, reason) of the conversations that the template refuses; they end
            before the refused turn.
        max_samples: the number of samples after which the remaining conversations are left out; None for all.
        block_turns: the number of assistant turns in a block.
        progress: reports on stderr how many answers are finished, how fast, and the time left.

    Raises:
        UserError: the template refuses too many conversations.

    Returns:
        One sample per assistant turn that has at least two tokens and does not repeat itself, in the columns
        of tokenized data, mapped from the files in `directory`; the token ids are those that the target
        generated.
    """
    directory.mkdir(parents=True, exist_ok=True)
    remaining = iter(conversations)
    stops = frozenset(sampling.stop_token_ids)
    parts: dict[int, Dataset] = {}  # by the block's number
    refusals: Refusals = []
    ends: Counter[str] = Counter()  # by reason
    num_conversations = num_with_markers = num_blocks = 0

    def blocks(num_turns: float) -> Iterator[Block]:
        nonlocal num_conversations, num_with_markers, num_blocks
        while num_turns > 0 and (some := _take_turns(remaining, min(block_turns, num_turns))):
            num_turns -= sum(map(_num_turns, some))
            num_conversations += len(some)
            num_with_markers += sum(has_markers(tokenizer, one.messages) for one in some)
            number, num_blocks = num_blocks, num_blocks + 1
            output = directory / f"block-{number:05d}.jsonl"
            if output.with_suffix(".arrow").exists():
                refusals.extend((id, reason) for id, reason in add(number, output)["refused"])
                continue
            dialogues = [
                Regenerated(one, tokenizer, template_kwargs, stops, max_tokens, refuse) for one in some
            ]
            yield Block(dialogues, output, number)

    def refuse(refusal: tuple[str, str]) -> None:
        refusals.append(refusal)
        check_refused(refusals, num_conversations)

    def finished(block: Block) -> None:
        dialogues = cast("Sequence[Regenerated]", block.dialogues)
        found = {
            "refused": [(one.conversation.id, one.refused) for one in dialogues if one.refused],
            "ends": Counter(one.ended for one in dialogues if one.ended is not None),
        }
        write_json(block.output.with_suffix(".json"), found)
        arrow = block.output.with_suffix(".arrow")
        with replacing(arrow) as sink, pa.ipc.new_stream(sink, SAMPLE_SCHEMA) as writer:
            for start in range(0, len(block.turns), _BATCH_SAMPLES):
                named = [
                    (f"{dialogues[one.index].conversation.id}/{one.turn}", one.prompt, one.ids)
                    for one in block.turns[start : start + _BATCH_SAMPLES]
                    if one.ids and not repeats_itself(one.ids, stops)
                ]
                writer.write_batch(record_batch(named, max_tokens))
        add(block.number, block.output)

    def add(number: int, output: Path) -> dict[str, Any]:
        """Add the samples of a finished block, and return how its conversations ended."""
        found = read_json(output.with_suffix(".json"))
        ends.update(found["ends"])
        parts[number] = Dataset.from_file(str(output.with_suffix(".arrow")))
        if progress:
            num_samples = sum(map(len, parts.values()))
            print(f"regenerate: {num_samples:,} samples of finished blocks", file=sys.stderr, flush=True)
        return found

    total = None
    if progress:
        num_answers = sum(map(_num_turns, conversations))
        total = num_answers if max_samples is None else min(num_answers, max_samples)
        # Each finished block has about as many; a conversation may end before its last turn.
        total = max(total - block_turns * len([*directory.glob("block-*.arrow")]), 0) or None
    num_taken = -1
    while num_taken < num_blocks:
        num_taken, num_turns = num_blocks, math.inf
        if max_samples is not None:
            # More follow where some gave no sample: at least 1 % of all, because a few use no GPU well.
            num_missing = max_samples - sum(map(len, parts.values()))
            num_turns = max(num_missing, max_samples // 100) if num_missing > 0 else 0
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
    for reason, count in ends.items():
        print(f"regenerate: {count:,} conversations end where {reason}", file=sys.stderr, flush=True)
    print_markers(num_with_markers)
    if refusals:
        on_refused(refusals)
    if not parts:
        return Dataset(SAMPLE_SCHEMA.empty_table())
    return concatenate_datasets([parts[number] for number in sorted(parts)])


def _take_turns(conversations: Iterator[Conversation], num_turns: float) -> list[Conversation]:
    """Take conversations until they have at least so many assistant turns; the longest come first."""
    block = []
    while num_turns > 0 and (conversation := next(conversations, None)) is not None:
        block.append(conversation)
        num_turns -= _num_turns(conversation)
    return sorted(block, key=lambda one: -len(str(one.messages)))


def _num_turns(conversation: Conversation) -> int:
    return sum(message["role"] == "assistant" for message in with_missing_answers(conversation.messages))
