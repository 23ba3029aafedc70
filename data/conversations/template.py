"""The chat template of a target, and the text that it writes."""

import hashlib
import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from data.conversations.perturbation import UNCHANGED, rewritten, template_source
from data.conversations.schemas import AS_TEXT, FORM, IDS, form_of, ids_of
from data.target.tokenizer import TEMPLATE_FILE
from eagle31.errors import UserError

FIELD = "target.chat_template"
TEXT_ARGUMENTS = (
    "conversations have tool calls whose arguments the chat template takes only as JSON text; vLLM gives it "
    "objects, with which it fails"
)
# What a template that reads the clock is given, so that a run has the same prompts on another day.
DATE = date(2026, 1, 1)
_CLOCK = "strftime_now"
_MOST_SECONDS = 20.0  # of the processor, for a text; a template takes milliseconds

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]] | None


class TemplateRefused(UserError):
    """The error of a template that raises on a conversation, for example on its roles."""


class Template:
    """A tokenizer's chat template, or one of `perturbation.TEMPLATES`, with its arguments."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Tools,
        template_kwargs: Mapping[str, Any],
        template: str = UNCHANGED,
    ) -> None:
        _require_template(tokenizer)
        self.tokenizer = tokenizer
        self.arguments = {"tools": list(tools) if tools else None, **template_kwargs}
        self.template = template
        source = template_source(template)
        if source is not None:
            self.arguments["chat_template"] = source
        source = source or tokenizer.get_chat_template(tools=self.arguments["tools"])
        if _CLOCK in source:
            with self._refusal():
                _compile_jinja_template(source).environment.globals[_CLOCK] = DATE.strftime
        self.has_text_arguments = False  # whether it has raised on calls whose arguments are objects

    def text(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """Return the text of the messages, and of the generation prompt if it is asked for.

        Text that has a template's markers already is as it is. A template that raises on the arguments of
        calls gets their JSON text.
        """
        if (form := form_of(messages)) is not None:
            if form != AS_TEXT or any(FORM not in message for message in messages):
                remedy = "A preformatted conversation has no other messages; leave out what adds them."
                raise TemplateRefused(FIELD, self.name, remedy)
            return "".join(message["content"] for message in messages)

        try:
            text = self._written(messages, add_generation_prompt)
        except TemplateRefused as refused:
            as_text = [_with_text_arguments(message) for message in messages]
            if as_text == list(messages):
                raise
            try:
                text = self._written(as_text, add_generation_prompt)
            except TemplateRefused:
                raise refused from None
            self.has_text_arguments = True
        return rewritten(text, messages, self.template, add_generation_prompt=add_generation_prompt)

    def _written(self, messages: Messages, add_generation_prompt: bool) -> str:
        with self._refusal(), _limited():
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **self.arguments
            )
        assert isinstance(text, str)
        return text

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Return the token ids of the messages and the generation prompt."""
        if all(message.get(FORM) == IDS for message in messages):
            return ids_of(messages)
        return self.encode(self.text(messages, add_generation_prompt=True))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text that the template has written."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    @contextmanager
    def _refusal(self) -> Iterator[None]:
        try:
            yield
        except TemplateSyntaxError as error:
            remedy = f"It is no Jinja template: {error.message}, in line {error.lineno}. Correct it."
            raise TemplateRefused(FIELD, self.name, remedy) from error
        except Exception as error:  # templates compute, and can fail as any code can
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, TemplateError) else error
            remedy = f"The template refuses a conversation: {reason}. Correct the data or the template."
            raise TemplateRefused(FIELD, self.name, remedy) from error

    @property
    def name(self) -> str:
        """Its file, or the tokenizer's name, in messages."""
        return name_of(self.tokenizer)


@contextmanager
def _limited() -> Iterator[None]:
    """Raise TimeoutError in a template that does not end, such as loops in loops; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"it has computed for {_MOST_SECONDS:g} seconds without an end")

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its tool calls as JSON text."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), dict):
            return call | {"function": changed(call["function"])}
        given = call.get("arguments")
        return (
            call | {"arguments": json.dumps(given, ensure_ascii=False)} if isinstance(given, dict) else call
        )

    return (
        message | {"tool_calls": [*map(changed, message["tool_calls"])]}
        if "tool_calls" in message
        else message
    )


def has_markers(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> bool:
    """Return whether the text of a message has special tokens, apart from the assistant's.

    The target reads them as those of its template. They do not change which tokens are the assistant's.
    """
    special, others = special_tokens(tokenizer), [one for one in messages if one["role"] != "assistant"]
    return any(FORM not in message and special.search(message["content"]) for message in others)


@lru_cache(maxsize=4)
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return what finds the tokens that no text should have."""
    tokens = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(tokens) or r"(?!)")


def template_fingerprint(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> str:
    """Return the sha256 of what turns messages into text: the template, its arguments and special tokens.

    The date is part of it if the template asks for it.
    """
    _require_template(tokenizer)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    written = [tokenizer.chat_template, special, dict(template_kwargs)]
    if _CLOCK in str(tokenizer.chat_template):
        written.append(DATE.isoformat())
    content = json.dumps(written, sort_keys=True)
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


def name_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return where the template is from, for messages."""
    return getattr(tokenizer, TEMPLATE_FILE, None) or tokenizer.name_or_path or type(tokenizer).__name__


def _require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        remedy = (
            f"The tokenizer of {name_of(tokenizer)} has no chat template, as usual for a base model; give "
            f"a Jinja file with {FIELD}=FILE, such as the template of the model's chat version."
        )
        raise UserError(FIELD, None, remedy)
