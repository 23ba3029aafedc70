"""A sample's tokens coloured by its loss mask, for a terminal or as a page."""

import html
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.text.sources import Conversation, ReadResult
from data.text.template import RenderedConversation, decode, template_fingerprint, uses_generation_markers
from eagle31.errors import UserError

_COUNTED = ("\x1b[30;42m", "\x1b[30;102m")  # two greens in turn, so that the tokens' edges show
_UNCOUNTED = ("\x1b[90m", "\x1b[37m")
_RESET = "\x1b[0m"
_UNFINISHED = "�"
_NUM_SHOWN = 5
_STYLE = """
body { font: 15px/1.6 ui-monospace, monospace; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; color: #667; }
.counted { background: #bfe8c5; color: #111; }
.counted:nth-child(even) { background: #98d6a3; }
pre span:hover { outline: 2px solid #36c; }
@media (prefers-color-scheme: dark) {
  body { background: #15181c; color: #dde; }
  .counted { background: #1d5c33; color: #fff; }
  .counted:nth-child(even) { background: #2a7a46; }
}
"""


@dataclass(frozen=True)
class Piece:
    """The fewest tokens of one side of the mask that are whole characters."""

    text: str
    counted: bool
    index: int  # of its first token
    ids: tuple[int, ...]


def pieces(tokenizer: PreTrainedTokenizerBase, sample: RenderedConversation) -> list[Piece]:
    """The sample's text in order, token by token where characters allow it."""
    found: list[Piece] = []
    pending: list[int] = []
    for i, (token, counted) in enumerate(zip(sample.input_ids, sample.loss_mask, strict=True)):
        pending.append(token)
        # Alone, a token of a sentencepiece vocabulary loses the space in front of it.
        before = list(found[-1].ids) if found else []
        text = decode(tokenizer, before + pending)[len(decode(tokenizer, before)) :]
        at_edge = i + 1 == len(sample.input_ids) or sample.loss_mask[i + 1] != counted
        if at_edge or not text.endswith(_UNFINISHED):
            found.append(Piece(text, counted, i + 1 - len(pending), tuple(pending)))
            pending = []
    return found


def coloured(parts: Sequence[Piece]) -> str:
    """Counted tokens on green, in ANSI colours."""
    return "".join(_in_colour(part, i) for i, part in enumerate(parts))


def bracketed(parts: Sequence[Piece]) -> str:
    """Each run of counted tokens in [[...]]."""
    text, inside = "", False
    for part in parts:
        if part.counted != inside:
            text += "[[" if part.counted else "]]"
            inside = part.counted
        text += part.text
    return text + ("]]" if inside else "")


def write_page(path: Path, title: str, facts: Sequence[str], samples: Sequence[Sequence[Piece]]) -> None:
    """One HTML file without dependencies; a token shows its index and id under the pointer."""
    lines = "".join(f"<li>{html.escape(fact)}</li>" for fact in facts)
    bodies = "".join(f"<pre>{''.join(map(_span, parts))}</pre>" for parts in samples)
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1><ul>{lines}</ul>{bodies}</html>\n"
    )
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, path)


def facts(
    tokenizer: PreTrainedTokenizerBase,
    result: ReadResult,
    conversation: Conversation,
    samples: Sequence[RenderedConversation],
    template_kwargs: Mapping[str, Any],
) -> list[str]:
    """What there is to know of the data, the conversation's samples and the template, a line each."""
    lines = [f"conversations: {len(result.conversations):,}, malformed rows: {result.num_malformed:,}"]
    lines += [f"  {where}: {why}" for where, why in result.malformed[:_NUM_SHOWN]]
    lines.append(f"conversation: {conversation.id}, {len(conversation.messages)} messages")
    for sample in samples:
        shares = f"tokens: {len(sample.input_ids):,}, counted: {sum(sample.loss_mask):,}"
        lines.append(f"{shares}, straddling a turn's edge: {sample.num_straddling}")
    markers = (
        "generation markers"
        if uses_generation_markers(tokenizer, conversation.tools)
        else "prefix differences"
    )
    lines.append(f"mask: from {markers}")
    lines.append(f"template fingerprint: {template_fingerprint(tokenizer, template_kwargs)}")
    return lines


def parse_template_kwargs(pairs: Sequence[str]) -> dict[str, Any]:
    """`key=value` pairs; a value that is JSON (true, 3, "x") is read as such, any other is text.

    Raises:
        UserError: a pair without `=`.
    """
    kwargs: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UserError("--template-kwargs", pair, "Write key=value, such as enable_thinking=false.")
        try:
            kwargs[key] = json.loads(value)
        except json.JSONDecodeError:
            kwargs[key] = value
    return kwargs


def _in_colour(part: Piece, index: int) -> str:
    colour = (_COUNTED if part.counted else _UNCOUNTED)[index % 2]
    # A background that goes over a line's end fills the rest of the line.
    text = part.text.replace("\n", f"↵{_RESET}\n{colour}" if part.counted else "\n")
    return f"{colour}{text}{_RESET}"


def _span(part: Piece) -> str:
    ids = " ".join(map(str, part.ids))
    kind = ' class="counted"' if part.counted else ""
    text = html.escape(part.text)
    return f'<span{kind} title="{part.index}: {ids}">{text}</span>'
