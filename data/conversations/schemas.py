"""Conversations, and what makes messages one: roles, contents and calls as vLLM passes them to a template."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

from data.conversations.perturbation import UNCHANGED

_SHOWN_CHARACTERS, _SHOWN_NAMES = 80, 40
MAX_CHARACTERS = 1 << 23  # of a conversation: more than 2,000,000 tokens of English
SYSTEM_ROLES = ("system", "developer")
_CALL = "function_call"  # ShareGPT's role of a call, and OpenAI's older key of one
_ROLES = {role: role for role in (*SYSTEM_ROLES, "user", "assistant", "tool", _CALL)}
_ROLES |= dict.fromkeys(("human", "prompter"), "user")
_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant")
_ROLES |= dict.fromkeys(("function", "function_response", "observation", "tool_response"), "tool")
_ROLES |= {"tool_call": _CALL}
_WEIGHTS = ("weight", "loss", "loss_weight", "train", "training")  # a message is context only if one is 0
_ZEROS = ("0", "0.0", "false", "no")  # as texts have it
_TEXTS = ("content", "value", "text")  # keys of a message's text
# In the type of a content part. As LLaVA's, a row with such a column has <image> where a text shows it.
_MEDIA = ("image", "video", "audio")
FORM, AS_TEXT, IDS = "preformatted", "text", "input_ids"  # the key of a message of such a row, and its values
NO_ANSWER = "there is no assistant turn"
REGENERATE = "set data.regenerate.enabled=true, with which the target writes the answers"

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template: each has `role`, `content` (str), and any other keys of the row.

    An assistant's message with a `weight` of 0 is context only.
    """

    id: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    template: str = UNCHANGED  # one of `perturbation.TEMPLATES`


# A list, or what reads one from disk when it is asked for it.
Conversations: TypeAlias = Sequence[Conversation]


class MalformedRow(Exception):
    """The reason why a row is not a conversation."""


def is_trained(message: Mapping[str, Any]) -> bool:
    """Return whether a message is the assistant's and more than context."""
    return message["role"] == "assistant" and message.get("weight") != 0


def are_ids(value: Any) -> bool:
    """Return whether a value is a list of token ids."""
    return (
        isinstance(value, list) and bool(value) and all(type(id) is int and 0 <= id < 1 << 31 for id in value)
    )


def as_ids(role: str, ids: Iterable[int]) -> dict[str, Any]:
    """Return a message that has token ids instead of a text."""
    return {"role": role, "content": " ".join(map(str, ids)), FORM: IDS}


def ids_of(messages: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the token ids of messages that have them."""
    return [int(id) for message in messages for id in message["content"].split()]


def form_of(messages: Iterable[Mapping[str, Any]]) -> str | None:
    """Return `AS_TEXT` or `IDS` for messages to which a template was applied already."""
    return next((message[FORM] for message in messages if FORM in message), None)


def are_messages(value: Any) -> bool:
    """Return whether a value is a list of messages, whatever their roles."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, dict) and not one.keys().isdisjoint(("role", "from")) for one in value)
    )


