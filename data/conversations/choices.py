"""What a recipe chooses about its text. The schema imports this module, so it imports no library."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eagle31.choice import Choice
from eagle31.errors import UserError

# Arguments of the chat template that each conversation or this project gives: those of apply_chat_template.
_GIVEN_ARGUMENTS = (
    *("conversation", "conversations", "messages", "tools", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)


class Turns(Choice):
    """The assistant turns that become training samples."""

    all = "all", "every assistant turn, in one sample unless the chat template rewrites earlier turns"
    last = "last", "the last assistant turn"
    each = "each", "every assistant turn, each in its own sample"


def check_template_kwargs(template_kwargs: Mapping[Any, Any], field: str) -> None:
    """Raise UserError for arguments that a chat template cannot be given.

    Args:
        field: the setting's name in the message, which ends before the argument's name.
    """
    for name, value in template_kwargs.items():
        if not isinstance(name, str) or not name.isidentifier():
            remedy = "An argument of a template has a name such as enable_thinking."
            raise UserError(f"{field}{name}", value, remedy)
        if name in _GIVEN_ARGUMENTS:
            remedy = "It is set for each conversation; leave it out."
            if name == "chat_template":
                remedy = "Give another template with target.chat_template=FILE."
            raise UserError(f"{field}{name}", value, remedy)


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
