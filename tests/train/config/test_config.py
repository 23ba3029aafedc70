"""The checks of a recipe: types by Hydra, values by `check`."""

import subprocess
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from omegaconf import MissingMandatoryValue

from data.text.choices import Overlong
from eagle31.errors import UserError
from tests.train.torchrun import ROOT, composed, environment, preloaded_python
from train.config.capture import CaptureMode
from train.config.run import RunConfig, Stage, check
from train.config.training import Schedule

RECIPES = ROOT / "recipes"
NEEDED = ["target.model=somewhere", "data.train=some.jsonl"]


def changed(key: str, value: Any) -> RunConfig:
    config = RunConfig()
    *groups, name = key.split(".")
    owner = reduce(getattr, groups, config)
    assert hasattr(owner, name), key
    setattr(owner, name, value)
    return config


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (RECIPES / "recipe").glob("*.yaml")))
def test_every_recipe_composes_and_is_valid(recipe: str) -> None:
    check(composed(recipe, *NEEDED))


@pytest.mark.parametrize(
    "choice",
    sorted(f"{p.parent.name}={p.stem}" for p in RECIPES.glob("*/*.yaml") if p.parent.name != "recipe"),
)
def test_every_group_can_be_chosen(choice: str) -> None:
    # A choice with several sources replaces the one in NEEDED.
    sources = ["data.train=null"] if choice == "data=mixture" else []
    check(composed("any_target", choice, *NEEDED, *sources))


def test_overrides_reach_their_fields_with_the_right_types() -> None:
    config = composed(
        "any_target",
        *NEEDED,
        "drafter=eagle3",
        "deepspeed=zero2",
        "capture.mode=online",
        "data.overlong=drop",
        "optim.schedule=linear",
        "optim.lr=1e-3",
        "drafter.aux_layer_ids=[1,2]",
        "stages=[data,report]",
        "train.max_steps=null",
    )
    assert (config.drafter.fc_norm, config.drafter.norm_output) == (False, False)
    assert config.deepspeed.zero_stage == 2
    assert config.capture.mode is CaptureMode.online
    assert config.data.overlong is Overlong.drop
    assert config.optim.schedule is Schedule.linear
    assert config.optim.lr == pytest.approx(1e-3)
    assert config.drafter.aux_layer_ids == [1, 2]
    assert config.stages == [Stage.data, Stage.report]
    assert config.train.max_steps is None


@pytest.mark.parametrize("drafter", ["eagle3", "eagle31"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["drafter.rope_parameters={rope_type: default,rope_theta: 1e6}"],
        ["drafter.rope_parameters.rope_type=default", "drafter.rope_parameters.rope_theta=1e6"],
    ],
)
def test_rope_parameters_can_be_set(drafter: str, arguments: list[str]) -> None:
    assert composed("any_target", *NEEDED, f"drafter={drafter}").drafter.rope_parameters == {}
    config = composed("any_target", *NEEDED, f"drafter={drafter}", *arguments)
    assert config.drafter.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


def test_template_kwargs_accept_any_key() -> None:
    one_by_one = composed(
        "any_target", *NEEDED, "data.template_kwargs.enable_thinking=false", "data.template_kwargs.a.b=1"
    )
    assert one_by_one.data.template_kwargs == {"enable_thinking": False, "a": {"b": 1}}
    assert composed("any_target", *NEEDED, "data.template_kwargs={c: x}").data.template_kwargs == {"c": "x"}


