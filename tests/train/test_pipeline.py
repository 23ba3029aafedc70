"""Whole runs under torchrun, on a real small target."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from data.embedded.target import EmbeddedTarget
from eagle31.json_files import read_json, read_jsonl
from tests.train.launch import ROOT, environment, torchrun, torchrun_command
from train.pipeline import exclusive

MAIN = "train/main.py"
STEPS = 24
TEXT_STAGES = "stages=[data,vocab,answers,capture]"


def arguments(target: EmbeddedTarget, output_dir: Path) -> list[str]:
    return [
        "recipe=any_target",
        f"target.model={target.model}",
        f"data.train={target.train}",
        f"output_dir={output_dir}",
        "data.num_validation=8",
        "data.num_test=6",
        "data.max_tokens=256",
        "data.num_workers=1",
        "drafter.draft_vocab_size=300",
        "train.row_tokens=256",
        "train.rows_per_step=4",
        f"train.max_steps={STEPS}",
        "train.log_every=1",
        "train.validate_every=8",
        "train.save_every=8",
        "train.ttt_steps=3",
        "optim.lr=3e-3",
        "deepspeed.precision=fp32",
        "evaluate.max_new_tokens=32",
        "evaluate.sampling=false",
    ]


@pytest.fixture(scope="module")
def captured(small_target: EmbeddedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output directory with everything before training done."""
    directory = tmp_path_factory.mktemp("captured") / "run"
    torchrun(MAIN, *arguments(small_target, directory), TEXT_STAGES)
    return directory


@pytest.fixture(scope="module")
def finished(
    small_target: EmbeddedTarget, captured: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """A whole run and what it printed."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    shutil.copytree(captured, directory)
    return directory, torchrun(MAIN, *arguments(small_target, directory))


def metrics_of(directory: Path) -> list[dict]:
    """The training curve without what time has a part in."""
    [path] = (directory / "artifacts").glob("train-*/metrics.jsonl")
    timed = ("seconds", "tokens_per_second", "data_wait_seconds")
    return [{k: v for k, v in record.items() if k not in timed} for record in read_jsonl(path)]


def test_a_run_ends_with_table_export_and_report(finished: tuple[Path, str]) -> None:
    directory, printed = finished
    assert "acceptance length" in printed
    assert {p.name for p in (directory / "export").iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
    }
    assert (directory / "report" / "index.html").is_file()
    assert "max_steps: 24" in (directory / "config.yaml").read_text()
    run = read_json(directory / "run.json")
    assert run["versions"]["torch"]
    assert run["git_revision"]


def test_training_learns(finished: tuple[Path, str]) -> None:
    records = metrics_of(finished[0])
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert len(losses) == STEPS
    assert sum(losses[-4:]) < 0.95 * sum(losses[:4])
    expected = [r["depth"][0]["expected_acceptance"] for r in records if r["kind"] == "train"]
    assert sum(expected[-4:]) > 1.5 * sum(expected[:2])
    validations = [record for record in records if record["kind"] == "validation"]
    assert [record["step"] for record in validations] == [0, 8, 16, 24]


def test_decoding_is_faithful_and_equals_replay(finished: tuple[Path, str]) -> None:
    [path] = (finished[0] / "artifacts").glob("evaluate-*/evaluation.json")
    evaluation = read_json(path)
    greedy, replay = evaluation["greedy"], evaluation["replay"]
    assert greedy["num_identical"] + greedy["num_near_tie"] == evaluation["num_prompts"] == 6
    assert greedy["num_drafts"] > 20
    if not greedy["num_near_tie"]:
        assert greedy["accepted_per_position"] == replay["accepted_per_position"]


def test_a_second_run_reuses_everything(small_target: EmbeddedTarget, finished: tuple[Path, str]) -> None:
    directory, _ = finished
    printed = torchrun(MAIN, *arguments(small_target, directory))
    for stage in ("data", "vocab", "answers", "capture", "train", "export", "evaluate"):
        assert f"{stage}: reused" in printed


def test_a_changed_setting_reruns_what_depends_on_it(
    small_target: EmbeddedTarget, finished: tuple[Path, str], tmp_path: Path
) -> None:
    shutil.copytree(finished[0], tmp_path / "run", symlinks=True)
    printed = torchrun(MAIN, *arguments(small_target, tmp_path / "run"), "export.dtype=float32")
    assert "train: reused" in printed
    assert "export: done" in printed
    assert "evaluate: done" in printed
    config = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert config["torch_dtype"] == "float32"


def test_a_missing_stage_is_named(small_target: EmbeddedTarget, tmp_path: Path) -> None:
    printed = torchrun(MAIN, *arguments(small_target, tmp_path), "stages=[train]", check=False)
    assert "error: stages=" in printed
    assert "'data'" in printed


def start(target: EmbeddedTarget, directory: Path, num_processes: int = 1) -> subprocess.Popen:
    command = torchrun_command(MAIN, *arguments(target, directory), num_processes=num_processes)
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_for_step(directory: Path, step: int) -> None:
    """Until the training curve shows it."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if any(
            f'"step": {step},' in path.read_text()
            for path in directory.glob("artifacts/train-*/metrics.jsonl")
        ):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was never reached")


def end_with(process: subprocess.Popen, number: int) -> None:
    if number == signal.SIGKILL:
        agent = psutil.Process(process.pid)
        for one in [*agent.children(recursive=True), agent]:
            one.kill()
    else:
        process.send_signal(number)
    process.wait(timeout=120)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill -9", "SIGTERM"])
def test_an_interrupted_run_goes_on_to_the_last_bit(
    small_target: EmbeddedTarget,
    captured: Path,
    finished: tuple[Path, str],
    tmp_path: Path,
    number: int,
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(captured, directory)
    process = start(small_target, directory)
    wait_for_step(directory, 13)
    end_with(process, number)
    assert metrics_of(directory)[-1]["step"] < STEPS
    saved = sorted(p.name for p in directory.glob("artifacts/train-*/checkpoints/step-*"))
    # SIGTERM saves where it stopped; kill -9 leaves the last regular checkpoint.
    assert (saved[-1] == "step-00000008") == (number == signal.SIGKILL)
    printed = torchrun(MAIN, *arguments(small_target, directory), "stages=[train]")
    assert "resuming" in printed
    assert metrics_of(directory) == metrics_of(finished[0])


def test_two_runs_do_not_write_to_one_directory(
    small_target: EmbeddedTarget, finished: tuple[Path, str]
) -> None:
    with exclusive(finished[0]):
        printed = torchrun(MAIN, *arguments(small_target, finished[0]), check=False)
    assert "another run" in printed


def test_another_number_of_processes_is_refused_while_a_run_is_unfinished(
    small_target: EmbeddedTarget, captured: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(captured, directory)
    process = start(small_target, directory, num_processes=2)
    wait_for_step(directory, 9)
    end_with(process, signal.SIGKILL)
    printed = torchrun(MAIN, *arguments(small_target, directory), "stages=[train]", check=False)
    assert "had 2 processes" in printed
