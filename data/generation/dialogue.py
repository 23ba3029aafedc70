"""A conversation whose assistant turns the target writes again, or in place of those that are missing.

What it wrote becomes a message for its chat template: reasoning, text and tool calls. The template decides
what a completion means: what it writes around the reasoning and the content of an example is looked for in
the completion. A message is taken if the template writes the completion again with it, character for
character; around a text it may leave out white space, and before it a thought, or write an empty one, as in
serving. The token that ends the turn may be left to the next message. Otherwise the conversation ends: its
next prompt would have what nobody wrote.
"""

import json
import re
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.conversations.boundaries import served_text
from data.conversations.prompts import with_missing_answers
from data.conversations.schemas import AS_TEXT, FORM, Conversation, as_ids, form_of
from data.conversations.template import Template, TemplateRefused, decode
from data.conversations.thoughts import REASONING_KEYS, opened, split_thought, without_empty_thought
from data.generation.answers import MIN_ANSWER_TOKENS

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_CONTEXT_TOKENS = 8
_REASONING, _CONTENT = "REASONING-of-an-example", "CONTENT-of-an-example"
_LOOP_TOKENS, _LOOPED_TOKENS = 256, 64
# Why a conversation ends before its last turn.
CUT = "an answer reaches data.regenerate.max_new_tokens"
EMPTY = "the target writes nothing"
NO_ROOM = "the next prompt leaves no room for an answer in data.max_tokens"
OVERLONG = "the first prompt leaves no room for an answer in data.max_tokens"
UNREADABLE = "the chat template does not write an answer again as the target wrote it"
OTHER_CALLS = "the recorded results of tools do not fit the target's calls"
REPEATED = "an answer repeats itself to its end, which is left out"


class Regenerated:
    """The prompts of a conversation's assistant turns, each with the target's earlier completions.

    Each message of the user that has no answer gets a turn too. The conversation ends after the last turn;
    where a prompt leaves no room for two tokens; where the template refuses; after a completion that is
    empty, has no end, repeats itself, or cannot be part of a prompt as it is; and where recorded messages do
    not fit what the target wrote: the results of tool calls that it did not make, or no results of calls that
    it made.

    Args:
        stop_token_ids: the tokens that end a completion.
        max_tokens: the limit for prompt and completion together.
        on_refused: called with (id, reason) if the template refuses; may raise UserError.
        on_overlong: called if the first prompt leaves no room; may raise UserError.
    """

    def __init__(
        self,
        conversation: Conversation,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any],
        stop_token_ids: Collection[int],
        max_tokens: int,
        on_refused: Callable[[tuple[str, str]], None],
        on_overlong: Callable[[], None] = lambda: None,
    ) -> None:
        self.conversation = conversation
        self.name = f"conversation {conversation.id}"
        self.ended: str | None = None  # why it ended early: one of the reasons above
        self.refused: str | None = None  # why the template refuses
        self.turn = 0  # of the next prompt
        self.template = Template(tokenizer, conversation.tools, template_kwargs, conversation.template)
        self._stop_token_ids, self._max_tokens = stop_token_ids, max_tokens
        self._on_refused, self._on_overlong = on_refused, on_overlong
        self._messages = with_missing_answers(conversation.messages)
        self._position = 0
        self._history: list[dict[str, Any]] = []
        self._prompt: Sequence[int] = ()

    def next_prompt(self) -> Sequence[int] | None:
        """Return the token ids up to the next assistant turn, or None at the end."""
        messages = self._messages
        while self._position < len(messages) and messages[self._position]["role"] != "assistant":
            self._history.append(dict(messages[self._position]))
            self._position += 1
        if self._position >= len(messages):
            return None
        try:
            prompt = self.template.prompt_ids(self._history)
        except TemplateRefused as refused:
            self._end()
            self.refused = refused.remedy
            self._on_refused((self.conversation.id, refused.remedy))
            return None
        if len(prompt) + MIN_ANSWER_TOKENS > self._max_tokens:
            self._end(NO_ROOM if self.turn else OVERLONG)
            if not self.turn:
                self._on_overlong()
            return None
        self._prompt = array("i", prompt)  # a tenth of a list's memory
        return self._prompt

    def add_answer(self, ids: Sequence[int]) -> None:
        """Continue after the target's completion of the latest prompt."""
        self.turn += 1
        if not ids:
            self._end(EMPTY)
            return
        if repeats_itself(ids, self._stop_token_ids):
            self._end(REPEATED)
            return
        messages = self._messages
        recorded = messages[self._position]
        self._position += 1
        if all(message["role"] != "assistant" for message in messages[self._position :]):
            self._end()  # nothing reads this turn
            return
        if ids[-1] not in self._stop_token_ids:
            self._end(CUT)
            return
        turn: dict[str, Any] | None = as_ids("assistant", ids)
        if not (form := form_of(messages)):
            turn = parsed_turn(self.template, self._history, self._prompt, ids)
        elif form == AS_TEXT:
            turn = {"role": "assistant", "content": decode(self.template.tokenizer, list(ids)), FORM: form}
        if turn is None:
            self._end(UNREADABLE)
            return
        has_results = messages[self._position]["role"] == "tool"
        if not (same_calls(turn, recorded) if has_results else not turn.get("tool_calls")):
            self._end(OTHER_CALLS)
            return
        self._history.append(turn)

    def min_tokens(self) -> int:
        """Return the fewest tokens that have room for the first prompt and an answer."""
        first = takewhile(lambda message: message["role"] != "assistant", self._messages)
        return len(self.template.prompt_ids(list(first))) + MIN_ANSWER_TOKENS

    def _end(self, reason: str | None = None) -> None:
        self.ended = reason
        self._position = len(self._messages)


