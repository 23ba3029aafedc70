"""Finding secrets in texts that are printed or written to files."""

import os
import re

HIDDEN = "(hidden)"
# What is before the host in a URL: user:password@ or token@. A password may have a slash, unlike a port.
_IN_URL = re.compile(r"(?<=://)(?:[^/\s]{1,500}@|[^/\s:@[]{1,200}:(?!\d{1,5}/)[^\s@]{1,500}@)")
_NAMES = (
    r"(?:\w+_)?(?:api_key|secret|secret_key|access_key|password|credentials?)"
    r"|(?:(?:\w+_)?(?:hf|hub|access|auth|session|api|bearer)_)?token"
)
_NAME = re.compile(rf"(?i)(?:.*\.)?(?:{_NAMES})")
_ASSIGNED = re.compile(
    rf"""(?i)(?P<name>(?<!\w)(?:{_NAMES})['"]?\s*[:=]\s*)(?:'[^']*'?|"[^"]*"?|[^\s,}}\])]+)"""
)
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_SHORTEST = 16  # characters of a secret of the environment; a shorter value may be a part of any text


def is_secret_name(name: str) -> bool:
    """Return whether a key, dotted or not, or a variable has the name of a secret, such as HF_TOKEN."""
    return _NAME.fullmatch(name) is not None


def has_url_credentials(text: str) -> bool:
    """Return whether a text has a URL with a password or a token before its host."""
    return _IN_URL.search(text) is not None


def has_token(text: str) -> bool:
    """Return whether a text has a token of the Hub, or the secret of one of this process's variables."""
    secrets = [value for name, value in os.environ.items() if is_secret_name(name)]
    return _HUB_TOKEN.search(text) is not None or any(
        len(one) >= _SHORTEST and one in text for one in secrets
    )


def without_url_credentials(text: str) -> str:
    """Return a text without the passwords and tokens of its URLs, and without tokens of the Hub."""
    return _HUB_TOKEN.sub(HIDDEN, _IN_URL.sub("...@", text))


def without_credentials(text: str) -> str:
    """Return a value that a user has given without the secrets that it has by name or in URLs."""
    return _ASSIGNED.sub(rf"\g<name>{HIDDEN}", without_url_credentials(text))
