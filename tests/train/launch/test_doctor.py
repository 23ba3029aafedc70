"""scripts/doctor for the small run on machines with and without faults, and what every run checks first."""

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data.embedded.target import EmbeddedTarget
from eagle31.errors import UserError
from tests.bad_input.faults import port_in_use, protected
from tests.processes import free_ports
from tests.runs.here import Outcome, run_command
from tests.train.small_run import arguments
from tests.train.torchrun import composed
from train.config.run import captures_in_vllm, drafts_in_vllm, starts_vllm
from train.launch import doctor
from train.launch.start import check_eagle3, check_environment, check_port

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
NEEDED = ("target.model=nowhere", "data.train=nowhere.jsonl", "output_dir=nowhere")
ANSWERED, CAPTURED = "target.engine=vllm", "capture.source=vllm"
SERVERS = "vllm.servers=[http://127.0.0.1:1]"


def examined(target: EmbeddedTarget, directory: Path, *extra: str) -> Outcome:
    settings = arguments(target, Path("kept/run"))
    return run_command("scripts/doctor", "recipe=any_target", *settings, *extra, directory=directory)


def rows(outcome: Outcome) -> dict[str, str]:
    """Return the status of each check by its name, from --json."""
    return {check["name"]: check["status"] for check in json.loads(outcome.out)}


def test_a_machine_that_suffices_is_left_as_it_is(
    small_target: EmbeddedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    outcome = examined(small_target, tmp_path)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.endswith("\nThis run can start on this machine.\n")
    found = rows(examined(small_target, tmp_path, "--json"))
    expected = {
        "GPUs",
        "directories",
        "plan",
        "served by",
        "disk",
        "target",
        "chat template",
        "data.train",
        "W&B",
    }
    assert expected <= found.keys()
    assert "lacking" not in found.values()
    assert TOKEN not in outcome.out
    assert os.listdir(tmp_path) == []


def test_what_is_lacking_has_a_row_and_a_remedy(
    small_target: EmbeddedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").mkdir()
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("WANDB_MODE", "banana")
    served = (
        f"vllm.servers=[http://127.0.0.1:{free_ports(1)[0]}]",
        "capture=vllm_online",
        "capture.spool_gb=1e6",
    )
    elsewhere = ("data.train=none.jsonl", "--json")
    with protected(tmp_path / "kept"):
        outcome = examined(small_target, tmp_path, *served, *elsewhere)
    assert outcome.status == 1
    lacking = [check for check in json.loads(outcome.out) if check["status"] == "lacking"]
    assert all(check["remedy"] for check in lacking)
    names = {check["name"].partition(" ")[0] for check in lacking}
    assert names == {"directories", "disk", "host", "data.train", "server", "W&B"}


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("data.train=none.jsonl", "no such file"),
        ("target.model=bare", "convert its weights"),
        ("drafter.init_from=/none/at/all", "No such directory"),
    ],
)
def test_the_plan_alone_checks_what_takes_a_second(
    small_target: EmbeddedTarget, tmp_path: Path, setting: str, remedy: str
) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(small_target.model / "config.json", tmp_path / "bare")
    settings = [*arguments(small_target, Path("run")), "stages=[plan]", setting]
    outcome = run_command("train/main.py", "recipe=any_target", *settings, directory=tmp_path)
    assert outcome.status == 2, outcome.err
    assert outcome.err.startswith(f"error: {setting}: ")
    assert remedy in outcome.err


