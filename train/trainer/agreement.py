"""What all ranks know of each other while a checkpoint is written or read, so that none waits for another."""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from eagle31.errors import UserError
from train.distributed import World


def gathered(value: Any, world: World) -> list[Any]:
    """Return the value of each rank, which must be possible in JSON. Every rank calls."""
    if not dist.is_initialized():
        return [value]
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(world.device)
    size = torch.tensor([len(content)], device=world.device)
    sizes = [torch.empty_like(size) for _ in range(world.size)]
    dist.all_gather(sizes, size)
    longest = max(int(one) for one in sizes)
    padded = content.new_zeros(longest)
    padded[: len(content)] = content
    received = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(received, padded)
    return [
        json.loads(bytes(one[: int(length)].tolist())) for one, length in zip(received, sizes, strict=True)
    ]


def agreed(world: World, action: Callable[[], Any], on_error: Callable[[OSError], UserError]) -> list[Any]:
    """Run `action` on every rank, and return what it returns on each. Every rank calls.

    Args:
        on_error: returns the error for the user, from that of a failed read or write.

    Raises:
        UserError: on every rank, if the action failed on some rank.
    """
    result, problem = None, None
    try:
        result = action()
    except OSError as error:
        problem = on_error(error)
    except UserError as error:
        problem = error
    found = gathered([result, problem and [problem.field, str(problem.value), problem.remedy]], world)
    if failed := next((one for _, one in found if one), None):
        raise UserError(*failed)
    return [one for one, _ in found]


def agreed_on_main(world: World, action: Callable[[], Any], on_error: Callable[[OSError], UserError]) -> Any:
    """Run `action` on rank 0 and return its result on every rank, with the errors of `agreed`."""
    return agreed(world, action if world.is_main else lambda: None, on_error)[0]
