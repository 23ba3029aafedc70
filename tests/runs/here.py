"""Runs the project's commands in this process, without the time that their imports take."""

import runpy
import sys
import tempfile
import traceback
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runs.forked import ROOT


@dataclass(frozen=True)
class Outcome:
    """What a command that has ended leaves."""

    status: int
    out: str
    err: str


def run_command(script: str, *arguments: object, directory: Path = ROOT) -> Outcome:
    """Run a command in this process, as `__main__` in a directory.

    An exception that the command does not turn into a message is printed as Python prints it, with status 1.

    Args:
        script: relative to the repository's root.
    """
    status = 0
    with ExitStack() as stack:
        # Files, because libraries ask for their descriptors.
        out, err = (stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(2))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(sys, "argv", [str(ROOT / script), *map(str, arguments)])
        patch.setattr(sys, "path", list(sys.path))  # a command puts the repository's root there
        patch.setattr(sys, "excepthook", sys.excepthook)
        # DeepSpeed would go on with groups of one that is no more, in the tests that follow.
        patch.setattr("torch.distributed.destroy_process_group", lambda: None)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"):
            patch.delenv(name, raising=False)
        stack.enter_context(chdir(directory))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except Exception:
            traceback.print_exc()
            status = 1
        printed = []
        for stream in (out, err):
            stream.seek(0)
            printed.append(stream.read())
    return Outcome(status, *printed)
