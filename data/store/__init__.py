"""Hidden states on disk: many writers, shards that each vouch for themselves, one logical order."""

from data.store.reader import HiddenStateStore
from data.store.shards import DamagedShard

__all__ = ["DamagedShard", "HiddenStateStore"]
