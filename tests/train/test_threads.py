import pytest

from train.threads import set_thread_defaults


@pytest.mark.parametrize(
    ("num_cores", "processes", "threads"), [(8, None, "8"), (8, "4", "2"), (2, "4", "1"), (96, "8", "12")]
)
def test_the_processes_of_a_node_share_its_cores(num_cores: int, processes: str | None, threads: str) -> None:
    environment = {} if processes is None else {"LOCAL_WORLD_SIZE": processes}
    set_thread_defaults(environment, num_cores, has_gpu=False)
    assert environment["OMP_NUM_THREADS"] == threads
    assert environment["OMP_WAIT_POLICY"] == "passive"
    assert environment["DS_ACCELERATOR"] == "cpu"


def test_what_the_user_has_set_stays() -> None:
    given = {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "active", "DS_ACCELERATOR": "cuda"}
    environment = dict(given)
    set_thread_defaults(environment, 8, has_gpu=False)
    assert environment == given


def test_deepspeed_finds_a_gpu_by_itself() -> None:
    environment: dict[str, str] = {}
    set_thread_defaults(environment, 8, has_gpu=True)
    assert "DS_ACCELERATOR" not in environment
