"""Explains a failed run by the state of the machine: which checks concern an exception."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from eagle31.errors import UserError
from train.config.run import RunConfig
from train.distributed import World, shared_values
from train.doctor.check import table
from train.doctor.examine import Topic, examine

_ERRNO = {
    errno.ENOSPC: {Topic.disk, Topic.memory},  # memory has /dev/shm
    errno.EDQUOT: {Topic.disk},
    errno.EMFILE: {Topic.limits},
    errno.ENFILE: {Topic.limits},
    errno.EACCES: {Topic.permission},
    errno.EPERM: {Topic.permission},
    errno.EROFS: {Topic.permission},
    errno.EADDRINUSE: {Topic.ports},
    errno.EADDRNOTAVAIL: {Topic.ports},
    errno.ENOLCK: {Topic.locks},
    errno.EOPNOTSUPP: {Topic.locks},
    errno.ENOMEM: {Topic.memory},
}
# Libraries, and processes of the run, report such errors as text only.
_TEXTS = {
    "No space left on device": {Topic.disk, Topic.memory},
    "(os error 28)": {Topic.disk, Topic.memory},
    "disk is full": {Topic.disk},
    "Disk quota exceeded": {Topic.disk},
    "Too many open files": {Topic.limits},
    "Permission denied": {Topic.permission},
    "Read-only file system": {Topic.permission},
    "Address already in use": {Topic.ports},
    "Cannot allocate memory": {Topic.memory},
    "CUDA out of memory": {Topic.gpus},
    "CUDA error": {Topic.gpus},
    "NCCL": {Topic.gpus, Topic.memory},
}
_FIELDS = {
    "vllm.servers": {Topic.servers},
    "VLLM_API_KEY": {Topic.servers},
    "vllm": {Topic.vllm, Topic.gpus},
    "EAGLE31_VLLM_PYTHON": {Topic.vllm},
    "EAGLE31_VLLM_ENV": {Topic.vllm},
    "capture.mooncake.master": {Topic.vllm},
}


def explanation(error: BaseException, config: RunConfig, world: World) -> list[str]:
    """Return lines about what the machine has and lacks, as far as it concerns an error.

    They are empty for an error that has nothing to do with the machine, and on all but the first process of a
    node that fails.
    """
    topics = topics_of(error)
    if not topics or not _is_first(world):
        return []
    return [
        "this machine, as scripts/doctor sees it:",
        *(f"  {line}" for line in table(examine(config, topics))),
    ]


def topics_of(error: BaseException) -> set[Topic]:
    """Return what checks an error, or a cause of it, is about."""
    topics = set[Topic]()
    for one in _causes(error):
        if isinstance(one, torch.OutOfMemoryError):
            topics |= {Topic.gpus}
        if isinstance(one, MemoryError):
            topics |= {Topic.memory}
        if isinstance(one, OSError):
            topics |= _ERRNO.get(one.errno or 0, set())
        if isinstance(one, UserError):
            topics |= _FIELDS.get(one.field, set())
        for text, about in _TEXTS.items():
            if text in str(one):
                topics |= about
    return topics


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@contextmanager
def naming_full_disk(directory: Path) -> Iterator[None]:
    """Raise UserError for a full disk, whichever way a library reports it.

    Args:
        directory: where the files go.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if Topic.disk not in topics_of(error):
            raise
        remedy = "The disk is full: free some space and give the same command again; finished work is kept."
        raise UserError("output_dir", directory, remedy) from error


def _is_first(world: World) -> bool:
    """Whether no other process of this node has explained its failure."""
    if world.size == 1:
        return True
    try:
        return shared_values().add(f"doctor/{world.node_rank}", 1) == 1
    except RuntimeError:  # the process that serves the values has ended
        return world.leads_node
