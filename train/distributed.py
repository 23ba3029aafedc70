"""The processes of a run: ranks, what they know of each other, and waiting without a process group."""

import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from data.addresses import is_loopback
from eagle31.errors import UserError
from eagle31.kernels.packed_attention import take_flash_attention_3

_FIRST_PAUSE, _LONGEST_PAUSE = 0.016, 2.0  # seconds, between two looks
# With these, all ranks end within a minute of a lost rank's last sign of life.
BEAT_SECONDS = 5.0  # between two signs of life of a rank
SILENT_SECONDS = 40.0  # without one before a rank counts as lost
START_SECONDS = 600.0  # for a rank's first one, which follows imports from a shared file system
_FAILURE, _BEAT, _ENDED = "failure", "beat", "ended"  # values that the ranks share
_ending = threading.Event()  # this process no longer watches the others
_numbers = count()  # of what the ranks do together
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_STORE_SECONDS = 60.0  # time to reach torchrun's store
_LOCAL_ADDR = "give torchrun --local-addr=ADDRESS_OF_THIS_NODE on each node."


@dataclass(frozen=True)
class World:
    """This process's place among the processes of the run."""

    rank: int
    local_rank: int
    size: int
    node_rank: int = 0
    num_nodes: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def leads_node(self) -> bool:
        """Whether this is the first process of its node."""
        return self.local_rank == 0

    @property
    def device(self) -> torch.device:
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank)
        return torch.device("cpu")

    @property
    def ranks_per_node(self) -> int:
        return max(1, self.size // self.num_nodes)

    def use_device(self) -> None:
        """Make this rank's GPU the current one, which CUDA work that names no device uses, and prepare it.

        Without this, every process of a node also creates a context on the first GPU.

        Its memory is mapped as it is needed, so that rows of different lengths leave no gaps, unless the user
        has configured PyTorch's allocator. It is no variable of the environment, because vLLM and TorchSpec's
        engines would inherit it: a store that registers their memory would then read what is elsewhere.
        """
        if self.device.type == "cuda":
            if self.local_rank >= torch.cuda.device_count():
                remedy = f"This node has {torch.cuda.device_count()} GPUs, and each process needs one."
                raise UserError("torchrun --nproc-per-node", self.ranks_per_node, remedy)
            torch.cuda.set_device(self.device)
            if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
                torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
            take_flash_attention_3(self.device)

    @staticmethod
    def from_environment() -> "World":
        """Read torchrun's environment variables; without them the run is one process."""
        return World(
            rank=int(os.environ.get("RANK", 0)),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            size=int(os.environ.get("WORLD_SIZE", 1)),
            node_rank=int(os.environ.get("GROUP_RANK", 0)),
            num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        )


@cache
def shared_values() -> dist.Store:
    """Return the key-value store of the run's processes, which torchrun serves; keys are this project's own.

    It exists before the process group does. Without torchrun it is this process's own.

    Raises:
        UserError: this process cannot reach it.
    """
    if "RANK" not in os.environ:
        return dist.HashStore()
    # With the same function as `init_process_group`, so that both agree about who serves it.
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_STORE_SECONDS)))
    except dist.DistError as error:
        remedy = f"torchrun's store cannot be reached there ({_in_one_line(error)}); {_LOCAL_ADDR}"
        raise UserError("MASTER_ADDR", os.environ["MASTER_ADDR"], remedy) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"eagle31/{attempt}", store)


def ending(error: Exception, world: World) -> Exception:
    """Return what ends this process, and tell the ranks that may wait for it. The first failure counts.

    An error that only says that the connection to another rank has failed becomes what ended that one.
    """
    _ending.set()
    rank = f"rank {world.rank} on {socket.gethostname()}"
    lost = isinstance(error, dist.DistError) or "/gloo/" in str(error)
    found = UserError(rank, type(error).__name__, str(error))
    if lost:
        remedy = f"{_in_one_line(error)} See what the other ranks print."
        found = UserError(rank, "the connection to another rank has failed", remedy)
    if world.size > 1:
        with suppress(RuntimeError):  # the store ends with the process that serves it
            found = _post(shared_values(), found)
    return found if lost else error


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _post(values: dist.Store, failure: UserError) -> UserError:
    """Share a failure unless there is one; return the one that is shared."""
    fields = [failure.field, failure.value, failure.remedy]
    return UserError(*json.loads(values.compare_set(_FAILURE, "", json.dumps(fields, default=str))))


def watch_ranks(world: World) -> None:
    """Begin to show the other ranks that this one lives, and to end this process once another one is lost.

    torchrun ends the processes of a node of which one fails, and not those of the other nodes. A rank that
    waits in a collective for a process that was killed, or whose node is gone, would wait for hours.
    """
    if world.size > 1:
        # Of this thread, because an operation of the other one may take long.
        values = shared_values().clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        threading.Thread(target=_watch, args=(world, values), daemon=True).start()


