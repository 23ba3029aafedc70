"""Which columns of a row make a conversation: the known names, columns of messages, and what they become."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from data.conversations.preformatted import MASKS, SplitText, token_messages
from data.conversations.schemas import (
    AS_TEXT,
    IDS,
    REGENERATE,
    SYSTEM_ROLES,
    MalformedRow,
    Messages,
    are_ids,
    are_messages,
    as_ids,
    listed,
    parsed_json,
    text_of,
    type_name,
    with_known_role,
)

_LISTS = ("messages", "conversations")
_PROMPTS = ("prompt", "instruction", "question", "query", "problem", "turns")
_RESPONSES = ("response", "output", "answer", "completion", "solution")
_FURTHER = ("input", "context")  # what an instruction is about
_SYSTEMS = ("system", "system_prompt", "system_message")
_JSON_LIST = re.compile(r"\s*\[\s*\{")
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*(["'])(role|from|content|value)\1\s*:""")


class NoLayout(MalformedRow):
    """The reason why no columns of a row are known to make a conversation, with what the user can do."""


@dataclass(frozen=True)
class Layout:
    """The columns of a row that make its conversation.

    Args:
        prompt: a text, several texts of the user, or messages.
        response: the answer to it: a text or messages.
        has_messages: whether `prompt` has to be a list of messages.
        further: a text that follows the prompt's after an empty line.
        system: a text that becomes the first message.
        history: earlier turns: pairs of texts, or messages.
        form: `AS_TEXT` or `IDS` where a template was applied already.
    """

    prompt: str
    response: str | None = None
    has_messages: bool = False
    further: str | None = None
    system: str | None = None
    history: str | None = None
    form: str | None = None

    @property
    def columns(self) -> list[str]:
        """The columns that it reads, in their order in the conversation."""
        names = (self.system, self.history, self.prompt, self.further, self.response)
        return [name for name in names if name is not None]

    def messages(self, row: Mapping[str, Any], split_text: SplitText) -> Messages:
        """Return the row's messages, with the roles that templates know.

        Args:
            split_text: makes messages of a text that a template has written.

        Raises:
            MalformedRow: a column has something else.
        """
        if self.form == IDS:
            return token_messages(row, self.response)
        if self.form == AS_TEXT:
            return split_text(row[self.prompt]) if isinstance(row.get(self.prompt), str) else []
        asked = _listed(row.get(self.prompt), self.prompt) if self.has_messages else self._asked(row)
        answer = None if self.response is None else row.get(self.response)
        if answer not in (None, "") and not (self.has_messages and asked and _is_answer(asked[-1])):
            asked = [*asked, *_spoken(answer, "assistant")]
        found = [with_known_role(message) for message in (*_history(self._value(row, "history")), *asked)]
        system = self._value(row, "system")
        if system in (None, ""):
            return found
        if all(message["role"] not in SYSTEM_ROLES for message in found[:1]):
            return [{"role": "system", "content": system}, *found]
        if found[0].get("content") != system:
            raise MalformedRow(f"its column {self.system} and its first message are different system prompts")
        return found

    def _value(self, row: Mapping[str, Any], name: str) -> Any:
        column = getattr(self, name)
        return None if column is None else row.get(column)

    def _asked(self, row: Mapping[str, Any]) -> Messages:
        prompt, further = _cell(row.get(self.prompt)), self._value(row, "further")
        if further is not None and (text := text_of(further)).strip():
            prompt = f"{prompt}\n\n{text}" if prompt.strip() else text
        return _spoken(prompt, "user")


def find_layout(
    row: Mapping[str, Any], prompt: str | None, response: str | None, require_answer: bool, group: str
) -> Layout:
    """Return the layout of a row.

    Rows of several kinds in one table have null in the columns of the others, so those without a value count
    only where the others make no conversation.

    Args:
        prompt, response: the columns of the user's and of the assistant's text; None: found by name.
        group: the settings in which the user can name columns, such as data.

    Raises:
        NoLayout: none fits, or more than one.
    """
    given = {name: value for name, value in row.items() if value is not None}
    with suppress(NoLayout):
        return _find_layout(given, prompt, response, require_answer, group)
    return _find_layout(row, prompt, response, require_answer, group)


