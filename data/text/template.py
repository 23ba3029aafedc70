"""Conversations as the target's own chat template writes them, and which tokens are the assistant's."""

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from operator import itemgetter
from typing import Any

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from data.text.sources import Conversation
from eagle31.errors import UserError

_FIELD = "target.chat_template"
_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_NUM_EXCERPT_CHARACTERS = 40

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]] | None


class Turns(Enum):
    """Which assistant turns become training samples."""

    all = "all"  # one sample, every assistant turn counted
    last = "last"  # one sample, the last assistant turn counted
    each = "each"  # a sample for each assistant turn, rendered as the last one: what serving sees


@dataclass(frozen=True)
class RenderedConversation:
    """N tokens of one sample."""

    input_ids: list[int]  # [N]
    loss_mask: list[bool]  # [N], true where the assistant wrote the token
    num_straddling: int = 0  # tokens left out because they lie on both sides of a turn's edge

    @property
    def num_prompt_tokens(self) -> int:
        """The index of the first token of the assistant's."""
        return self.loss_mask.index(True)

    @property
    def has_counted_row(self) -> bool:
        """Row t counts when x[t+1] and x[t+2] are the assistant's."""
        return any(first and second for first, second in pairwise(self.loss_mask))

    def cut(self, max_tokens: int) -> "RenderedConversation":
        return RenderedConversation(
            self.input_ids[:max_tokens], self.loss_mask[:max_tokens], self.num_straddling
        )


class TemplateRefused(UserError):
    """The template itself raised on a conversation, such as for roles that do not alternate."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    *,
    turns: Turns = Turns.all,
    template_kwargs: Mapping[str, Any],
    eos_token_ids: Collection[int],
) -> list[RenderedConversation]:
    """The samples of one conversation, at least one.

    A template with generation markers says itself which tokens are the assistant's. Of any other, a turn's
    tokens are those of the conversation up to it without those of its prompt (the messages before it and the
    generation prompt), which must be a prefix. Either way a turn ends with its end-of-turn token: the target
    never samples what templates put behind it. Messages behind the last assistant turn are left out.

    Args:
        conversation: with an assistant turn.
        template_kwargs: passed to the template, such as enable_thinking.
        eos_token_ids: the tokens that end a turn.

    Raises:
        TemplateRefused: the template does not take this conversation.
        UserError: the tokenizer has no template, or one that writes a turn's beginnings in different ways.
    """
    messages, tools = conversation.messages, conversation.tools
    assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert assistant, f"{conversation.id} has no assistant turn"
    target = _Template(tokenizer, tools, template_kwargs, turns)
    if turns is Turns.each:
        return [target.sample(messages[: i + 1], [i], eos_token_ids) for i in assistant]
    counted = assistant if turns is Turns.all else assistant[-1:]
    return [target.sample(messages[: assistant[-1] + 1], counted, eos_token_ids)]


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Tools, template_kwargs: Mapping[str, Any]
) -> list[int]:
    """The ids that serving answers: the messages and the generation prompt."""
    target = _Template(tokenizer, tools, template_kwargs, Turns.last)
    return target.encode(target.text(messages, add_generation_prompt=True))


def uses_generation_markers(tokenizer: PreTrainedTokenizerBase, tools: Tools = None) -> bool:
    """Whether the mask comes from marks in the template of what the assistant wrote.

    Marks are characters, and tokenizers written in Python do not tell which characters a token has.
    """
    _require_template(tokenizer)
    template = tokenizer.get_chat_template(tools=list(tools) if tools else None)
    return tokenizer.is_fast and _GENERATION_MARKER.search(template) is not None


def template_fingerprint(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> str:
    """sha256 of what turns messages into text: template, arguments, and the special tokens it may name."""
    _require_template(tokenizer)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    content = json.dumps([tokenizer.chat_template, special, dict(template_kwargs)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def eos_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a turn, from the tokenizer and the generation config beside it, if there is one."""
    ids = {tokenizer.eos_token_id}
    try:
        generation = GenerationConfig.from_pretrained(tokenizer.name_or_path).eos_token_id
    except OSError:  # a tokenizer without a model
        generation = None
    ids.update(generation if isinstance(generation, list) else [generation])
    return frozenset(id for id in ids if id is not None)


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """The exact text of the tokens, special ones included."""
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


