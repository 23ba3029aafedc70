"""Finding the tokens of a rendered conversation at which a turn starts and ends."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from data.conversations.choices import Turns
from data.conversations.template import FIELD, Messages, Template, TemplateRefused, decode
from data.conversations.token_bytes import token_ends

_NUM_EXCERPT_CHARACTERS = 40


@dataclass(frozen=True)
class Encoded:
    """A conversation's text, its N tokens, and the byte at which each ends where that is known."""

    text: str
    ids: list[int]  # [N]
    ends: list[int] | None  # [N]


def encoded(template: Template, text: str, ids: list[int] | None = None) -> Encoded:
    """Return the tokens of a text; `ids` are its tokens where they are known."""
    ids = template.encode(text) if ids is None else ids
    return Encoded(text, ids, token_ends(template.tokenizer, text, ids))


def boundary(
    template: Template, history: Messages, add_generation_prompt: bool, full: Encoded, turns: Turns
) -> tuple[int, int]:
    """Find where the text of `history` ends in the tokens of the full conversation.

    Args:
        turns: the choice of the recipe, for the remedies of the error.

    Returns:
        (before, after): tokens below `before` belong to the history, and tokens from `after` on do not. A
        token between them crosses the boundary.

    Raises:
        TemplateRefused: the history's text is no prefix of the full one.
    """
    text = template.text(history, add_generation_prompt=add_generation_prompt)
    rendered_as = "as a prompt" if add_generation_prompt else "as the last message"
    _require_prefix(template, text, full.text, rendered_as, turns)
    if full.ends is not None:
        position = len(text.encode(errors="replace"))
        before = bisect_right(full.ends, position)
        is_exact = not position or (before > 0 and full.ends[before - 1] == position)
        return before, before if is_exact else before + 1
    input_ids, ids = full.ids, template.encode(text)
    common = _num_common(ids, input_ids)
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


def boundary_tokens(offsets: Sequence[tuple[int, int]], character: int) -> tuple[int, int]:
    """Return (before, after) as `boundary` does, for the boundary before a character."""
    after = bisect_left(offsets, character, key=itemgetter(0))
    straddles = after > 0 and offsets[after - 1][1] > character
    return after - straddles, after


def last_eos(ids: list[int], start: int, end: int, eos_token_ids: Collection[int]) -> int | None:
    """Return the index of the last token from `start` to `end` that ends a turn, if there is one."""
    return next((i for i in range(end - 1, start - 1, -1) if ids[i] in eos_token_ids), None)


def _require_prefix(template: Template, prefix: str, full_text: str, rendered_as: str, turns: Turns) -> None:
    if full_text.startswith(prefix):
        return
    index = _num_common(prefix, full_text)
    near = slice(max(index - _NUM_EXCERPT_CHARACTERS, 0), index + _NUM_EXCERPT_CHARACTERS)
    remedies = [f"give {FIELD}=FILE, a template with {{% generation %}} markers or with a stable prefix"]
    if turns is Turns.all:
        remedies.insert(
            0, "use data.turns=each or data.turns=last, which render a turn as the last one, as in serving"
        )
        if "enable_thinking" in str(template.tokenizer.chat_template):
            remedies.insert(
                1, "set data.template_kwargs.enable_thinking=false if that makes the prefix stable"
            )
    raise TemplateRefused(
        FIELD,
        template.name,
        f"The template writes the start of a turn in two ways, so that its tokens cannot be found: "
        f"{rendered_as} {prefix[near]!r}, and in the full conversation {full_text[near]!r}, from "
        f"character {index} on. Remedies: {'; or '.join(remedies)}.",
    )


def _num_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
