"""Programs, libraries, packages, keys, models and data that are there or not."""

import os
import sys
from pathlib import Path

import pytest

from data.conversations.reading import Source
from train.config.export import HubConfig
from train.doctor import accounts, environment, inputs, programs
from train.doctor.check import Status
from train.versions import missing_packages

SECRET = "hf_abcdefghijklmnopqrstuvwxyz"


def write_program(path: Path, lines: str) -> None:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)


def test_a_vllm_environment_is_needed_only_where_vllm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", "/nowhere/python")
    assert programs.vllm_check(starts_vllm=False).status is Status.ok
    check = programs.vllm_check(starts_vllm=True)
    assert (check.status, check.field) == (Status.lacking, "EAGLE31_VLLM_PYTHON")
    assert "scripts/setup/vllm" in check.remedy


@pytest.mark.parametrize(
    ("version", "status"), [("0.32.1", Status.ok), ("0.33.0", Status.warning), (None, Status.lacking)]
)
def test_the_version_of_vllm_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, status: Status
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    packages.mkdir(parents=True)
    if version is not None:
        (packages / f"vllm-{version}.dist-info").mkdir()
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", str(python))
    check = programs.vllm_check(starts_vllm=True)
    assert check.status is status
    assert (version or "no vLLM") in check.found


def test_slurm_is_lacking_where_its_commands_are_missing_or_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert programs.slurm_check(None).found == "without sbatch, srun, scontrol"
    for name in ("sbatch", "srun"):
        write_program(tmp_path / name, "exit 0")
    write_program(tmp_path / "scontrol", '[ $# -lt 3 ] || { echo "Partition $3 not found" >&2; exit 1; }')
    assert programs.slurm_check(None).status is Status.ok
    check = programs.slurm_check("gpu")
    assert (check.status, "Partition gpu not found" in check.remedy) == (Status.lacking, True)


def test_a_store_needs_the_package_of_its_protocol(tmp_path: Path) -> None:
    assert programs.store_check("s3://bucket/store").status is Status.ok
    missing = programs.store_check("gs://bucket/store")
    assert (missing.status, "pip install gcsfs" in missing.remedy) == (Status.lacking, True)
    assert "give s3://" in programs.store_check("banana://store").remedy
    assert programs.store_check(str(tmp_path)).status is Status.ok
    assert programs.store_check(str(tmp_path / "none")).status is Status.lacking


def test_missing_packages_have_the_command_for_this_checkout(tmp_path: Path) -> None:
    assert missing_packages() == []
    assert environment.packages_check([], {"torch": "2.13.0"}, tmp_path).status is Status.ok
    check = environment.packages_check(["torch", "wandb"], {}, tmp_path)
    assert (check.status, check.found) == (Status.lacking, "without torch, wandb")
    assert "scripts/quickstart" in check.remedy
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    assert environment.packages_check(["torch"], {}, tmp_path).remedy.endswith(f"source {activate}")


@pytest.mark.parametrize(
    ("variables", "status"),
    [
        ({}, Status.ok),
        ({"OMP_NUM_THREADS": "2"}, Status.ok),
        ({"OMP_NUM_THREADS": "8"}, Status.warning),
        ({"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "ACTIVE"}, Status.warning),
    ],
)
def test_threads(variables: dict[str, str], status: Status) -> None:
    assert environment.threads_check(variables, 4).status is status


def test_an_old_python_is_lacking() -> None:
    assert environment.python_check((3, 9), "/usr/bin/python3").status is Status.lacking


def test_a_push_needs_a_token_and_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = HubConfig(repo_id="org/drafter")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    there = accounts.hub_check(hub, pushes=True)
    assert (there.status, there.found) == (Status.ok, "set")
    assert SECRET not in str(there)
    assert accounts.hub_check(HubConfig(), pushes=True).field == "hub.repo_id"
    assert accounts.hub_check(HubConfig(), pushes=False).found == "set"
    monkeypatch.delenv("HF_TOKEN")
    check = accounts.hub_check(hub, pushes=True)
    assert (check.status, check.field) == (Status.lacking, "HF_TOKEN")
    assert accounts.hub_check(HubConfig(), pushes=False).found == "not set"


def test_a_mooncake_master_has_to_be_reached_from_every_machine() -> None:
    check = programs.mooncake_check("127.0.0.1:50051", ["http://node1:8000"])
    assert (check.status, check.field) == (Status.lacking, "capture.mooncake.master")
    assert "http://node1:8000 is another machine" in check.remedy


def test_an_engine_needs_the_package_of_mooncake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", str(python))
    write_program(python, "exit 0")
    assert programs.engine_mooncake_check().status is Status.ok
    write_program(python, "exit 1")
    check = programs.engine_mooncake_check()
    assert (check.status, check.field) == (Status.lacking, "capture.transport")
    assert "pip install 'mooncake" in check.remedy


def test_keys_are_looked_for_and_never_shown() -> None:
    assert accounts.server_key_check({}, "VLLM_API_KEY", remote=False) is None
    for variables, status in (({"VLLM_API_KEY": SECRET}, Status.ok), ({}, Status.lacking)):
        check = accounts.server_key_check(variables, "VLLM_API_KEY", remote=True)
        assert check is not None
        assert check.status is status
        assert SECRET not in str(check)


def test_a_target_is_here_cached_or_downloaded(tmp_path: Path) -> None:
    def status(model: str, cached: int = 0, offline: bool = False) -> tuple[Status, str]:
        check = inputs.target_check(model, 1000 - cached, cached, offline)
        return check.status, check.found

    assert status("embedded")[0] is Status.ok
    assert status("org/model") == (Status.ok, "not cached, downloaded by the run")
    assert status("org/model", offline=True) == (Status.lacking, "not cached")
    assert status("org/model", cached=1000, offline=True)[0] is Status.ok
    assert status("org/model", cached=300, offline=True)[0] is Status.lacking
    assert status(str(tmp_path))[0] is Status.lacking  # without config.json
    (tmp_path / "config.json").touch()
    assert status(str(tmp_path))[0] is Status.ok
    assert status(str(tmp_path / "none"))[0] is Status.lacking


def test_sources_are_here_cached_or_downloaded(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    locations = [
        "embedded",
        str(tmp_path / "rows.jsonl"),
        str(tmp_path / "none.jsonl"),
        "org/cached",
        "org/far",
    ]
    sources = [Source(location, "data.train") for location in locations]
    checks = inputs.data_checks(sources, frozenset({"org/cached"}), offline=True)
    ok, lacking = Status.ok, Status.lacking
    assert [check.status for check in checks] == [ok, ok, lacking, ok, lacking]
    assert inputs.data_checks(sources, frozenset(), offline=False)[-1].found.endswith("downloaded by the run")
    assert os.listdir(tmp_path) == ["rows.jsonl"]
