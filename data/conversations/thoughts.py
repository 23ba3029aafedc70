"""The reasoning of an assistant's message, and what chat templates write around it."""

import re
from collections.abc import Mapping
from typing import Any

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # templates read one of them
_NAME = r"(?:\w+:)?(?:think(?:ing)?|thought|reasoning)"  # <think>, [THINK], <seed:think>
_OPENING, _CLOSING = rf"[<\[]{_NAME}[>\]]", rf"[<\[]/{_NAME}[>\]]"
_END = re.compile(_CLOSING, re.IGNORECASE)
_EMPTY = re.compile(rf"\s*{_OPENING}\s*(?P<end>{_CLOSING})\s*", re.IGNORECASE)
_PROMPTED = re.compile(rf"(?P<opening>{_OPENING})(?P<space>\s*)(?P<closing>{_CLOSING}\s*)?\Z", re.IGNORECASE)
_MOST_OPENING_CHARACTERS = 32  # of what a prompt may end with


def recorded_reasoning(message: Mapping[str, Any]) -> str:
    """Return the reasoning that a message has, in a key or in its text; empty if it has none."""
    in_keys = next((str(message[key]) for key in REASONING_KEYS if message.get(key)), "")
    before, end, _ = split_thought(message["content"])
    return in_keys or (opened(before) if end else "")


def split_thought(text: str) -> tuple[str, str, str]:
    """Split an assistant's text at the mark that ends a thought, as `str.partition` does."""
    found = _END.search(text)
    return (text[: found.start()], found[0], text[found.end() :]) if found else ("", "", text)


def opened(thought: str) -> str:
    """Return the thought without the mark that begins it."""
    return re.sub(_OPENING, "", thought, count=1, flags=re.IGNORECASE)


def prompted_thought(prompt: str) -> str:
    """Return the begin of a thought, or the empty thought, with which a prompt ends; empty if it has none."""
    found = _PROMPTED.search(prompt, max(len(prompt) - 2 * _MOST_OPENING_CHARACTERS, 0))
    return found[0] if found else ""


def after_prompted_thought(prompted: str, message: Mapping[str, Any], written: str) -> str:
    """Return what the target generates after a prompt that begins, or skips, its thought.

    Args:
        prompted: what `prompted_thought` returns.
        message: the assistant's, with its thought in a key or in its text.
        written: the answer as the template writes it after a prompt without `prompted`.
    """
    rest = split_thought(written)[2].lstrip()
    found = _PROMPTED.search(prompted)
    assert found is not None
    if found["closing"]:
        return rest
    before, mark, after = split_thought(message["content"])
    if mark:
        gap = after[: len(after) - len(after.lstrip())]
        return opened(before.lstrip()).removeprefix(found["space"]) + mark + gap + rest
    thought = recorded_reasoning(message).strip()
    closing = f"{found['opening'][0]}/{found['opening'][1:]}{2 * found['space']}"
    return thought + (found["space"] if thought else "") + closing + rest


def without_empty_thought(text: str) -> str:
    """Return the text without the begin and the end of a thought, and without white space, at its end."""
    return re.sub(rf"\s*({_OPENING})?\s*({_CLOSING})?\s*\Z", "", text, flags=re.IGNORECASE)


def empty_thought_end(text: str, start: int) -> int | None:
    """Return where a thought of white space ends that begins at `start`, or within the prompt before it."""
    for found in _EMPTY.finditer(text, max(start - _MOST_OPENING_CHARACTERS, 0)):
        if found.start() > start:
            return None
        if found.end("end") > start:
            return found.end()
    return None
