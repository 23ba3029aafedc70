"""Directories that a run writes to: whether it can, their space, and whether locks work there."""

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.locks import try_lock
from eagle31.errors import UserError
from train.doctor.check import Check, Status, judged, ok
from train.planning.memory_check import gigabytes

_CLOCK_SECONDS = 5.0  # between this machine and its file servers


def writable_check(
    name: str, field: str, directory: Path, otherwise: Status = Status.lacking, loss: str = ""
) -> Check:
    """Return whether files can be written below a directory, which may not exist yet. It is really tried.

    Args:
        field: the setting that names the directory.
        otherwise: the status of one that cannot be written to.
        loss: what the run does without then, as a sentence.
    """
    written = _written(directory.expanduser().absolute())
    obstacle = next(filter(None, map(write_obstacle, written)), None)
    remedy = f"Nothing can be written there ({obstacle}); give a directory that this account can write to."
    remedy += f" {loss}" if loss else ""
    found = "writable" if obstacle is None else obstacle
    good = obstacle is None
    return judged(name, good, found, "writable", remedy, otherwise=otherwise, field=field, value=directory)


def _written(directory: Path) -> list[Path]:
    """Return the directory, and what an earlier run may have made in it as another account."""
    return [directory, *(path for path in (directory / "artifacts",) if os.path.isdir(path))]


def write_obstacle(directory: Path) -> str | None:
    """Return why no file can be written below a directory, which may not exist yet; None if one can."""
    there = existing(directory)
    if not there.is_dir():
        return f"{there} is a file"
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"eagle31")
            file.flush()
    except OSError as error:
        return f"{there}: {os.strerror(error.errno or 0)}"
    return None


def own_directory_check(name: str, field: str, directory: Path) -> Check:
    """Return whether other accounts can put files of theirs in the place of those in a directory."""
    path = directory.expanduser().absolute()
    obstacle = None
    if path.is_symlink():
        obstacle = "it is a link"
    elif path.is_dir():
        status = path.stat()
        if status.st_uid not in (os.getuid(), 0):
            obstacle = f"it belongs to account {status.st_uid}"
        elif status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            obstacle = "every account can write to it"
    remedy = f"Others could exchange what is written there ({obstacle}); give a directory of this account."
    found = "of this account" if obstacle is None else obstacle
    good = obstacle is None
    return judged(name, good, found, "of this account", remedy, field=field, value=directory)


def existing(path: Path) -> Path:
    """Return the path, or the nearest of its parents that exists."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def directory_bytes(directory: Path) -> int:
    """Return the bytes of the files below a directory; 0 where there is none."""
    paths = (os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in names)
    return sum(os.lstat(path).st_size for path in paths)


@dataclass(frozen=True)
class SpaceUse:
    """What a run writes below a directory."""

    directory: Path
    what: str
    num_bytes: int
    remedy: str


def space_checks(uses: Iterable[SpaceUse]) -> list[Check]:
    """Return, for each disk, whether it has room for all that goes there."""
    disks: dict[int, list[SpaceUse]] = {}
    for use in uses:
        where = existing(use.directory.expanduser().absolute())
        disks.setdefault(os.stat(where).st_dev, []).append(use)
    return [_space_check(together) for together in disks.values()]


def _space_check(uses: Sequence[SpaceUse]) -> Check:
    where = existing(uses[0].directory.expanduser().absolute())
    free, needed = shutil.disk_usage(where).free, sum(use.num_bytes for use in uses)
    largest = max(uses, key=lambda use: use.num_bytes)
    parts = ", ".join(f"{use.what} {gigabytes(use.num_bytes)}" for use in uses)
    found = f"{gigabytes(free)} free on that of {where}"
    shown = parts if len(uses) == 1 else f"{gigabytes(needed)}: {parts}"
    return judged("disk", free >= needed, found, shown, largest.remedy, field="disk", value=where)


def lock_check(directory: Path) -> Check:
    """Return whether one process at a time can lock a file where the output directory is."""
    name, needed = "locks", "one holder at a time"
    where = existing(directory.expanduser().absolute())
    try:
        with tempfile.TemporaryDirectory(dir=where, prefix=".eagle31-doctor-") as scratch:
            path = Path(scratch) / "lock"
            first = try_lock(path)
            assert first is not None, "nobody else knows this file"
            with first:
                second = try_lock(path)
            if second is not None:
                second.close()
            found = "flock" if second is None else "locks exclude nobody"
    except UserError:
        found = "no flock"
    except OSError as error:
        found = f"{where}: {os.strerror(error.errno or 0)}"
    remedy = "No lock works there: give a directory on another file system, or mount it with flock."
    return judged(name, found == "flock", found, needed, remedy, field="output_dir", value=directory)


def clock_check(directory: Path) -> Check:
    """Return whether the clock of a directory's file server agrees with this machine's."""
    where = existing(directory.expanduser().absolute())
    try:
        with tempfile.NamedTemporaryFile(dir=where, prefix=".eagle31-doctor-") as file:
            file.write(b"eagle31")
            file.flush()
            apart = abs(os.stat(file.name).st_mtime - time.time())
    except OSError as error:
        return ok("clock", f"not compared: {os.strerror(error.errno or 0)}")
    return clocks_check(apart)


def clocks_check(apart_seconds: float) -> Check:
    remedy = "Set both clocks by NTP (chronyc tracking, timedatectl); signed requests and file times need it."
    found = f"{apart_seconds:.0f} s from the file system's"
    good = apart_seconds <= _CLOCK_SECONDS
    return judged("clock", good, found, f"{_CLOCK_SECONDS:.0f} s", remedy, otherwise=Status.warning)


def umask_check(umask: int) -> Check:
    """Return whether other accounts of the group can read what this one writes."""
    remedy = "Another account that serves cannot read the export: set umask 022, or 027 with a common group."
    good = not umask & 0o040
    return judged("umask", good, f"{umask:03o}", "no more than 037", remedy, otherwise=Status.warning)


def own_umask() -> int:
    """Return this process's umask, from the kernel: reading it with os.umask would change it for a moment."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022
