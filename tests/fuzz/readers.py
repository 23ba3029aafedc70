"""The readers of the files and messages that eagle31 writes and downloads, each with a valid content."""

import warnings
from pathlib import Path

from tests.fuzz.messages import message_readers
from tests.fuzz.reader import Reader
from tests.fuzz.runs import data_readers, result_readers, training_readers
from tests.fuzz.stores import store_readers, transport_readers
from tests.fuzz.tensors import checkpoint_readers, tensor_readers

GROUPS = {
    "tensors": tensor_readers,
    "checkpoint": checkpoint_readers,
    "store": store_readers,
    "transport": transport_readers,
    "results": result_readers,
    "training": training_readers,
    "data": data_readers,
    "messages": message_readers,
}


def readers(directory: Path) -> dict[str, tuple[Path, Reader]]:
    """Return the readers by name, each with a directory of valid files, which is made."""
    found: dict[str, tuple[Path, Reader]] = {}
    for group, make in GROUPS.items():
        place = directory / group
        place.mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = make(place)
        assert not found.keys() & made.keys()
        found |= {name: (place, reader) for name, reader in made.items()}
    return found
