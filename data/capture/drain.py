"""States that come online, written into a store: for sources that write none themselves."""

from collections.abc import Mapping
from typing import Any

from data.capture.offline import (
    CapturedStates,
    StoreSpec,
    check_space,
    finish_store,
    open_store,
    store_fields,
)
from data.capture.online import OnlineStates
from data.progress import Progress
from data.store.shards import refuse
from data.store.writer import StoreWriter

_WRITER = "online"


def drain_to_store(
    wanted: StoreSpec,
    source: OnlineStates | None,
    states: CapturedStates,
    *,
    shard_tokens: int,
    manifest_fields: Mapping[str, Any],
    progress: bool = False,
) -> None:
    """Writes what is missing; returns on every rank once the store is finished.

    Args:
        source: of the same dataset; None on the ranks that only wait for the end.
        states: as they are captured.

    Raises:
        UserError: as `OnlineStates.get_many` does; the disk cannot hold the store, or the directory holds
            another one. What is finished by then is kept.
    """
    rank = 0 if source is not None else 1
    directory = wanted.directory
    fields = store_fields(wanted, manifest_fields)
    missing = open_store(directory, fields, rank)
    if source is not None and missing:
        check_space(wanted, missing, states)
        total = sum(source.lengths[sample_id] for sample_id in missing)
        bar = Progress("capture", total, "tokens", shown=progress)
        source.expect(missing)
        with StoreWriter(directory, _WRITER, wanted.encoding, shard_tokens) as writer, bar:
            for sample_id in missing:
                [sample] = source.get_many([sample_id])
                if sample_id in source.refused:
                    refuse(directory, _WRITER, sample_id, source.refused[sample_id])
                else:
                    writer.append(sample_id, sample)
                bar.update(source.lengths[sample_id])
    finish_store(wanted, fields, rank, progress=progress)
