"""Rendering conversations with the target's chat template, and finding the assistant's tokens."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.conversations.boundaries import (
    Encoded,
    boundary,
    encoded,
    last_eos,
    served_text,
)
from data.conversations.choices import Turns
from data.conversations.schemas import IDS, Conversation, form_of, ids_of, is_trained
from data.conversations.template import TEXT_ARGUMENTS, Messages, Template, TemplateRefused
from data.conversations.thoughts import empty_thought_end, recorded_reasoning, split_thought

LOST_REASONING = "answers have reasoning that the chat template does not write, so that it is left out"
LOST_CALLS = "answers have tool calls that the chat template does not write, so that they are left out"
EMPTY_THOUGHT = (
    "answers begin with an empty thought that the chat template adds; the target would not write it, so that "
    "it is not supervised"
)
REWRITTEN = (
    "conversations become several samples, because the chat template writes earlier turns in another way "
    "than the target wrote them"
)
_QUESTION, _ANSWER = "QUESTION-of-an-example", "ANSWER-of-an-example"


@dataclass(frozen=True)
class RenderedConversation:
    """The N tokens of one sample and their loss mask."""

    input_ids: list[int]  # [N]
    loss_mask: list[bool]  # [N], true for the assistant's tokens
    num_straddling: int = 0  # tokens that are masked because they cross the boundary of a turn
    notes: Counter[str] = field(default_factory=Counter)  # how often the template does what, as REWRITTEN

    @property
    def num_prompt_tokens(self) -> int:
        """The index of the assistant's first token."""
        return self.loss_mask.index(True)

    @property
    def min_tokens(self) -> int | None:
        """The length up to the first supervised position t, x[t+2] included; None: there is none.

        x[t+1] and x[t+2] are both the assistant's.
        """
        pairs = enumerate(pairwise(self.loss_mask), start=2)
        return next((length for length, both in pairs if all(both)), None)

    def cut(self, max_tokens: int) -> "RenderedConversation":
        """Return the first `max_tokens` tokens."""
        ids, mask = self.input_ids[:max_tokens], self.loss_mask[:max_tokens]
        return replace(self, input_ids=ids, loss_mask=mask)


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    *,
    turns: Turns = Turns.all,
    template_kwargs: Mapping[str, Any],
    eos_token_ids: Collection[int],
) -> list[RenderedConversation]:
    """Render one conversation into one or more samples.

    A turn's tokens are those that follow its prompt, which is the text of the earlier messages and the
    generation prompt.
    Turns share a sample where the template writes their prompts and answers again at the start of its text.
    A turn ends with its end-of-turn token, which some templates write only as the start of the next message,
    because the target never samples what follows it. Messages after the last assistant turn are left out.

    Args:
        conversation: has at least one assistant turn that is not context only.
        template_kwargs: arguments of the template, such as enable_thinking.
        eos_token_ids: the tokens that end a turn.

    Raises:
        TemplateRefused: the template raises on this conversation, or writes no answer after its prompt.
        UserError: the tokenizer has no template.
    """
    messages, tools = conversation.messages, conversation.tools
    assistant = [i for i, message in enumerate(messages) if is_trained(message)]
    assert assistant, f"{conversation.id} has no assistant turn to train on"
    template = Template(tokenizer, tools, template_kwargs, conversation.template)
    find = _preformatted_samples if form_of(messages) else _rendered_samples
    if turns is Turns.each:
        samples = [one for i in assistant for one in find(template, messages, [i], eos_token_ids)]
    else:
        supervised = assistant if turns is Turns.all else assistant[-1:]
        samples = find(template, messages, supervised, eos_token_ids)
        samples[0].notes[REWRITTEN] += len(samples) > 1
    samples[0].notes[TEXT_ARGUMENTS] += template.has_text_arguments
    return samples


