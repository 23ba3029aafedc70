"""An enumeration whose members say what they mean."""

from enum import Enum


class Choice(Enum):
    """Members are written `name = "name", "what it means"`; the pages of docs/ are made from them."""

    _value_: str
    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> "Choice":
        member = object.__new__(cls)
        member._value_ = value
        member.meaning = meaning
        return member
