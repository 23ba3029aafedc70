"""Opening data sets that a stage has saved, which may have been damaged since."""

from pathlib import Path

from datasets import Dataset, load_from_disk

from eagle31.errors import UserError


def load_saved(directory: Path) -> Dataset:
    """Open a data set that a stage has saved in its directory.

    Raises:
        UserError: a file is missing or damaged; the remedy is to have the stage run again.
    """
    try:
        dataset = load_from_disk(str(directory))
        # Lists with wrong offsets would be read beyond their ends.
        dataset.data.table.validate(full=True)
    except Exception as error:  # `datasets` believes what its JSON files say of columns
        reason = str(error).partition("\n")[0]
        raise damaged(directory, reason) from error
    return dataset


def damaged(directory: Path, reason: str) -> UserError:
    """Return the error of a saved data set that cannot be used."""
    remedy = f"It is damaged ({reason}). Delete {directory.parent}, and the stage makes it again."
    return UserError("data set", directory, remedy)
