"""What the other ranks do for rank 0: jobs, which reach them in order through torchrun's store.

A job is a function of the run's context; its further arguments are values of JSON.
"""

import json
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from train.context import RunContext
from train.distributed import read_when_set, shared_values, wait_for_count

Job = Callable[..., None]
_numbers = count()  # of the jobs that this process has posted or received
_NO_MORE = ""


def on_every_rank(context: RunContext, job: Job, **arguments: Any) -> None:
    """Have the other ranks run a job, and run it here. Rank 0 calls."""
    on_other_ranks(context, job, **arguments)
    job(context, **arguments)


def on_other_ranks(context: RunContext, job: Job, **arguments: Any) -> None:
    """Have the other ranks run a job, without waiting for them. Rank 0 calls."""
    _post(context, job.__name__, arguments)


def end_jobs(context: RunContext) -> None:
    """Tell the other ranks that there are no more jobs, and wait until they know. Rank 0 calls."""
    if key := _post(context, _NO_MORE, {}):
        # Where this process serves the store, it ends with it.
        wait_for_count(f"{key}/known", context.world.size - 1)


def received_jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the jobs that rank 0 posts, by name with their arguments, until it has no more.

    Raises:
        UserError: another rank has failed.
    """
    while True:
        key = _next_key()
        job, arguments = json.loads(read_when_set(shared_values(), key))
        if job == _NO_MORE:
            shared_values().add(f"{key}/known", 1)
            return
        yield job, arguments


def _post(context: RunContext, job: str, arguments: dict[str, Any]) -> str | None:
    if context.world.size == 1:
        return None
    key = _next_key()
    shared_values().set(key, json.dumps([job, arguments]))
    return key


def _next_key() -> str:
    return f"job/{next(_numbers)}"
