"""The exception for errors that a user can correct."""

from collections.abc import Mapping

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


def require_positive(values: Mapping[str, float | None]) -> None:
    """Raise UserError for the first value, by field, that is not greater than 0; None is not a value."""
    for field, value in values.items():
        if value is not None and not value > 0:
            raise UserError(field, value, "It must be greater than 0.")
