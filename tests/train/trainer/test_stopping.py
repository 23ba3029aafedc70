import json

import pytest

from tests.train.torchrun import torchrun

WORKER = "tests/train/trainer/stopping_worker.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    directory = tmp_path_factory.mktemp("stopping")
    torchrun(WORKER, str(directory), num_processes=2, seconds=300)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("stage", "step", "asked"), [(0, 3, 1), (2, 3, 1), pytest.param(3, 1, 0, id="shared rows")]
)
def test_a_stop_while_a_rank_waits_for_states_loses_no_step(
    results: list[dict], stage: int, step: int, asked: int
) -> None:
    """All ranks save the step before the one whose rows have not come, and the training resumes with it."""
    for rank, found in enumerate(results):
        stopped, resumed = found[f"stopped-{stage}"]
        assert stopped["step"] <= step
        assert stopped["stopped"] == ("SIGTERM" if rank == asked else "another rank")
        assert [resumed] == found[f"whole-{stage}"]