def with_known_role(message: Any) -> dict[str, Any]:
    """Return a message with `role` and `content`, also for ShareGPT's `from` and `value`.

    Raises:
        MalformedRow: it has no known role.
    """
    if not isinstance(message, dict):
        raise MalformedRow(f"a message is {type_name(message)}, not an object")
    key = "role" if "role" in message else "from"
    if key not in message:
        raise MalformedRow(f"a message has neither role nor from, only {listed(message)}")
    role = message[key].lower() if isinstance(message[key], str) else message[key]
    if not isinstance(role, str) or role not in _ROLES:
        raise MalformedRow(f"unknown role {_shown(message[key])}")
    if key == "role" and _ROLES[role] == message[key] != _CALL and "content" in message:
        return message
    text = next((message[name] for name in _TEXTS if message.get(name) is not None), None)
    others = {name: value for name, value in message.items() if name not in ("role", "from", *_TEXTS)}
    found = {"role": _ROLES[role], "content": text, **others}
    if found["role"] == _CALL:
        call = found.pop("content")
        calls = parsed_json(call, "a function call") if isinstance(call, str) else call
        found |= {"role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}
    return found


def usable(messages: Messages, row: Mapping[str, Any]) -> tuple[Messages, list[str]]:
    """Return the messages of a row that can be used, and what is cut from the conversation.

    Only text is used, from the first message of the user on.
    """
    cut = []
    marks = [f"<{kind}>" for kind in _MEDIA if row.get(kind) or row.get(f"{kind}s")]
    for reason, ends in (
        ("images, videos or sounds: only the turns before the first are used", partial(_has_media, marks)),
        ("an empty message: only the turns before it are used", _is_empty),
    ):
        end = next((i for i, message in enumerate(messages) if ends(message)), None)
        if end is not None:
            cut.append(reason)
            messages = messages[:end]
    if all(message["role"] in SYSTEM_ROLES for message in messages):
        return messages, cut or ["no messages"]
    roles = [message["role"] for message in messages]
    first = roles.index("user") if "user" in roles else len(roles)
    kept = [one for i, one in enumerate(messages) if i >= first or one["role"] in SYSTEM_ROLES]
    if len(kept) < len(messages):
        cut.append("a start with the assistant: only the turns from the user's first one on are used")
    return kept, cut


def _has_media(marks: Sequence[str], message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, str):
        return any(mark in content for mark in marks)
    parts = content if isinstance(content, list) else []
    types = [str(part.get("type")) for part in parts if isinstance(part, dict)]
    return any(kind in type_ for type_ in types for kind in _MEDIA)


def _is_empty(message: Mapping[str, Any]) -> bool:
    """Return whether a message of the user or the assistant says nothing."""
    content = message.get("content") or ""
    if message["role"] not in ("user", "assistant") or not isinstance(content, str | list):
        return False
    more = ("tool_calls", _CALL, "reasoning_content", "reasoning")
    return not text_of(content).strip() and not any(message.get(key) for key in more)


def to_conversation(row: dict[str, Any], messages: Messages, require_answer: bool) -> Conversation:
    """Convert messages with known roles to a conversation as vLLM would pass it to the template.

    Text parts are joined by newlines, empty `tool_calls` are removed, and tool call arguments that are a JSON
    string are parsed. Calls and tools without OpenAI's `function` get it.

    Raises:
        MalformedRow: the row is not a conversation.
    """
    checked = tuple(_checked(message) for message in messages)
    roles = [message["role"] for message in checked]
    if require_answer and "assistant" not in roles:
        raise MalformedRow(NO_ANSWER)
    if require_answer and not any(map(is_trained, checked)):
        raise MalformedRow("all assistant turns are context only")
    if "user" not in roles:
        raise MalformedRow("there is no user message")
    tools = _tools(row.get("tools") or row.get("functions"))
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
    message["content"] = text_of(message.get("content", ""))
    weights = [message.pop(key) for key in _WEIGHTS if key in message]
    if message["role"] == "assistant" and any(not one or str(one).lower() in _ZEROS for one in weights):
        message["weight"] = 0
    calls = message.pop("tool_calls", None) or [message.pop(_CALL, None)]
    if calls != [None]:
        message["tool_calls"] = _tool_calls(calls)
    return message


def text_of(content: Any) -> str:
    """Return the text of a message's content, whose parts are joined by newlines.

    Raises:
        MalformedRow: it has something else.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise MalformedRow(f"content is {type_name(content)}, not text")
    return "\n".join(_part(part) for part in content)


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        raise MalformedRow("a content part is not text")
    return text


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise MalformedRow("tool_calls is not a list of objects")
    named = [_as_function(call) for call in calls]
    if not all("function" in call for call in named):
        raise MalformedRow("a tool call has no name")
    return [call | {"function": _with_parsed_arguments(call["function"])} for call in named]


def _as_function(value: dict[str, Any]) -> dict[str, Any]:
    """Return a call or a tool as OpenAI writes them, with its name under `function`."""
    if isinstance(value.get("function"), dict) or "name" not in value:
        return value
    outer: dict[str, Any] = {key: value[key] for key in ("id", "type") if key in value}
    inner = {key: item for key, item in value.items() if key not in outer}
    return {"type": "function", **outer, "function": inner}


def _with_parsed_arguments(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    return function | {"arguments": parsed_json(arguments or "{}", "tool call arguments")}


def _tools(tools: Any) -> tuple[dict[str, Any], ...] | None:
    if isinstance(tools, str) and tools.strip():
        tools = parsed_json(tools, "tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise MalformedRow("tools is not a list of objects")
    return tuple(map(_as_function, tools))


def parsed_json(text: str, what: str) -> Any:
    """Return what a text in a row has; raise MalformedRow if it is not JSON."""
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


def type_name(value: Any) -> str:
    """Return what a value is, as messages show it."""
    return "missing" if value is None else f"a {type(value).__name__}"
