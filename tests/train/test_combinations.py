"""Runs that combine many settings that differ from the defaults."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.embedded.target import EmbeddedTarget
from eagle31.json_files import read_json, read_jsonl
from tests.runs.forked import start
from tests.train.small_run import MAIN, RECIPE, arguments, assert_faithful, metrics_of, wait_for_step
from tests.train.torchrun import torchrun

# Whoever has one of these in the environment finds it in no file or output of a run.
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
PLANTED = "planted0secret0of0forty0characters0000000"


def test_online_capture_a_kill_regeneration_frozen_head_and_another_width(
    small_target: EmbeddedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, PLANTED)
    directory = tmp_path / "run"
    settings = ["drafter=eagle3", "drafter.hidden_size=48", "drafter.train_lm_head=false"]
    settings += ["data.regenerate.enabled=true", "data.regenerate.max_new_tokens=24"]
    settings += ["data.regenerate.temperature=1"]
    settings += ["data.regenerate.batch_size=64", "capture.mode=online", "deepspeed.zero_stage=2"]
    settings += ["train.rollout_chunk=16", "train.max_drafts_per_row=40"]
    settings += [
        "train.max_steps=8",
        "train.validate_every=4",
        "train.save_every=4",
    ]
    command = [MAIN, f"recipe={RECIPE}", *arguments(small_target, directory), *settings]
    # Until then the two processes share each row.
    ranks = start(*command, "train.row_ranks=2", log=tmp_path / "log", num_processes=2)
    wait_for_step(directory, 5, ranks)
    ranks.kill()
    before = [record for record in metrics_of(directory) if record["kind"] == "train"]
    printed = torchrun(*command, num_processes=2)
    assert "resuming after step 4" in printed
    assert "acceptance length" in printed
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 50
    assert not [path for path in written if PLANTED.encode() in path.read_bytes()]
    assert PLANTED not in printed
    assert (directory / "report" / "index.html").is_file()
    # Only held-out completions are in stores, and no training data.
    stores = {path.parent.name for path in directory.glob("artifacts/*/*/shard-*.safetensors")}
    assert stores == {"validation", "test", "sampled"}
    [answers] = directory.glob("artifacts/data-*/regenerated/block-00000.jsonl")
    assert read_jsonl(answers)[0]["model"]
    records = [record for record in metrics_of(directory) if record["kind"] == "train"]
    losses = [record["loss"] for record in records]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert losses[4] == pytest.approx(before[4]["loss"], rel=1e-6)
    report = read_json(directory / "report" / "metrics.json")
    run, sampled = report["run"], report["evaluation"]["sampling"]
    assert (sampled["num_prompts"], sampled["settings"]) == (6, "temperature=1")
    assert sampled["greedy_drafts"]["texts_hash"] != report["evaluation"]["trained"]["texts_hash"]
    assert run["regenerated"]
    assert run["num_tokens"] > run["num_samples"] > 100
    config = read_json(directory / "export" / "config.json")
    assert (config["hidden_size"], config["target_hidden_size"]) == (48, 64)
    assert (config["fc_norm"], config["norm_output"]) == (False, False)
    tensors = load_file(directory / "export" / "model.safetensors")
    assert tensors["embed_tokens.weight"].shape == (512, 48)
    # Exported are the bytes that the training has kept; the head was not trained.
    [kept] = map(load_file, directory.glob("artifacts/train-*/vocab.safetensors"))
    assert torch.equal(tensors["embed_tokens.weight"], kept["embed_tokens"])
    assert torch.equal(tensors["lm_head.weight"], kept["lm_head"].to(tensors["lm_head.weight"].dtype))
    assert_faithful(directory)
