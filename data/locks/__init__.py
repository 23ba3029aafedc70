"""Locks among the processes of all nodes."""

from data.locks.file_lock import try_lock
from data.locks.lease import LeaseTimes
from data.locks.lock import Lock

__all__ = ["LeaseTimes", "Lock", "try_lock"]
