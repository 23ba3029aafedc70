"""Small files of conversations."""

import json
from pathlib import Path
from typing import Any

from data.conversations.schemas import Conversation

CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}


def write_jsonl(path: Path, rows: list[Any]) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def pair(question: str = "two?", answer: str = "2") -> dict[str, str]:
    return {"question": question, "answer": answer}


def conversation(id: str, *contents: str, system: str | None = None) -> Conversation:
    """Make a conversation of alternating user and assistant messages."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    first = [] if system is None else [{"role": "system", "content": system}]
    return Conversation(id, (*first, *messages))
