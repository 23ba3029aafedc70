"""What is said about GPUs, from what a machine with GPUs would report."""

import pytest

from tests.train.torchrun import composed
from train.doctor.check import Check, Status
from train.doctor.gpus import Gpu, capability_checks, count_check, driver_check, nccl_check, plan_check
from train.doctor.needs import Needs
from train.planning import plan as planning
from train.planning.placement import Cluster

H100 = Gpu("NVIDIA H100 80GB HBM3", 85_000_000_000, (9, 0))
T4 = Gpu("Tesla T4", 15_800_000_000, (7, 5))
V100 = Gpu("Tesla V100", 16_900_000_000, (7, 0))


@pytest.mark.parametrize(
    ("gpus", "needed", "status", "found"),
    [
        ([H100] * 8, 8, Status.ok, "8 x NVIDIA H100 80GB HBM3 of 85 GB"),
        ([H100] * 4, 8, Status.lacking, "4 x"),
        ([], 1, Status.lacking, "none"),
        ([], 0, Status.ok, "none"),
    ],
)
def test_gpus_are_counted(gpus: list[Gpu], needed: int, status: Status, found: str) -> None:
    check = count_check(gpus, needed, 80_000_000_000)
    assert check.status is status
    assert check.found.startswith(found)
    assert bool(check.remedy) is (status is Status.lacking)


@pytest.mark.parametrize(
    ("driver", "cuda", "num_gpus", "status", "said"),
    [
        ("580.65.06", "13.0", 8, Status.ok, ""),
        ("550.54.14", "13.0", 0, Status.lacking, "newer driver"),  # torch finds no GPU because of it
        ("550.54.14", "12.8", 8, Status.ok, ""),
        ("580.65.06", None, 0, Status.lacking, "CPU build"),
        ("580.65.06", "13.0", 0, Status.lacking, "finds a GPU and torch none"),
        (None, "13.0", 0, Status.warning, "no driver"),
    ],
)
def test_the_driver_is_compared_with_the_cuda_of_torch(
    driver: str | None, cuda: str | None, num_gpus: int, status: Status, said: str
) -> None:
    check = driver_check(driver, cuda, num_gpus)
    assert check is not None
    assert (check.status, said in check.remedy) == (status, True)


def test_a_cpu_build_on_a_machine_without_a_driver_needs_none() -> None:
    assert driver_check(None, None, 0) is None


def by_name(checks: list[Check]) -> dict[str, Status]:
    return {check.name: check.status for check in checks}


def test_old_gpus_lack_what_the_recipe_asks_for() -> None:
    def statuses(gpu: Gpu, **changed: object) -> dict[str, Status]:
        asked: dict = {"bf16": True, "head_dim": 128, "in_vllm": True, "fp8_target": True} | changed
        return by_name(capability_checks([H100, gpu], **asked))

    assert set(statuses(H100).values()) == {Status.ok}
    old = {"GPU for vLLM": Status.ok, "GPU for fp8": Status.warning, "flash attention": Status.warning}
    assert statuses(T4) == old
    assert statuses(V100)["GPU for vLLM"] is Status.lacking
    assert statuses(V100, in_vllm=False, fp8_target=False) == {"flash attention": Status.warning}
    assert statuses(H100, bf16=False)["flash attention"] is Status.warning
    assert statuses(H100, head_dim=512)["flash attention"] is Status.warning
    assert capability_checks([], bf16=True, head_dim=None, in_vllm=True, fp8_target=True) == []


def test_nccl_is_needed_for_several_gpus_and_its_interface_must_exist() -> None:
    found = ["lo", "eth0"]
    assert nccl_check(None, 1, {}, found) is None
    assert nccl_check(None, 2, {}, found).status is Status.lacking  # type: ignore[union-attr]
    for named, status in {
        "eth": Status.ok,
        "=eth0": Status.ok,
        "^lo": Status.ok,
        "ib": Status.lacking,
    }.items():
        check = nccl_check((2, 27, 5), 2, {"NCCL_SOCKET_IFNAME": named}, found)
        assert check is not None
        assert check.status is status, named


@pytest.mark.parametrize(("gigabytes", "status"), [(24, Status.ok), (1, Status.lacking)])
def test_memory_is_that_of_the_plan(monkeypatch: pytest.MonkeyPatch, gigabytes: int, status: Status) -> None:
    num_bytes = gigabytes * 10**9
    monkeypatch.setattr(planning, "cluster_at_hand", lambda world: Cluster(1, 1, 1, num_bytes))
    monkeypatch.setattr(planning, "available_gpu_bytes", lambda config: num_bytes)
    check = plan_check(Needs(composed("qwen3_0_6b")).plan)
    assert check.status is status, check
    assert check.found == f"{gigabytes} GB each"
    assert "for training" in check.needed
