"""Whether the Hub can be asked for what is not on this machine."""

from functools import cache
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import get_session

from eagle31.errors import UserError

_SECONDS = 10.0


@cache
def check_hub(field: str, repository: str, kind: str) -> None:
    """Raise UserError for a repository that is not on this machine where the Hub does not answer.

    `huggingface_hub` would try again for half a minute, for each file.

    Args:
        field: the setting that names the repository.
        kind: model or dataset.
    """
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type=kind)
    if constants.HF_HUB_OFFLINE or folder.is_dir():
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception as error:  # of httpx, and of what it uses
        remedy = (
            f"It is not on this machine, and {constants.ENDPOINT} does not answer ({error}); give a path."
        )
        raise UserError(field, repository, remedy) from error
