"""What happens around a run: it stops when it is asked to, and ends when one of its ranks hangs or ends."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from eagle31.errors import UserError
from eagle31.json_files import write_json
from train.command import FAILURE, hand_to_torchrun
from train.config.run import RunConfig
from train.distributed import World, connected_values, leave_process_group, shared_values
from train.lifetime.activity import ACTIVITY
from train.lifetime.departures import Departures
from train.lifetime.held_signals import release_signals
from train.lifetime.stops import STOPPED_FILE, Stopped, StopRequests, seconds_left, stop_requests
from train.lifetime.watch import RankWatch

_STOPPED, _REASON = "run/stopped", "run/reason"  # how many ranks have stopped, and why
_TOGETHER_SECONDS = 20.0  # until all ranks have stopped; torchrun grants 30 s
_POLL_SECONDS = 0.1


@contextmanager
def supervised(config: RunConfig, world: World) -> Iterator[None]:
    """Run a body that stops on signals and at the time limit, and fails when a rank hangs or ends.

    Every rank enters.

    Raises:
        Stopped: all ranks were asked to stop; `stopped.json` in the output directory then says why.
    """
    output_dir = Path(config.output_dir)
    left = seconds_left(config.stop_after_minutes, os.environ, time.time())
    with (
        Departures(connected_values(), world.rank, world.size, world.node_rank, fail=_fail) as departures,
        stop_requests(left, announced=world.is_main) as requests,
    ):
        try:
            with _watched(config, world, requests):
                release_signals()
                yield
        except Stopped:
            _conclude(world, requests, departures, output_dir)
            raise
        except BaseException:
            departures.report_failure()
            raise
        finally:
            leave_process_group()


def _fail(message: str) -> int:
    hand_to_torchrun(f"error: {message}")
    return FAILURE


def _watched(config: RunConfig, world: World, requests: StopRequests) -> RankWatch | nullcontext[None]:
    if world.size == 1:
        return nullcontext()
    minutes = config.deepspeed.timeout_minutes

    def fail(message: str) -> int:
        return _fail(str(UserError("deepspeed.timeout_minutes", minutes, message)))

    watch = RankWatch(
        connected_values(),
        world.rank,
        world.size,
        limit_seconds=60 * minutes,
        directory=Path(config.output_dir),
        stop=requests.request,
        fail=fail,
    )
    requests.on_request = lambda reason: watch.tell_stop(f"{reason}, rank {world.rank}")
    return watch


def _conclude(world: World, requests: StopRequests, departures: Departures, output_dir: Path) -> None:
    """Wait a while for the other ranks, which torchrun would end with this one; then say that all stopped.

    Where a rank fails or is killed, torchrun has the others stop. Such a run is not to be queued again.
    """
    values, deadline = shared_values(), time.monotonic() + _TOGETHER_SECONDS
    if requests.reason is not None:  # In training the others may have been asked alone.
        values.set(_REASON, requests.reason)
    values.add(_STOPPED, 1)
    while (num_stopped := values.add(_STOPPED, 0)) < world.size:
        if departures.found() is not None or time.monotonic() > deadline:
            return
        time.sleep(_POLL_SECONDS)
    assert num_stopped == world.size
    if world.is_main:
        reason = values.get(_REASON).decode()
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_json(
            output_dir / STOPPED_FILE,
            {"reason": reason, "stage": ACTIVITY.stage, "step": ACTIVITY.step, "at": now},
        )
        print(f"stopped in {ACTIVITY}, by {reason}; the same command resumes", flush=True)
