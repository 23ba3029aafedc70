"""Every recipe composes, is valid, and can be planned without its target's weights or the network."""

import json
import re
import socket
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from data.target.architecture import active_intermediate_size
from eagle31.errors import UserError
from eagle31.json_files import write_json
from tests.train.torchrun import ROOT, composed, run_here
from train.config.run import Stage, check, uses_vllm
from train.config.vllm import Placement
from train.distributed import World
from train.planning.at_hand import check_gpu_memory
from train.planning.memory import USABLE_FRACTION, worst_counts
from train.planning.placement import Cluster, place_servers, serves_training
from train.planning.plan import Plan, make_plan
from train.planning.remedies import assignments
from train.planning.sizes import RunSizes
from train.planning.table import format_plan
from train.planning.target import planned_config
from train.planning.work import WorkPlan, newest_data_summary

RECIPES = sorted(path.stem for path in (ROOT / "recipes" / "recipe").glob("*.yaml"))
NAMED = [name for name in RECIPES if name != "any_target"]
# Parameters in 10^9, total and active per token, from the model cards.
SIZES = {
    "kimi_k2_6": (1000, 32),
    "kimi_k2_5": (1000, 32),
    "deepseek_v3": (671, 37),
    "qwen3_0_6b": (0.6, 0.6),
    "qwen3_8b": (8.2, 7.6),
    "qwen3_30b_a3b": (30.5, 3.3),
    "qwen3_235b_a22b": (235, 22),
    "llama3_1_8b": (8.03, 7.5),
    "llama3_3_70b": (70.6, 69.5),
    "gpt_oss_20b": (20.9, 3.6),
    "gpt_oss_120b": (116.8, 5.1),
    "minimax_m2_5": (229, 10),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("the plan used the network or read weights")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr("data.target.checkpoint.Checkpoint.read_tensor", refused)


def planned(recipe: str, *arguments: str) -> Plan:
    config = composed(recipe, *arguments)
    check(config)
    return make_plan(
        config, World(rank=0, local_rank=0, size=1), newest_data_summary(Path(config.output_dir))
    )


@cache
def plain(recipe: str) -> Plan:
    """Return the plan of the unchanged recipe, before any run."""
    return planned(recipe, "output_dir=/nothing/has/run/here")


@pytest.mark.parametrize("recipe", NAMED)
def test_a_recipe_can_be_planned_and_fits(recipe: str, tmp_path: Path) -> None:
    plan = plain(recipe)
    assert not plan.shortages
    assert plan.work.steps
    assert plan.num_parameters == sum(_count(shape) for shape in plan.tensors.values())
    write_json(tmp_path / "plan.json", plan.to_json())
    table = format_plan(plan)
    assert recipe in table
    assert "unknown" not in table or recipe == "quickstart"


@pytest.mark.parametrize("recipe", SIZES)
def test_the_target_has_the_parameters_of_its_model_card(recipe: str) -> None:
    total, active = SIZES[recipe]
    found = plain(recipe).target.parameters
    assert found.total / 1e9 == pytest.approx(total, rel=0.03)
    assert found.active / 1e9 == pytest.approx(active, rel=0.1)


@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [("quickstart", "2.427 M"), ("qwen3_0_6b", "596 M"), ("qwen3_8b", "8.191 B"), ("kimi_k2_6", "1,026 B")],
)
def test_the_targets_parameters_are_shown_in_a_unit_that_fits(recipe: str, parameters: str) -> None:
    assert f" {parameters} parameters, " in format_plan(plain(recipe))


@pytest.mark.parametrize("recipe", SIZES)
def test_a_recipe_names_its_sources_and_says_whether_it_ever_ran(recipe: str) -> None:
    # "Run on 2026-12-01: acceptance length 2.9.", for example, once it has run.
    said = r"Never run (?:at full size|on a GPU)\.|Run on \d{4}-\d\d-\d\d\b"
    assert re.search(said, " ".join(header(recipe).split()))
    assert "Source" in (ROOT / "recipes" / "target" / f"{recipe}.yaml").read_text()


@pytest.mark.parametrize("recipe", SIZES)
def test_the_commands_in_a_header_can_be_composed(recipe: str) -> None:
    lines = re.sub(r"\\\n\s*", "", header(recipe)).splitlines()
    commands = [line.partition(" recipe=")[2].split() for line in lines if " recipe=" in line]
    assert commands
    for name, *arguments in commands:
        assert name == recipe
        check(composed(recipe, *arguments))


@pytest.mark.parametrize("recipe", SIZES)
def test_a_recipe_fits_the_nodes_that_its_header_names(recipe: str) -> None:
    config = composed(recipe)
    if not uses_vllm(config):
        return
    assert config.plan.gpu_memory_gb is not None
    assert f"{config.plan.gpu_memory_gb:.0f} GB" in header(recipe)
    node = Cluster(1, 8, 8, int(config.plan.gpu_memory_gb * 1e9))
    sizes = RunSizes(config).on_gpus(node.num_ranks)
    here = place_servers(config, node, sizes)
    assert (here.kind, here.num_servers, here.gpus) == (Placement.shared, 1, 8)
    if serves_training(config):
        apart = place_servers(config, replace(node, capture_nodes=1), sizes)
        assert (apart.kind, apart.num_servers, apart.gpus) == (Placement.apart, 1, 8)


