"""Programs and libraries apart from this Python: vLLM's environment, Mooncake, Slurm, object storage."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from data.addresses import is_url
from data.store.remote import check_protocol
from data.transport.mooncake_store import check_joinable, check_master
from data.vllm.environment import check_mooncake, find_python, installed_version
from eagle31.errors import UserError
from train.doctor.check import Check, Status, asked, judged, ok, refusal

VLLM = "0.32"  # with which the tests have run
_SLURM = ("sbatch", "srun", "scontrol")


def vllm_check(starts_vllm: bool) -> Check:
    """Return whether vLLM's environment is there.

    Args:
        starts_vllm: whether the run starts vLLM on this machine.
    """
    try:
        python = find_python()
    except UserError as error:
        if not starts_vllm:
            return ok("vLLM", "no environment", "not by this run; scripts/check_serving")
        return refusal("vLLM", VLLM, error, "no environment")
    version = installed_version(python)
    try:
        done = subprocess.run([str(python), "-IS", "--version"], capture_output=True, text=True, timeout=60)
        runs = done.stdout.strip() if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired):
        runs = None
    otherwise = Status.lacking if starts_vllm else Status.warning
    if version is None or runs is None:
        remedy = (
            f"{python} does not run, or has no vLLM: run scripts/setup/vllm, or correct EAGLE31_VLLM_PYTHON."
        )
        found = f"no vLLM in {python}" if runs else f"{python} does not run"
        return Check("vLLM", otherwise, found, VLLM, remedy, "EAGLE31_VLLM_PYTHON", python)
    remedy = "Other versions are not tested: scripts/setup/vllm installs this one."
    good = version.split("+")[0].startswith(f"{VLLM}.")
    return judged("vLLM", good, f"{version}, {runs}", VLLM, remedy, otherwise=Status.warning)


def mooncake_check(master: str, clients: Sequence[str]) -> Check:
    """Return whether this process could join a Mooncake store, and servers on other machines, too.

    Args:
        clients: the URLs of these servers.
    """

    def question() -> None:
        check_master(master, clients)
        check_joinable(master)

    return asked("Mooncake", question, f"{master} answers", "libraries, a master")


def engine_mooncake_check() -> Check:
    """Return whether an engine that the run starts could put into a Mooncake store."""
    needed = "its package in vLLM's environment"
    return asked("Mooncake in vLLM", lambda: check_mooncake(find_python()), "installed", needed)


def slurm_check(partition: str | None) -> Check:
    """Return whether jobs can be submitted from here, to this partition."""
    missing = [name for name in _SLURM if shutil.which(name) is None]
    if missing:
        remedy = "Run scripts/submit on a login node of the cluster, or use launcher=local."
        found = f"without {', '.join(missing)}"
        return Check("Slurm", Status.lacking, found, ", ".join(_SLURM), remedy, "launcher", "slurm")
    command = ["scontrol", "show", "partition"] + ([partition] if partition else [])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        reason = "" if done.returncode == 0 else (done.stderr or done.stdout).strip().partition("\n")[0]
    except subprocess.TimeoutExpired:
        reason = "the controller does not answer"
    needed = "a controller" if partition is None else f"partition {partition}"
    remedy = f"scontrol says: {reason}. Correct launcher.partition, or ask the administrator."
    return judged(
        "Slurm",
        not reason,
        "not usable" if reason else "answers",
        needed,
        remedy,
        field="launcher",
        value="slurm",
    )


def store_check(store: str) -> Check:
    """Return whether a finished store is there, or in object storage, whether it could be read."""
    name, field = "given store", "capture.store"
    if not is_url(store):
        good = Path(store).expanduser().is_dir()
        remedy = "There is no such directory: give a finished store, or null to capture."
        return judged(
            name, good, "a directory" if good else "missing", store, remedy, field=field, value=store
        )
    protocol = f"{store.partition('://')[0]}://"
    return asked(name, lambda: check_protocol(store), f"reads {protocol}", f"a package for {protocol}")
