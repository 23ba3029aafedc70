"""The exception for errors that a user can correct."""

from collections.abc import Mapping


class UserError(ValueError):
    """An error in the input, with the field, its value, and the remedy.

    Args:
        field: the value's source as the user writes it (`data.train`, or `file.jsonl:12`).
        value: the value found there.
        remedy: what is wrong and what to do, in full sentences.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field = field
        self.value = value
        self.remedy = remedy
        super().__init__(f"{field}={value!s}: {remedy}")

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str, str]]:
        # Worker processes send it to their parent, and pickle would rebuild it from its message alone.
        return type(self), (self.field, str(self.value), self.remedy)


def require_positive(values: Mapping[str, float | None]) -> None:
    """Raise UserError for the first value, by field, that is not greater than 0; None is not a value."""
    for field, value in values.items():
        if value is not None and not value > 0:
            raise UserError(field, value, "It must be greater than 0.")