def header(recipe: str) -> str:
    """Return the comment at the top of a recipe's file."""
    comment = (ROOT / "recipes" / "recipe" / f"{recipe}.yaml").read_text().partition("defaults:")[0]
    return "\n".join(line.removeprefix("#") for line in comment.splitlines())


def test_kimis_drafter_has_the_shape_of_published_ones() -> None:
    plan = plain("kimi_k2_6")
    assert plan.drafter.aux_layer_ids == (2, 30, 58)
    assert plan.tensors["lm_head.weight"] == [163840, 7168]
    assert plan.tensors["fc.weight"] == [7168, 3 * 7168]
    assert plan.tensors["layers.0.self_attn.q_a_proj.weight"] == [1536, 2 * 7168]
    assert plan.tensors["layers.0.self_attn.kv_a_proj_with_mqa.weight"] == [512 + 64, 2 * 7168]
    assert plan.tensors["layers.0.self_attn.kv_b_proj.weight"] == [64 * 256, 512]
    assert plan.tensors["layers.0.mlp.up_proj.weight"] == [18432, 7168]
    assert plan.layout.target is not None
    assert plan.layout.target.gpus_per_replica == 8


@pytest.mark.parametrize("recipe", ["qwen3_30b_a3b", "gpt_oss_120b", "minimax_m2_5", "kimi_k2_6"])
def test_a_drafter_is_as_wide_as_the_experts_that_a_token_passes_through(recipe: str, tmp_path: Path) -> None:
    plan = plain(recipe)
    width = active_intermediate_size(planned_config(composed(recipe).target))
    assert plan.drafter.intermediate_size == width
    assert not any("narrower" in note for note in plan.notes)
    narrow = planned(recipe, f"output_dir={tmp_path}", "drafter.intermediate_size=768")
    assert any("narrower" in note and str(width) in note for note in narrow.notes)


APART = "vllm.servers=[http://node9:8000]"  # the target has GPUs that the plan does not know


def test_a_layout_has_the_changes_with_which_training_fits(tmp_path: Path) -> None:
    arguments = [f"output_dir={tmp_path}", APART, "plan.gpu_memory_gb=34"]
    plan = planned("kimi_k2_6", *arguments)
    assert plan.layout.works
    assert plan.layout.overrides["deepspeed.zero_stage"] == 2
    changes = assignments(plan.layout.overrides)
    assert f"the run needs {changes}" in format_plan(plan)
    assert planned("kimi_k2_6", *arguments, *changes.split()).layout.overrides == {}


def test_the_suggested_change_makes_training_fit(tmp_path: Path) -> None:
    arguments = [f"output_dir={tmp_path}", APART, "plan.gpu_memory_gb=24"]
    (shortage,) = [one for one in planned("kimi_k2_6", *arguments).shortages if one.what == "training"]
    assert shortage.needed_bytes > shortage.available_bytes == int(24e9 * USABLE_FRACTION)
    changes = [word for word in shortage.change.split() if "=" in word]
    assert changes
    after = planned("kimi_k2_6", *arguments, *changes, "data.max_tokens=512").shortages
    assert not [one for one in after if one.what == "training"]


def test_a_run_whose_training_does_not_fit_is_refused(tmp_path: Path) -> None:
    arguments = [f"output_dir={tmp_path}", "vllm.servers=[http://node1:8000]"]
    config, cluster = composed("kimi_k2_6", *arguments), Cluster(1, 8, 8, int(24e9))
    with pytest.raises(UserError, match=r"train\.row_tokens=\d+: .* training needs .*Set deepspeed") as error:
        check_gpu_memory(config, cluster, [Stage.train])
    assert "plan.check_memory=false" in error.value.remedy
    changes = [word.strip(".") for word in error.value.remedy.split() if "=" in word]
    changes.remove("plan.check_memory=false")
    check_gpu_memory(composed("kimi_k2_6", *arguments, *changes, "data.max_tokens=512"), cluster, list(Stage))
    check_gpu_memory(config, cluster, [Stage.evaluate])
    check_gpu_memory(config, replace(cluster, gpu_bytes=int(141e9)), list(Stage))
    check_gpu_memory(config, replace(cluster, gpu_bytes=None), list(Stage))
    check_gpu_memory(composed("kimi_k2_6", *arguments, "plan.check_memory=false"), cluster, list(Stage))


def test_a_run_whose_target_does_not_fit_is_refused(tmp_path: Path) -> None:
    config = composed("kimi_k2_6", f"output_dir={tmp_path}", "capture=hf", "target.engine=hf")
    cluster = Cluster(1, 8, 8, int(141e9))
    with pytest.raises(UserError, match=r"the target needs .*capture=vllm"):
        check_gpu_memory(config, cluster, [Stage.capture, Stage.train])


