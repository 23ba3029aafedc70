"""Whole runs under torchrun, on a real small target."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

from data.embedded.target import EmbeddedTarget
from eagle31.errors import UserError
from eagle31.frozen import project_width
from eagle31.json_files import read_json, read_jsonl
from tests.train.hub_server import TOKEN, running_hub
from tests.train.launch import ROOT, environment, run_here, torchrun, torchrun_command
from train.capture_stage import open_source
from train.config import Stage
from train.fit_stage import train_inputs
from train.pipeline import STAGES, StageRun, exclusive

MAIN = "train/main.py"
RECIPE = "any_target"
STEPS = 24
TEXT_STAGES = "stages=[data,vocab,answers,capture]"


def arguments(target: EmbeddedTarget, output_dir: Path) -> list[str]:
    return [
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
        "tracking.mode=disabled",
    ]


@pytest.fixture(scope="module")
def captured(small_target: EmbeddedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output directory with everything before training done."""
    directory = tmp_path_factory.mktemp("captured") / "run"
    run_here(RECIPE, *arguments(small_target, directory), TEXT_STAGES)
    return directory


@pytest.fixture(scope="module")
def finished(
    small_target: EmbeddedTarget, captured: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """A whole run and what it printed."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    shutil.copytree(captured, directory)
    return directory, torchrun(MAIN, f"recipe={RECIPE}", *arguments(small_target, directory))


def metrics_of(directory: Path) -> list[dict]:
    """The training curve without what time has a part in."""
    [path] = (directory / "artifacts").glob("train-*/metrics.jsonl")
    timed = ("seconds", "tokens_per_second", "data_wait_seconds", "data_wait_fraction")
    return [{k: v for k, v in record.items() if k not in timed} for record in read_jsonl(path)]


def test_a_run_ends_with_table_export_and_report(finished: tuple[Path, str]) -> None:
    directory, printed = finished
    assert "acceptance length" in printed
    assert {p.name for p in (directory / "export").iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
        "verification",
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


def assert_faithful(directory: Path) -> None:
    """Greedy text is the target's own, and replay counts what decoding accepted."""
    [path] = directory.glob("artifacts/evaluate-*/evaluation.json")
    evaluation = read_json(path)
    greedy, replay = evaluation["greedy"], evaluation["replay"]
    assert greedy["num_identical"] + greedy["num_near_tie"] == evaluation["num_prompts"] == 6
    assert greedy["num_drafts"] > 20
    if not greedy["num_near_tie"]:
        assert greedy["accepted_per_position"] == replay["accepted_per_position"]


def test_decoding_is_faithful_and_equals_replay(finished: tuple[Path, str]) -> None:
    assert_faithful(finished[0])


def test_a_second_run_reuses_everything(
    small_target: EmbeddedTarget, finished: tuple[Path, str], capsys: pytest.CaptureFixture
) -> None:
    run_here(RECIPE, *arguments(small_target, finished[0]))
    printed = capsys.readouterr().out
    for stage in ("data", "vocab", "answers", "capture", "train", "export", "evaluate"):
        assert f"{stage}: reused" in printed


def test_a_changed_setting_reruns_what_depends_on_it(
    small_target: EmbeddedTarget,
    finished: tuple[Path, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    shutil.copytree(finished[0], tmp_path / "run", symlinks=True)
    run_here(RECIPE, *arguments(small_target, tmp_path / "run"), "export.dtype=float32")
    printed = capsys.readouterr().out
    assert "train: reused" in printed
    assert "export: done" in printed
    assert "evaluate: done" in printed
    config = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert config["torch_dtype"] == "float32"


def test_a_missing_stage_is_named(small_target: EmbeddedTarget, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'data'") as caught:
        run_here(RECIPE, *arguments(small_target, tmp_path), "stages=[train]")
    assert caught.value.field == "stages"


def test_two_runs_do_not_write_to_one_directory(
    small_target: EmbeddedTarget, finished: tuple[Path, str]
) -> None:
    with exclusive(finished[0]), pytest.raises(UserError, match="another run"):
        run_here(RECIPE, *arguments(small_target, finished[0]))


def test_malformed_rows_are_told_with_line_and_reason(
    small_target: EmbeddedTarget, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    lines = small_target.train.read_text().splitlines()
    lines[2:2] = ["{oops", '{"messages": 7}']
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    own = [f"data.train={tmp_path / 'rows.jsonl'}", "data.max_malformed_fraction=0.1", "stages=[data]"]
    run_here(RECIPE, *arguments(small_target, tmp_path / "run"), *own)
    printed = capsys.readouterr().out
    assert f"data: 2 of {len(lines)} rows" in printed
    assert "rows.jsonl:3: no JSON" in printed
    assert "rows.jsonl:4: messages is a int" in printed
    assert "num_malformed=2" in printed


@pytest.mark.parametrize("damage", ["gone", "cut", "altered"])
def test_a_damaged_shard_is_named_and_captured_anew_alone(
    small_target: EmbeddedTarget,
    captured: Path,
    tmp_path: Path,
    damage: str,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(captured, directory)
    command = [*arguments(small_target, directory), "stages=[data,vocab,answers,capture,train]"]
    [shard] = directory.glob("artifacts/capture-*/train/shard-hf-0-00000.safetensors")
    whole = shard.read_bytes()
    if damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(whole[:-1] if damage == "cut" else whole[:-1] + bytes([whole[-1] ^ 1]))
    # The stage without what a process group needs: it opens its data, and no more.
    opened = StageRun(train_inputs, lambda context, _: {"num_samples": len(open_source(context))})
    monkeypatch.setitem(STAGES, Stage.train, opened)
    with pytest.raises(UserError, match="captured anew") as caught:
        run_here(RECIPE, *command)
    assert caught.value.field == str(shard)
    if damage == "altered":
        assert "delete it and run again" in caught.value.remedy
        shard.unlink()
    capsys.readouterr()
    run_here(RECIPE, *command)
    printed = capsys.readouterr()
    assert "answers: reused" in printed.out
    assert "capture: done" in printed.out
    assert "/train," in printed.err
    assert "/validation," not in printed.err
    assert shard.read_bytes() == whole


def start(target: EmbeddedTarget, directory: Path, *own: str, num_processes: int = 1) -> subprocess.Popen:
    command = torchrun_command(
        MAIN, f"recipe={RECIPE}", *arguments(target, directory), *own, num_processes=num_processes
    )
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


@pytest.fixture(scope="module")
def interrupted(
    small_target: EmbeddedTarget, captured: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int]:
    """A run that was first told to stop and then killed, and the step at which it stopped."""
    directory = tmp_path_factory.mktemp("interrupted") / "run"
    shutil.copytree(captured, directory)
    process = start(small_target, directory)
    wait_for_step(directory, 3)
    end_with(process, signal.SIGTERM)
    stopped = metrics_of(directory)[-1]["step"]
    # It saves where it stopped.
    assert saved_steps(directory)[-1] == f"step-{stopped:08d}"
    process = start(small_target, directory)
    wait_for_step(directory, 13)
    end_with(process, signal.SIGKILL)
    return directory, stopped


def saved_steps(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.glob("artifacts/train-*/checkpoints/step-*"))


def test_another_number_of_processes_is_refused_while_a_run_is_unfinished(
    small_target: EmbeddedTarget, interrupted: tuple[Path, int]
) -> None:
    command = [f"recipe={RECIPE}", *arguments(small_target, interrupted[0])]
    printed = torchrun(MAIN, *command, num_processes=2, check=False)
    assert "error: nproc=2: " in printed
    assert "had 1 processes" in printed
    # What a person can put right comes without the traceback of where it was found.
    assert "UserError" not in printed


def test_an_interrupted_run_goes_on_to_the_last_bit(
    small_target: EmbeddedTarget, interrupted: tuple[Path, int], finished: tuple[Path, str]
) -> None:
    directory, stopped = interrupted
    assert 3 <= stopped < 13
    assert 13 <= metrics_of(directory)[-1]["step"] < STEPS
    # kill -9 leaves the last regular checkpoint.
    assert saved_steps(directory)[-1] == "step-00000008"
    command = [f"recipe={RECIPE}", *arguments(small_target, directory)]
    printed = torchrun(MAIN, *command, "stages=[train]")
    assert "resuming behind step 8" in printed
    assert metrics_of(directory) == metrics_of(finished[0])


def hf_workers(process: subprocess.Popen) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "data.capture.hf_worker" in child.cmdline()]


def kill_trainers(process: subprocess.Popen) -> None:
    """The launcher and the ranks, whose own processes have to see for themselves that they are gone."""
    workers = hf_workers(process)
    agent = psutil.Process(process.pid)
    for one in [*agent.children(recursive=True), agent]:
        if one not in workers:
            one.kill()
    process.wait()
    assert len(workers) == 2
    assert not psutil.wait_procs(workers, timeout=30)[1]


def test_online_killed_regenerated_frozen_head_and_another_width_together(
    small_target: EmbeddedTarget, tmp_path: Path
) -> None:
    directory, spools = tmp_path / "run", tmp_path / "spools"
    spools.mkdir()
    own = ["drafter=eagle3", "drafter.hidden_size=48", "drafter.train_lm_head=false"]
    own += ["data.regenerate.enabled=true", "data.regenerate.max_new_tokens=24"]
    own += ["data.regenerate.batch_size=64", "capture.mode=online", "tracking.mode=offline"]
    own += ["train.max_steps=8", "train.validate_every=4", "train.save_every=4", "evaluate.untrained=false"]
    own += ["capture.spool_gb=0.01", f"capture.spool_dir={spools}"]
    process = start(small_target, directory, *own, num_processes=2)
    wait_for_step(directory, 1)
    hf_workers(process)[0].kill()
    wait_for_step(directory, 5)
    kill_trainers(process)
    before = [record for record in metrics_of(directory) if record["kind"] == "train"]
    assert sum(record["producer_restarts"] for record in before) >= 1
    assert len(list(spools.iterdir())) == 2
    printed = torchrun(MAIN, f"recipe={RECIPE}", *arguments(small_target, directory), *own, num_processes=2)
    assert "resuming behind step 4" in printed
    assert "acceptance length" in printed
    assert not list(spools.iterdir())
    assert (directory / "report" / "index.html").is_file()
    # Of the held-out answers only, and nothing of the training data.
    stores = {path.parent.name for path in directory.glob("artifacts/*/*/shard-*.safetensors")}
    assert stores == {"validation", "test"}
    assert list(directory.glob("artifacts/train-*/wandb/offline-run-*/*.wandb"))
    [answers] = directory.glob("artifacts/data-*/regenerated/turn-000.jsonl")
    assert read_jsonl(answers)[0]["model"]
    records = [record for record in metrics_of(directory) if record["kind"] == "train"]
    losses = [record["loss"] for record in records]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    # What is computed together differs from run to run, and with it the last digits.
    assert losses[4] == pytest.approx(before[4]["loss"], rel=1e-3)
    assert {"spool_gb", "starved_seconds", "spool_full_seconds"} < set(records[-1])
    facts = read_json(directory / "report" / "metrics.json")["facts"]
    assert facts["regenerated"]
    assert facts["num_tokens"] > facts["num_samples"] > 100
    config = read_json(directory / "export" / "config.json")
    assert (config["hidden_size"], config["target_hidden_size"]) == (48, 64)
    assert (config["fc_norm"], config["norm_output"]) == (False, False)
    tensors = load_file(directory / "export" / "model.safetensors")
    assert tensors["embed_tokens.weight"].shape == (512, 48)
    # The head was not trained: still the target's rows, in another width.
    model = load_file(small_target.model / "model.safetensors")
    rows = project_width(model["lm_head.weight"][tensors["t2d"]], 48)
    torch.testing.assert_close(tensors["lm_head.weight"], rows.to(tensors["lm_head.weight"].dtype))
    assert_faithful(directory)


def test_two_layers_in_bf16_under_zero_2_together(
    small_target: EmbeddedTarget, captured: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(captured, directory)
    own = ["drafter.num_hidden_layers=2", "deepspeed=zero2", "deepspeed.precision=bf16"]
    own += ["train.max_steps=8", "train.validate_every=4", "evaluate.untrained=false"]
    own += ["train.loss=lk_lambda", "train.activation_checkpointing=true"]
    printed = torchrun(MAIN, f"recipe={RECIPE}", *arguments(small_target, directory), *own, num_processes=2)
    assert "capture: reused" in printed
    assert "acceptance length" in printed
    assert (directory / "report" / "index.html").is_file()
    losses = [record["loss"] for record in metrics_of(directory) if record["kind"] == "train"]
    assert losses[-1] < losses[0]
    config = read_json(directory / "export" / "config.json")
    assert (config["num_hidden_layers"], config["torch_dtype"]) == (2, "bfloat16")
    assert_faithful(directory)


def test_a_finished_run_is_pushed(
    finished: tuple[Path, str], small_target: EmbeddedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = finished
    push = [*arguments(small_target, directory), "stages=[push]"]
    with pytest.raises(UserError, match=r"hub\.repo_id"):
        run_here(RECIPE, *push)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(UserError, match="HF_TOKEN"):
        run_here(RECIPE, *push, "hub.repo_id=someone/drafter")
    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        run_here(RECIPE, *push, "hub.repo_id=someone/drafter", "hub.license=mit")
    [(_, files)] = hub.commits["someone/drafter"]
    assert files["model.safetensors"] == (directory / "export" / "model.safetensors").read_bytes()
    assert TOKEN not in (directory / "config.yaml").read_text()
