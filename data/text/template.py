"""Rendering conversations with the target's chat template, and finding the assistant's tokens."""

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from data.text.choices import Turns
from data.text.perturbation import (
    UNCHANGED,
    NoEffect,
    PromptSetting,
    rewritten,
    template_source,
    with_documents,
    with_system,
)
from data.text.schemas import Conversation
from data.text.time_limit import TooLong, time_limit
from data.text.token_bytes import token_ends
from eagle31.errors import UserError

_FIELD = "target.chat_template"
_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_NUM_EXCERPT_CHARACTERS = 40
RENDER_SECONDS = 30.0  # of the processor, for one conversation; one of a thousand turns takes about a second

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]] | None


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


class TemplateRefused(UserError):
    """The error of a template that raises on a conversation, for example on its roles, or does not end."""


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
        conversation: has at least one assistant turn.
        template_kwargs: arguments of the template, such as enable_thinking.
        eos_token_ids: the tokens that end a turn.

    Raises:
        TemplateRefused: the template raises on this conversation.
        UserError: the tokenizer has no template, or a turn's prompt is not a prefix of the conversation.
    """
    messages, tools = conversation.messages, conversation.tools
    assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert assistant, f"{conversation.id} has no assistant turn"
    target = _Template(tokenizer, tools, template_kwargs, turns, conversation.template)
    with target.limited():
        if turns is Turns.each:
            return [target.sample(messages[: i + 1], [i], eos_token_ids) for i in assistant]
        supervised = assistant if turns is Turns.all else assistant[-1:]
        return [target.sample(messages[: assistant[-1] + 1], supervised, eos_token_ids)]


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools,
    template_kwargs: Mapping[str, Any],
    template: str = UNCHANGED,
) -> list[int]:
    """Return the token ids of the messages and the generation prompt, as in serving.

    Args:
        template: the target's, or a change of it; see `data.text.perturbation.TEMPLATES`.
    """
    target = _Template(tokenizer, tools, template_kwargs, Turns.last, template)
    with target.limited():
        return target.encode(target.text(messages, add_generation_prompt=True))


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
    target = _Template(tokenizer, conversation.tools, template_kwargs, Turns.last, conversation.template)
    with target.limited():
        prompt = target.text(messages[:last], add_generation_prompt=True)
        if prompt != target.text(messages[:last], add_generation_prompt=False):
            return None
        header, found, _ = target.text(messages, add_generation_prompt=False)[len(prompt) :].partition(answer)
    return header if answer and found and header.strip() else None


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
    target = _Template(tokenizer, tools, template_kwargs, Turns.last, template)
    with target.limited():
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
        NoEffect: the prompt would be the same as without the setting.
        TemplateRefused: the template raises, for example because it takes no system prompt.
    """
    unchanged = render_prompt(tokenizer, messages, tools, template_kwargs)
    changed = with_system(messages, setting.system)
    ids = render_prompt(tokenizer, changed, tools, template_kwargs, setting.template)
    if setting.context_tokens is not None and len(ids) < setting.context_tokens:
        changed = with_documents(changed, documents, setting.context_tokens - len(ids), tokenizer)
        ids = render_prompt(tokenizer, changed, tools, template_kwargs, setting.template)
    if ids == unchanged and setting != PromptSetting():
        raise NoEffect("template", setting, "The prompt is the same as without this change; leave it out.")
    return ids


def uses_generation_markers(tokenizer: PreTrainedTokenizerBase, tools: Tools = None) -> bool:
    """Return whether the loss mask comes from generation markers in the template.

    Markers are character offsets, and tokenizers written in Python do not report the characters of a token.
    """
    _require_template(tokenizer)
    template = tokenizer.get_chat_template(tools=list(tools) if tools else None)
    return tokenizer.is_fast and _GENERATION_MARKER.search(template) is not None