class _Template:
    """A tokenizer's template with its arguments."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Tools,
        template_kwargs: Mapping[str, Any],
        turns: Turns,
    ) -> None:
        _require_template(tokenizer)
        self.tokenizer = tokenizer
        self.arguments = {"tools": list(tools) if tools else None, **template_kwargs}
        self.turns = turns
        self.uses_markers = uses_generation_markers(tokenizer, tools)

    def sample(
        self, messages: Messages, counted: Sequence[int], eos_token_ids: Collection[int]
    ) -> RenderedConversation:
        """Counts the turns at the indices `counted`; the last of `messages` is one of them."""
        if self.uses_markers:
            input_ids, spans, num_straddling = self._marked_spans(messages, counted, eos_token_ids)
        else:
            input_ids, spans, num_straddling = self._prefix_spans(messages, counted, eos_token_ids)
        loss_mask = [False] * len(input_ids)
        for start, end in spans:
            loss_mask[start:end] = [True] * max(end - start, 0)
        return RenderedConversation(input_ids, loss_mask, num_straddling)

    def text(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        with self._refusal():
            return self.tokenizer.apply_chat_template(  # type: ignore[return-value]
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **self.arguments
            )

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _prefix_spans(
        self, messages: Messages, counted: Sequence[int], eos_token_ids: Collection[int]
    ) -> tuple[list[int], list[tuple[int, int]], int]:
        whole = self.text(messages, add_generation_prompt=False)
        input_ids = self.encode(whole)
        spans, num_straddling = [], 0
        for i in counted:
            before, start = self._edge(messages[:i], True, whole, input_ids)
            end, behind = len(input_ids), len(input_ids)
            if i + 1 < len(messages):
                end, behind = self._edge(messages[: i + 1], False, whole, input_ids)
            last_eos = _last_eos(input_ids, start, end, eos_token_ids)
            spans.append((start, end if last_eos is None else last_eos + 1))
            num_straddling += start - before + (behind - end if last_eos is None else 0)
        return input_ids, spans, num_straddling

    def _marked_spans(
        self, messages: Messages, counted: Sequence[int], eos_token_ids: Collection[int]
    ) -> tuple[list[int], list[tuple[int, int]], int]:
        # Not return_assistant_tokens_mask: it counts tokens that straddle a mark, and loses the last bytes
        # of a character of several tokens before one.
        whole, marks = self._marked_text(messages)
        encoding = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        input_ids, offsets = list(encoding["input_ids"]), encoding["offset_mapping"]
        first, num_straddling = 0, 0
        if self.turns is not Turns.all:
            before, first = self._edge(messages[: counted[-1]], True, whole, input_ids)
            num_straddling += first - before
        spans = []
        for mark in marks:
            before, start = _edge_tokens(offsets, mark[0])
            end, behind = _edge_tokens(offsets, mark[1])
            if end <= first:
                continue
            if start > first:  # else it is counted at the prompt's edge
                num_straddling += start - before
            last_eos = _last_eos(input_ids, start, end, eos_token_ids)
            if last_eos is not None:
                end = last_eos + 1
            elif end < len(input_ids) and input_ids[end] in eos_token_ids:
                end += 1  # some markers leave out the end-of-turn token, which the target samples too
            else:
                num_straddling += behind - end
            spans.append((max(start, first), end))
        return input_ids, spans, num_straddling

    def _marked_text(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """The text and the characters between the generation markers, marks that touch being one."""
        with self._refusal():
            rendered: Any = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self.tokenizer.get_chat_template(tools=self.arguments["tools"]),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.arguments},
            )
        (text,), (marks,) = rendered
        joined: list[tuple[int, int]] = []
        for start, end in marks:
            touches = joined and joined[-1][1] == start
            joined.append((joined.pop()[0] if touches else start, end))
        return text, joined

    def _edge(
        self, history: Messages, add_generation_prompt: bool, whole: str, input_ids: list[int]
    ) -> tuple[int, int]:
        """Where the text of `history` ends among the tokens of the whole text.

        Returns:
            (before, behind): tokens below `before` are the history's, from `behind` on they are not; one
            between them lies on both sides.
        """
        text = self.text(history, add_generation_prompt=add_generation_prompt)
        self._require_prefix(text, whole, "as a prompt" if add_generation_prompt else "as the last message")
        ids = self.encode(text)
        common = _num_common(ids, input_ids)
        if common == len(ids):
            return common, common
        # Merged otherwise across the edge: find the token where the history's text is used up.
        rest = decode(self.tokenizer, ids[common:])
        last = min(len(input_ids), common + 4 * len(rest) + 1)  # a character has at most four tokens
        for end in range(common + 1, last + 1):
            found = decode(self.tokenizer, input_ids[common:end])
            if found.startswith(rest):
                return (end if found == rest else end - 1), end
        return common, last

    @contextmanager
    def _refusal(self) -> Iterator[None]:
        try:
            yield
        except TemplateError as error:
            remedy = f"The template refuses a conversation: {error}. Correct the data, or the template."
            raise TemplateRefused(_FIELD, self._name, remedy) from error

    def _require_prefix(self, prefix: str, whole: str, how: str) -> None:
        if whole.startswith(prefix):
            return
        at = _num_common(prefix, whole)
        near = slice(max(at - _NUM_EXCERPT_CHARACTERS, 0), at + _NUM_EXCERPT_CHARACTERS)
        remedies = [
            f"give {_FIELD}=FILE, a template with {{% generation %}} markers or one whose beginning stays"
        ]
        if self.turns is Turns.all:
            remedies.insert(
                0,
                "use data.turns=each or data.turns=last, which render a turn as serving does, as the last",
            )
            if "enable_thinking" in str(self.tokenizer.chat_template):
                remedies.insert(1, "set data.template_kwargs.enable_thinking=false if that keeps them equal")
        raise UserError(
            _FIELD,
            self._name,
            f"The template writes a turn's beginning in two ways, so that its tokens cannot be told apart: "
            f"{how} {prefix[near]!r}, in the whole conversation {whole[near]!r}, from character {at} on. "
            f"Remedies: {'; or '.join(remedies)}.",
        )

    @property
    def _name(self) -> str:
        return self.tokenizer.name_or_path or type(self.tokenizer).__name__


def _require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise UserError(_FIELD, None, f"The tokenizer has no chat template; give one with {_FIELD}=FILE.")


def _num_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the common beginning."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _last_eos(ids: list[int], start: int, end: int, eos_token_ids: Collection[int]) -> int | None:
    return next((i for i in range(end - 1, start - 1, -1) if ids[i] in eos_token_ids), None)


def _edge_tokens(offsets: Sequence[tuple[int, int]], character: int) -> tuple[int, int]:
    """(before, behind) as of `_Template._edge`, for an edge in front of a character."""
    behind = bisect_left(offsets, character, key=itemgetter(0))
    straddles = behind > 0 and offsets[behind - 1][1] > character
    return behind - straddles, behind
