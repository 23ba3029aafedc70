"""The exception for errors that a user can correct."""

import json

from eagle31.credentials import HIDDEN, is_secret_name, without_credentials, without_url_credentials


class UserError(ValueError):
    """An error in the input, with the field, its value, and the remedy, without secrets.

    A value whose field has the name of a secret, and credentials in URLs, are in no part of it.

    Args:
        field: the value's source as the user writes it (`data.train`, or `file.jsonl:12`).
        value: the value found there.
        remedy: what is wrong and what to do, in full sentences.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        if value is None or isinstance(value, bool):
            value = json.dumps(value)  # as in YAML
        text = str(value)
        shown = HIDDEN if is_secret_name(field) and value else without_credentials(text)
        if shown != text:
            value, remedy = shown, remedy.replace(text, shown)
        self.field = without_url_credentials(field)
        self.value = value
        self.remedy = without_url_credentials(remedy)
        super().__init__(f"{self.field}={value!s}: {self.remedy}")

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str, str]]:
        # Worker processes send it to their parent, and pickle would rebuild it from its message alone.
        return type(self), (self.field, str(self.value), self.remedy)
