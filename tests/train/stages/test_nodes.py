"""The data stage on several nodes, each of which answers its own blocks of conversations."""

import re
import signal
from pathlib import Path

import pytest
from datasets import load_from_disk

from data.embedded.target import EmbeddedTarget
from tests.runs.forked import start
from tests.train.small_run import RECIPE, arguments


def answered(
    target: EmbeddedTarget, directory: Path, num_nodes: int, *settings: str, killed: int = -1
) -> tuple[list[dict], set[tuple[int, int]]]:
    """Return the samples, and (rank, block) of what was answered; no samples of a run that was killed."""
    command = [f"recipe={RECIPE}", *arguments(target, directory), "stages=[data]", *settings]
    command += ["data.regenerate.enabled=true", "data.regenerate.max_new_tokens=8"]
    log = directory.with_name(f"{directory.name}-{killed}.log")
    ranks = start(
        "tests/train/stages/answering_worker.py",
        killed,
        *command,
        "data.regenerate.batch_size=2",
        log=log,
        num_processes=num_nodes,
        num_nodes=num_nodes,
    )
    try:
        status = ranks.wait()
    finally:
        ranks.kill()
    assert status == (0 if killed < 0 else -signal.SIGKILL), ranks.printed()
    found = {(int(a), int(b)) for a, b in re.findall(r"rank (\d) answers block (\d+)", ranks.printed())}
    [data] = directory.glob("artifacts/data-*")
    return ([] if killed >= 0 else load_from_disk(str(data / "train")).to_list()), found


@pytest.mark.parametrize("settings", [["temperature=1", "40"], ["temperature=1"]])
def test_the_samples_do_not_depend_on_the_number_of_nodes_nor_on_a_kill(
    small_target: EmbeddedTarget, tmp_path: Path, settings: list[str]
) -> None:
    given = [f"data.regenerate.{settings[0]}", *(f"data.max_samples={number}" for number in settings[1:])]
    one, by_one = answered(small_target, tmp_path / "one", 1, *given)
    assert len({block for _, block in by_one}) > 4
    _, before = answered(small_target, tmp_path / "two", 2, *given, killed=3)
    two, after = answered(small_target, tmp_path / "two", 2, *given)
    assert two == one
    assert {block for _, block in before | after} == {block for _, block in by_one}
    assert all(rank == block % 2 for rank, block in before | after)
    assert (1, 1) in before - after  # finished blocks are not answered again
