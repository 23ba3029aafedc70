"""Fixtures and hooks of the whole suite."""

import gc
import multiprocessing.spawn
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

gc.disable()  # what the tests import lives as long as the session, so no collection needs to visit it

from data.vllm.environment import ROOT, environment, find_python
from tests.eagle31.export.reload import reload_in_this_process
from tests.order import arrange, extend_time_limits
from tests.preloaded.start import begin_session, end_session, interpreter
from tests.train.torchrun import preloaded_python
from train.drafter import export_checks

MAKE_SECONDS = 1100


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also the long matrices, whose tables are committed")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full(why): a test that runs with --full only")
    if not hasattr(config, "workerinput"):  # one of xdist's workers has it
        begin_session()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        end_session()


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
    extend_time_limits(items)
    arrange(items)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python of vLLM's environment, which is made where it is missing.

    A test is skipped, with the reason, where it cannot be made: without a network, for example.
    """
    if "EAGLE31_VLLM_PYTHON" not in os.environ:
        setup = subprocess.run(
            [ROOT / "scripts" / "setup" / "vllm"], capture_output=True, text=True, timeout=MAKE_SECONDS
        )
        if setup.returncode:
            pytest.skip(f"vLLM's environment is missing: {(setup.stderr.strip() or 'no message')[-500:]}")
    return find_python()


@pytest.fixture(scope="session")
def preloaded_vllm(vllm_python: Path) -> Path:
    """An interpreter that has imported vLLM. See `tests.preloaded.start`."""
    modules = (
        "vllm.entrypoints.llm",
        "vllm.entrypoints.openai.api_server",
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.llama_eagle3",
    )
    return interpreter("vllm", str(vllm_python), modules, environment(vllm_python))


@pytest.fixture(scope="module")
def preloaded_servers(preloaded_vllm: Path) -> Iterator[Path]:
    """The vLLM servers that the module's tests start are run by `preloaded_vllm`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE31_VLLM_PYTHON", str(preloaded_vllm))
        yield preloaded_vllm


@pytest.fixture(scope="module")
def preloaded_children() -> Iterator[None]:
    """The processes that the project's code starts in the module's tests are run by `preloaded_python`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", preloaded_python())
        patch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(preloaded_python()))
        yield


@pytest.fixture
def reload_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reload exports in this process instead of a fresh one."""
    monkeypatch.setattr(export_checks, "reload_in_fresh_process", reload_in_this_process)
