"""Recipes, with as many processes as their node has GPUs, on small stand-ins for their targets.

They run with --full; tests/train/launch/test_apart.py has kimi_k2_6 on two nodes.
"""

import json
import re
from pathlib import Path

import pytest

from eagle31.json_files import read_json, read_jsonl
from tests.recipes.headers import RECIPES
from tests.recipes.stand_ins import assert_captured, save_stand_in, small_run
from tests.runs.forked import ROOT
from tests.train.small_run import assert_agreement
from tests.train.torchrun import composed, torchrun
from train.config.capture import CaptureMode
from train.config.drafter import Attention
from train.config.target import TargetEngine
from train.plan.sizes import RunSizes

RUN_SECONDS = 1500
# Dense, with experts, latent attention, a gated delta net, sinks, and several residual streams.
STAND_INS = (
    *("llama3_1_8b", "qwen3_30b_a3b", "kimi_k2_6"),
    *("qwen3_5_9b", "gpt_oss_20b", "deepseek_v4_flash"),
)


@pytest.mark.full("a complete run of each recipe")
@pytest.mark.parametrize("recipe", STAND_INS)
@pytest.mark.timeout(RUN_SECONDS)
def test_a_recipe_runs_on_a_stand_in(recipe: str, vllm_python: Path, tmp_path: Path) -> None:
    stand_in, run = save_stand_in(recipe, tmp_path), tmp_path / "run"
    given = composed(recipe)
    num_ranks = given.plan.gpus_per_node or 1 if given.target.device_map is None else 1
    command = [f"recipe={recipe}", *small_run(recipe, stand_in, run, num_ranks)]
    printed = torchrun("train/main.py", *command, num_processes=num_ranks, seconds=RUN_SECONDS)
    assert "acceptance length" in printed
    assert (run / "report" / "index.html").is_file()
    config = composed(recipe, *command[1:])
    assert_regenerated(run)
    assert_captured(run, stand_in.model, online=config.capture.mode is CaptureMode.online)
    assert_trained(run)
    exported = read_json(run / "export" / "config.json")
    assert exported["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(
        RunSizes(config).drafter.aux_layer_ids
    )
    assert (exported["fc_norm"], exported["norm_output"]) == (True, True)
    latent = config.drafter.attention is Attention.mla
    assert exported["architectures"] == [
        "Eagle3DeepseekV2ForCausalLM" if latent else "LlamaForCausalLMEagle3"
    ]
    [evaluation] = [read_json(path) for path in run.glob("artifacts/evaluate-*/evaluation.json")]
    assert evaluation["engine"].startswith(
        "vLLM" if config.target.engine is TargetEngine.vllm else "eagle31 (transformers"
    )
    assert_agreement(evaluation)


def assert_regenerated(run: Path) -> None:
    """Check that the target wrote the answers that are trained on."""
    answers = [row for path in run.glob("artifacts/data-*/regenerated/*.jsonl") for row in read_jsonl(path)]
    assert len(answers) > 1
    assert len({json.dumps(row) for row in answers}) > 1


def assert_trained(run: Path) -> None:
    [metrics] = run.glob("artifacts/train-*/metrics.jsonl")
    losses = [record["loss"] for record in read_jsonl(metrics) if record["kind"] == "train"]
    assert len(losses) == 2
    assert all(0 < loss < 100 for loss in losses)


def test_the_table_of_the_documentation_has_every_recipe() -> None:
    [table] = re.findall(r"\| planned for \|\n((?:\|.*\n)+)", (ROOT / "docs" / "recipes.md").read_text())
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted([*RECIPES, "any_target", "quickstart"])
