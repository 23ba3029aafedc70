"""scripts/doctor, for the small run on machines with and without faults."""

import json
import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from data.embedded.target import EmbeddedTarget
from tests.bad_input.commands import Outcome, run_command
from tests.bad_input.faults import free_port, port_in_use, protected
from tests.train.conftest import small_target
from tests.train.small_run import arguments

__all__ = ["small_target"]  # the fixture

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def doctor(target: EmbeddedTarget, directory: Path, *extra: str) -> Outcome:
    settings = arguments(target, Path("kept/run"))
    return run_command("scripts/doctor", "recipe=any_target", *settings, *extra, directory=directory)


def rows(outcome: Outcome) -> dict[str, str]:
    """Return the status of each check by its name, from --json."""
    return {check["name"]: check["status"] for check in json.loads(outcome.out)}


def test_a_machine_that_suffices_is_left_as_it_is(small_target: EmbeddedTarget, tmp_path: Path) -> None:
    outcome = doctor(small_target, tmp_path)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.endswith("\nThis run can start on this machine.\n")
    found = rows(doctor(small_target, tmp_path, "--json"))
    expected = {
        "Python",
        "packages",
        "GPUs",
        "memory",
        "/dev/shm",
        "open files",
        "output_dir",
        "disk",
        "locks",
    }
    assert expected | {"clock", "target", "data.train", "vLLM", "HF_TOKEN", "W&B"} <= found.keys()
    assert "lacking" not in found.values()
    assert TOKEN not in outcome.out
    assert os.listdir(tmp_path) == []


def test_what_is_lacking_has_a_row_and_a_remedy(small_target: EmbeddedTarget, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    served = (f"vllm.servers=[http://127.0.0.1:{free_port()}]", "capture=vllm_online", "capture.spool_gb=1e6")
    elsewhere = ("data.train=none.jsonl", "hub.repo_id=org/drafter")
    with protected(tmp_path / "kept"), port_in_use() as port, pytest.MonkeyPatch.context() as patch:
        patch.delenv("HF_TOKEN")
        patch.delenv("WANDB_API_KEY", raising=False)
        patch.setenv("NETRC", str(tmp_path / "netrc"))
        patch.setenv("PET_MASTER_PORT", str(port))
        outcome = doctor(small_target, tmp_path, *served, *elsewhere, "--json")
    assert outcome.status == 1
    found = rows(outcome)
    [server] = [name for name in found if name.startswith("server ")]
    named = ["output_dir", "/dev/shm", "data.train", server, "torchrun's port", "HF_TOKEN"]
    assert [name for name in named if found[name] != "lacking"] == []
    assert all(check["remedy"] for check in json.loads(outcome.out) if check["status"] == "lacking")


def test_a_job_of_slurm_is_not_for_this_machine(
    small_target: EmbeddedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    outcome = doctor(small_target, tmp_path, "launcher=slurm", "launcher.gpus_per_node=8")
    assert outcome.status == 1
    assert outcome.out.endswith("This run cannot start on this machine: Slurm.\n")
    assert "not looked at" in outcome.out  # the rest may be on the next line


def test_a_target_that_cannot_be_reached_is_one_row(
    small_target: EmbeddedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    outcome = doctor(small_target, tmp_path, "target.model=nowhere/at-all", "target.revision=x", "--json")
    assert outcome.status == 1
    lacking = [check for check in json.loads(outcome.out) if check["status"] == "lacking"]
    assert [(check["name"], check["found"]) for check in lacking] == [("target.model", "nowhere/at-all")]
    assert {"data.train", "umask", "vLLM"} <= rows(outcome).keys()


def test_a_recipe_that_is_none_is_a_mistake(tmp_path: Path) -> None:
    outcome = run_command("scripts/doctor", "recipe=quick", directory=tmp_path)
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith("error: recipe=quick: ")
