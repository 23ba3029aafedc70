"""Secrets have no place in a configuration: it is written to the output directory and sent to W&B."""

import dataclasses

from eagle31.credentials import HIDDEN, has_url_credentials, is_secret_name
from eagle31.errors import UserError


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
            name = f"{field}.{key}".lstrip(".")
            if isinstance(item, str) and item and is_secret_name(str(key)):
                remedy = "A configuration is written to files; give the secret in an environment variable."
                raise UserError(name, HIDDEN, remedy)
            check_secrets(item, name)
    elif isinstance(value, list | tuple):
        for item in value:
            check_secrets(item, field)
    elif isinstance(value, str) and has_url_credentials(value):
        remedy = (
            "A configuration is written to files, so its URLs have no credentials: a server's key belongs in "
            "VLLM_API_KEY, and those of object storage in the variables or files of its own client."
        )
        raise UserError(field, value, remedy)
