"""The versions of the code and the packages that a run uses."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = (
    "torch",
    "transformers",
    "deepspeed",
    "datasets",
    "accelerate",
    "hydra-core",
    "safetensors",
    "wandb",
    "ray",
)


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that results depend on."""
    versions = {name: version(name) for name in PACKAGES if _installed(name)}
    torchspec = find_spec("torchspec")
    if torchspec is not None and torchspec.origin is not None:  # a checkout, whose name has its commit
        versions["torchspec"] = Path(torchspec.origin).resolve().parents[1].name
    return versions


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def git_revision() -> str | None:
    """Return the checkout's commit, with `+changes` if files differ from it; None outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        revision = git("rev-parse", "HEAD")
        return f"{revision}+changes" if git("status", "--porcelain") else revision
    except (OSError, subprocess.CalledProcessError):
        return None
