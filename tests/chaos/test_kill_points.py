"""A run that is killed anywhere, and started again with the same command, ends as one that nobody killed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from data.embedded.target import EmbeddedTarget
from tests.chaos.chains import CHOSEN, QUICK, RUNS, Chain, drawn_chains
from tests.chaos.library import compiler
from tests.chaos.outcome import differences, outcome_of
from tests.chaos.points import Change
from tests.chaos.runs import REPO, ChaosRun
from tests.chaos.table import Row, write_table
from tests.train.conftest import small_target  # noqa: F401
from tests.train.reporting.hub_server import running_hub

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(compiler() is None, reason="a C compiler is needed to stop a process at a write"),
]


@dataclass(frozen=True)
class Uninterrupted:
    """A run that nobody killed: what it changed, and what it left."""

    changes: list[Change]
    outcome: dict[str, str]


@pytest.fixture(scope="module")
def uninterrupted(
    small_target: EmbeddedTarget,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int, tuple[str, ...]], Uninterrupted]:
    @cache
    def run(num_processes: int, settings: tuple[str, ...]) -> Uninterrupted:
        directory = tmp_path_factory.mktemp("uninterrupted") / "run"
        with running_hub() as hub:
            one = ChaosRun(directory, small_target, hub, num_processes, settings)
            return Uninterrupted(one.finish_logged(), outcome_of(one.output, hub, REPO))

    return run


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[list[Row]]:
    """The table's rows; with `--full` it is written."""
    found: list[Row] = []
    yield found
    if request.config.getoption("--full"):
        write_table(found)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_is_killed_anywhere_ends_as_one_that_nobody_killed(
    name: str,
    small_target: EmbeddedTarget,  # noqa: F811
    uninterrupted: Callable[[int, tuple[str, ...]], Uninterrupted],
    rows: list[Row],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if name not in QUICK and not request.config.getoption("--full"):
        pytest.skip("part of scripts/test --full")
    chain = chain_of(name, uninterrupted)
    expected = uninterrupted(chain.num_processes, chain.settings).outcome
    with running_hub() as hub:
        run = ChaosRun(tmp_path / "killed", small_target, hub, chain.num_processes, chain.settings)
        own = []
        for point in chain.points:
            own.append(Row(chain, point))
            rows.append(own[-1])
            started = time.monotonic()
            own[-1].free_seconds = run.kill_at(point)
            own[-1].seconds = time.monotonic() - started
        run.finish()
        found = differences(outcome_of(run.output, hub, REPO), expected)
    for row in own:
        row.result = "; ".join(found) or "identical"
    assert not found, "\n".join([*map(str, chain.points), *found])
    run.remove()


def chain_of(name: str, uninterrupted: Callable[[int, tuple[str, ...]], Uninterrupted]) -> Chain:
    chosen = {chain.name: chain for chain in CHOSEN}
    if name in chosen:
        return chosen[name]
    num_processes = int(name.removeprefix("random ").partition(".")[0])
    drawn = drawn_chains(uninterrupted(num_processes, ()).changes, num_processes)
    return {chain.name: chain for chain in drawn}[name]
