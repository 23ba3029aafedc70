"""Addresses of machines, of files and on the Hub."""

from functools import cache
from ipaddress import ip_address
from pathlib import Path

from eagle31.errors import UserError

_HUB_SECONDS = 10.0


def is_url(location: str | Path) -> bool:
    """Return whether a location is a URL such as s3://bucket/path, and not a path."""
    return "://" in str(location)


def is_loopback(host: str | None) -> bool:
    """Return whether a host name or an IP address stands for the machine that reads it, on every machine."""
    if host == "localhost":
        return True
    try:
        return host is not None and ip_address(host).is_loopback
    except ValueError:
        return False  # a name that other machines may know


@cache
def check_hub(field: str, repository: str, kind: str) -> None:
    """Raise UserError for a repository that is not on this machine where the Hub does not answer.

    `huggingface_hub` would try again for half a minute, for each file.

    Args:
        field: the setting that names the repository.
        kind: model or dataset.
    """
    # vLLM's processes import this module.
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import get_session

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type=kind)
    if constants.HF_HUB_OFFLINE or folder.is_dir():
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception as error:  # of httpx, and of what it uses
        remedy = (
            f"It is not on this machine, and {constants.ENDPOINT} does not answer ({error}); give a path."
        )
        raise UserError(field, repository, remedy) from error
