"""Converting a row of a data set to a conversation: the known schemas, and what makes a row malformed."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import Any, Protocol

from data.conversations.perturbation import UNCHANGED
from eagle31.errors import UserError

_SHOWN_CHARACTERS, _SHOWN_NAMES = 80, 40
MAX_CHARACTERS = 1 << 23  # of a conversation: more than 2,000,000 tokens of English
SYSTEM_ROLES = ("system", "developer")
_ROLES = {*SYSTEM_ROLES, "user", "assistant", "tool"}
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "function_response": "tool",
    "observation": "tool",
}
_MEDIA = ("image", "video", "audio")  # in the type of a content part
_PAIRS = (("prompt", "response"), ("instruction", "output"), ("question", "answer"))
_PROMPTS = ("turns", *(prompt for prompt, _ in _PAIRS))
NO_ANSWER = "there is no assistant turn"
REGENERATE = "set data.regenerate.enabled=true, with which the target writes the answers"

Messages = list[dict[str, Any]]
Schema = Callable[[dict[str, Any]], Messages]


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template: each has `role`, `content` (str), and any other keys of the row."""

    id: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    template: str = UNCHANGED  # one of `perturbation.TEMPLATES`


class Conversations(Protocol):
    """Conversations that can be read in any order, such as a list; those on disk are read one by one."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Conversation: ...
    def __iter__(self) -> Iterator[Conversation]: ...


class MalformedRow(Exception):
    """The reason why a row is not a conversation."""


@dataclass(frozen=True)
class Columns:
    """The columns of the user's and of the assistant's text. None: found by name."""

    prompt: str | None = None
    response: str | None = None


def find_schema(
    row: dict[str, Any], source: str, columns: Columns, require_answer: bool, field: str
) -> Schema:
    """Determine the schema of a source from its first row.

    Raises:
        UserError: no schema fits, or more than one; the error lists the columns.
    """
    found = f"The columns are {listed(row)}." if row else "The first row has no columns."
    group = field.removesuffix(".source") if field.endswith(".source") else "data"
    names = f"{group}.prompt_column and {group}.response_column"
    no_answers = (
        f"It has prompts without answers: {REGENERATE}, or give answers too, in the columns that {names} "
        f"name. {found}"
    )
    prompt, response = columns.prompt, columns.response
    missing = sorted({one for one in (prompt, response) if one is not None and one not in row})
    if prompt is not None or response is not None:
        if prompt is None:
            raise UserError(field, source, f"Name both {names}. {found}")
        if missing:
            raise UserError(field, source, f"There is no column {', '.join(missing)}. {found}")
        if response is None and require_answer:
            raise UserError(field, source, no_answers)
        return partial(_from_pair, prompt, None, response)
    for column in ("messages", "conversations"):
        if column in row:
            return partial(_from_list, column)
    pairs: list[tuple[str, str | None]] = [pair for pair in _PAIRS if row.keys() >= set(pair)]
    if not pairs:
        pairs = [(prompt, None) for prompt in _PROMPTS if prompt in row]
        if pairs and require_answer:
            raise UserError(field, source, no_answers)
    if len(pairs) == 1:
        [(prompt, response)] = pairs
        return partial(_from_pair, prompt, "input" if prompt == "instruction" else None, response)
    raise UserError(
        field,
        source,
        f"{'Several schemas fit' if pairs else 'No known schema fits'}. {found} The known schemas are "
        "messages (role, content), conversations (from, value) and two text columns, which "
        f"{names} name." + ("" if require_answer else f" For prompts alone, name {group}.prompt_column."),
    )


def _from_pair(prompt: str, further: str | None, response: str | None, row: dict[str, Any]) -> Messages:
    if prompt not in row:
        raise MalformedRow(f"there is no {prompt}")
    messages = _asked(_with_input(row[prompt], further and row.get(further)))
    if response is not None and row.get(response) not in (None, ""):
        messages.append({"role": "assistant", "content": row[response]})
    return messages


def _asked(prompt: Any) -> Messages:
    """Return the messages of a prompt: a text, several of the user, as MT-Bench has them, or messages."""
    parts = prompt if isinstance(prompt, list) else [prompt]
    if all(isinstance(part, dict) and ("role" in part or "from" in part) for part in parts):
        return [_role_and_content(part) for part in parts]
    turns = parts if all(isinstance(part, str) for part in parts) else [prompt]
    return [{"role": "user", "content": turn} for turn in turns]


def _with_input(prompt: Any, further: Any) -> Any:
    """Join a prompt and what it is about, such as Alpaca's `instruction` and `input`."""
    if further is None:
        return prompt
    text = _text(further)
    return f"{_text(prompt)}\n\n{text}" if text.strip() else prompt


