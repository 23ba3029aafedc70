"""Rendering conversations with the target's chat template, and finding the assistant's tokens."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.conversations.boundaries import boundary, boundary_tokens, encoded, last_eos
from data.conversations.choices import Turns
from data.conversations.schemas import Conversation, is_trained
from data.conversations.template import Messages, Template

Spans = list[tuple[int, int]]  # of tokens, the end excluded


@dataclass(frozen=True)
class RenderedConversation:
    """The N tokens of one sample and their loss mask."""

    input_ids: list[int]  # [N]
    loss_mask: list[bool]  # [N], true for the assistant's tokens
    num_straddling: int = 0  # tokens that are masked because they cross the boundary of a turn

    @property
    def num_prompt_tokens(self) -> int:
        """The index of the assistant's first token."""
        return self.loss_mask.index(True)

    @property
    def has_supervised_position(self) -> bool:
        """Whether some position t is supervised: x[t+1] and x[t+2] are both the assistant's."""
        return any(first and second for first, second in pairwise(self.loss_mask))

    def cut(self, max_tokens: int) -> "RenderedConversation":
        """Return the first `max_tokens` tokens."""
        return RenderedConversation(
            self.input_ids[:max_tokens], self.loss_mask[:max_tokens], self.num_straddling
        )


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    *,
    turns: Turns = Turns.all,
    template_kwargs: Mapping[str, Any],
    eos_token_ids: Collection[int],
) -> list[RenderedConversation]:
    """Render one conversation into one or more samples.

    Generation markers in a template tell which tokens are the assistant's. Without markers, a turn's tokens
    are the difference between the conversation up to the turn and the turn's prompt (the earlier messages and
    the generation prompt), which must be a prefix of it. In both cases a turn ends with its end-of-turn
    token, because the target never samples what templates write after it. Messages after the last assistant
    turn are left out.

    Args:
        conversation: has at least one assistant turn that is not context only.
        template_kwargs: arguments of the template, such as enable_thinking.
        eos_token_ids: the tokens that end a turn.

    Raises:
        TemplateRefused: the template raises on this conversation, or a turn's prompt is not a prefix of it.
        UserError: the tokenizer has no template.
    """
    messages, tools = conversation.messages, conversation.tools
    assistant = [i for i, message in enumerate(messages) if is_trained(message)]
    assert assistant, f"{conversation.id} has no assistant turn to train on"
    target = Template(tokenizer, tools, template_kwargs, conversation.template)
    if turns is Turns.each:
        return [_sample(target, messages[: i + 1], [i], turns, eos_token_ids) for i in assistant]
    supervised = assistant if turns is Turns.all else assistant[-1:]
    return [_sample(target, messages[: assistant[-1] + 1], supervised, turns, eos_token_ids)]


def _sample(
    template: Template,
    messages: Messages,
    supervised: Sequence[int],
    turns: Turns,
    eos_token_ids: Collection[int],
) -> RenderedConversation:
    """Render the messages; the turns at the indices `supervised`, the last among them, get the loss."""
    find = _marked_spans if template.uses_markers else _prefix_spans
    input_ids, spans, num_straddling = find(template, messages, supervised, turns, eos_token_ids)
    loss_mask = [False] * len(input_ids)
    for start, end in spans:
        loss_mask[start:end] = [True] * max(end - start, 0)
    return RenderedConversation(input_ids, loss_mask, num_straddling)


def _prefix_spans(
    template: Template,
    messages: Messages,
    supervised: Sequence[int],
    turns: Turns,
    eos_token_ids: Collection[int],
) -> tuple[list[int], Spans, int]:
    full = encoded(template, template.text(messages, add_generation_prompt=False))
    input_ids = full.ids
    spans, num_straddling = [], 0
    for i in supervised:
        before, start = boundary(template, messages[:i], True, full, turns)
        end, after = len(input_ids), len(input_ids)
        if i + 1 < len(messages):
            end, after = boundary(template, messages[: i + 1], False, full, turns)
        eos = last_eos(input_ids, start, end, eos_token_ids)
        spans.append((start, end if eos is None else eos + 1))
        num_straddling += start - before + (after - end if eos is None else 0)
    return input_ids, spans, num_straddling


def _marked_spans(
    template: Template,
    messages: Messages,
    supervised: Sequence[int],
    turns: Turns,
    eos_token_ids: Collection[int],
) -> tuple[list[int], Spans, int]:
    # return_assistant_tokens_mask is not used: it includes tokens that cross a marker, and excludes the
    # last tokens of a character that is encoded as several tokens before a marker.
    full_text, marks = template.marked_text(messages)
    encoding = template.tokenizer(
        full_text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    input_ids, offsets = list(encoding["input_ids"]), encoding["offset_mapping"]
    first, num_straddling = 0, 0
    context: set[int] = set()  # of the marks
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and not is_trained(message):
            before, after = (len(template.marked_text(messages[: i + end])[1]) for end in (0, 1))
            context.update(range(before, after))
    if turns is not Turns.all:
        full = encoded(template, full_text, input_ids)
        before, first = boundary(template, messages[: supervised[-1]], True, full, turns)
        num_straddling += first - before
    spans = []
    for mark in (mark for i, mark in enumerate(marks) if i not in context):
        before, start = boundary_tokens(offsets, mark[0])
        end, after = boundary_tokens(offsets, mark[1])
        if end <= first:
            continue
        if start > first:  # otherwise it was added at the end of the prompt
            num_straddling += start - before
        eos = last_eos(input_ids, start, end, eos_token_ids)
        if eos is not None:
            end = eos + 1
        elif end < len(input_ids) and input_ids[end] in eos_token_ids:
            end += 1  # some markers exclude the end-of-turn token, which the target samples too
        else:
            num_straddling += after - end
        spans.append((max(start, first), end))
    return input_ids, spans, num_straddling
