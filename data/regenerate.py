"""Training data on the target's own terms: the assistant turns written by the target."""

from collections.abc import Callable, Sequence
from pathlib import Path

from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from data.conversations import Conversation
from data.generate import answers_dataset
from data.template import render_prompt

Answer = Callable[[list[list[int]], Path], list[list[int]]]


def regenerate(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    answer: Answer,
    *,
    max_tokens: int,
    template_kwargs: dict,
    directory: Path,
) -> Dataset:
    """Replaces the assistant turns one after the other, each behind the target's own earlier ones.

    Args:
        answer: prompts and a file to resume from -> token ids of each answer.
        max_tokens: of prompt and answer together; prompts without room for two tokens are left out, longer
            answers are cut.
        directory: holds the answers of each turn, `turn-000.jsonl`.

    Returns:
        One sample per assistant turn, in the columns of tokenised data; token ids are the target's own.
    """
    histories: list[list[dict]] = [[] for _ in conversations]
    position = [0] * len(conversations)
    parts = []
    turn = 0
    while True:
        prompts, owners = [], []
        for index, conversation in enumerate(conversations):
            upcoming = _take_until_assistant(conversation, position, index, histories[index])
            if not upcoming:
                continue
            prompt = render_prompt(tokenizer, histories[index], conversation.tools, template_kwargs)
            if len(prompt) + 2 > max_tokens:
                position[index] = len(conversation.messages)
                continue
            prompts.append(prompt)
            owners.append(index)
        if not prompts:
            break
        answers = answer(prompts, directory / f"turn-{turn:03d}.jsonl")
        kept = [ids[: max_tokens - len(prompt)] for prompt, ids in zip(prompts, answers, strict=True)]
        names = [f"{conversations[owner].id}/{turn}" for owner in owners]
        parts.append(answers_dataset(prompts, kept, names))
        for owner, ids in zip(owners, answers, strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            histories[owner].append({"role": "assistant", "content": text})
            position[owner] += 1
        turn += 1
    return concatenate_datasets(parts) if parts else answers_dataset([], [], [])


def _take_until_assistant(
    conversation: Conversation, position: list[int], index: int, history: list[dict]
) -> bool:
    """Moves messages into the history up to the next assistant turn; false when there is none."""
    messages = conversation.messages
    while position[index] < len(messages):
        message = messages[position[index]]
        if message["role"] == "assistant":
            return True
        history.append(dict(message))
        position[index] += 1
    return False
