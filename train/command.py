"""How every command starts and ends: threads, messages for users, and exit statuses.

A command written in Python begins with

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from train.command import prepare, run_command

    prepare()
    import ...

and ends with `run_command(main)`. This module imports the standard library alone, so that it works where the
environment does not.
"""

import ctypes
import errno
import gc
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

from eagle31.errors import UserError

FAILURE = 1
MISTAKE = 2  # the user's; argparse's status, too
INTERRUPTED = 130

# For what the machine refuses. Other errors of the operating system keep their traceback.
_REMEDIES = {
    errno.EACCES: "Give a path that this account can use, or change its owner or mode.",
    errno.EROFS: "Give a path on a file system that can be written to.",
    errno.ENOSPC: "Free some space there and give the same command again; finished work is kept.",
    errno.EDQUOT: "Free some of the quota and give the same command again; finished work is kept.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n) and give the same command again.",
    errno.ENOTDIR: "A part of this path is a file; give another path.",
}
_FULL = (errno.ENOSPC, errno.EDQUOT)

_PR_SET_PDEATHSIG = 1  # prctl(2)
_OUR_PACKAGES = ("eagle31", "data", "train", "tests")


def prepare() -> None:
    """Prepare the process for the imports that follow: threads, speed, and a remedy for a missing package."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    set_thread_defaults(os.environ, cores, has_gpu=shutil.which("nvidia-smi") is not None)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Where torchrun is killed, it leaves its processes with the GPUs and the output directory's lock.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pause_collection()
    sys.excepthook = _report_failed_import


def set_thread_defaults(environment: MutableMapping[str, str], num_cores: int, has_gpu: bool) -> None:
    """Set what the user left open, before torch is imported; what is set already stays."""
    # OpenMP's threads spin by default while they wait, which delays everything else on the same cores: a
    # decoding step of a small model takes 5 to 15 times as long when two busy processes share two cores.
    # GNU's OpenMP, which PyTorch has, may spin for some microseconds, which delays nobody much; without
    # that, a training step of a small drafter takes 1.15 to 1.6 times as long.
    if "OMP_WAIT_POLICY" not in environment:
        environment["OMP_WAIT_POLICY"] = "passive"
        environment.setdefault("GOMP_SPINCOUNT", "1000")
    # For several processes on a node torchrun sets OMP_NUM_THREADS=1 itself and leaves no mark. A user's 1
    # looks the same, so it stays: one thread is enough on GPUs, and on the CPU the user can set it.
    num_processes = int(environment.get("LOCAL_WORLD_SIZE", 1))
    environment.setdefault("OMP_NUM_THREADS", str(max(num_cores // num_processes, 1)))
    if not has_gpu:
        environment.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns when it has to find out
        # oneDNN keeps 1,024 primitives by default, in bfloat16 with copies of weights, and memory grows with
        # each new shape. With 8, a training step takes as long.
        environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8")


def pause_collection() -> None:
    """Stop collecting garbage until `resume_collection`, for the imports between the two.

    What an import makes lives as long as the process, and Python's collector would look at it time and again:
    that takes 2.6 of the 7 seconds of a command that imports `train.pipeline` and does nothing else.
    """
    gc.disable()


def resume_collection() -> None:
    """Collect garbage again, apart from what has been imported so far."""
    gc.freeze()
    gc.enable()


def run_command(main: Callable[[], int | None], failures: tuple[type[Exception], ...] = ()) -> NoReturn:
    """Run a command's `main` and exit with its status, or with that of its error.

    Args:
        main: returns the exit status; None stands for 0.
        failures: exceptions whose message tells all there is to know; they need no traceback.
    """
    resume_collection()
    try:
        status = main() or 0
    except UserError as error:
        status = _report(f"error: {error}", MISTAKE)
    except failures as error:
        status = _report(f"error: {error}", FAILURE)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except OSError as error:
        if error.errno not in _REMEDIES or (error.filename is None and error.errno not in _FULL):
            raise
        reason = f"{os.strerror(error.errno)}. {_REMEDIES[error.errno]}"
        where = _full_disk() if error.filename is None else error.filename
        named = "" if where is None else f"file={os.fspath(where)}: "
        status = _report(f"error: {named}{reason}", MISTAKE)
    sys.exit(status)


def _full_disk() -> str | None:
    """Return a directory whose disk is full: a write that fails does not name its file."""
    given = [one.removeprefix("output_dir=") for one in sys.argv if one.startswith("output_dir=")]
    caches = os.environ.get("HF_HOME", os.path.expanduser("~/.cache")), os.environ.get("TMPDIR", "/tmp")
    for directory in filter(os.path.isdir, (*given, os.getcwd(), *caches)):
        usage = shutil.disk_usage(directory)
        if usage.free < usage.total / 1000:
            return directory
    return None


def _report(message: str, status: int) -> int:
    """Print the message once on a node, and hand it to torchrun for the table of a failed process."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    # Several processes find the same mistake; torchrun's table has the message of the one that ended first.
    if not error_file or os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)
    if error_file:
        details = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError), open(error_file, "w") as file:  # its disk may be the one that is full
            json.dump({"message": {"message": message, "extraInfo": details}}, file)
    return status


def _report_failed_import(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Handle what ends a command before `run_command`."""
    if issubclass(kind, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] not in _OUR_PACKAGES:
        remedy = (
            f"{sys.executable} does not have it. scripts/quickstart sets up the environment; to activate it, "
            "run `source .venv/bin/activate`."
        )
        print(f"error: package={error.name}: {remedy}", file=sys.stderr)
        sys.exit(MISTAKE)
    sys.__excepthook__(kind, error, traceback)
