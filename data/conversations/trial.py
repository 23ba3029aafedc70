"""A trial of the tokenizer and the chat template, before all conversations are read."""

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.conversations.choices import Turns
from data.conversations.masks import render
from data.conversations.prompts import prompt_messages, render_prompt, unprompted_header
from data.conversations.schemas import Conversation
from data.conversations.template import TemplateRefused
from data.target.tokenizer import check_ids

_CONVERSATIONS = 4


def try_rendering(
    conversations: Iterable[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    *,
    turns: Turns | None,
    template_kwargs: Mapping[str, Any],
    eos_token_ids: Collection[int],
    vocab_size: int,
) -> str | None:
    """Render the first conversations, and return the first note about what the template does, if any.

    Args:
        turns: None renders only the prompts, whose answers the target will write.
        vocab_size: of the target.

    Raises:
        UserError: the template refuses all of them, or the tokenizer is not the target's.
    """
    refusals, first = [], list(islice(conversations, _CONVERSATIONS))
    for conversation in first:
        try:
            if turns is None:
                messages, tools = prompt_messages(conversation), conversation.tools
                rendered = [render_prompt(tokenizer, messages, tools, template_kwargs)]
            else:
                samples = render(
                    tokenizer,
                    conversation,
                    turns=turns,
                    template_kwargs=template_kwargs,
                    eos_token_ids=eos_token_ids,
                )
                rendered = [sample.input_ids for sample in samples]
            header = unprompted_header(tokenizer, conversation, template_kwargs)
        except TemplateRefused as refused:
            refusals.append(refused)
            continue
        for ids in rendered:
            check_ids(tokenizer, ids, vocab_size)
        if header is not None:
            return (
                "the chat template ignores add_generation_prompt, so that the loss mask includes what it "
                f"writes before an answer: {header!r}"
            )
    if refusals and len(refusals) == len(first):
        raise refusals[0]
    return None