def _from_list(column: str, row: dict[str, Any]) -> Messages:
    messages = row.get(column)
    if isinstance(messages, str) and messages.lstrip().startswith("["):  # in a CSV file
        messages = _parsed(messages, column)
    if not isinstance(messages, list):
        raise MalformedRow(f"{column} is {_type_name(messages)}, not a list")
    return [_role_and_content(message) for message in messages]


def _role_and_content(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise MalformedRow(f"a message is {_type_name(message)}, not an object")
    if "role" in message:
        return message
    if "from" not in message:
        raise MalformedRow(f"a message has neither role nor from, only {listed(message)}")
    role = message["from"]
    if not isinstance(role, str) or role not in _SHAREGPT_ROLES:
        raise MalformedRow(f"unknown role {_shown(role)}")
    return {"role": _SHAREGPT_ROLES[role], "content": message.get("value")}


def before_images(messages: Messages) -> Messages:
    """Return the messages before the first that has an image, a video or a sound among its content parts."""
    return list(takewhile(lambda message: not _has_media(message.get("content")), messages))


def _has_media(content: Any) -> bool:
    parts = content if isinstance(content, list) else []
    types = [str(part.get("type")) for part in parts if isinstance(part, dict)]
    return any(kind in type_ for type_ in types for kind in _MEDIA)


def to_conversation(row: dict[str, Any], messages: Messages, require_answer: bool) -> Conversation:
    """Convert the messages of a row to a conversation as vLLM would pass it to the template.

    Text parts are joined by newlines, empty `tool_calls` are removed, and tool call arguments that are a JSON
    string are parsed.

    Raises:
        MalformedRow: the row is not a conversation.
    """
    checked = tuple(_checked(message) for message in messages)
    roles = [message["role"] for message in checked]
    if require_answer and "assistant" not in roles:
        raise MalformedRow(NO_ANSWER)
    if "user" not in roles or ("assistant" in roles and roles.index("assistant") < roles.index("user")):
        raise MalformedRow("there is no user message before the first assistant turn")
    tools = _tools(row.get("tools"))
    identifier = row.get("id")
    _check_text([identifier, checked, tools])
    if identifier is None or identifier == "":
        content = json.dumps([checked, tools], sort_keys=True, default=str)
        identifier = hashlib.sha256(content.encode()).hexdigest()[:16]
    return Conversation(str(identifier), checked, tools)


def _check_text(values: Any) -> None:
    """Raise MalformedRow for what no template and no tokenizer can read.

    These are halves of UTF-16 pairs, which JSON can write, bytes that are not UTF-8, values that are nested
    too deeply, and more than can be tokenized.
    """
    try:
        text = json.dumps(values, ensure_ascii=False, default=str)
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise MalformedRow(f"a text has {half}, which is no character") from error
    except RecursionError as error:
        raise MalformedRow("its values are nested too deeply") from error
    if len(text) > MAX_CHARACTERS:
        raise MalformedRow(
            f"it has {len(text):,} characters, more than the {MAX_CHARACTERS:,} that are tokenized"
        )


def _checked(message: dict[str, Any]) -> dict[str, Any]:
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise MalformedRow(f"unknown role {_shown(role)}")
    message["content"] = _text(message.get("content", ""))
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"])
        if not message["tool_calls"]:
            del message["tool_calls"]
    says_more = any(message.get(key) for key in ("tool_calls", "reasoning_content", "reasoning"))
    if role in ("user", "assistant") and not message["content"].strip() and not says_more:
        raise MalformedRow(f"a message of the {role} has empty content")
    return message


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise MalformedRow(f"content is {_type_name(content)}, not text")
    return "\n".join(_part(part) for part in content)


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        raise MalformedRow("a content part is not text")
    return text


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise MalformedRow("tool_calls is not a list of objects")
    return [_with_parsed_arguments(call) for call in calls]


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_parsed_arguments(call["function"])}
    if not isinstance(call.get("arguments"), str):
        return call
    return call | {"arguments": _parsed(call["arguments"] or "{}", "tool call arguments")}


def _tools(tools: Any) -> tuple[dict[str, Any], ...] | None:
    if isinstance(tools, str) and tools:
        tools = _parsed(tools, "tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise MalformedRow("tools is not a list of objects")
    return tuple(tools)


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # more digits, or more brackets, than Python parses
        raise MalformedRow(f"{what} are not JSON ({error})") from error


def _shown(value: Any) -> str:
    """Return a value as messages show it, which is short however long the value is."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def listed(names: Iterable[Any]) -> str:
    """Return names as messages list them."""
    shown = [str(name)[:_SHOWN_CHARACTERS] for name in islice(names, _SHOWN_NAMES + 1)]
    return ", ".join([*shown[:_SHOWN_NAMES], "..."] if len(shown) > _SHOWN_NAMES else shown)


def _type_name(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"
