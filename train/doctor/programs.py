"""Programs and libraries apart from this Python: vLLM's environment, Mooncake, Slurm, object storage."""

import shutil
import subprocess
from pathlib import Path

from data.addresses import is_url
from data.transport.mooncake_store import load_mooncake, reach
from data.vllm.environment import find_python, installed_version
from eagle31.errors import UserError
from train.doctor.check import Check, Status, judged, ok
from train.doctor.environment import has_module

VLLM = "0.32"  # with which the tests have run
_SLURM = ("sbatch", "srun", "scontrol")
# The module that fsspec needs for a protocol, and the extra of this project that installs it.
_STORAGE = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs")}


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
        return Check("vLLM", Status.lacking, "no environment", VLLM, error.remedy, error.field, error.value)
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


def mooncake_check(master: str) -> Check:
    """Return whether this process could join a Mooncake store."""
    try:
        load_mooncake()
        reach(master)
    except UserError as error:
        return Check(
            "Mooncake",
            Status.lacking,
            str(error.value),
            "libraries, a master",
            error.remedy,
            error.field,
            error.value,
        )
    return ok("Mooncake", f"{master} answers", "libraries, a master")


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
    protocol = store.partition("://")[0]
    module, extra = _STORAGE.get(protocol, ("fsspec", protocol))
    good = has_module(module)
    found = module if good else f"without {module}"
    remedy = f"pip install --editable '.[{extra}]'."
    return judged(name, good, found, f"{module} for {protocol}://", remedy, field=field, value=store)
