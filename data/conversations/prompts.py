"""The prompt of a conversation, as in serving: its messages and the generation prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.conversations.perturbation import UNCHANGED, PromptSetting, with_documents, with_system
from data.conversations.schemas import Conversation
from data.conversations.template import Messages, Template, Tools
from eagle31.errors import UserError


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
    target = Template(tokenizer, tools, template_kwargs, template)
    return target.encode(target.text(messages, add_generation_prompt=True))


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools,
    template_kwargs: Mapping[str, Any],
    template: str = UNCHANGED,
    *,
    add_generation_prompt: bool,
) -> str:
    """Return the text of the messages, and of the generation prompt if it is asked for."""
    target = Template(tokenizer, tools, template_kwargs, template)
    return target.text(messages, add_generation_prompt=add_generation_prompt)


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
    """Return what a template without a generation prompt writes before the assistant's last answer.

    The loss mask counts it as the assistant's, because in serving the target would have to write it. None:
    the template writes a generation prompt, or nothing before the answer.

    Raises:
        TemplateRefused: the template raises on this conversation.
    """
    last = max(i for i, message in enumerate(conversation.messages) if message["role"] == "assistant")
    messages, answer = conversation.messages[: last + 1], conversation.messages[last]["content"].strip()
    target = Template(tokenizer, conversation.tools, template_kwargs, conversation.template)
    prompt = target.text(messages[:last], add_generation_prompt=True)
    if prompt != target.text(messages[:last], add_generation_prompt=False):
        return None
    header, found, _ = target.text(messages, add_generation_prompt=False)[len(prompt) :].partition(answer)
    return header if answer and found and header.strip() else None
