"""Removing what killed processes have left in a run's output directory."""

import os
import re
import shutil
from pathlib import Path

from data.vllm.server_info import remove_ended

# How this project, and how safetensors, names what is being written.
_LEFTOVER = re.compile(r"\..+\.partial|\.tmp\w{6}")
# Servers that outlive a run write shards and refusals; whoever writes a store looks after their leftovers.
_OF_WRITERS = re.compile(r"\.shard-.*")
_REFUSED = "refused"


def remove_leftovers(directory: Path) -> None:
    """Remove unfinished files and directories, and the descriptions of killed vLLM servers of this machine.

    None of them counts as a result, but a checkpoint or an export takes as much space as a finished one.
    Only the process that has the directory's lock may call this, before the run writes anything.
    """
    remove_ended(directory)
    for entry in os.scandir(directory):
        path = Path(entry.path)
        if _LEFTOVER.fullmatch(entry.name) and not _OF_WRITERS.fullmatch(entry.name):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        elif entry.is_dir(follow_symlinks=False) and entry.name != _REFUSED:
            remove_leftovers(path)