def _watch(world: World, values: dist.Store) -> None:
    # Counted in beats of this rank, which no clock moves on while the whole run is suspended.
    seen = dict.fromkeys(range(1, world.size), (b"", 0)) if world.is_main else {}
    try:
        for beat in count():
            # Where rank 0's node is gone without a word, the store's operations wait for as long as TCP does.
            silent = UserError(
                "rank 0", f"silent for {SILENT_SECONDS:.0f} s", "Its node or the network is gone."
            )
            unanswered = threading.Timer(SILENT_SECONDS, _end, [silent])
            unanswered.daemon = True  # a process that ends does not wait for it
            unanswered.start()
            values.set(f"{_BEAT}/{world.rank}", str(beat))
            for rank, (last, since) in seen.items():
                name = f"{_BEAT}/{rank}"
                now = values.get(name) if values.check([name]) else b""
                seconds = (beat - since) * BEAT_SECONDS
                if now not in (last, _ENDED.encode()):
                    seen[rank] = now, beat
                elif now == last and seconds > (SILENT_SECONDS if last else START_SECONDS):
                    remedy = "Its process or node is gone; see what it printed."
                    _post(values, UserError(f"rank {rank}", f"silent for {seconds:.0f} s", remedy))
            failed = values.check([_FAILURE])
            unanswered.cancel()
            if failed:
                _end(UserError(*json.loads(values.get(_FAILURE))))
            if _ending.wait(BEAT_SECONDS):
                return
    except RuntimeError as gone:  # its store
        _end(UserError("rank 0", "its node is gone", str(gone).partition("\n")[0]))


def _end(error: UserError) -> None:
    if not _ending.is_set():  # what this process has started ends with it
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def wait_until(done: Callable[[], bool], seconds: float = math.inf) -> bool:
    """Block until `done`, asked ever more rarely; `watch_ranks` ends the wait for a rank that is lost.

    Returns:
        False if it is not so after that many seconds.

    Raises:
        UserError: another process has failed.
    """
    pause, started = _FIRST_PAUSE, time.monotonic()
    while not done():
        if shared_values().check([_FAILURE]):
            raise UserError(*json.loads(shared_values().get(_FAILURE)))
        if time.monotonic() - started > seconds:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


def read_when_set(values: dist.Store, name: str) -> str:
    """Return a value once another process has set it. Raises what `wait_until` does."""
    wait_until(lambda: values.check([name]))
    return values.get(name).decode()


def made_by_main(make: Callable[[], Any], world: World) -> Any:
    """Return on every rank what `make` returns on rank 0, as JSON has it; the others wait for it.

    Every rank calls, in the same order. It raises what `wait_until` does.
    """
    name = f"made/{next(_numbers)}"
    if world.is_main:
        shared_values().set(name, json.dumps(make()))
    return json.loads(read_when_set(shared_values(), name))


def told_by_nodes(value: str | None, world: World) -> list[str]:
    """Return the value of the first process of each node, by node; the others wait for all.

    Every rank calls, in the same order as `made_by_main`. It raises what `wait_until` does.

    Args:
        value: None on other processes.
    """
    name = f"told/{next(_numbers)}"
    if value is not None:
        shared_values().set(f"{name}/{world.node_rank}", value)
    return [read_when_set(shared_values(), f"{name}/{node}") for node in range(world.num_nodes)]


def node_address() -> str:
    """Return the address under which the other nodes of the run reach this one.

    It is the address from which this node reaches the first node. No packet is sent.

    Raises:
        UserError: on this node the first node's name is a loopback address.
    """
    first = os.environ["MASTER_ADDR"]
    family, kind, protocol, _, address = socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        found = probe.getsockname()[0]
    if is_loopback(found):
        remedy = f"Other nodes do not reach it; {_LOCAL_ADDR}"
        raise UserError("MASTER_ADDR", f"{first} ({found})", remedy)
    return found


def wait_for(path: Path) -> None:
    """Block until a file exists that another process writes. Raises what `wait_until` does."""
    wait_until(path.exists)


def wait_for_ranks(world: World) -> None:
    """Block until every rank has called this, in the same order as `made_by_main`, with or without a group.

    It raises what `wait_until` does.
    """
    name, values = f"reached/{next(_numbers)}", shared_values()
    values.add(name, 1)
    wait_until(lambda: values.add(name, 0) >= world.size)


def sum_over_ranks(value: Tensor) -> Tensor:
    """Sum a tensor over all ranks in place, and return it. Every rank calls."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def on_main_first(is_main: bool, action: Callable[[], None]) -> None:
    """Run `action` on rank 0 while the other ranks wait. Every rank calls."""
    if is_main:
        action()
    if dist.is_initialized():
        dist.barrier()


def gathered(value: Any, world: World) -> list[Any]:
    """Return the value of each rank. Every rank calls."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, value)
    return found


def leave_ranks(world: World) -> None:
    """Destroy the process group if there is one; the others no longer expect this rank. Every rank calls."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if world.size > 1:
        values = shared_values()
        if world.is_main:  # where this process serves the store, it ends with it
            wait_until(lambda: values.add(_ENDED, 0) == world.size - 1)
        _ending.set()
        with suppress(RuntimeError):
            values.set(f"{_BEAT}/{world.rank}", _ENDED)
            values.add(_ENDED, 1)
