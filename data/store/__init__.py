"""Hidden states on disk: many writers, shards with a checksum each, and one logical order of samples."""

from data.store.reader import HiddenStateStore
from data.store.shards import DamagedShard

__all__ = ["DamagedShard", "HiddenStateStore"]
