"""Finding the tokens of a rendered conversation at which a turn starts and ends."""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from data.conversations.template import FIELD, Messages, Template, TemplateRefused, decode
from data.conversations.thoughts import after_prompted_thought, prompted_thought
from data.conversations.token_bytes import normalized, token_ends

_NUM_EXCERPT_CHARACTERS = 40
_THINKING = re.compile(r"(?<![\w.'\"])(enable_)?thinking\b")  # an argument, not the key of a message
_EXAMPLE = "\ue000ANSWER-of-an-example"  # no answer begins like this


@dataclass(frozen=True)
class Encoded:
    """A conversation's text, its N tokens, and the byte at which each ends where that is known."""

    text: str
    ids: list[int]  # [N]
    ends: list[int] | None  # [N], in the text that `normalize` returns
    normalize: Callable[[str], str]


def encoded(template: Template, text: str) -> Encoded:
    """Return the tokens of a text."""
    ids = template.encode(text)
    for normalize in (str, partial(normalized, template.tokenizer)):
        ends = token_ends(template.tokenizer, normalize(text), ids)
        if ends is not None:
            break
    return Encoded(text, ids, ends, normalize)


def served_text(template: Template, messages: Messages, prompt: str, written: str) -> str:
    """Return the text of a conversation in which the last message follows its prompt, as in serving.

    Templates may write the history in another way once it is answered: some have the system prompt in the
    last message of the user, or leave out the thoughts before an answer. The text is then the prompt, and
    what the template writes for the answer. After a prompt that begins a thought, that is the recorded one.

    Args:
        messages: the last is the assistant's.
        prompt: the text of the messages before it and the generation prompt.
        written: the text of all messages.

    Raises:
        TemplateRefused: the template writes something else between the last question and the answer.
    """
    if written.startswith(prompt):
        return written
    if prompted := prompted_thought(prompt):
        before = prompt.removesuffix(prompted)
        answer = served_text(template, messages, before, written)[len(before) :]
        return prompt + after_prompted_thought(prompted, messages[-1], answer)
    asked = messages[-2]["content"]  # which some templates write as JSON, if a tool said it
    found = max(prompt.rfind(text) for text in (asked.strip(), json.dumps(asked, ensure_ascii=False)[1:-1]))
    between = prompt[found:] if asked.strip() and found >= 0 else ""
    example = [*messages[:-1], {"role": "assistant", "content": _EXAMPLE}]
    other = template.text(example, add_generation_prompt=False)
    header = written[: num_common(written, other)]
    if not between or between not in header:
        raise _two_ways(template, prompt, written)
    return prompt + written[header.rfind(between) + len(between) :]


def boundary(template: Template, full: Encoded, character: int) -> tuple[int, int]:
    """Find the boundary before a character of the conversation in its tokens.

    Returns:
        (before, after): tokens below `before` are before it, and tokens from `after` on are not. A token
        between them crosses the boundary.
    """
    text = full.text[:character]
    if full.ends is not None:
        position = len(full.normalize(text).encode(errors="replace"))
        before = bisect_right(full.ends, position)
        is_exact = not position or (before > 0 and full.ends[before - 1] == position)
        return before, before if is_exact else before + 1
    input_ids, ids = full.ids, template.encode(text)
    common = num_common(ids, input_ids)
    if common == len(ids):
        return common, common
    # Tokens merge differently across the boundary: find the token in which the history's text ends.
    rest = decode(template.tokenizer, ids[common:])
    last = min(len(input_ids), common + 4 * len(rest) + 1)  # a character is at most four tokens
    for end in range(common + 1, last + 1):
        found = decode(template.tokenizer, input_ids[common:end])
        if found.startswith(rest):
            return (end if found == rest else end - 1), end
    return common, last


def last_eos(ids: list[int], start: int, end: int, eos_token_ids: Collection[int]) -> int | None:
    """Return the index of the last token from `start` to `end` that ends a turn, if there is one."""
    return next((i for i in range(end - 1, start - 1, -1) if ids[i] in eos_token_ids), None)


def _two_ways(template: Template, prompt: str, written: str) -> TemplateRefused:
    index = num_common(prompt, written)
    near = slice(max(index - _NUM_EXCERPT_CHARACTERS, 0), index + _NUM_EXCERPT_CHARACTERS)
    remedies = [
        "set data.regenerate.enabled=true, with which the target writes the answers",
        f"give {FIELD}=FILE, a template with a stable prefix",
    ]
    if argument := _THINKING.search(str(template.tokenizer.chat_template)):
        remedies.insert(0, f"set data.template_kwargs.{argument[0]}=false if that makes the prefix stable")
    return TemplateRefused(
        FIELD,
        template.name,
        f"The template writes the start of an answer in two ways, so that its tokens cannot be found: "
        f"as a prompt {prompt[near]!r}, and in the full conversation {written[near]!r}, from "
        f"character {index} on. Remedies: {'; or '.join(remedies)}.",
    )


def num_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