@pytest.mark.parametrize(
    "argument",
    [
        "train.max_steps=many",
        "optim.lr=fast",
        "drafter.fc_norm=7.5",
        "drafter.aux_layer_ids=[a]",
        "deepspeed.zero_stage=two",
        "deepspeed.precision=fp16",
        "capture.mode=sideways",
        "optim.schedule=sawtooth",
        "stages=[fly]",
        "data.regenerate.batch_size=1.5",
        "train.ttt_steps=null",
        "deepspeed=zero4",
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_key(argument: str) -> None:
    with pytest.raises(UserError) as caught:
        composed("any_target", *NEEDED, argument)
    assert (caught.value.field, caught.value.value) == tuple(argument.split("="))


def test_main_refuses_a_wrong_value_before_any_work(tmp_path: Path) -> None:
    command = [preloaded_python(), "train/main.py", "recipe=any_target", f"output_dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [*command, *NEEDED, "train.max_steps=many"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2
    assert done.stderr == "error: train.max_steps=many: Give a whole number, or null.\n"
    assert not (tmp_path / "run").exists()


POSITIVE = (
    *("data.max_tokens", "data.num_validation", "data.num_test"),
    *("capture.shard_tokens", "capture.batch_tokens", "capture.spool_gb", "capture.processes"),
    *("vllm.max_concurrency", "capture.mooncake.segment_gb"),
    *("train.ttt_steps", "train.row_tokens", "train.rows_per_step", "train.num_epochs"),
    *("train.log_every", "train.validate_every", "train.save_every", "train.keep_checkpoints"),
    *("evaluate.draft_tokens", "evaluate.max_new_tokens"),
    *(
        "optim.lr",
        "optim.matrix_lr",
        "optim.max_grad_norm",
        "optim.eps",
        "optim.max_norm_jump",
        "optim.max_skipped_steps",
    ),
    *("data.regenerate.max_new_tokens", "data.regenerate.batch_size"),
)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in POSITIVE for value in (0, -1)),
        ("optim.lr", float("nan")),
        ("optim.lr", float("inf")),
        ("optim.lr", 1e10),
        ("optim.matrix_lr", 1.0),
        ("optim.momentum", 1.0),
        ("optim.momentum", -0.1),
        ("optim.max_grad_norm", float("inf")),
        ("optim.betas", [0.9, float("nan")]),
        ("capture.spool_gb", float("inf")),
        ("evaluate.temperature", float("inf")),
        ("train.max_steps", 0),
        ("capture.max_samples", 0),
        ("capture.codec", "fp4"),
        ("capture.final_states", "some"),
        ("train.step_decay", 0.0),
        ("train.step_decay", 1.01),
        ("train.reach_smoothing", 1.1),
        ("train.ttt_curriculum_fraction", -0.1),
        ("train.position_gap_probability", 1.1),
        ("train.position_gap_tokens", 0),
        ("train.diagnose_every", -1),
        ("train.rows_per_step_start", 0),
        ("train.rows_per_step_start", 9),
        ("train.rows_growth_fraction", 0.0),
        ("train.rows_growth_fraction", 1.0),
        ("data.max_tokens", 2049),
        ("deepspeed.zero_stage", 4),
        ("deepspeed.zero_stage", -1),
        ("deepspeed.offload_optimizer", True),
        ("deepspeed.offload_parameters", True),
        ("optim.warmup_fraction", -0.1),
        ("optim.warmup_fraction", 1.0),
        ("optim.head_start_fraction", 1.0),
        ("optim.betas", [0.9]),
        ("optim.betas", [0.9, 1.0]),
        ("optim.min_lr_fraction", 1.5),
        ("optim.weight_decay", -0.1),
        ("data.max_malformed_fraction", -0.1),
        ("data.num_workers", 0),
        ("data.augment.template_probability", 1.1),
        ("data.augment.system_probability", -0.1),
        ("data.augment.templates", ["nope"]),
        ("data.augment.systems", ["nope"]),
        ("data.augment.documents_tokens", 0),
        ("data.regenerate.temperature", -1.0),
        ("data.regenerate.top_p", 0.0),
        ("data.regenerate.top_k", -1),
        ("data.regenerate.completions", 0),
        # Greedy completions are all the same.
        ("data.regenerate.top_p", 0.9),
        ("data.regenerate.top_k", 20),
        ("data.regenerate.completions", 4),
        ("evaluate.max_new_tokens", 2048),
        ("optim.betas", [0.9, 0.95, 0.99]),
        ("evaluate.temperature", 0.0),
        ("stages", []),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_field(key: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        check(changed(key, value))
    assert caught.value.field == key
    assert caught.value.remedy.endswith(".")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.max_steps", 1),
        ("train.max_steps", None),
        ("train.rows_per_step_start", 8),
        ("optim.max_norm_jump", None),
        ("capture.max_samples", 1),
        ("train.step_decay", 1.0),
        ("data.max_tokens", 2048),
        ("deepspeed.zero_stage", 3),
        ("optim.warmup_fraction", 0.0),
        ("optim.betas", [0.8, 0.9]),
        ("stages", [Stage.report]),
    ],
)
def test_values_at_the_limits_are_accepted(key: str, value: Any) -> None:
    check(changed(key, value))


def test_a_missing_required_value_is_named() -> None:
    with pytest.raises(MissingMandatoryValue) as caught:
        composed("any_target", "target.model=somewhere")
    assert caught.value.full_key == "data.train"


@pytest.mark.parametrize(
    ("stage", "offload", "valid"),
    [
        (1, "offload_optimizer", True),
        (3, "offload_optimizer", True),
        (2, "offload_parameters", False),
        (3, "offload_parameters", True),
    ],
)
def test_offloading_needs_a_zero_stage(stage: int, offload: str, valid: bool) -> None:
    config = changed("deepspeed.zero_stage", stage)
    setattr(config.deepspeed, offload, True)
    if valid:
        check(config)
    else:
        with pytest.raises(UserError, match=f"deepspeed.{offload}"):
            check(config)


def test_a_mooncake_store_must_hold_everything_that_may_wait() -> None:
    settings = [
        *NEEDED,
        "capture=hf_online",
        "capture.transport=mooncake",
        "capture.spool_gb=8",
    ]
    with pytest.raises(UserError, match=r"capture\.mooncake\.segment_gb"):
        check(composed("any_target", *settings))
    check(composed("any_target", *settings, "capture.mooncake.segment_gb=9"))


@pytest.mark.parametrize("source", ["hf", "vllm"])
def test_capture_groups_set_source_and_mode_and_the_mode_alone_keeps_the_source(source: str) -> None:
    for settings in ([f"capture={source}_online"], [f"capture={source}", "capture.mode=online"]):
        capture = composed("any_target", *NEEDED, *settings).capture
        assert (capture.source.value, capture.mode) == (source, CaptureMode.online)
    capture = composed("any_target", *NEEDED, f"capture={source}").capture
    assert (capture.source.value, capture.mode) == (source, CaptureMode.offline)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (["vllm.gpu_memory_fraction=0"], "vllm.gpu_memory_fraction"),
        (["vllm.gpu_memory_fraction=1"], "vllm.gpu_memory_fraction"),
        (["vllm.gpu_memory_fraction=nan"], "vllm.gpu_memory_fraction"),
        (
            ["vllm.gpu_memory_fraction=0.5", "vllm.engine_args.gpu_memory_utilization=0.5"],
            "vllm.gpu_memory_fraction",
        ),
        (["vllm.start_minutes=0"], "vllm.start_minutes"),
        (["vllm.max_concurrency=0"], "vllm.max_concurrency"),
    ],
)
def test_values_that_no_server_could_use_are_refused(settings: list[str], field: str) -> None:
    with pytest.raises(UserError) as caught:
        check(composed("any_target", *NEEDED, *settings))
    assert caught.value.field == field


