"""Capture to a store by sources that only deliver states online."""

from collections.abc import Mapping
from typing import Any

from data.capture.finishing import finish_store
from data.capture.online import OnlineStates
from data.capture.opening import (
    CapturedStates,
    StoreSpec,
    check_space,
    check_store_refusals,
    open_store,
    store_fields,
)
from data.progress import Progress
from data.store.shards import refuse
from data.store.writer import StoreWriter

_WRITER = "online"


def drain_to_store(
    store: StoreSpec,
    source: OnlineStates | None,
    states: CapturedStates,
    *,
    shard_tokens: int,
    manifest_fields: Mapping[str, Any],
    progress: bool = False,
) -> None:
    """Write the missing samples; return on every rank once the store is finished.

    Args:
        source: the source of the same dataset; None on the ranks that only wait.
        states: the sizes of the captured states.

    Raises:
        UserError: `OnlineStates.get_many` raises it, the disk cannot hold the store, or the directory holds
            another store. Finished shards are kept.
    """
    rank = 0 if source is not None else 1
    directory = store.directory
    fields = store_fields(store, manifest_fields)
    missing = open_store(directory, fields, rank)
    if source is not None and missing:
        check_store_refusals(store)
        check_space(store, missing, states)
        total = sum(source.lengths[sample_id] for sample_id in missing)
        bar = Progress("capture", total, "tokens", shown=progress)
        source.expect(missing)
        with StoreWriter(directory, _WRITER, store.encoding, shard_tokens) as writer, bar:
            for sample_id in missing:
                [sample] = source.get_many([sample_id])
                if sample_id in source.refused:
                    refuse(directory, _WRITER, sample_id, source.refused[sample_id])
                else:
                    writer.append(sample_id, sample)
                bar.update(source.lengths[sample_id])
    finish_store(store, fields, rank, progress=progress)
