"""The one exception for what a user can put right."""

from collections.abc import Mapping


class UserError(ValueError):
    """Bad input: names the field, the value it has, and the remedy.

    Args:
        field: where the value comes from, as the user writes it (`data.train`, or `file.jsonl:12`).
        value: what was found there.
        remedy: what is wrong with it and what to do, as a full sentence.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field = field
        self.value = value
        self.remedy = remedy
        super().__init__(f"{field}={value!s}: {remedy}")

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str, str]]:
        # Worker processes send it back: an exception is rebuilt from its message otherwise.
        return type(self), (self.field, str(self.value), self.remedy)


def require_positive(values: Mapping[str, float | None]) -> None:
    """Raise UserError for the first value, by field, that is not greater than 0; None is not a value."""
    for field, value in values.items():
        if value is not None and not value > 0:
            raise UserError(field, value, "It must be greater than 0.")
