"""Whole runs under torchrun, on a real small target."""

import json
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from data.embedded.target import EmbeddedTarget
from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from eagle31.decoding.speculative import Decoded
from eagle31.errors import UserError
from eagle31.json_files import read_json
from tests.train.reporting.hub_server import TOKEN, running_hub
from tests.train.small_run import (
    MAIN,
    RECIPE,
    STEPS,
    arguments,
    assert_faithful,
    end_with,
    metrics_of,
    saved_steps,
    start,
    wait_for_step,
)
from tests.train.torchrun import composed, run_here, torchrun
from train.config.run import Stage
from train.config.target import TargetEngine
from train.context import RunContext
from train.distributed import World
from train.evaluation import vllm as vllm_evaluation
from train.parity.compare import check_case
from train.parity.reference import decode_reference, reference_drafter
from train.pipeline import STAGES, StageRun, exclusive, run_stage, run_stages
from train.serving.drafts import common_length
from train.serving.engine import DecodeJob, EngineFailure, JobResult, Sampling, run_jobs
from train.stages.capture import open_source
from train.stages.report import run_report
from train.stages.train import train_inputs

CPU = torch.device("cpu")


@dataclass(frozen=True)
class AskedVllm:
    """A run that was evaluated in vLLM, what vLLM was asked, and what it answered."""

    directory: Path
    jobs: list[DecodeJob]
    results: list[JobResult]


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


def test_decoding_is_faithful_and_equals_replay(finished: tuple[Path, str]) -> None:
    assert_faithful(finished[0])


def evaluations(directory: Path) -> list[dict[str, Any]]:
    """Through transformers, in vLLM."""
    found = [read_json(path) for path in directory.glob("artifacts/evaluate-*/evaluation.json")]
    return sorted(found, key=lambda one: one["engine"].startswith("vLLM"))


@pytest.fixture(scope="module")
def in_vllm(
    small_target: EmbeddedTarget,
    finished: tuple[Path, str],
    vllm_python: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> AskedVllm:
    """With one more job behind those of the stage: what is sampled parts from what is written greedily."""
    found = AskedVllm(tmp_path_factory.mktemp("in_vllm") / "run", [], [])
    shutil.copytree(finished[0], found.directory, symlinks=True)

    def kept(jobs: Sequence[DecodeJob], python: Path, log: Path) -> list[JobResult]:
        parting = replace(jobs[1], name="parting", passes=[Sampling(1.0, 0)], warm_up=False)
        found.jobs.extend([*jobs, parting])
        found.results.extend(run_jobs(found.jobs, python, log))
        return found.results[: len(jobs)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_evaluation, "run_jobs", kept)
        patch.setattr(RunContext, "load_target", lambda self: pytest.fail("transformers loaded the target"))
        evaluate_in_vllm(small_target, found.directory)
    return found


def evaluate_in_vllm(target: EmbeddedTarget, directory: Path) -> None:
    """Of a finished run, whose answers are those of transformers."""
    context = RunContext(composed(RECIPE, *arguments(target, directory)), World(rank=0, local_rank=0, size=1))
    run_stages(context)
    context.config.target.engine = TargetEngine.vllm
    run_stage(context, Stage.evaluate, selected=True)
    run_report(context)


@pytest.fixture(scope="module")
def decoded(small_target: EmbeddedTarget, in_vllm: AskedVllm) -> list[Decoded]:
    """What eagle31's own engine makes of the prompts that vLLM had."""
    [export] = in_vllm.directory.glob("artifacts/export-*/checkpoint")
    spec, job = TargetSpec(str(small_target.model)), in_vllm.jobs[0]
    drafter = reference_drafter(export, load_target_parts(spec), CPU, torch.float32)
    limits: dict[str, Any] = {"max_new_tokens": job.max_new_tokens, "stop_token_ids": job.stop_token_ids}
    return decode_reference(drafter, spec, job.prompts, CPU, k=job.engine.k, **limits)


def test_vllm_drafts_and_writes_what_the_evaluator_does(in_vllm: AskedVllm, decoded: list[Decoded]) -> None:
    drafted, alone, _ = (result.passes[0].served for result in in_vllm.results)
    comparison = check_case(decoded, drafted, alone, in_vllm.jobs[0].engine.k)
    assert comparison.failures == []
    assert comparison.ours.num_accepted > 10


def test_numbers_from_vllm_are_the_evaluators(in_vllm: AskedVllm) -> None:
    hf, vllm = evaluations(in_vllm.directory)
    names = ("num_drafts", "accepted_per_position", "num_tokens", "num_target_forwards", "num_identical")
    assert {name: vllm["greedy"][name] for name in names} == {name: hf["greedy"][name] for name in names}
    for name in ("k", "num_prompts", "max_new_tokens", "replay", "by_draft_length"):
        assert vllm[name] == hf[name]
    assert vllm["untrained"] is None
    assert vllm["sampling"] is None  # which vLLM gets wrong on the CPU


def test_margins_from_vllm_are_the_evaluators(in_vllm: AskedVllm, decoded: list[Decoded]) -> None:
    parting = in_vllm.results[2]
    expected = []
    for text, one in zip(parting.passes[0].served.texts, decoded, strict=True):
        first = common_length(text, one.token_ids)
        expected.append(None if first in (len(text), len(one.token_ids)) else one.margins[first])
    assert sum(margin is not None for margin in expected) > 2
    assert list(parting.margins) == pytest.approx(expected, abs=1e-4)
    assert set(in_vllm.results[1].margins) == {None}


def test_report_and_card_say_that_vllm_measured(in_vllm: AskedVllm) -> None:
    engine = evaluations(in_vllm.directory)[1]["engine"]
    assert engine.startswith("vLLM 0.")
    assert engine.endswith(", float32, cpu, 8 at a time")
    page = (in_vllm.directory / "report" / "index.html").read_text()
    card = (in_vllm.directory / "export" / "README.md").read_text()
    assert engine in page
    assert engine in card
    assert "untrained, by replay" in page
    assert "not from vLLM" not in card


def test_an_engine_that_fails_leaves_no_result(
    small_target: EmbeddedTarget, finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished[0], tmp_path / "run", symlinks=True)
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", sys.executable)  # which has no vLLM
    with pytest.raises(EngineFailure, match=r"No module named 'vllm'[^$]*The whole log: .*vllm-evaluate"):
        evaluate_in_vllm(small_target, tmp_path / "run")
    assert len(evaluations(tmp_path / "run")) == 1


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
    with exclusive(finished[0]), pytest.raises(UserError, match="Another run is using this directory"):
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
    assert "rows.jsonl:3: the line is not JSON" in printed
    assert "rows.jsonl:4: messages is a int" in printed
    assert "num_malformed=2" in printed


@pytest.mark.parametrize("damage", ["gone", "cut", "altered"])
def test_a_damaged_shard_is_named_and_captured_again_alone(
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
    with pytest.raises(UserError, match="captured again") as caught:
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
    assert "resuming after step 8" in printed
    assert metrics_of(directory) == metrics_of(finished[0])


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
