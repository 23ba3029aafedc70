import json
from pathlib import Path

import pytest

from tests.train.torchrun import torchrun

WORKER = "tests/train/trainer/parallel_worker.py"
NUM_MATRICES = 8  # fc, q, k, v, o, gate, up, down


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    directory = tmp_path_factory.mktemp("parallel")
    found = {}
    for num_processes in (1, 2):
        path: Path = directory / f"{num_processes}.json"
        torchrun(WORKER, str(path), num_processes=num_processes)
        found[num_processes] = json.loads(path.read_text())
    return found


def runs(results: dict[int, dict], name: str) -> list[dict]:
    """The runs of one configuration, on one process and on two; one process has not all of them."""
    found = [one[name] for one in results.values() if name in one]
    assert found
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_processes_train_as_one_does(results: dict[int, dict], stage: int) -> None:
    reference = results[1]["zero0"]
    assert reference["losses"][-1] < reference["losses"][0]
    assert sum(reference["replay"]["3"][1:]) > 0
    for run in runs(results, f"zero{stage}"):
        assert run["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert run["grad_norms"] == pytest.approx(reference["grad_norms"], rel=1e-4)
        # Replay's rows differ in their number of chunks, each of which reads the head.
        assert run["replay"] == reference["replay"]
        # Without ZeRO 3 rank 0 measures alone.
        assert run["drift"]["drift/num_positions"] == 29
        assert run["drift"] == pytest.approx(reference["drift"], rel=1e-3, abs=1e-3)
        assert run["weights"] == pytest.approx(reference["weights"], rel=1e-4, abs=1e-4)


def test_dspark_trains_in_chunks_on_two_processes_at_zero_3_as_on_one(results: dict[int, dict]) -> None:
    (reference, run) = runs(results, "dspark")
    assert reference["losses"][-1] < reference["losses"][0]
    assert sum(reference["replay"]["3"][1:]) > 0
    assert run["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert run["grad_norms"] == pytest.approx(reference["grad_norms"], rel=1e-4)
    assert run["replay"] == reference["replay"]
    assert run["weights"] == pytest.approx(reference["weights"], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("stage", [1, 3])
def test_two_processes_that_share_rows_train_as_one_does(results: dict[int, dict], stage: int) -> None:
    run, reference = results[2][f"shared-zero{stage}"], results[1]["zero0"]
    assert run["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert run["grad_norms"] == pytest.approx(reference["grad_norms"], rel=1e-4)
    assert run["weights"] == pytest.approx(reference["weights"], rel=1e-4, abs=1e-4)


def test_a_shared_row_has_the_gradients_of_the_whole_row(results: dict[int, dict]) -> None:
    differences = results[2]["shared gradients"]
    assert len(differences) == 6
    assert max(differences.values()) < 1e-10


@pytest.mark.full("more processes")
@pytest.mark.parametrize("num_processes", [4, 8])
def test_more_processes_share_a_row(num_processes: int) -> None:
    torchrun("tests/eagle31/training/shared_worker.py", num_processes=num_processes)


def test_bf16_reduces_and_accumulates_in_float32(results: dict[int, dict]) -> None:
    # Every micro-batch's gradient is the same bf16 tensor on one rank and on two. So runs differ only in the
    # order of float32 sums; sums in bf16 would differ by up to 2 ** -8.
    reference = results[1]["bf16-zero1"]
    for run in [one for stage in (1, 3) for one in runs(results, f"bf16-zero{stage}")]:
        assert run["losses"] == pytest.approx(reference["losses"], rel=1e-6)
        assert run["grad_norms"] == pytest.approx(reference["grad_norms"], rel=1e-6)
        assert run["weights"] == pytest.approx(reference["weights"], rel=1e-6, abs=1e-4)
        # What is exported are the master weights, which are not rounded to bf16.
        assert not run["rounded"]


def test_bf16_follows_float32(results: dict[int, dict]) -> None:
    run, reference = results[2]["bf16-zero3"], results[1]["zero0"]
    # bf16 has 8 significant bits. A loss averages over rounding errors of both signs.
    assert run["losses"] == pytest.approx(reference["losses"], rel=2**-8)
    # A gradient's elements have errors of a few units in the last place; after updates the paths differ too.
    assert run["grad_norms"][0] == pytest.approx(reference["grad_norms"][0], rel=2**-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_muon_trains_on_two_processes_as_on_one(results: dict[int, dict], stage: int) -> None:
    reference = results[1]["muon-zero0"]
    assert reference["losses"] != results[1]["zero0"]["losses"]
    for run in runs(results, f"muon-zero{stage}"):
        assert run["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert run["grad_norms"] == pytest.approx(reference["grad_norms"], rel=1e-4)
        assert run["weights"] == pytest.approx(reference["weights"], rel=1e-4, abs=1e-3)


def muon_results(results: dict[int, dict]) -> list[dict]:
    found = [run for one in results.values() for name, run in one.items() if name.startswith("muon-")]
    assert len(found) == 4
    return found


def test_muon_orthogonalizes_whole_matrices(results: dict[int, dict]) -> None:
    for run in muon_results(results):
        values = run["refused"]["singular values"]
        assert len(values) == NUM_MATRICES
        for name, (smallest, largest) in values.items():
            assert 0.6 < smallest < largest < 1.2, name


def test_muon_in_bf16_follows_float32(results: dict[int, dict]) -> None:
    reference = results[1]["muon-zero0"]
    run = results[2]["muon-bf16-offload-zero3"]
    assert run["losses"] == pytest.approx(reference["losses"], rel=2**-8)
    assert not run["rounded"]


@pytest.mark.parametrize("name", ["zero0", "zero2", "bf16-zero1", "muon-zero2", "muon-bf16-offload-zero3"])
def test_refused_steps_change_nothing(results: dict[int, dict], name: str) -> None:
    for run in runs(results, name):
        refused = run["refused"]
        assert refused["damaged"] == {"refused": True, "unchanged": True}
        assert refused["sound"] == {"refused": False, "unchanged": False}
