"""The requirements that are checked before any stage."""

from pathlib import Path

import pytest

from eagle31.errors import UserError
from tests.train.torchrun import composed
from train.config.run import check
from train.context import RunContext
from train.distributed import World
from train.pipeline import run_stages
from train.requirements import check_environment, starts_vllm

NEEDED = ("target.model=nowhere", "data.train=nowhere.jsonl", "output_dir=nowhere")
ANSWERED, CAPTURED = "target.engine=vllm", "capture.source=vllm"
SERVERS = "vllm.servers=[http://127.0.0.1:1]"


@pytest.mark.parametrize(
    ("starts", "arguments"),
    [
        (True, (ANSWERED,)),
        (True, (ANSWERED, "stages=[answers]")),
        (True, (ANSWERED, "stages=[evaluate]")),
        (True, (ANSWERED, SERVERS)),  # no server has the export as its drafter
        (True, (ANSWERED, "stages=[data]", "data.regenerate.enabled=true")),
        (False, (ANSWERED, "stages=[data]")),
        (False, (ANSWERED, "stages=[answers]", SERVERS)),
        (False, (ANSWERED, "stages=[capture,train]")),
        (True, (CAPTURED, "stages=[capture]")),
        (False, (CAPTURED, "stages=[capture]", SERVERS)),
        (False, (CAPTURED, "stages=[train]")),
        (True, (CAPTURED, "stages=[train]", "capture.mode=online")),
        (False, ()),
    ],
)
def test_which_runs_start_vllm(starts: bool, arguments: tuple[str, ...]) -> None:
    assert starts_vllm(composed("any_target", *NEEDED, *arguments)) is starts


def test_a_missing_vllm_environment_is_reported_before_the_target_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", "/nowhere/python")
    config = composed("any_target", *NEEDED, ANSWERED)
    with pytest.raises(UserError, match="vLLM's environment does not exist"):
        run_stages(RunContext(config, World(rank=0, local_rank=0, size=1)))


def test_a_mooncake_master_that_other_machines_cannot_reach_is_refused() -> None:
    through = ("capture=vllm_online", "capture.transport=mooncake", "stages=[data]")
    config = composed("any_target", *NEEDED, *through, "vllm.servers=[http://node1:8000]")
    with pytest.raises(UserError, match=r"capture\.mooncake\.master=127\.0\.0\.1:50051: http://node1:8000"):
        check_environment(config)
    check_environment(composed("any_target", *NEEDED, *through, "vllm.servers=[http://localhost:8000]"))


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        (r"vllm\.engine_args\.max_model_len=8", ("vllm.engine_args={max_model_len: 8}",)),
        (r"data\.regenerate\.temperature=3\.0", (ANSWERED, "data.regenerate.temperature=3")),
        (r"evaluate\.temperature=2\.5", (ANSWERED, "evaluate.temperature=2.5")),
    ],
)
def test_values_that_vllm_refuses_are_refused(field: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=field):
        check(composed("any_target", *NEEDED, *arguments))
