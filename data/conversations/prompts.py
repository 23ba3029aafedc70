"""The prompts of a conversation, as in serving: the messages up to an answer, and the generation prompt."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.conversations.perturbation import UNCHANGED, PromptSetting, with_documents, with_system
from data.conversations.schemas import SYSTEM_ROLES, Conversation, form_of
from data.conversations.template import Messages, Template, Tools
from eagle31.errors import UserError

_EXAMPLE = "ANSWER-of-an-example"


def with_missing_answers(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages with an empty assistant turn after each of the user's that has no answer."""
    missing = set(_unanswered(messages))
    answered: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        answered.append(message)
        if index in missing:
            answered.append({"role": "assistant", "content": ""})
    return answered


def prompt_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Return the messages up to the turn that the target writes.

    That is the answer to the first of the user's messages that has none, and else the last assistant turn.
    """
    messages = list(conversation.messages)
    missing = next(_unanswered(messages), None)
    if missing is not None:
        return messages[: missing + 1]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return messages


def _unanswered(messages: Messages) -> Iterator[int]:
    """Yield the indices of the user's messages that are followed by another of the user's, or by nothing."""
    spoken = [index for index, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES]
    for index, following in zip_longest(spoken, spoken[1:]):
        is_last = following is None
        if messages[index]["role"] == "user" and (is_last or messages[following]["role"] == "user"):
            yield index


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools,
    template_kwargs: Mapping[str, Any],
    template: str = UNCHANGED,
) -> list[int]:
    """Return the token ids of the messages and the generation prompt, as in serving.

    Args:
        template: the target's, or a change of it; see `data.conversations.perturbation.TEMPLATES`.
    """
    return Template(tokenizer, tools, template_kwargs, template).prompt_ids(messages)


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools,
    template_kwargs: Mapping[str, Any],
    setting: PromptSetting,
    documents: Sequence[str] = (),
) -> list[int]:
    """Return the token ids of the messages and the generation prompt under other conditions.

    Args:
        documents: the texts that lengthen the prompt, where the setting asks for it.

    Raises:
        UserError: the prompt would be the same as without the setting, which would measure nothing.
        TemplateRefused: the template raises, for example because it takes no system prompt.
    """
    unchanged = render_prompt(tokenizer, messages, tools, template_kwargs)
    changed = with_system(messages, setting.system)
    ids = render_prompt(tokenizer, changed, tools, template_kwargs, setting.template)
    if setting.context_tokens is not None and len(ids) < setting.context_tokens:
        changed = with_documents(changed, documents, setting.context_tokens - len(ids), tokenizer)
        ids = render_prompt(tokenizer, changed, tools, template_kwargs, setting.template)
    if ids == unchanged and setting != PromptSetting():
        raise UserError("template", setting, "The prompt is the same as without this change; leave it out.")
    return ids


def unprompted_header(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, template_kwargs: Mapping[str, Any]
) -> str | None:
    """Return what a template without a generation prompt writes before an answer.

    The loss mask counts it as the assistant's, because in serving the target would have to write it. None:
    the template writes a generation prompt, or nothing before the answer.

    Raises:
        TemplateRefused: the template raises on this conversation.
    """
    messages = prompt_messages(conversation)
    if form_of(messages):
        return None
    target = Template(tokenizer, conversation.tools, template_kwargs, conversation.template)
    prompt = target.text(messages, add_generation_prompt=True)
    if prompt != target.text(messages, add_generation_prompt=False):
        return None
    answered = target.text(
        [*messages, {"role": "assistant", "content": _EXAMPLE}], add_generation_prompt=False
    )
    header, found, _ = answered[len(prompt) :].partition(_EXAMPLE)
    return header if found and header.strip() else None
