"""The versions of the code and the packages that a run uses, and those that have been tested."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_SETUP = ROOT / "scripts" / "setup"

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


def missing_packages() -> list[str]:
    """Return the distributions that pyproject.toml requires of a run and that are not installed."""
    text = (ROOT / "pyproject.toml").read_text()
    found = []
    for pattern in (r"(?ms)^dependencies = \[(.*?)^\]", r"(?ms)^train = \[(.*?)^\]"):
        match = re.search(pattern, text)
        assert match is not None, pattern
        found += re.findall(r'"([A-Za-z0-9-]+)', match[1])
    return [name for name in found if not _installed(name)]


@dataclass(frozen=True)
class ReleaseRange:
    """The oldest and the newest release of a package with which the tests have run."""

    oldest: str
    newest: str

    def __contains__(self, release: str) -> bool:
        return _numbers(self.oldest) <= _numbers(release) <= _numbers(self.newest)


def release_ranges() -> dict[str, ReleaseRange]:
    """Return the tested range of each package: what `scripts/test --oldest` and `--newest` install."""
    oldest, newest = (_pinned(_SETUP / f"releases_{which}.txt") for which in ("oldest", "newest"))
    assert oldest.keys() == newest.keys()
    return {name: ReleaseRange(oldest[name], newest[name]) for name in oldest}


def untested_packages(installed: Mapping[str, str]) -> list[str]:
    """Return a sentence about each installed package whose release is outside its tested range."""
    ranges = release_ranges()
    return [
        f"{name} {release} has not been tested, which {ranges[name].oldest} to {ranges[name].newest} have"
        for name, release in installed.items()
        if name in ranges and release not in ranges[name]
    ]


def _pinned(path: Path) -> dict[str, str]:
    pairs = (line.split("==") for line in path.read_text().splitlines() if "==" in line)
    return {name: release.strip() for name, release in pairs}


def _numbers(release: str) -> list[int]:
    """Return the numbers of a release without what follows them, as in 2.13.0+cpu."""
    return [int(number) for number in re.findall(r"\d+", re.split(r"[+a-zA-Z]", release)[0])]


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
