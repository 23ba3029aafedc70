"""The locked versions: complete, hashed, and within pyproject.toml's bounds."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
LOCKED = ROOT / "scripts/setup/locked"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CPU = ["build", "torch_cpu", "train", "dev", "triton"]
CUDA = ["build", "torch_cuda", "train", "dev", "triton"]
MACHINES = [
    {"python_version": version, "python_full_version": f"{version}.9", "platform_machine": machine}
    for version in ("3.10", "3.11", "3.12", "3.13", "3.14")
    for machine in ("x86_64", "aarch64")
]


def locked(*parts: str) -> dict[Requirement, str]:
    """Return the requirements in these files, and the lines with their hashes."""
    entries = {}
    for part in parts:
        text = "".join(line for line in (LOCKED / f"{part}.txt").open() if not line.startswith("#"))
        for entry in re.split(r"\n(?=\S)", text.rstrip("\n")):
            pin, _, hashes = entry.partition(" \\\n")
            entries[Requirement(pin)] = hashes
    return entries


def version_of(pin: Requirement) -> str:
    [specifier] = pin.specifier
    assert specifier.operator == "==", pin
    return specifier.version


def applies(requirement: Requirement, machine: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({**machine, "extra": ""})


def required(*extras: str) -> Iterator[Requirement]:
    """Yield what pyproject.toml requires, with the extras and those that they name."""
    names = [*PROJECT["dependencies"], *(one for e in extras for one in PROJECT["optional-dependencies"][e])]
    for requirement in map(Requirement, names):
        if requirement.name == PROJECT["name"]:
            yield from required(*requirement.extras)
        else:
            yield requirement


@pytest.mark.parametrize(
    ("parts", "extra"), [(CPU, "dev"), (CPU[:-2], "train"), (CUDA, "dev")], ids=["cpu", "run", "cuda"]
)
def test_what_pyproject_requires_is_locked_once(parts: list[str], extra: str) -> None:
    everything = locked(*parts)
    for machine in MACHINES:
        pins = [pin for pin in everything if applies(pin, machine)]
        versions = {canonicalize_name(pin.name): version_of(pin) for pin in pins}
        assert len(versions) == len(pins), "a package is locked twice"
        for requirement in required(extra):
            if applies(requirement, machine):
                assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement
