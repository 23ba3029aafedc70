"""On-policy training data: the target answers the conversations again, turn by turn."""

from collections.abc import Callable, Sequence
from pathlib import Path

from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from data.generation.answers import answers_dataset
from data.text.schemas import Conversation
from data.text.template import TemplateRefused, render_prompt
from data.text.tokenize import check_refused

Answer = Callable[[list[list[int]], Path], list[list[int]]]


def regenerate(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    answer: Answer,
    *,
    max_tokens: int,
    template_kwargs: dict,
    directory: Path,
    on_refused: Callable[[list[tuple[str, str]]], None],
) -> Dataset:
    """Replace the assistant turns one by one; each prompt contains the target's earlier completions.

    Args:
        answer: maps prompts, and a file to resume from, to the token ids of each answer; a conversation ends
            at an empty answer.
        max_tokens: the limit for prompt and answer together; prompts without room for two tokens are left
            out, and longer answers are cut.
        directory: where each turn's answers are written, as `turn-000.jsonl` and so on.
        on_refused: called once with (id, reason) of the conversations that the template refuses; they end
            before the refused turn.

    Raises:
        UserError: the template refuses too many conversations.

    Returns:
        One sample per assistant turn, in the columns of tokenized data; the token ids are those that the
        target generated.
    """
    histories: list[list[dict]] = [[] for _ in conversations]
    position = [0] * len(conversations)
    refusals: list[tuple[str, str]] = []
    parts = []
    turn = 0
    while True:
        prompts, owners = [], []
        for index, conversation in enumerate(conversations):
            upcoming = _take_until_assistant(conversation, position, index, histories[index])
            if not upcoming:
                continue
            try:
                prompt = render_prompt(tokenizer, histories[index], conversation.tools, template_kwargs)
            except TemplateRefused as refused:
                refusals.append((conversation.id, refused.remedy))
                position[index] = len(conversation.messages)
                continue
            if len(prompt) + 2 > max_tokens:
                position[index] = len(conversation.messages)
                continue
            prompts.append(prompt)
            owners.append(index)
        check_refused(refusals, len(conversations))
        if not prompts:
            break
        answers = answer(prompts, directory / f"turn-{turn:03d}.jsonl")
        kept = [ids[: max_tokens - len(prompt)] for prompt, ids in zip(prompts, answers, strict=True)]
        names = [f"{conversations[owner].id}/{turn}" for owner in owners]
        parts.append(answers_dataset(prompts, kept, names))
        for owner, ids in zip(owners, answers, strict=True):
            completion = tokenizer.decode(ids, skip_special_tokens=True)
            histories[owner].append({"role": "assistant", "content": completion})
            position[owner] = position[owner] + 1 if ids else len(conversations[owner].messages)
        turn += 1
    if refusals:
        on_refused(refusals)
    return concatenate_datasets(parts) if parts else answers_dataset([], [], [])


def _take_until_assistant(
    conversation: Conversation, position: list[int], index: int, history: list[dict]
) -> bool:
    """Move messages into the history up to the next assistant turn; return false if there is none."""
    messages = conversation.messages
    while position[index] < len(messages):
        message = messages[position[index]]
        if message["role"] == "assistant":
            return True
        history.append(dict(message))
        position[index] += 1
    return False
