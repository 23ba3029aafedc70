"""Checks and measurements on a GPU, which `scripts/gpu_check` runs.

EAGLE31_GPU_CHECK_DEVICE is `cuda`, or `cpu` for small sizes on any machine; without it these tests are
skipped.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.runs import Check
from train.distributed import World
from train.tables import aligned

DEVICE = os.environ.get("EAGLE31_GPU_CHECK_DEVICE")
LIMIT = 25 * 60  # seconds of the whole check
KERNEL_SECONDS = 2  # of a kernel's test, most of them for its compilation
STARTED = time.monotonic()
OUTPUT = Path(os.environ.get("EAGLE31_GPU_CHECK_OUTPUT", "outputs/gpu_check")).resolve()
Figure = Callable[..., None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(600))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what might end after the limit, before any fixture is made for it."""
    if time.monotonic() - STARTED + at_most(item) > LIMIT and DEVICE == "cuda":
        pytest.skip(f"{LIMIT // 60} minutes are almost over: give its name with -k")


def at_most(item: pytest.Item) -> int:
    """Return how many seconds a test takes on a GPU at most, by estimate."""
    mark = item.get_closest_marker("at_most")
    return KERNEL_SECONDS if mark is None else mark.args[0]


def pytest_collection_finish(session: pytest.Session) -> None:
    """List the tests with `--collect-only`, as `scripts/gpu_check --dry-run` does."""
    if DEVICE is not None and session.config.option.collectonly:
        rows = [["test", "at most"], *([one.nodeid, f"{at_most(one)} s"] for one in session.items)]
        print(*aligned(rows), f"in all: {sum(map(at_most, session.items)) / 60:.0f} minutes", sep="\n")


@pytest.fixture(scope="session")
def check() -> Check:
    if DEVICE is None:
        pytest.skip("scripts/gpu_check runs it")
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    if DEVICE == "cuda":
        World.from_environment().use_device()
    return Check(OUTPUT, torch.device(DEVICE))


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """Add a measured value to the table: figure(name, value, unit)."""

    def add(name: str, value: float | str, unit: str = "") -> None:
        record_property(
            name, f"{value:.4g} {unit}".strip() if isinstance(value, float) else f"{value} {unit}".strip()
        )

    return add


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the figures, and write them to gpu_check.json."""
    reports = [one for key in ("passed", "failed", "skipped") for one in terminalreporter.stats.get(key, [])]
    found = [one for one in reports if one.nodeid.startswith("tests/gpu/") and one.when == "call"]
    if not found:
        return
    tests = [
        {"test": one.nodeid.partition("::")[2], "outcome": one.outcome, "seconds": round(one.duration, 1)}
        | {"figures": dict(one.user_properties)}
        for one in found
    ]
    rows = [["test", "figure", "value"]]
    rows += [[test["test"], name, value] for test in tests for name, value in test["figures"].items()]
    terminalreporter.write_line("\n".join(aligned(rows, text_columns=3)))
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / "gpu_check.json").write_text(json.dumps(tests, indent=1) + "\n")
    terminalreporter.write_line(f"figures: {OUTPUT / 'gpu_check.json'}")
