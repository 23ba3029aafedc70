"""Fixtures and hooks of the whole suite."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["WANDB_MODE"] = "disabled"  # whatever key its user has
os.environ["HF_TOKEN_PATH"] = os.devnull  # where `hf auth login` keeps a token
gc.disable()  # what the tests import lives as long as the session, so no collection needs to visit it

from data.capture.vllm.environment import ROOT, find_python
from tests.order import arrange
from tests.workers import fork_workers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also the long matrices")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: a check or measurement on a GPU, which scripts/gpu_check runs")
    config.addinivalue_line("markers", "at_most(seconds): how long a test of tests/gpu takes on a GPU")
    config.addinivalue_line("markers", "full(why): a test that runs with --full only")
    settings.register_profile("suite", deadline=None, database=None, derandomize=True)
    settings.load_profile("suite")
    if config.getoption("tx", None) and not hasattr(config, "workerinput"):
        fork_workers()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what --full runs, before any fixture is made for it."""
    mark = item.get_closest_marker("full")
    if mark is not None and not item.config.getoption("--full"):
        pytest.skip(f"--full runs it: {mark.args[0]}")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    arrange(items)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python of vLLM's environment, which is made where it is missing.

    A test is skipped, with the reason, where it cannot be made: without a network, for example.
    """
    if "EAGLE31_VLLM_PYTHON" not in os.environ:
        setup = subprocess.run([ROOT / "scripts" / "setup" / "vllm"], capture_output=True, text=True)
        if setup.returncode:
            pytest.skip(f"vLLM's environment is missing: {(setup.stderr.strip() or 'no message')[-500:]}")
    return find_python()


@pytest.fixture(scope="session")
def mooncake() -> Path | None:
    """The directory of the system libraries that Mooncake needs; None where the system has them.

    Every test that imports Mooncake, or starts a process that does, asks for it.
    """
    setup = subprocess.run([ROOT / "scripts" / "setup" / "mooncake"], capture_output=True, text=True)
    assert setup.returncode == 0, setup.stderr
    return Path(setup.stdout.strip()) if setup.stdout.strip() else None


@pytest.fixture(scope="session")
def torchspec(mooncake: Path | None) -> Path:
    """TorchSpec's checkout, which this adds to the environment.

    EAGLE31_TORCHSPEC names a checkout or an archive of one; otherwise an archive in `shared/torchspec` next
    to the checkout, or further up, is used. Tests are skipped where neither is at hand.
    """
    archives = [path for parent in ROOT.parents for path in sorted(parent.glob("shared/torchspec/*.tar.gz"))]
    given = os.environ.get("EAGLE31_TORCHSPEC") or next(iter(archives), None)
    if given is None:
        pytest.skip("TorchSpec is not at hand: EAGLE31_TORCHSPEC=PATH names a checkout or an archive of it")
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        pytest.skip("TorchSpec needs Python 3.11 to 3.13")
    setup = subprocess.run(
        [ROOT / "scripts" / "setup" / "torchspec", given],
        capture_output=True,
        text=True,
    )
    assert setup.returncode == 0, setup.stderr
    return Path(setup.stdout.strip())
