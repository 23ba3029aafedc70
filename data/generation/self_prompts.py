"""Prompts that the target writes itself: it continues its chat template at the start of a user's turn.

Source: Magpie (arXiv 2406.08464), section 2.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from transformers import PreTrainedTokenizerBase

from data.conversations.template import Messages, Template, TemplateRefused, decode, has_markers
from data.generation.answers import AnswerGenerator, answer_prompts
from data.sampling import Sampling
from eagle31.errors import UserError
from eagle31.json_files import write_jsonl

_CONTENT = "CONTENT-of-a-user"


@dataclass(frozen=True)
class UserTurn:
    """What the target reads before it writes a user's message, and which tokens end the message."""

    prompt: list[int]
    stop_token_ids: tuple[int, ...]


def user_messages(content: str, system_prompt: str | None) -> Messages:
    """Return a user's message, after that of the system if there is one."""
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": content}]


def user_turn(
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None,
    template_kwargs: Mapping[str, Any],
    eos_token_ids: Collection[int],
) -> UserTurn:
    """Return the place of a user's message in the target's chat template.

    Args:
        eos_token_ids: the target's; each ends the message too.

    Raises:
        UserError: the template refuses the messages, or has nothing before the user's or no token after it.
    """
    template = Template(tokenizer, None, template_kwargs)
    try:
        text = template.text(user_messages(_CONTENT, system_prompt), add_generation_prompt=True)
    except TemplateRefused as refused:
        _refuse(refused.remedy)
    before, *rest = text.split(_CONTENT)
    if len(rest) != 1:
        _refuse(f"Its chat template writes a user's message {len(rest)} times.")
    prompt, after = template.encode(before), template.encode(rest[0])
    if not set(prompt) - {tokenizer.bos_token_id}:
        _refuse("Its chat template writes nothing before a user's message.")
    # Not all tokens of templates are marked as special; some added tokens are white space, which texts have.
    end = tokenizer.added_tokens_decoder.get(after[0]) if after else None
    if end is None or not end.content.strip():
        _refuse("Its chat template has no special token at the end of a user's message.")
    return UserTurn(prompt, tuple(sorted({*eos_token_ids, after[0]})))


def write_self_prompts(
    generator: AnswerGenerator,
    tokenizer: PreTrainedTokenizerBase,
    turn: UserTurn,
    sampling: Sampling,
    *,
    num: int,
    system_prompt: str | None,
    output: Path,
    **settings: Any,
) -> None:
    """Have the target write prompts, and write those that can be used into a JSONL file of conversations.

    An interrupted run resumes from the tokens in a file next to it.

    Args:
        sampling: stops at the turn's stop tokens.
        num: of the prompts that it writes.
        settings: of `answer_dialogues`.

    Raises:
        UserError: none can be used.
    """
    written = output.with_suffix(".tokens.jsonl")
    answers = answer_prompts(generator, [turn.prompt] * num, sampling, output=written, **settings)
    kept: dict[str, int] = {}  # the number of the first answer with this text
    left_out: Counter[str] = Counter()
    for number, ids in enumerate(answers):
        text, reason = _read(tokenizer, ids, turn.stop_token_ids)
        if reason is None and text in kept:
            reason = "repeat another"
        if reason is None:
            kept[text] = number
        else:
            left_out[reason] += 1
    reasons = "".join(f", {count:,} {reason}" for reason, count in left_out.items())
    print(f"data: {len(kept):,} of {num:,} prompts of the target are used{reasons}", flush=True)
    if not kept:
        _refuse(f"None of {num:,} prompts can be used{reasons}.")
    rows = ((number, user_messages(text, system_prompt)) for text, number in kept.items())
    write_jsonl(output, ({"id": str(number), "messages": messages} for number, messages in rows))


def _read(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop_token_ids: Collection[int]
) -> tuple[str, str | None]:
    """Return the text of a prompt, and why it is left out."""
    if not ids or ids[-1] not in stop_token_ids:
        return "", "have no end"
    text = decode(tokenizer, list(ids[:-1])).strip()
    if not text:
        return "", "are empty"
    return text, "have special tokens" if has_markers(tokenizer, user_messages(text, None)) else None


def _refuse(reason: str) -> NoReturn:
    remedy = f"The target cannot write its own prompts. {reason} Give prompts or conversations instead."
    raise UserError("data.train", "self", remedy)
