"""A store that the user gives to be read instead of capturing: is it this target's, and this data's?"""

from collections.abc import Mapping
from typing import Any

from datasets import Dataset

from data.capture.tokens import tokens_fingerprint
from data.store.index import as_read_back
from data.store.reader import store_description
from eagle31.errors import UserError

# Fields that may differ: the same target may be elsewhere, and its fingerprint says whether it is the same.
_PLACES = frozenset({"target", "target_revision"})
_SETTINGS = {
    "encoding": "capture.codec or capture.final_states",
    "aux_layer_ids": "drafter.aux_layer_ids",
}


def check_states(location: str, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Compare how the store's states were made with how this run would make them.

    Args:
        location: a directory or a URL.
        expected: the fields of this run's own store.

    Returns:
        The store's fields, without the places of the target and of its shards.

    Raises:
        UserError: there is no finished store, or a field differs.
    """
    fields = store_description(location)
    for name, value in as_read_back(expected).items():
        if name not in _PLACES and fields.get(name) != value:
            change = f"change {_SETTINGS[name]}, " if name in _SETTINGS else ""
            remedy = f"Its {name} is {fields.get(name)}, and this run's is {value}; {change}"
            raise UserError("capture.store", location, f"{remedy}give another store, or null to capture.")
    return {name: value for name, value in fields.items() if name not in _PLACES}


def check_samples(location: str, dataset: Dataset) -> None:
    """Raise UserError if the store holds states of other samples than those of the training data."""
    fields = store_description(location)
    expected = {"dataset_samples": len(dataset), "tokens_fingerprint": tokens_fingerprint(dataset)}
    if any(fields[name] != value for name, value in expected.items()):
        remedy = (
            f"It holds {fields['dataset_samples']:,} samples of other data than this run's {len(dataset):,}; "
            "give the run the data, the split and the seed that the store was captured with."
        )
        raise UserError("capture.store", location, remedy)