def _rendered_samples(
    template: Template,
    messages: Messages,
    supervised: Sequence[int],
    eos_token_ids: Collection[int],
) -> list[RenderedConversation]:
    """Return samples in which the turns at the indices `supervised` get the loss, each in one of them."""
    prompts = {i: template.text(messages[:i], add_generation_prompt=True) for i in supervised}
    written = {i: template.text(messages[: i + 1], add_generation_prompt=False) for i in supervised}
    samples: list[RenderedConversation] = []
    while supervised:
        last = supervised[-1]
        text = served_text(template, messages[: last + 1], prompts[last], written[last])
        shared = {
            i: (len(prompts[i]), len(written[i]))
            for i in supervised[:-1]
            if text.startswith(prompts[i]) and text.startswith(written[i])
        } | {last: (len(prompts[last]), len(text))}
        full = encoded(template, text)
        of = [(messages[i], text[start:end]) for i, (start, end) in shared.items()]
        samples.insert(0, _sample(template, full, [*shared.values()], of, eos_token_ids))
        supervised = [i for i in supervised if i not in shared]
    return samples


def _preformatted_samples(
    template: Template,
    messages: Messages,
    supervised: Sequence[int],
    eos_token_ids: Collection[int],
) -> list[RenderedConversation]:
    """Return the sample of messages whose contents joined are its text, or its token ids."""
    messages = messages[: supervised[-1] + 1]
    if form_of(messages) == IDS:
        parts = [(len(ids_of([one])), i in supervised) for i, one in enumerate(messages)]
        return [RenderedConversation(ids_of(messages), [own for size, own in parts for _ in range(size)])]
    ends = [*accumulate(len(one["content"]) for one in messages)]
    full = encoded(template, "".join(one["content"] for one in messages))
    of = [(messages[i], messages[i]["content"]) for i in supervised]
    spans = [(ends[i - 1], ends[i]) for i in supervised]
    return [_sample(template, full, spans, of, eos_token_ids)]


def _sample(
    template: Template,
    full: Encoded,
    spans: Sequence[tuple[int, int]],
    turns: Sequence[tuple[Mapping[str, Any], str]],
    eos_token_ids: Collection[int],
) -> RenderedConversation:
    """Return the sample in which the target wrote what is in `spans` of characters.

    Args:
        turns: the messages that are in the spans, each with a text in which it is.
    """
    ids, loss_mask = full.ids, [False] * len(full.ids)
    notes, num_straddling = Counter[str](), 0
    has_thoughts = any(split_thought(turn["content"])[1] for turn, _ in turns)
    for first, last in spans:
        thought = None if has_thoughts else empty_thought_end(full.text, first)
        if thought is not None:
            first = thought
            notes[EMPTY_THOUGHT] += 1
        before, start = boundary(template, full, first)
        end, after = boundary(template, full, last) if last < len(full.text) else (len(ids), len(ids))
        eos = last_eos(ids, start, end, eos_token_ids)
        if eos is not None:
            end = eos + 1
        elif end < len(ids) and ids[end] in eos_token_ids:
            end += 1  # the next message writes it
        else:
            num_straddling += after - end
        num_straddling += start - before
        loss_mask[start:end] = [True] * max(end - start, 0)
    notes[LOST_CALLS] += sum(_lacks_calls(turn, text) for turn, text in turns)
    notes[LOST_REASONING] += sum(recorded_reasoning(turn).strip() not in text for turn, text in turns)
    if loss_mask and loss_mask[-1] and ids[-1] not in eos_token_ids:
        closing = _closing_token(template, turns[-1][0], eos_token_ids)
        ids, loss_mask = ids + closing, loss_mask + [True] * len(closing)
    return RenderedConversation(ids, loss_mask, num_straddling, notes)


def _lacks_calls(turn: Mapping[str, Any], text: str) -> bool:
    functions = [call.get("function", call) for call in turn.get("tool_calls", [])]
    return any(str(function.get("name")) not in text for function in functions)


def _closing_token(template: Template, turn: Mapping[str, Any], eos_token_ids: Collection[int]) -> list[int]:
    """Return the token that ends a turn where a template writes it as the start of the next message."""
    calls = {"tool_calls": turn["tool_calls"]} if "tool_calls" in turn else {}
    example = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _ANSWER, **calls},
        {"role": "tool" if calls else "user", "content": _QUESTION},
    ]
    try:
        ended, following = (template.text(example[:n], add_generation_prompt=False) for n in (2, 3))
    except TemplateRefused:
        return []
    first = template.encode(following[len(ended) :])[:1] if following.startswith(ended) else []
    return [id for id in first if id in eos_token_ids]
