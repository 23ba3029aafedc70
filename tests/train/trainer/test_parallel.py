import json
from pathlib import Path

import pytest

from tests.train.torchrun import torchrun

WORKER = "tests/train/trainer/parallel_worker.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    directory = tmp_path_factory.mktemp("parallel")
    found = {}
    for num_processes in (1, 2):
        path: Path = directory / f"{num_processes}.json"
        torchrun(WORKER, str(path), num_processes=num_processes)
        found[num_processes] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_processes_train_as_one_does(results: dict[int, dict], stage: int) -> None:
    reference = results[1]["zero0"]
    assert reference["losses"][-1] < reference["losses"][0]
    assert sum(reference["replay"]["3"][1:]) > 0
    for num_processes in (1, 2):
        run = results[num_processes][f"zero{stage}"]
        assert run["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert run["grad_norms"] == pytest.approx(reference["grad_norms"], rel=1e-4)
        # Replay's rows differ in their number of chunks, each of which reads the head.
        assert run["replay"] == reference["replay"]
        assert run["weights"] == pytest.approx(reference["weights"], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("stage", [0, 2])
def test_bf16_follows_float32(results: dict[int, dict], stage: int) -> None:
    reference = results[1]["zero0"]["losses"]
    for num_processes in (1, 2):
        assert results[num_processes][f"bf16-zero{stage}"]["losses"] == pytest.approx(reference, rel=0.02)