def repeats_itself(ids: Sequence[int], stop_token_ids: Collection[int]) -> bool:
    """Return whether the last 256 tokens before the stop token repeat a sequence of at most 64 tokens."""
    ids = list(ids[:-1] if ids[-1] in stop_token_ids else ids)
    tail = ids[-_LOOP_TOKENS:]
    looped = (period for period in range(1, _LOOPED_TOKENS + 1) if tail[period:] == tail[:-period])
    return len(tail) == _LOOP_TOKENS and any(looped)


def parsed_turn(
    template: Template, history: Sequence[dict[str, Any]], prompt: Sequence[int], answer: Sequence[int]
) -> dict[str, Any] | None:
    """Return the assistant's message after `history` with which the template writes the answer, or None.

    Args:
        prompt: the token ids of the history and the generation prompt.
        answer: the token ids of the target's completion, of which the last ends it.
    """
    tokenizer = template.tokenizer
    # Decoded after the prompt's end, because some tokenizers drop a text's first space.
    context = list(prompt[-_CONTEXT_TOKENS:])
    answered = decode(tokenizer, [*context, *answer]).removeprefix(decode(tokenizer, context))
    end = decode(tokenizer, list(answer[-1:]))
    answered = answered.removesuffix(end)
    before = template.text(history, add_generation_prompt=True)
    readings = [*_parsed(template, prompt, answer)]
    for keys in (REASONING_KEYS, ()):
        example = {"role": "assistant", "content": _CONTENT, **dict.fromkeys(keys, _REASONING)}
        written = _written(template, history, example, before)
        if written is None:
            continue
        opening, _, _ = written.partition(_CONTENT)
        around = map(re.escape, opening.split(_REASONING))
        if found := re.match("(.*?)".join(around) + "(.*)", answered, re.DOTALL):
            readings += _readings(found.groups(), tokenizer.all_special_tokens)
    thought, mark, rest = split_thought(answered)
    parts = (opened(thought), rest) if mark else (rest,)
    readings += _readings(parts, tokenizer.all_special_tokens)
    for message in readings:
        content = message["content"]
        stripped = content.strip().join(answered.rsplit(content, 1)) if content else answered
        for shown in dict.fromkeys((content, content.strip())):
            read = message | {"content": shown}
            said = dict.fromkeys((answered, stripped))
            if any(_writes(template, history, read, before, text, end) for text in said):
                return read
    return None


def _written(
    template: Template, history: Sequence[dict[str, Any]], message: dict[str, Any], prompt: str
) -> str | None:
    """Return what the template writes for a message after its prompt; None if it refuses."""
    messages = [*history, message]
    try:
        written = template.text(messages, add_generation_prompt=False)
        return served_text(template, messages, prompt, written)[len(prompt) :]
    except TemplateRefused:
        return None


def _writes(
    template: Template,
    history: Sequence[dict[str, Any]],
    message: dict[str, Any],
    prompt: str,
    said: str,
    end: str,
) -> bool:
    """Return whether the template writes a message as the target said it, or with another thought alone.

    Args:
        end: the token that ends what was said. The next message may write it.
    """
    turn = _written(template, history, message, prompt)
    if turn is not None and (turn.startswith(said + end) or turn == said):
        return True
    _, mark, rest = split_thought(said)
    if not rest or (not mark and opened(said) != said):  # a thought without an end
        return False
    try:
        text = template.text([*history, message], add_generation_prompt=False)
    except TemplateRefused:
        return False
    head, found, _ = text.rpartition(rest if mark and rest + end not in text else rest + end)
    return bool(found) and without_empty_thought(head) == without_empty_thought(prompt)


def same_calls(turn: Mapping[str, Any], recorded: Mapping[str, Any]) -> bool:
    """Return whether a turn makes the calls of the recorded one, to which recorded results belong.

    A turn without calls is compared by its text, which may have calls in another format.
    """
    calls = _calls(turn), _calls(recorded)
    return calls[0] == calls[1] if any(calls) else turn["content"].strip() == recorded["content"].strip()


def _calls(message: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the name and arguments of each call, structured or in the text."""
    calls = message.get("tool_calls") or [_call(one) for one in _CALL.findall(message["content"])]
    functions = [call.get("function", call) for call in calls if call is not None]
    return [(function.get("name"), function.get("arguments") or {}) for function in functions]


def _parsed(template: Template, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the message that the tokenizer's own parser reads, if it has one."""
    tokenizer = template.tokenizer
    if getattr(tokenizer, "response_template", None):
        try:
            parsed = tokenizer.parse_response(
                list(answer), prefix=list(prompt), tools=template.arguments["tools"]
            )
            yield {"content": "", **parsed, "role": "assistant"}
        except (ValueError, TypeError):  # it is not written as the format requires
            pass


def _readings(parts: Sequence[str], special_tokens: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield messages that an answer may be, of its reasoning, if it has any, and its content."""
    *reasonings, content = parts
    message: dict[str, Any] = {"role": "assistant"}
    message |= dict.fromkeys(REASONING_KEYS if reasonings else (), *reasonings[:1])
    calls = [_call(one) for one in _CALL.findall(content)]
    readings = [message | {"content": content}]
    if calls and None not in calls:
        readings.insert(0, message | {"content": _CALL.sub("", content).strip(), "tool_calls": calls})
    for reading in readings:
        if not any(token in part for token in special_tokens for part in (*reasonings, reading["content"])):
            yield reading


def _call(text: str) -> dict[str, Any] | None:
    """Return the call that a JSON object describes, or None."""
    try:
        call = json.loads(text)
    except json.JSONDecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