def test_a_frozen_head_is_not_trained_late() -> None:
    config = changed("optim.head_start_fraction", 0.5)
    check(config)
    config.drafter.train_lm_head = False
    with pytest.raises(UserError, match=r"optim\.head_start_fraction=0\.5: .* drafter\.train_lm_head=true"):
        check(config)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"train.shuffle_window_tokens": 0}, "greater than 0"),
        ({"train.shuffle_window_tokens": 1000, "train.row_tokens": 2048}, "more than a row"),
        (
            {"train.shuffle_window_tokens": 1 << 20, "capture.mode": CaptureMode.online},
            "capture.mode=offline",
        ),
    ],
)
def test_windows_need_files_and_room_for_a_row(changes: dict[str, Any], remedy: str) -> None:
    config = RunConfig()
    for key, value in changes.items():
        group, name = key.split(".")
        setattr(getattr(config, group), name, value)
    with pytest.raises(UserError, match=rf"train\.shuffle_window_tokens.*{remedy}"):
        check(config)
    config.train.shuffle_window_tokens = None
    check(config)


@pytest.mark.parametrize(
    ("key", "value", "mode", "remedy"),
    [
        ("capture.store", "", CaptureMode.offline, "It is empty"),
        ("capture.cache_dir", " ", CaptureMode.offline, "It is empty"),
        ("capture.store", "s3://bucket/store", CaptureMode.online, "Online training reads no store"),
        ("capture.cache_dir", "/nvme", CaptureMode.online, "Online training reads no store"),
        ("capture.read_threads", 0, CaptureMode.offline, "greater than 0"),
        ("capture.cache_gb", -1.0, CaptureMode.offline, "greater than 0"),
    ],
)
def test_reading_a_store_needs_one(key: str, value: Any, mode: CaptureMode, remedy: str) -> None:
    config = changed(key, value)
    config.capture.mode = mode
    with pytest.raises(UserError, match=remedy) as caught:
        check(config)
    assert caught.value.field == key