def test_the_suggested_change_makes_the_target_fit(tmp_path: Path) -> None:
    arguments = [f"output_dir={tmp_path}", "capture=hf", "target.engine=hf"]
    (shortage,) = [one for one in planned("kimi_k2_6", *arguments).shortages if one.what == "the target"]
    changes = [word.strip(".") for word in shortage.change.split() if "vllm" in word]
    assert changes == ["capture=vllm", "vllm.engine_args.tensor_parallel_size=8"]
    after = planned("kimi_k2_6", *arguments, *changes)
    assert after.layout.works
    assert after.layout.target is not None
    assert after.layout.target.gpus_per_replica == 8


def test_the_plan_stage_alone_writes_only_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here("kimi_k2_6", "stages=[plan]", f"output_dir={tmp_path}")
    assert "1,841.2 M" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["num_parameters"] == 1_841_220_608
    assert not (tmp_path / "artifacts").exists()


def test_a_recipe_that_contradicts_the_targets_config_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    text = {"model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "vocab_size": 151936}
    (target / "config.json").write_text(json.dumps(text))
    with pytest.raises(UserError, match=r"target\.architecture\.head_dim|target\.architecture\.") as caught:
        planned("qwen3_0_6b", f"target.model={target}", f"output_dir={tmp_path}")
    assert "config.json" in caught.value.remedy


def test_tokens_are_measured_after_the_data_stage(tmp_path: Path) -> None:
    summary = {"num_tokens": 163_840_000, "num_samples": 800_000}  # the recipe takes 400,000
    stage = tmp_path / "artifacts" / "data-0123"
    stage.mkdir(parents=True)
    (stage / "stage.json").write_text(json.dumps({"facts": summary}))
    work = planned("kimi_k2_6", f"output_dir={tmp_path}").work
    assert (work.tokens.count, work.tokens.source) == (81_920_000, "measured")
    assert work.steps == 81_920_000 // (16 * 8192)


def test_the_plan_counts_fewer_rows_at_the_start() -> None:
    def work(*settings: str) -> WorkPlan:
        return planned("kimi_k2_6", "output_dir=/nothing/has/run/here", *settings).work

    growth = ("train.rows_per_step=16", "train.rows_per_step_start=4", "train.rows_growth_fraction=0.5")
    constant = work("train.rows_per_step=16", "train.max_steps=1000")
    growing = work(*growth, "train.max_steps=1000")
    # A quarter of the steps has 4 rows, a quarter 8, and half of them 16.
    assert (constant.mean_rows_per_step, growing.mean_rows_per_step) == (None, 11)
    assert growing.trained_tokens == 11 * 1000 * 8192
    assert constant.train_flops is not None
    assert growing.train_flops == pytest.approx(11 / 16 * constant.train_flops)
    # An epoch has as many rows, and so more steps.
    epochs = work(*growth, "plan.num_tokens=81920000")
    assert epochs.steps == 81_920_000 // (11 * 8192)
    assert 81_920_000 - 16 * 8192 < (epochs.trained_tokens or 0) <= 81_920_000
    # The steps that roll out least have the fewest rows.
    curriculum = ("train.ttt_steps=2", "train.ttt_curriculum_fraction=0.5")
    one, two = (work(f"train.ttt_steps={depth}").step_flops.total for depth in (1, 2))
    assert work(*curriculum, *growth).step_flops.total == pytest.approx((3 * one + 8 * two) / 11)
    assert work(*curriculum).step_flops.total == pytest.approx((one + two) / 2)
    shown = format_plan(planned("kimi_k2_6", "output_dir=/nothing/has/run/here", *growth))
    assert "11 rows per step on average" in shown


def test_hours_come_from_a_measured_speed_if_there_is_one(tmp_path: Path) -> None:
    run = tmp_path / "artifacts" / "train-0123"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text(
        '{"kind": "train", "tokens_per_second": 10000}\n{"kind": "validation"}\n'
    )
    found = planned("kimi_k2_6", f"output_dir={tmp_path}", "train.max_steps=1000").layout.hours
    assert found is not None
    assert found.train == pytest.approx(1000 * 16 * 8192 / 10000 / 3600)
    assert "measured" in (found.how or "")


def test_the_worst_row_is_supervised_everywhere() -> None:
    assert worst_counts(10, 3).rows == (8, 7, 6)


@pytest.mark.parametrize("recipe", NAMED)
def test_every_recipe_can_be_planned_with_both_optimizers(recipe: str) -> None:
    muon, adamw = plain(recipe), planned(recipe, "output_dir=/nothing/has/run/here", "optim=adamw")
    assert adamw.orthogonalization is None
    assert muon.orthogonalization is not None
    assert 0 < muon.orthogonalization.fraction < 0.25
    assert "FLOPs of Newton-Schulz" in format_plan(muon)
    # One moment instead of two.
    vectors_and_head = sum(
        _count(shape) for name, shape in muon.tensors.items() if len(shape) == 1 or "lm_head" in name
    )
    settings = muon.layout.settings
    split = settings.world_size if settings.zero_stage else 1
    saved = adamw.layout.memory.optimizer - muon.layout.memory.optimizer
    assert saved == pytest.approx(4 * (muon.num_parameters - vectors_and_head) / split, abs=1)


def _count(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
