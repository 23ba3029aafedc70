"""The versions of the code and the packages that a run uses."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "torch",
    "transformers",
    "deepspeed",
    "datasets",
    "accelerate",
    "hydra-core",
    "safetensors",
    "wandb",
)


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that results depend on."""
    return {name: version(name) for name in PACKAGES if _installed(name)}


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def git_revision() -> str | None:
    """Return the checkout's commit, with `+changes` if files differ from it; None outside a repository."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        revision = git("rev-parse", "HEAD")
        return f"{revision}+changes" if git("status", "--porcelain") else revision
    except (OSError, subprocess.CalledProcessError):
        return None