def template_fingerprint(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> str:
    """Return the sha256 of what turns messages into text: the template, its arguments and special tokens."""
    _require_template(tokenizer)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    content = json.dumps([tokenizer.chat_template, special, dict(template_kwargs)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def eos_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end a turn, from the tokenizer and its model's generation config, if any."""
    ids = {tokenizer.eos_token_id}
    try:
        generation = GenerationConfig.from_pretrained(tokenizer.name_or_path).eos_token_id
    except OSError:  # a tokenizer without a model
        generation = None
    ids.update(generation if isinstance(generation, list) else [generation])
    return frozenset(id for id in ids if id is not None)


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Return the exact text of the tokens, including special tokens."""
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


@dataclass(frozen=True)
class _Encoded:
    """A conversation's text, its N tokens, and the byte at which each ends where that is known."""

    text: str
    ids: list[int]  # [N]
    ends: list[int] | None  # [N]


class _Template:
    """A tokenizer's chat template together with its arguments."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Tools,
        template_kwargs: Mapping[str, Any],
        turns: Turns,
        template: str = UNCHANGED,
    ) -> None:
        _require_template(tokenizer)
        self.tokenizer = tokenizer
        self.arguments = {"tools": list(tools) if tools else None, **template_kwargs}
        self.turns = turns
        self.template = template
        source = template_source(template)
        if source is not None:
            self.arguments["chat_template"] = source
        # Markers are offsets into the text of the target's own template.
        self.uses_markers = template == UNCHANGED and uses_generation_markers(tokenizer, tools)

    def sample(
        self, messages: Messages, supervised: Sequence[int], eos_token_ids: Collection[int]
    ) -> RenderedConversation:
        """Render the messages; the turns at the indices `supervised`, the last among them, get the loss."""
        if self.uses_markers:
            input_ids, spans, num_straddling = self._marked_spans(messages, supervised, eos_token_ids)
        else:
            input_ids, spans, num_straddling = self._prefix_spans(messages, supervised, eos_token_ids)
        loss_mask = [False] * len(input_ids)
        for start, end in spans:
            loss_mask[start:end] = [True] * max(end - start, 0)
        return RenderedConversation(input_ids, loss_mask, num_straddling)

    def text(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        with self._refusal():
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **self.arguments
            )
        assert isinstance(text, str)
        return rewritten(text, messages, self.template, add_generation_prompt=add_generation_prompt)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _prefix_spans(
        self, messages: Messages, supervised: Sequence[int], eos_token_ids: Collection[int]
    ) -> tuple[list[int], list[tuple[int, int]], int]:
        encoded = self._encoded(self.text(messages, add_generation_prompt=False))
        input_ids = encoded.ids
        spans, num_straddling = [], 0
        for i in supervised:
            before, start = self._boundary(messages[:i], True, encoded)
            end, after = len(input_ids), len(input_ids)
            if i + 1 < len(messages):
                end, after = self._boundary(messages[: i + 1], False, encoded)
            last_eos = _last_eos(input_ids, start, end, eos_token_ids)
            spans.append((start, end if last_eos is None else last_eos + 1))
            num_straddling += start - before + (after - end if last_eos is None else 0)
        return input_ids, spans, num_straddling

    def _marked_spans(
        self, messages: Messages, supervised: Sequence[int], eos_token_ids: Collection[int]
    ) -> tuple[list[int], list[tuple[int, int]], int]:
        # return_assistant_tokens_mask is not used: it includes tokens that cross a marker, and excludes the
        # last tokens of a character that is encoded as several tokens before a marker.
        full_text, marks = self._marked_text(messages)
        encoding = self.tokenizer(
            full_text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        input_ids, offsets = list(encoding["input_ids"]), encoding["offset_mapping"]
        first, num_straddling = 0, 0
        if self.turns is not Turns.all:
            encoded = self._encoded(full_text, input_ids)
            before, first = self._boundary(messages[: supervised[-1]], True, encoded)
            num_straddling += first - before
        spans = []
        for mark in marks:
            before, start = _boundary_tokens(offsets, mark[0])
            end, after = _boundary_tokens(offsets, mark[1])
            if end <= first:
                continue
            if start > first:  # otherwise it was added at the end of the prompt
                num_straddling += start - before
            last_eos = _last_eos(input_ids, start, end, eos_token_ids)
            if last_eos is not None:
                end = last_eos + 1
            elif end < len(input_ids) and input_ids[end] in eos_token_ids:
                end += 1  # some markers exclude the end-of-turn token, which the target samples too
            else:
                num_straddling += after - end
            spans.append((max(start, first), end))
        return input_ids, spans, num_straddling

    def _marked_text(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the character spans of the generation markers; adjacent spans are merged."""
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

    def _encoded(self, text: str, ids: list[int] | None = None) -> "_Encoded":
        ids = self.encode(text) if ids is None else ids
        return _Encoded(text, ids, token_ends(self.tokenizer, text, ids))

    def _boundary(
        self, history: Messages, add_generation_prompt: bool, encoded: "_Encoded"
    ) -> tuple[int, int]:
        """Find where the text of `history` ends in the tokens of the full text.

        Returns:
            (before, after): tokens below `before` belong to the history, and tokens from `after` on do not. A
            token between them crosses the boundary.
        """
        text = self.text(history, add_generation_prompt=add_generation_prompt)
        rendered_as = "as a prompt" if add_generation_prompt else "as the last message"
        self._require_prefix(text, encoded.text, rendered_as)
        if encoded.ends is not None:
            position = len(text.encode(errors="replace"))
            before = bisect_right(encoded.ends, position)
            is_exact = not position or (before > 0 and encoded.ends[before - 1] == position)
            return before, before if is_exact else before + 1
        input_ids, ids = encoded.ids, self.encode(text)
        common = _num_common(ids, input_ids)
        if common == len(ids):
            return common, common
        # Tokens merge differently across the boundary: find the token in which the history's text ends.
        rest = decode(self.tokenizer, ids[common:])
        last = min(len(input_ids), common + 4 * len(rest) + 1)  # a character is at most four tokens
        for end in range(common + 1, last + 1):
            found = decode(self.tokenizer, input_ids[common:end])
            if found.startswith(rest):
                return (end if found == rest else end - 1), end
        return common, last

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Limit the time in which one conversation is rendered."""
        try:
            with time_limit(RENDER_SECONDS):
                yield
        except TooLong as error:
            remedy = (
                f"The template takes more than {RENDER_SECONDS:g} s for one conversation: it does not end, "
                "or the conversation has very many turns. Correct the template or the data."
            )
            raise TemplateRefused(_FIELD, self._name, remedy) from error

    @contextmanager
    def _refusal(self) -> Iterator[None]:
        try:
            yield
        except TooLong:
            raise
        except TemplateSyntaxError as error:
            remedy = f"It is no Jinja template: {error.message}, in line {error.lineno}. Correct it."
            raise TemplateRefused(_FIELD, self._name, remedy) from error
        except Exception as error:  # templates compute, and can fail as any code can
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, TemplateError) else error
            remedy = f"The template refuses a conversation: {reason}. Correct the data or the template."
            raise TemplateRefused(_FIELD, self._name, remedy) from error

    def _require_prefix(self, prefix: str, full_text: str, rendered_as: str) -> None:
        if full_text.startswith(prefix):
            return
        index = _num_common(prefix, full_text)
        near = slice(max(index - _NUM_EXCERPT_CHARACTERS, 0), index + _NUM_EXCERPT_CHARACTERS)
        remedies = [f"give {_FIELD}=FILE, a template with {{% generation %}} markers or with a stable prefix"]
        if self.turns is Turns.all:
            remedies.insert(
                0,
                "use data.turns=each or data.turns=last, which render a turn as the last one, as in serving",
            )
            if "enable_thinking" in str(self.tokenizer.chat_template):
                remedies.insert(
                    1, "set data.template_kwargs.enable_thinking=false if that makes the prefix stable"
                )
        raise UserError(
            _FIELD,
            self._name,
            f"The template writes the start of a turn in two ways, so that its tokens cannot be found: "
            f"{rendered_as} {prefix[near]!r}, and in the full conversation {full_text[near]!r}, from "
            f"character {index} on. Remedies: {'; or '.join(remedies)}.",
        )

    @property
    def _name(self) -> str:
        return self.tokenizer.name_or_path or type(self.tokenizer).__name__


def _require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise UserError(_FIELD, None, f"The tokenizer has no chat template; give one with {_FIELD}=FILE.")


def _num_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _last_eos(ids: list[int], start: int, end: int, eos_token_ids: Collection[int]) -> int | None:
    return next((i for i in range(end - 1, start - 1, -1) if ids[i] in eos_token_ids), None)


def _boundary_tokens(offsets: Sequence[tuple[int, int]], character: int) -> tuple[int, int]:
    """Return (before, after) as `_Template._boundary` does, for the boundary before a character."""
    after = bisect_left(offsets, character, key=itemgetter(0))
    straddles = after > 0 and offsets[after - 1][1] > character
    return after - straddles, after
