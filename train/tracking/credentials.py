"""Secrets have no place in a configuration: it is written to the output directory and sent to W&B."""

import dataclasses
import re

from eagle31.errors import UserError

_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")  # user:password@ or token@ in a URL
_NAME = re.compile(
    r"(?i)(^|_)(api_key|secret|secret_key|access_key|password|credentials?)$"
    r"|^((hf|access|auth|session)_)?token$"
)


def check_secrets(value: object, field: str = "") -> None:
    """Raise UserError for a URL with credentials, and for a secret in a dictionary whose keys are not ours.

    The message has the field and not the secret.

    Args:
        value: a configuration, or a part of it.
        field: the key of the part.
    """
    if dataclasses.is_dataclass(value):
        for one in dataclasses.fields(value):
            check_secrets(getattr(value, one.name), f"{field}.{one.name}".lstrip("."))
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, str) and item and _NAME.search(str(key)):
                remedy = "A configuration is written to files; give the secret in an environment variable."
                raise UserError(f"{field}.{key}", "(hidden)", remedy)
            check_secrets(item, f"{field}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            check_secrets(item, field)
    elif isinstance(value, str) and _CREDENTIALS.search(value):
        remedy = (
            "A configuration is written to files, so its URLs have no credentials: a server's key belongs in "
            "VLLM_API_KEY, and those of object storage in the variables or files of its own client."
        )
        raise UserError(field, _CREDENTIALS.sub("...@", value), remedy)