def _find_layout(
    row: Mapping[str, Any], prompt: str | None, response: str | None, require_answer: bool, group: str
) -> Layout:
    found = f"The columns are {listed(row)}." if row else "The row has no columns."
    names = f"{group}.prompt_column and {group}.response_column"
    shared = {
        "system": next((name for name in _SYSTEMS if name in row), None),
        "history": "history" if "history" in row.keys() - {prompt} else None,
    }
    further = None
    if prompt is None and response is not None:
        raise NoLayout(f"Name both {names}. {found}")
    if not require_answer:  # several answers are those that count as right
        unneeded = {*_RESPONSES, response}
        row = {name: value for name, value in row.items() if name not in unneeded or not _are_texts(value)}
        response = response if response in row else None
    if prompt is not None:
        needed = [prompt, response] if require_answer and response is not None else [prompt]
        if missing := [name for name in needed if name not in row]:
            raise NoLayout(f"There is no column {', '.join(missing)}. {found}")
    else:
        if named := next((name for name in _LISTS if name in row), None):
            answers = [name for name in _RESPONSES if name in row]
            return Layout(named, answers[0] if len(answers) == 1 else None, True, **shared)
        prompts = [name for name in _PROMPTS if name in row] or [name for name in ("input",) if name in row]
        responses = [name for name in _RESPONSES if name in row]
        prompts = prompts or [
            name for name, value in row.items() if are_messages(_cell(value)) and name != "history"
        ]
        if not prompts and IDS in row:
            mask = next((name for name in MASKS if name in row), None)
            if mask or not require_answer:
                return Layout(IDS, mask, form=IDS)
            raise NoLayout(
                f"Token ids need a column that says which are supervised: {listed(MASKS)}. {found}"
            )
        if not prompts and not responses and isinstance(row.get("text"), str):
            return Layout("text", form=AS_TEXT)
        several = len(prompts) > 1 or (require_answer and len(responses) > 1)
        if several or not prompts:
            several_or_none = "Several schemas fit" if several else "No known schema fits"
            raise NoLayout(
                f"{several_or_none}. {found} The known schemas are messages (role, content), conversations "
                f"(from, value) and two text columns, which {names} name. For messages in one column, or "
                f"for prompts alone, name {group}.prompt_column."
            )
        [prompt] = prompts
        response = responses[0] if len(responses) == 1 else None
        if isinstance(_cell(row[prompt]), str):
            further = next((name for name in _FURTHER if name in row and name != prompt), None)
    if response is None and require_answer and not _has_answer(_cell(row[prompt])):
        raise NoLayout(
            f"It has prompts without answers: {REGENERATE}, or give answers too, in the columns that {names} "
            f"name. {found}"
        )
    return Layout(prompt, response, False, further, **shared)


def _has_answer(prompt: Any) -> bool:
    return are_messages(prompt) and any(_is_answer(with_known_role(message)) for message in prompt)


def _is_answer(message: Mapping[str, Any]) -> bool:
    return with_known_role(message)["role"] == "assistant"


def _cell(value: Any) -> Any:
    """Return what a column has: messages also where it is their JSON text, as in a CSV file."""
    if isinstance(value, str) and _JSON_LIST.match(value):
        with suppress(ValueError, RecursionError):
            if are_messages(found := json.loads(value)):
                return found
        if _MESSAGES.match(value):  # damaged, or as Python writes them
            raise MalformedRow("its messages are not JSON")
    return value


def _spoken(value: Any, role: str) -> Messages:
    """Return the messages of a cell: a text, several of the user, as MT-Bench has them, messages, or ids."""
    if are_ids(value):
        return [as_ids(role, value)]
    parts = value if isinstance(value, list) else [value]
    if are_messages(parts):
        return parts
    if _are_texts(value) and role == "assistant":
        raise MalformedRow(f"it has {len(parts)} answers, and one is needed")
    return [{"role": role, "content": turn} for turn in (parts if _are_texts(value) else [value])]


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(one, str) for one in value)


def _listed(messages: Any, column: str) -> Messages:
    if isinstance(messages, str) and messages.lstrip().startswith("["):  # in a CSV file
        messages = parsed_json(messages, column)
    if not isinstance(messages, list):
        raise MalformedRow(f"{column} is {type_name(messages)}, not a list")
    return messages


def _history(turns: Any) -> Messages:
    if isinstance(turns, str) and turns.strip():
        turns = _listed(turns, "history")
    if not turns or are_messages(turns):
        return turns or []
    if not all(isinstance(turn, Sequence) and not isinstance(turn, str) and len(turn) == 2 for turn in turns):
        raise MalformedRow("history has neither pairs of texts nor messages")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]
