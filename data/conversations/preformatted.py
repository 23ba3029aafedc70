"""Rows to which a template was applied already: text with its markers, or token ids with a loss mask.

They become messages of the user and the assistant in turn, whose contents joined are the text or the ids.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from itertools import groupby, pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.conversations.boundaries import num_common
from data.conversations.schemas import AS_TEXT, FORM, IDS, MalformedRow, Messages, are_ids, as_ids
from data.conversations.template import FIELD, Template, special_tokens
from data.conversations.thoughts import empty_thought_end

MASKS = ("loss_mask", "assistant_masks", "assistant_mask", "completion_mask", "response_mask", "labels")
_IGNORED = -100  # the label of a token that is not supervised
_REMEDY = "give messages, or name text as the prompt column for prompts alone"
_QUESTION, _ANSWER = "QUESTION-of-an-example", "ANSWER-of-an-example"

SplitText = Callable[[str], Messages]


def token_messages(row: Mapping[str, Any], mask_column: str | None) -> Messages:
    """Return the messages of the token ids in `input_ids`, without padding.

    Tokens after the last supervised one are left out, and the first token is context, which it always is.

    Args:
        mask_column: one of `MASKS`: whether each token is supervised, or its label. None: no token is.

    Raises:
        MalformedRow: the columns are no token ids and their mask, or no two tokens in a row are supervised.
    """
    ids: Any = row.get(IDS)
    given = [0] * len(ids or []) if mask_column is None else row.get(mask_column)
    if not are_ids(ids):
        raise MalformedRow(f"{IDS} is not a list of token ids")
    read = row.get("attention_mask") or [1] * len(ids)
    if not isinstance(given, list) or not len(given) == len(ids) == len(read):
        raise MalformedRow(f"{mask_column} has not one value for each of the {len(ids)} tokens of {IDS}")
    if mask_column != "labels":
        allowed: Sequence[tuple[Any, ...]] = [(0, 1)] * len(ids)
    else:
        allowed = [(_IGNORED, id) for id in ids]
    for id, value, values in zip(ids, given, allowed, strict=True):
        if value not in values:
            raise MalformedRow(
                f"{mask_column} has {value!r} for token {id}, neither {values[0]} nor {values[1]}"
            )
    mask = [value == values[1] for value, values in zip(given, allowed, strict=True)]
    tokens = [(id, one) for id, one, is_read in zip(ids, mask, read, strict=True) if is_read]
    tokens = [(id, one and i > 0) for i, (id, one) in enumerate(tokens)]
    if any(mask) and not any(first and second for (_, first), (_, second) in pairwise(tokens)):
        raise MalformedRow(f"{mask_column} has no two supervised tokens in a row")
    messages = [
        as_ids("assistant" if supervised else "user", [id for id, _ in run])
        for supervised, run in groupby(tokens, key=lambda token: token[1])
    ]
    return messages[:-1] if any(mask) and messages[-1]["role"] == "user" else messages


def not_split(text: str) -> Messages:
    """Raise MalformedRow: there is no template at whose markers the text could be split."""
    raise MalformedRow(f"its text may have a template's markers, which only a run reads: {_REMEDY}")


def text_splitter(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any], eos_token_ids: Collection[int]
) -> SplitText:
    """Return what splits a text at the markers of the target's template; raises MalformedRow without them.

    An answer begins after the generation prompt, and ends with the first token that ends a turn. What follows
    the last one is left out.
    """

    markers = cache(partial(_answer_markers, tokenizer, template_kwargs))
    tokens = map(str, tokenizer.convert_ids_to_tokens(sorted(eos_token_ids)))
    stops = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
    return lambda text: _split(text, *markers(), stops, tokenizer)


def _answer_markers(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
) -> tuple[str, str, str]:
    """Return what the template writes between answers and questions.

    That is what it writes before each answer, what the generation prompt has after that, and what comes
    between an answer and the next question.
    """
    template = Template(tokenizer, None, template_kwargs)
    asked = [{"role": "user", "content": _QUESTION}]
    before, prompt = (template.text(asked, add_generation_prompt=prompts) for prompts in (False, True))
    messages = [*asked, {"role": "assistant", "content": _ANSWER}, *asked]
    written = template.text(messages, add_generation_prompt=False)
    common = prompt[: num_common(prompt, written)]
    marker = common.removeprefix(before) or common.rpartition(_QUESTION)[2]
    return marker, prompt[len(common) :], written.partition(_ANSWER)[2].partition(_QUESTION)[0]


def _split(
    text: str,
    marker: str,
    following: str,
    question: str,
    stops: re.Pattern[str],
    tokenizer: PreTrainedTokenizerBase,
) -> Messages:
    messages: Messages = []
    asks = stops.sub("", question).strip()  # also where nothing ended the answer before it
    position = 0
    while marker.strip() and (found := text.find(marker, position)) >= 0:
        start = found + len(marker)
        start += len(following) if text.startswith(following, start) else 0
        start = empty_thought_end(text, start) or start
        stop = stops.search(text, start)
        end, another = stop.end() if stop else len(text), text.find(marker, start)
        goes_on = special_tokens(tokenizer).search(text, start) or (asks and asks in text[start:])
        if 0 <= another < end or (stop is None and goes_on):
            raise MalformedRow(f"an answer in its text has none of the target's stop tokens, {stops.pattern}")
        parts = (("user", text[position:start]), ("assistant", text[start:end]))
        messages += [{"role": role, "content": part, FORM: AS_TEXT} for role, part in parts if part]
        position = end
    if not messages:
        raise MalformedRow(
            f"its text has no {marker!r}, which the target's template writes before an answer: give the "
            f"template that wrote it with {FIELD}=FILE, or {_REMEDY}"
        )
    return messages
