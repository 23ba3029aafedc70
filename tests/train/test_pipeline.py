"""Complete runs with torchrun, on a small target."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from data.embedded.target import EmbeddedTarget
from eagle31.errors import UserError
from eagle31.json_files import read_json, read_jsonl, write_json
from tests.runs.forked import RUN_SECONDS, start
from tests.train.small_run import (
    MAIN,
    RECIPE,
    STEPS,
    TEXT_STAGES,
    arguments,
    assert_faithful,
    metrics_of,
    saved_steps,
)
from tests.train.torchrun import run_here, torchrun
from train import pipeline
from train.artifact import Artifact, exclusive
from train.command import FAILURE, MISTAKE
from train.config.compose import composed
from train.config.run import Stage
from train.context import RunContext
from train.distributed import World
from train.pipeline import RUN_FILE, STAGES, StageRun, check_node, run_stage
from train.stages.states import open_store
from train.stages.train import train_inputs


def test_a_run_ends_with_table_export_and_report(finished: tuple[Path, str]) -> None:
    directory, printed = finished
    assert "acceptance length" in printed
    assert {p.name for p in (directory / "export").iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
    }
    assert (directory / "report" / "index.html").is_file()
    written = (directory / "config.yaml").read_text()
    assert "max_steps: 24" in written
    assert "  lr: 0.003\n  matrix_lr: 0.03\n" in written  # given, and by the rule
    assert "muon, lr 0.003, matrix_lr 0.03 (rule)" in printed
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


def test_a_second_run_reuses_everything(
    small_target: EmbeddedTarget, finished: tuple[Path, str], capsys: pytest.CaptureFixture
) -> None:
    run_here(RECIPE, *arguments(small_target, finished[0]))
    printed = capsys.readouterr().out
    for stage in ("data", "vocab", "answers", "capture", "train", "export", "evaluate"):
        assert f"{stage}: reused" in printed


def test_a_damaged_export_is_written_again(
    small_target: EmbeddedTarget, finished: tuple[Path, str], capsys: pytest.CaptureFixture
) -> None:
    weights = finished[0] / "export" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:5000])
    run_here(RECIPE, *arguments(small_target, finished[0]))
    printed = capsys.readouterr().out
    assert "model.safetensors: It is missing, or not as the export was written" in printed
    assert "export: done" in printed
    assert "evaluate: reused" in printed
    assert weights.read_bytes() == content


def test_the_data_of_rank_0_alone_counts(small_target: EmbeddedTarget, tmp_path: Path) -> None:
    shutil.copy(small_target.train, tmp_path / "0.jsonl")  # a node of the other rank has none
    own = f"data.train={tmp_path}/${{oc.env:RANK}}.jsonl"
    command = [f"recipe={RECIPE}", *arguments(small_target, tmp_path / "run"), TEXT_STAGES, own]
    assert "capture: done" in torchrun(MAIN, *command, num_processes=2)


@pytest.mark.parametrize(
    "file",
    ["config.json", "chat_template.jinja"],
)
def test_ranks_with_different_files_end_with_a_message(
    file: str, small_target: EmbeddedTarget, tmp_path: Path
) -> None:
    for rank in range(2):
        shutil.copytree(small_target.model, tmp_path / str(rank))
    with open(tmp_path / "1" / file, "a") as changed:
        changed.write(" ")
    own = f"target.model={tmp_path}/${{oc.env:RANK}}"
    command = [f"recipe={RECIPE}", *arguments(small_target, tmp_path / "run"), TEXT_STAGES, own]
    ranks = start(MAIN, *command, num_processes=2, log=tmp_path / "log")
    try:
        for one in ranks.processes:
            one.join(RUN_SECONDS)
        assert ranks.processes[1].exitcode == MISTAKE, ranks.printed()
        assert ranks.processes[0].exitcode in (MISTAKE, FAILURE)
    finally:
        ranks.kill()
    for part in (
        "error: rank 1 on ",
        "=UserError: target.model",
        "Rank 1 finds files with these fingerprints",
    ):
        assert part in ranks.printed()


def test_a_rank_waits_for_what_rank_0_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(rank=1, local_rank=1, size=2)
    context = RunContext(composed(["recipe=quickstart", f"output_dir={tmp_path}"]), world)
    run = {"started_at": "now"}
    write_json(tmp_path / RUN_FILE, {"started_at": "before"})  # what NFS still shows of an earlier run
    monkeypatch.setattr(pipeline, "made_by_main", lambda *_: [run, []])
    monkeypatch.setattr(pipeline, "_model_fingerprints", lambda _: [])
    monkeypatch.setattr(pipeline, "SEEN_SECONDS", 0.0)
    with pytest.raises(UserError, match="Rank 1 does not find there what rank 0 has written"):
        check_node(context, [])
    monkeypatch.setattr(pipeline, "SEEN_SECONDS", 60.0)
    threading.Timer(0.2, write_json, [tmp_path / RUN_FILE, run]).start()
    check_node(context, [])


def test_two_runs_cannot_share_a_directory(small_target: EmbeddedTarget, finished: tuple[Path, str]) -> None:
    with exclusive(finished[0]), pytest.raises(UserError, match="Another run is using this directory"):
        run_here(RECIPE, *arguments(small_target, finished[0]))


def test_what_another_run_has_made_in_the_meantime_is_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    context = RunContext(composed(["recipe=quickstart", f"output_dir={tmp_path}"]), World(0, 0, 1))
    context.artifacts[Stage.vocab] = artifact = Artifact.locate(tmp_path, "vocab", {})
    artifact.finish(1.0, {})

    def runs(context: RunContext, directory: Path) -> dict[str, Any]:
        raise AssertionError("the stage runs again")

    monkeypatch.setitem(STAGES, Stage.vocab, StageRun(lambda context: {}, runs))
    run_stage(context, Stage.vocab, unfinished=True)
    assert context.reused == {"vocab"}
    assert capsys.readouterr().out == f"vocab: reused, {artifact.directory}\n"


def test_only_a_damaged_shard_is_captured_again(
    small_target: EmbeddedTarget,
    captured: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(captured, directory)
    command = [*arguments(small_target, directory), "stages=[data,vocab,answers,capture,train]"]
    [shard] = directory.glob("artifacts/capture-*/train/shard-rank-0-00000.safetensors")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))

    def read_all(context: RunContext, _: Path) -> dict[str, int]:
        source = open_store(context.artifacts[Stage.capture].directory / "train", context.world)
        return {"num_samples": len(source.get_many(range(len(source))))}

    # A train stage that only reads its data, so that no process group is needed.
    monkeypatch.setitem(STAGES, Stage.train, StageRun(train_inputs, read_all))
    with pytest.raises(UserError, match="captured again") as caught:
        run_here(RECIPE, *command)
    assert caught.value.field == str(shard)
    assert "delete the shard and run again" in caught.value.remedy
    shard.unlink()
    capsys.readouterr()
    run_here(RECIPE, *command)
    printed = capsys.readouterr()
    assert "answers: reused" in printed.out
    assert "capture: done" in printed.out
    assert "/train," in printed.err
    assert "/validation," not in printed.err
    again = max(shard.parent.glob("shard-rank-0-*.safetensors"))
    assert again.read_bytes() == whole


def test_a_damaged_checkpoint_is_skipped_and_other_processes_resume(
    small_target: EmbeddedTarget, finished: tuple[Path, str], tmp_path: Path
) -> None:
    """Three processes under ZeRO 3 resume what one process began under ZeRO 0, with four rows a step."""
    directory = Path(shutil.copytree(finished[0], tmp_path / "run", symlinks=True))
    [training] = directory.glob("artifacts/train-*")
    (training / "stage.json").unlink()
    *_, good, bad = sorted(training.glob("checkpoints/step-*"))
    damaged = bad / "part-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-100] ^= 1
    damaged.write_bytes(content)
    command = [f"recipe={RECIPE}", *arguments(small_target, directory), "deepspeed.zero_stage=3"]
    printed = torchrun(MAIN, *command, "stages=[train]", num_processes=3)
    assert "4 rows of a step cannot be divided equally among 3 processes: 2 more rows are empty" in printed
    assert f"the checkpoint of step {STEPS} is damaged: {damaged} " in printed
    assert f"resuming after step {int(good.name[5:])} of {STEPS}" in printed
    # It is the same training, and the checkpoint was written again.
    assert [training] == list(directory.glob("artifacts/train-*"))
    assert saved_steps(directory)[-1] == bad.name
    assert not list(training.glob("checkpoints/damaged-*"))
    for ours, theirs in zip(metrics_of(directory), metrics_of(finished[0]), strict=True):
        assert (ours["kind"], ours["step"]) == (theirs["kind"], theirs["step"])
        for name in {"loss", "supervised_positions", "acceptance_length", "num_drafts"} & ours.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
        if "grad_norm" in ours:
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def test_an_adapted_drafter_starts_with_the_weights_of_the_export(
    small_target: EmbeddedTarget, finished: tuple[Path, str], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(finished[0], tmp_path / "run", symlinks=True))
    [first] = directory.glob("artifacts/train-*")
    command = [*arguments(small_target, directory), f"drafter.init_from={finished[0]}/export"]
    same_data = "data.max_samples=null"
    stages = "stages=[data,vocab,answers,capture,train]"
    torchrun(MAIN, "recipe=adapt", *command, same_data, "train.max_steps=2", stages)
    [adapted] = set(directory.glob("artifacts/train-*")) - {first}
    before, after = (
        [one for one in read_jsonl(path / "metrics.jsonl") if one["kind"] == "validation"]
        for path in (first, adapted)
    )
    trained = read_json(first / "stage.json")["summary"]["best_validation_acceptance_length"]
    untrained, at_start = (one[0]["acceptance_length"]["4"] for one in (before, after))
    assert at_start == pytest.approx(trained, rel=0.03)  # the export is rounded to bfloat16
    assert abs(at_start - trained) < (at_start - untrained) / 2