def test_a_target_without_a_chat_template_is_named(small_target: EmbeddedTarget, tmp_path: Path) -> None:
    shutil.copytree(small_target.model, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    found = rows(examined(small_target, tmp_path, "target.model=base", "--json"))
    assert [name for name, status in found.items() if status == "lacking"] == ["chat template"]
    settings = [*arguments(small_target, Path("run")), "stages=[plan]", "target.model=base"]
    outcome = run_command("train/main.py", "recipe=any_target", *settings, directory=tmp_path)
    assert outcome.status == 2
    assert "The tokenizer of base has no chat template" in outcome.err


def test_a_target_that_vllm_does_not_serve_is_named_and_refused_where_the_run_needs_vllm(
    small_target: EmbeddedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(small_target.model, tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    path.write_text(path.read_text().replace("LlamaForCausalLM", "Gemma3ForCausalLM"))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")  # as vLLM answers for it
    python.chmod(0o755)
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", str(python))
    settings = ("target.model=other", "data.train=none.jsonl")
    assert rows(examined(small_target, tmp_path, *settings, "--json"))["served by"] == "warning"
    assert rows(examined(small_target, tmp_path, *settings, CAPTURED, "--json"))["served by"] == "lacking"
    command = ["recipe=any_target", *arguments(small_target, Path("run")), *settings]
    outcome = run_command("train/main.py", *command, CAPTURED, directory=tmp_path)
    assert outcome.status == 2
    assert "WARNING: vLLM" in outcome.out
    assert outcome.err.splitlines()[-1].startswith("error: target.model=other: vLLM ")
    assert "capture=hf" in outcome.err


@pytest.mark.parametrize(
    ("captures", "drafts", "settings"),
    [
        (False, True, (ANSWERED,)),
        (False, False, (ANSWERED, "stages=[data,answers,capture,train]")),
        (True, False, (CAPTURED,)),
        (False, False, (CAPTURED, SERVERS)),
        (False, False, (CAPTURED, ANSWERED, "stages=[data]")),
        (True, False, (CAPTURED, ANSWERED, "stages=[answers]")),
    ],
)
def test_which_runs_need_eagle_3_in_vllm(captures: bool, drafts: bool, settings: tuple[str, ...]) -> None:
    config = composed("any_target", *NEEDED, *settings)
    assert (captures_in_vllm(config), drafts_in_vllm(config)) == (captures, drafts)


def test_states_of_transformers_model_in_vllm_are_refused() -> None:
    config = composed("any_target", *NEEDED, CAPTURED, "vllm.engine_args.model_impl=transformers")
    with pytest.raises(UserError, match=r"engine_args\.model_impl=transformers: .*capture=hf"):
        check_eagle3(config)


def test_gpus_that_the_recipe_is_planned_for_are_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_driver_version", lambda: None)
    check = doctor._gpus(composed("qwen3_8b"))
    assert (check.status, "80 GB" in check.found) == ("lacking", True)
    monkeypatch.setattr(doctor, "_driver_version", lambda: "550.54")
    check = doctor._gpus(composed("quickstart"))
    assert (check.status, "no GPU in torch" in check.found) == ("lacking", True)
    gpu = SimpleNamespace(name="NVIDIA H100", total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    check = doctor._gpus(composed("qwen3_8b"))
    assert (check.status, check.found) == ("ok", "2 x NVIDIA H100 of 80 GB, driver 550.54")


@pytest.mark.parametrize(("version", "status"), [("0.32.1", "ok"), ("0.33.0", "warning"), (None, "lacking")])
def test_the_version_of_vllm_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, status: str
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    packages.mkdir(parents=True)
    if version is not None:
        (packages / f"vllm-{version}.dist-info").mkdir()
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", str(python))
    [check] = doctor._programs(composed("any_target", *NEEDED, ANSWERED))
    assert check.status == status


@pytest.mark.parametrize(
    ("starts", "settings"),
    [
        (True, (ANSWERED,)),
        (True, (ANSWERED, SERVERS)),  # no server has the export as its drafter
        (False, (ANSWERED, "stages=[answers]", SERVERS)),
        (False, (CAPTURED, "stages=[train]")),
        (True, (CAPTURED, "stages=[train]", "capture.mode=online")),
    ],
)
def test_which_runs_start_vllm(
    starts: bool, settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = composed("any_target", *NEEDED, *settings)
    assert starts_vllm(config) is starts
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", "/nowhere/python")
    if starts:
        with pytest.raises(UserError, match="vLLM's environment does not exist"):
            check_environment(config)
    else:
        check_environment(config)


def test_a_port_in_use_is_refused() -> None:
    with port_in_use() as port, pytest.raises(UserError, match=r"Nothing can listen on 127\.0\.0\.1"):
        check_port("--port", port)
    check_port("--port", free_ports(1)[0])
