"""Showing a sample's tokens colored by the loss mask, on a terminal or in an HTML page."""

import errno
import html
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.conversations.choices import check_template_kwargs
from data.conversations.masks import RenderedConversation
from data.conversations.reading import ReadResult
from data.conversations.schemas import Conversation
from data.conversations.template import decode, template_fingerprint, uses_generation_markers
from eagle31.errors import UserError

_SUPERVISED = ("\x1b[30;42m", "\x1b[30;102m")  # two alternating greens show where tokens begin
_MASKED = ("\x1b[90m", "\x1b[37m")
_RESET = "\x1b[0m"
_UNFINISHED = "�"
_NUM_SHOWN = 5
_STYLE = """
body { font: 15px/1.6 ui-monospace, monospace; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; color: #667; }
.supervised { background: #bfe8c5; color: #111; }
.supervised:nth-child(even) { background: #98d6a3; }
pre span:hover { outline: 2px solid #36c; }
@media (prefers-color-scheme: dark) {
  body { background: #15181c; color: #dde; }
  .supervised { background: #1d5c33; color: #fff; }
  .supervised:nth-child(even) { background: #2a7a46; }
}
"""


@dataclass(frozen=True)
class Piece:
    """The fewest tokens with the same mask value that are whole characters."""

    text: str
    supervised: bool
    index: int  # of its first token
    ids: tuple[int, ...]


def pieces(tokenizer: PreTrainedTokenizerBase, sample: RenderedConversation) -> list[Piece]:
    """Split the sample's text into pieces of one token, or of several where a character needs them."""
    found: list[Piece] = []
    pending: list[int] = []
    for i, (token, supervised) in enumerate(zip(sample.input_ids, sample.loss_mask, strict=True)):
        pending.append(token)
        # A sentencepiece token that is decoded alone loses its leading space.
        before = list(found[-1].ids) if found else []
        text = decode(tokenizer, before + pending)[len(decode(tokenizer, before)) :]
        mask_changes = i + 1 == len(sample.input_ids) or sample.loss_mask[i + 1] != supervised
        if mask_changes or not text.endswith(_UNFINISHED):
            found.append(Piece(text, supervised, i + 1 - len(pending), tuple(pending)))
            pending = []
    return found


def colored(parts: Sequence[Piece]) -> str:
    """Format the pieces in ANSI colors, the supervised tokens on green."""
    return "".join(_in_color(part, i) for i, part in enumerate(parts))


def bracketed(parts: Sequence[Piece]) -> str:
    """Format the pieces with each run of supervised tokens in [[...]]."""
    text, inside = "", False
    for part in parts:
        if part.supervised != inside:
            text += "[[" if part.supervised else "]]"
            inside = part.supervised
        text += part.text
    return text + ("]]" if inside else "")


def write_page(path: Path, title: str, summary: Sequence[str], samples: Sequence[Sequence[Piece]]) -> None:
    """Write a self-contained HTML page; a token's tooltip shows its index and id."""
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in summary)
    bodies = "".join(f"<pre>{''.join(map(_span, parts))}</pre>" for parts in samples)
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1><ul>{lines}</ul>{bodies}</html>\n"
    )
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, path)


def summarize(
    tokenizer: PreTrainedTokenizerBase,
    result: ReadResult,
    conversation: Conversation,
    samples: Sequence[RenderedConversation],
    template_kwargs: Mapping[str, Any],
) -> list[str]:
    """Describe the data, the conversation's samples and the template, in one line each."""
    lines = [f"conversations: {len(result.conversations):,}, malformed rows: {result.num_malformed:,}"]
    lines += [f"  {where}: {reason}" for where, reason in result.malformed[:_NUM_SHOWN]]
    lines.append(f"conversation: {conversation.id}, {len(conversation.messages)} messages")
    for sample in samples:
        counts = f"tokens: {len(sample.input_ids):,}, supervised: {sum(sample.loss_mask):,}"
        lines.append(f"{counts}, crossing the boundary of a turn: {sample.num_straddling}")
    markers = (
        "generation markers"
        if uses_generation_markers(tokenizer, conversation.tools)
        else "prefix differences"
    )
    lines.append(f"mask: from {markers}")
    lines.append(f"template fingerprint: {template_fingerprint(tokenizer, template_kwargs)}")
    return lines


def parse_template_kwargs(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` pairs; a value is parsed as JSON (true, 3, "x") if possible, and is text otherwise.

    Raises:
        UserError: a pair has no `=`, or its key is no argument that a template can be given.
    """
    kwargs: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UserError("--template-kwargs", pair, "Write key=value, such as enable_thinking=false.")
        try:
            kwargs[key] = json.loads(value)
        except (ValueError, RecursionError):  # more digits, or more brackets, than Python parses
            kwargs[key] = value
    check_template_kwargs(kwargs, "--template-kwargs=")
    return kwargs


def _in_color(part: Piece, index: int) -> str:
    color = (_SUPERVISED if part.supervised else _MASKED)[index % 2]
    # A background color that continues after a line break would fill the rest of the line.
    text = part.text.replace("\n", f"↵{_RESET}\n{color}" if part.supervised else "\n")
    return f"{color}{text}{_RESET}"


def _span(part: Piece) -> str:
    ids = " ".join(map(str, part.ids))
    kind = ' class="supervised"' if part.supervised else ""
    text = html.escape(part.text)
    return f'<span{kind} title="{part.index}: {ids}">{text}</span>'
