"""What a recipe chooses about its text. The schema imports this module, so it imports no library."""

from collections.abc import Mapping
from pathlib import Path
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

    all = "all", "one sample in which every assistant turn is supervised"
    last = "last", "one sample in which the last assistant turn is supervised"
    each = "each", "one sample for each assistant turn, rendered as the last one, as in serving"


class Overlong(Choice):
    """The treatment of samples with more than `max_tokens` tokens."""

    drop = "drop", "leave the sample out"
    cut = "cut", "keep the first max_tokens"


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


def check_split(setting: str, value: str, field: str, source: str) -> None:
    """Raise UserError for a split, or a subset, of a file or of a saved data set without splits."""
    path = Path(source)
    is_directory = path.is_dir()
    if not is_directory and not path.is_file():
        return
    if not is_directory or not (path / "dataset_dict.json").exists():
        what = "data set without any" if is_directory else "file"
        raise UserError(
            setting, value, f"It has no effect, because {field}={source} is a {what}; leave it out."
        )
