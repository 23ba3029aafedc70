"""The locked versions: complete, hashed, within pyproject.toml's bounds, and without known advisories."""

import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.advisories import Advisories, advisory_server

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
LOCKED = ROOT / "scripts/setup/locked"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CPU = ["build", "torch_cpu", "train", "dev"]
CUDA = ["build", "torch_cuda", "train", "dev"]
MACHINES = [
    {"python_version": version, "python_full_version": f"{version}.9", "platform_machine": machine}
    for version in ("3.10", "3.11", "3.12", "3.13", "3.14")
    for machine in ("x86_64", "aarch64")
]
# An advisory that does not concern this project: its name, and why.
ACCEPTED: dict[str, str] = {}


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


@pytest.mark.parametrize("part", sorted({*CPU, *CUDA}))
def test_every_version_is_exact_and_has_hashes(part: str) -> None:
    entries = locked(part)
    assert entries
    for pin, hashes in entries.items():
        assert version_of(pin)
        lines = [line.removesuffix(" \\").strip() for line in hashes.splitlines()]
        assert lines, pin
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", line) for line in lines), pin


def test_no_index_is_named() -> None:
    text = "".join(path.read_text() for path in LOCKED.iterdir())
    assert not re.search(r"://|--(extra-)?index|--find-links|--trusted-host|^-|@", text, re.MULTILINE)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda one: "-".join(one.values()))
@pytest.mark.parametrize(
    ("parts", "extra"), [(CPU, "dev"), (CPU[:-1], "train"), (CUDA, "dev")], ids=["cpu", "run", "cuda"]
)
def test_what_pyproject_requires_is_locked_once(
    parts: list[str], extra: str, machine: dict[str, str]
) -> None:
    pins = [pin for pin in locked(*parts) if applies(pin, machine)]
    versions = {canonicalize_name(pin.name): version_of(pin) for pin in pins}
    assert len(versions) == len(pins), "a package is locked twice"
    for requirement in required(extra):
        if applies(requirement, machine):
            assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_what_the_locked_packages_require_is_locked() -> None:
    """For those that are installed here in their locked version."""
    pins = [pin for pin in locked(*CPU) if applies(pin, {})]
    names = {canonicalize_name(pin.name) for pin in pins}
    compared = 0
    for pin in pins:
        try:
            found = distribution(pin.name)
        except PackageNotFoundError:
            continue
        if found.version != version_of(pin):
            continue
        compared += 1
        for requirement in map(Requirement, found.requires or []):
            if applies(requirement, {}):
                assert canonicalize_name(requirement.name) in names, f"{pin.name} requires {requirement}"
    assert compared > 20


def test_a_run_and_the_checks_share_their_versions() -> None:
    names = [{(pin.name, str(pin.marker)) for pin in locked(part)} for part in CUDA]
    assert sum(map(len, names)) == len(set().union(*names))


def test_an_advisory_is_found() -> None:
    with advisory_server({("jinja2", "2.4.1"): ["PYSEC-1"]}) as url:
        found = Advisories(url).query({"jinja2": "2.4.1", "numpy": "2.0"})
    assert found == {"jinja2 2.4.1": ["PYSEC-1"]}


def test_an_advisory_service_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(OSError, match="querybatch"):
        Advisories("http://127.0.0.1:9/querybatch").query({"numpy": "2.0"})


def test_no_advisory_concerns_a_locked_version() -> None:
    versions: dict[str, str] = {}
    for pin in locked(*CUDA):
        if applies(pin, MACHINES[-1]):
            versions[pin.name] = version_of(pin)
    try:
        found = Advisories().query(versions)
    except OSError as error:
        pytest.skip(f"no advisory database can be reached: {error}")
    unknown = {name: sorted(set(ids) - set(ACCEPTED)) for name, ids in found.items()}
    assert not any(unknown.values()), unknown
