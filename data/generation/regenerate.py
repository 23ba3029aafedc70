"""On-policy training data: the target answers the conversations again, turn by turn."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from data.conversations.schemas import Conversation
from data.conversations.template import has_markers
from data.conversations.tokenize import SAMPLE_SCHEMA, check_refused, print_markers
from data.generation.answers import AnswerGenerator, answer_dialogues, record_batch
from data.generation.dialogue import Regenerated, repeats_itself
from data.sampling import Sampling
from eagle31.json_files import read_json, write_json

Refusals = list[tuple[str, str]]

# Assistant turns in memory at a time: they keep many GPUs busy, and take a few GB at 8,000 tokens each.
BLOCK_TURNS = 16384
_BATCH_SAMPLES = 1024


def regenerate(
    conversations: Iterable[Conversation],
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
    """Replace the assistant turns one by one; each prompt contains the target's earlier completions.

    Conversations are answered in blocks, whose samples go to disk, so that the memory does not depend on
    their number. The last block ends soon after `max_samples` samples.

    Args:
        max_tokens: the limit for prompt and answer together; prompts without room for two tokens are left
            out, and longer answers are cut.
        directory: where each block's answers are written, as `block-00000.jsonl`, and its samples, as
            `block-00000.arrow`. An interrupted run resumes from these files.
        on_refused: called once with (id, reason) of the conversations that the template refuses; they end
            before the refused turn.
        max_samples: the number of samples after which the remaining conversations are left out; None for all.
        block_turns: the number of assistant turns in a block.
        progress: reports the finished blocks on stderr.

    Raises:
        UserError: the template refuses too many conversations.

    Returns:
        One sample per assistant turn that has at least two tokens and does not repeat itself, in the columns
        of tokenized data, mapped from the files in `directory`; the token ids are those that the target
        generated.
    """
    directory.mkdir(parents=True, exist_ok=True)
    remaining = iter(conversations)
    parts: list[Dataset] = []
    refusals: Refusals = []
    ends: Counter[str] = Counter()  # by reason
    num_samples = num_conversations = num_with_markers = 0

    def refuse(refusal: tuple[str, str]) -> None:
        refusals.append(refusal)
        check_refused(refusals, num_conversations)

    while max_samples is None or num_samples < max_samples:
        block = _take_turns(remaining, _block_size(num_samples, max_samples, block_turns))
        if not block:
            break
        num_conversations += len(block)
        num_with_markers += sum(has_markers(tokenizer, one.messages) for one in block)
        path = directory / f"block-{len(parts):05d}.arrow"
        record = path.with_suffix(".json")  # how the conversations of a finished block ended
        if path.exists():
            found = read_json(record)
            refusals += [(id, reason) for id, reason in found["refused"]]
        else:
            num_before = len(refusals)
            stops = frozenset(sampling.stop_token_ids)
            dialogues = [
                Regenerated(one, tokenizer, template_kwargs, stops, max_tokens, refuse) for one in block
            ]
            turns = answer_dialogues(
                generator,
                dialogues,
                sampling,
                output=path.with_suffix(".jsonl"),
                model_fingerprint=model_fingerprint,
                number=len(parts),
                title="regenerate",
                progress=progress,
            )
            partial = path.with_suffix(".partial")
            with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_stream(sink, SAMPLE_SCHEMA) as writer:
                for start in range(0, len(turns), _BATCH_SAMPLES):
                    named = [
                        (f"{block[one.index].id}/{one.turn}", one.prompt, one.ids)
                        for one in turns[start : start + _BATCH_SAMPLES]
                        if one.ids and not repeats_itself(one.ids, stops)
                    ]
                    writer.write_batch(record_batch(named, max_tokens))
            found = {
                "refused": refusals[num_before:],
                "ends": Counter(one.ended for one in dialogues if one.ended is not None),
            }
            write_json(record, found)
            partial.replace(path)
        ends.update(found["ends"])
        parts.append(Dataset.from_file(str(path)))
        num_samples += len(parts[-1])
        if progress:
            total = "" if max_samples is None else f" of at most {max_samples:,}"
            print(f"regenerate: {num_samples:,}{total} samples", file=sys.stderr, flush=True)
    for reason, count in ends.items():
        print(f"regenerate: {count:,} conversations end where {reason}", file=sys.stderr, flush=True)
    print_markers(num_with_markers)
    if refusals:
        on_refused(refusals)
    return concatenate_datasets(parts) if parts else Dataset(SAMPLE_SCHEMA.empty_table())


def _block_size(num_samples: int, max_samples: int | None, block_turns: int) -> int:
    """Return the number of turns to answer next: at least 1 % of all, because a few use no GPU well."""
    if max_samples is None:
        return block_turns
    return min(block_turns, max(max_samples - num_samples, max_samples // 100))


def _take_turns(conversations: Iterator[Conversation], num_turns: int) -> list[Conversation]:
    """Take conversations until they have at least so many assistant turns; the longest come first."""
    block = []
    while num_turns > 0 and (conversation := next(conversations, None)) is not None:
        block.append(conversation)
        num_turns -= sum(message["role"] == "assistant" for message in conversation.messages)
    return sorted(block, key=lambda one: -len(str(one.messages)))
