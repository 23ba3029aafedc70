"""Every recipe can be planned without its target's weights or the network, and the commands start it."""

import os
import shlex
import socket
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig

from data.target.architecture import attention_flops
from data.target.served import engines
from eagle31.errors import UserError
from eagle31.json_files import write_json
from tests.recipes.headers import header
from tests.runs.forked import ROOT
from tests.train.torchrun import composed, run_here
from train.config import compose
from train.config.run import Stage, check
from train.distributed import World
from train.plan.cluster import Cluster
from train.plan.disk import host_memory
from train.plan.earlier import note_settings
from train.plan.memory import USABLE_FRACTION
from train.plan.placement import place_target
from train.plan.plan import Plan, check_gpu_memory, make_plan
from train.plan.sizes import RunSizes, planned_config
from train.plan.table import format_plan
from train.plan.work import data_summary, run_work

RECIPES = sorted(path.stem for path in (ROOT / "recipes" / "recipe").glob("*.yaml"))
NAMED = [name for name in RECIPES if name not in ("adapt", "any_target")]
# Parameters in 10^9, total and active per token, from the model cards.
SIZES = {
    "kimi_k2_6": (1000, 32),
    "deepseek_v3": (671, 37),
    "qwen3_0_6b": (0.6, 0.6),
    "qwen3_4b": (4.0, 4.0),
    "qwen3_8b": (8.2, 7.6),
    "qwen3_14b": (14.8, 14.0),
    "qwen3_32b": (32.8, 32.0),
    "qwen3_coder_30b_a3b": (30.5, 3.3),
    "qwen3_coder_480b_a35b": (480, 35),
    "qwen3_next_80b_a3b": (80, 3.5),
    "qwen3_5_4b": (4.2, 4.2),
    "qwen3_5_9b": (9.0, 8.0),
    "mistral_small_3_2": (23.6, 22.9),
    "ministral3_8b": (8.4, 8.0),
    "gemma4_26b_a4b": (25.2, 3.8),
    "nemotron3_nano": (31.6, 3.2),
    "qwen3_30b_a3b": (30.5, 3.3),
    "qwen3_235b_a22b": (235, 22),
    "llama3_1_8b": (8.03, 7.5),
    "llama3_3_70b": (70.6, 69.5),
    "gpt_oss_20b": (20.9, 3.6),
    "gpt_oss_120b": (116.8, 5.1),
    "minimax_m2_5": (229, 10),
    "minimax_m3": (427, 26),
    "deepseek_v4_flash": (284, 13),
    "glm_5_2": (744, 40),
    "qwen3_6_27b": (27, 26),
    "qwen3_6_35b_a3b": (35, 3),
    "gemma4_31b": (30.7, 30.7),
    "smollm2_135m": (0.1345, 0.1345),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("the plan used the network or read weights")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr("data.target.checkpoint.Checkpoint.read_tensor", refused)


@cache
def planned(recipe: str, *arguments: str) -> Plan:
    """Return the plan of stages=[plan], of a run that has not begun unless it has an output_dir."""
    given = ["output_dir=/nothing/has/run/here", "stages=[plan]", *arguments]
    config = composed(recipe, *given)
    check(config)
    return make_plan(config, World(0, 0, 1), given)


@pytest.mark.parametrize("recipe", ["kimi_k2_6", "llama3_1_8b", "llama3_3_70b"])
def test_long_contexts_fit_a_node_that_trains_and_one_that_captures(recipe: str) -> None:
    one, two = planned(recipe, "context=long").ways
    assert two.works
    assert composed(recipe, "context=long").train.row_tokens == 131_072
    # A cache of four such sequences would fit no GPU of Kimi's.
    assert two.servers is not None
    assert two.servers.server is not None
    assert two.servers.server.least_sequences == 1
    assert one.works == (recipe != "kimi_k2_6")


def test_a_target_with_fewer_positions_is_refused_long_contexts() -> None:
    with pytest.raises(UserError, match=r"data\.max_tokens=131072: .* 40960 positions"):
        planned("qwen3_8b", "context=long")


@pytest.mark.parametrize("recipe", NAMED)
def test_a_recipe_fits_the_nodes_that_its_header_names(recipe: str) -> None:
    plan = planned(recipe)
    assert plan.work.steps
    table = format_plan(plan)
    assert "unknown" not in table or recipe in ("quickstart", "smollm2_135m")
    described = plan.first.cluster.gpu_bytes
    if described is not None:
        assert f"{described / 1e9:.0f} GB" in header(f"recipe/{recipe}")
    for way in plan.ways:
        assert way.works, (way.refusal, way.shortages)
        assert all(line in table for _, line in way.commands)


@pytest.mark.parametrize("recipe", SIZES)
def test_the_target_has_the_parameters_of_its_model_card(recipe: str) -> None:
    total, active = SIZES[recipe]
    found = planned(recipe).sizes.target.parameters
    assert found.total / 1e9 == pytest.approx(total, rel=0.03)
    assert found.active / 1e9 == pytest.approx(active, rel=0.1)


def test_a_budget_changes_the_hours() -> None:
    standard, quick = (planned("qwen3_8b", *more).first.hours for more in ((), ("budget=quick",)))
    assert standard is not None
    assert quick is not None
    assert quick.total is not None
    assert standard.total is not None
    assert quick.total < standard.total / 10


def test_the_prompts_that_a_target_writes_limit_the_samples_and_are_tokens_that_it_generates() -> None:
    settings = ("data=self", "data.self_prompts.num=1000", "data.self_prompts.max_new_tokens=50")
    work = planned("qwen3_0_6b", *settings).work
    assert work.tokens == (1000 - 128 - 256) * 700  # without those that are held out
    assert work.completions is not None
    assert work.completions.tokens == work.tokens * composed("qwen3_0_6b").plan.assistant_fraction + 50_000
    fewer = planned("qwen3_0_6b", *settings, "data.max_samples=100").work
    assert fewer.tokens == 100 * 700


def test_a_target_that_is_spread_over_a_node_has_one_process_there_and_its_gpus_compute_in_turn() -> None:
    plan = planned("deepseek_v4_flash")
    [way], flops = plan.ways, plan.work.capture_flops
    assert way.hours is not None
    assert flops is not None
    assert way.hours.capture == pytest.approx(flops / 250e12 / 3600)
    sizes = RunSizes(composed("deepseek_v4_flash"))
    with pytest.raises(UserError, match=r"target\.device_map=auto: .*8 processes"):
        place_target(sizes, replace(way.cluster, processes_per_node=8))
    sizes = RunSizes(composed("deepseek_v4_flash", "capture=vllm_online"))
    with pytest.raises(UserError, match=r"capture\.source=vllm: .*residual streams"):
        place_target(sizes, way.cluster)


def test_a_draft_vocabulary_that_is_not_smaller_than_the_targets_is_planned_as_the_whole() -> None:
    plan, whole = (planned("qwen3_0_6b", f"drafter.draft_vocab_size={one}") for one in ("1000000", "null"))
    assert plan.sizes.drafter == whole.sizes.drafter
    assert [note for note in plan.notes if note not in whole.notes] == [
        "drafter.draft_vocab_size=1000000 is not less than the target's vocabulary of 151936, so that the "
        "drafter has all of it"
    ]


def test_a_target_with_rope_for_each_kind_of_layer_is_planned_and_its_engine_named(tmp_path: Path) -> None:
    config = Gemma3TextConfig(num_hidden_layers=6, architectures=["Gemma3ForCausalLM"])  # one attends to all
    config.save_pretrained(tmp_path)
    given = (f"target.model={tmp_path}", "data.train=none", "drafter.draft_vocab_size=null")
    plan = planned("any_target", *given)
    assert plan.sizes.drafter.rope_parameters["rope_theta"] == 1e6
    assert [
        note for note in plan.notes if note.startswith("RoPE as in the target's layers of full_attention")
    ]
    assert f"WARNING: {next(iter(engines()))} does not serve Gemma3ForCausalLM" in format_plan(plan)
    windowed = planned("any_target", *given, "drafter.sliding_window=8")
    assert windowed.sizes.drafter.rope_parameters["rope_theta"] == 1e4
    own = planned("any_target", *given, "drafter.rope_parameters={rope_type: default, rope_theta: 7.0}")
    assert own.sizes.drafter.rope_parameters["rope_theta"] == 7.0
    assert not [note for note in own.notes if note.startswith("RoPE")]


def test_the_commands_compose_to_a_run_that_is_placed_as_planned() -> None:
    for way in planned("kimi_k2_6").ways:
        assert way.servers is not None
        [words] = [shlex.split(line) for _, line in way.commands if line.startswith("torchrun")]
        script = words.index("train/main.py")
        options = dict(zip(words[1:script:2], words[2:script:2], strict=True))
        config = compose.composed(words[script + 1 :])
        processes = int(options["--nproc-per-node"])
        cluster = replace(way.cluster, target_nodes=0, processes_per_node=processes)
        assert cluster.num_nodes == int(options.get("--nnodes", 1))
        placement = place_target(RunSizes(config), cluster)
        assert (placement.kind, placement.num_replicas) == (way.servers.kind, way.servers.num_replicas)
        assert len(set(config.vllm.servers)) == len(config.vllm.servers)  # two nodes may not have the same


def test_torchspecs_engines_have_a_node_and_ray_has_its_commands() -> None:
    one, two = planned("kimi_k2_6", "capture=torchspec").ways
    assert "torchspec.gpus_per_engine=8" in str(one.refusal)
    assert [(where, line.split(" recipe=")[0]) for where, line in two.commands] == [
        ("TARGET1", "ray start --head --port=6379 --num-gpus=8"),
        ("TRAIN1", "ray start --address=TARGET1:6379 --num-gpus=0"),
        ("TRAIN1", "RAY_ADDRESS=TARGET1:6379 torchrun --nproc-per-node 8 train/main.py"),
    ]
    # Three GPUs are left to training, whose 16 rows two processes can share.
    smaller = ["capture=torchspec", "torchspec.gpus_per_engine=5", "plan.num_nodes=1"]
    [alone] = planned("qwen3_8b", *smaller, "plan.gpus_per_node=8").ways
    assert (alone.cluster.processes_per_node, alone.refusal) == (2, None)


def test_what_the_user_says_of_the_nodes_counts() -> None:
    [way] = planned("kimi_k2_6", "plan.num_nodes=1", "plan.gpus_per_node=4", "plan.gpu_memory_gb=288").ways
    assert (way.cluster.gpus_per_node, way.cluster.gpu_bytes) == (4, 288_000_000_000)
    assert way.refusal is not None
    assert "there are 4 on a node" in way.refusal


APART = "vllm.servers=[http://node9:8000]"  # the target has GPUs that the plan does not know


def test_servers_that_are_named_write_on_all_of_their_gpus() -> None:
    plan = planned("kimi_k2_6", "vllm.servers=[http://a:1,http://b:1]")
    config, hours = composed("kimi_k2_6"), plan.first.hours
    assert plan.work.completions is not None
    assert hours is not None
    assert hours.regenerate == plan.work.completions.hours(config.plan, num_gpus=2 * 8)


ONE_GPU = ("plan.num_nodes=1", "plan.gpus_per_node=1", "plan.gpu_memory_gb=24")


def test_one_gpu_of_24_gb_has_a_form_that_the_refusal_names() -> None:
    for recipe in ("qwen3_4b", "qwen3_8b"):
        refused = planned(recipe, *ONE_GPU).first.refusal
        assert refused is not None
        assert "Set machine=one_gpu" in refused
        assert "tensor_parallel_size" not in refused
        assert planned(recipe, "machine=one_gpu").first.works
    assert planned("qwen3_4b", "machine=one_gpu", "target.engine=vllm").first.works
    refused = planned("qwen3_8b", "machine=one_gpu", "target.engine=vllm").first.refusal
    assert refused is not None
    assert "Set target.engine=hf" in refused
    refused = planned("qwen3_14b", *ONE_GPU).first.refusal
    assert refused is not None
    assert not [one for one in ("one_gpu", "raise it", "start fewer") if one in refused]
    [shortage] = planned("qwen3_14b", "machine=one_gpu").first.shortages
    assert shortage.remedy == "Use several GPUs, or larger ones."


def test_training_that_does_not_fit_is_refused_with_the_numbers() -> None:
    plan = planned("kimi_k2_6", APART, "plan.gpu_memory_gb=24")
    [shortage] = plan.first.shortages
    assert shortage.needed_bytes > shortage.available_bytes == int(24e9 * USABLE_FRACTION)
    assert "DOES NOT FIT: training needs 37.7 GB of each GPU, 22.1 GB are available" in format_plan(plan)
    config, cluster = composed("kimi_k2_6", APART), Cluster(1, 8, 8, int(24e9))
    with pytest.raises(UserError, match=r"train\.row_tokens=\d+: .*training needs 37\.7 GB"):
        check_gpu_memory(config, cluster, [Stage.train])
    check_gpu_memory(config, cluster, [Stage.evaluate])
    check_gpu_memory(config, replace(cluster, gpu_bytes=int(34e9)), [Stage.train])  # the estimate may be high
    check_gpu_memory(config, replace(cluster, gpu_bytes=None), list(Stage))


def test_only_settings_that_lower_the_memory_of_training_are_its_remedies() -> None:
    kimi, small = (RunSizes(composed(name)) for name in ("kimi_k2_6", "qwen3_0_6b"))
    rows = "or shorter rows (train.row_tokens, data.max_tokens)"
    assert small.smaller_training(8) == rows
    assert kimi.smaller_training(1) == f"deepspeed.offload_optimizer=true (37.2 GB), {rows}"
    for_eight = "deepspeed.zero_stage=2 (32.2 GB), deepspeed.offload_optimizer=true (37.2 GB)"
    assert kimi.smaller_training(8) == f"{for_eight}, {rows}"


def test_a_target_that_does_not_fit_is_refused() -> None:
    config = composed("kimi_k2_6", "capture=hf", "target.engine=hf")
    with pytest.raises(UserError, match=r"the target needs .*capture=vllm"):
        check_gpu_memory(config, Cluster(1, 8, 8, int(141e9)), [Stage.capture, Stage.train])


def test_a_target_that_only_writes_in_transformers_has_to_fit_a_gpu() -> None:
    one, two = planned("llama3_3_70b", "target.engine=hf").ways
    for way in (one, two):
        [shortage] = way.shortages
        assert str(shortage).startswith("the target needs 141 GB of each GPU")
        assert shortage.remedy == "Set target.engine=vllm."
    config = composed("llama3_3_70b", "target.engine=hf")
    check_gpu_memory(config, one.cluster, [Stage.capture, Stage.train])
    with pytest.raises(UserError, match="the target needs 141 GB"):
        check_gpu_memory(config, one.cluster, [Stage.answers])


def test_torchspecs_engines_have_to_hold_the_target() -> None:
    refused = planned("kimi_k2_6", "capture=torchspec", "torchspec.gpus_per_engine=2").ways[1]
    assert ["Raise torchspec.gpus_per_engine" in str(one) for one in refused.shortages] == [True]
    assert planned("kimi_k2_6", "capture=torchspec").ways[1].works


def test_hours_of_regeneration_that_are_unknown_are_said_to_be() -> None:
    table = format_plan(planned("qwen3_8b", "data.max_samples=null", "train.max_steps=1000"))
    assert "capture 0.141, regeneration unknown (" in table
    assert "regeneration" not in format_plan(planned("qwen3_8b", "data.regenerate.enabled=false"))


OTHERS = ["data.max_samples=1000", "drafter.aux_layer_ids=[2,18,34]"]


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("other", [None, *OTHERS])
def test_only_a_store_of_this_run_is_room_that_it_no_longer_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool, other: str | None
) -> None:
    monkeypatch.setattr("train.plan.disk.free_bytes", lambda _: 10**11)  # enough for the rest
    monkeypatch.setattr("train.plan.disk.host_bytes", lambda: 10**15)
    settings = [f"output_dir={tmp_path}", "plan.gpu_memory_gb=null", "plan.gpus_per_node=null"]
    settings += ["capture=vllm", "capture.codec=fp8", "data.max_samples=600000", "capture.spool_gb=0.01"]
    written = tmp_path / "artifacts" / "capture-0123"
    note_settings(composed("qwen3_8b", *settings, *([other] if other else [])), Stage.capture, written)
    if finished:
        write_json(written / "stage.json", {})
    else:
        with (written / "shard").open("wb") as shard:
            shard.truncate(15 * 10**12)  # more than the store will have
    lacking = planned("qwen3_8b", *settings).lacking
    assert bool(lacking) == (other is not None)
    for one in lacking:
        assert "the store" in one
        assert "data.max_samples" in one


def test_the_memory_of_the_host_holds_the_spool_the_optimizer_and_rows_in_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = RunSizes(composed("llama3_1_8b", "context=long", "deepspeed.offload_optimizer=true"))
    found = host_memory(sizes, Cluster(2, 8, 8, int(80e9)))
    assert {use.what: use.num_bytes for use in found.uses} == {
        "the spool": 160 * 10**9,
        "the optimizer": 12 * sizes.num_parameters // 2,
        # Two rows of each of eight processes, with three aux layers and the final one of 4,096 in 16 bits.
        "states of rows": 2 * 8 * 131_072 * 4 * 4096 * 2,
    }
    # Peaks of resident memory with SmolLM2's recipe, with 8 steps of a rollout, and with the quickstart.
    for recipe, steps, measured in (
        ("smollm2_135m", 4, 1652),
        ("smollm2_135m", 8, 1652),
        ("quickstart", 4, 918),
    ):
        settings = ("deepspeed.precision=fp32", f"train.ttt_steps={steps}")
        sizes_on_cpu = RunSizes(composed(recipe, *settings))
        [training] = host_memory(sizes_on_cpu, Cluster(1, 0, 1, None)).uses
        assert training.num_bytes == pytest.approx(measured * 1e6, rel=0.15)
    # A target that ends before training has to fit, too; online, both are there at once.
    for mode, expected in (("hf", ["the target"]), ("hf_online", ["training", "the target"])):
        large = RunSizes(composed("qwen3_8b", "machine=cpu", f"capture={mode}"))
        uses = host_memory(large, Cluster(1, 0, 2, None)).uses
        assert [use.what for use in uses] == expected
        assert uses[-1].num_bytes == pytest.approx(2 * 16.4e9, rel=0.01)
    for total, fits in ((10**12, True), (10**11, False)):
        monkeypatch.setattr("train.plan.disk.host_bytes", lambda total=total: total)
        assert (host_memory(sizes, Cluster(2, 8, 8, int(80e9))).remedy == "") == fits


# Layers, heads, widths of a key and a value, and parameters that a token passes through, in 10^9.
@pytest.mark.parametrize(
    ("recipe", "layers", "heads", "widths", "ratio"),
    [("llama3_1_8b", 32, 32, 128 + 128, 2.3), ("kimi_k2_6", 61, 64, 192 + 128, 2.6)],
)
def test_the_targets_attention_is_counted(
    recipe: str, layers: int, heads: int, widths: int, ratio: float
) -> None:
    plan, tokens = planned(recipe, "context=long"), 131_072
    of_attention = layers * 2 * heads * widths * (tokens + 1) / 2  # per token, which reads half of the keys
    of_parameters = 2 * plan.sizes.target.parameters.active
    assert of_attention / of_parameters == pytest.approx(ratio, abs=0.1)
    assert plan.work.trained_tokens is not None
    expected = plan.work.trained_tokens * (of_attention + of_parameters)
    assert plan.work.capture_flops == pytest.approx(expected, rel=1e-6)


def test_a_sliding_window_limits_attention() -> None:
    config = composed("gpt_oss_20b")
    pairs = 12 * 1000 * 1001 // 2 + 12 * (128 * 129 // 2 + (1000 - 128) * 128)
    assert attention_flops(planned_config(config.target), 1000) == 2 * 64 * (64 + 64) * pairs


def test_writing_completions_takes_the_time_of_its_steps_on_every_node() -> None:
    """20,000 samples of 700 tokens, 0.7 of which are written in batches of 32."""
    one, two = (planned("qwen3_0_6b", f"plan.num_nodes={n}", "plan.gpus_per_node=8") for n in (1, 2))
    tokens, steps = 9_800_000, 306_250
    keys_and_values = 28 * 2 * 8 * 128 * 2 * 700 * (1 - 0.7 / 2)  # of the mean position, in 16 bits
    written = one.work.completions
    assert written is not None
    assert (written.tokens, written.steps) == (tokens, steps)
    assert written.read_bytes == pytest.approx(steps * 1.5e9 + tokens * keys_and_values)
    assert written.overhead_seconds == pytest.approx(steps * 28 / 1000)
    assert one.first.hours is not None
    assert two.first.hours is not None
    seconds = written.prefill_flops / 30e12 + written.overhead_seconds
    assert one.first.hours.regenerate == pytest.approx(seconds / 8 / 3600)
    assert two.first.hours.regenerate == pytest.approx(seconds / 16 / 3600)


def test_the_plan_stage_alone_writes_only_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here("kimi_k2_6", "stages=[plan]", f"output_dir={tmp_path}")
    assert "1,841.2 M" in capsys.readouterr().out
    assert not (tmp_path / "artifacts").exists()


def test_a_drafter_that_cannot_be_exported_is_refused() -> None:
    with pytest.raises(UserError, match=r"drafter\.hidden_size=1001"):
        planned("qwen3_8b", "drafter.hidden_size=1001")


def test_tokens_are_those_of_the_newest_data_with_the_same_settings(tmp_path: Path) -> None:
    made = {"data-0": (80_000_000, ""), "data-1": (81_920_000, ""), "data-2": (90_000_000, "data.turns=last")}
    for age, (name, (tokens, other)) in enumerate(made.items()):
        directory, given = tmp_path / "artifacts" / name, [f"output_dir={tmp_path}", *filter(None, [other])]
        note_settings(composed("kimi_k2_6", *given), Stage.data, directory)
        os.utime(directory / "settings.json", (age, age))
        counts = {"num_tokens": tokens, "num_supervised_tokens": tokens // 2, "num_samples": 200_000}
        write_json(directory / "stage.json", {"summary": counts, "seconds": 1})
    note_settings(composed("kimi_k2_6", f"output_dir={tmp_path}"), Stage.data, tmp_path / "artifacts/data-3")
    work = planned("kimi_k2_6", f"output_dir={tmp_path}").work
    assert (work.tokens, work.tokens_from) == (81_920_000, "measured")
    assert work.steps == 2 * 81_920_000 // (16 * 8192)
    write_json(tmp_path / "artifacts/data-1/stage.json", {})
    with pytest.raises(UserError, match=r"data-1/stage\.json: It is damaged .*Delete"):
        data_summary(composed("kimi_k2_6", f"output_dir={tmp_path}"))


def test_states_take_what_the_data_stage_counted_and_those_of_held_out_prompts_are_exact() -> None:
    config = composed("qwen3_8b", "capture=hf", "capture.codec=fp8")
    summary = {"num_tokens": 10_000, "num_supervised_tokens": 7_500, "num_samples": 50}
    work = run_work(RunSizes(config), summary)
    assert work.store_bytes == 10_000 * 5 + (3 * 10_000 + 7_500) * (4096 + 1)
    held_out = (config.data.num_validation + 2 * config.data.num_test) * 200  # sampled answers, too
    assert work.held_out_bytes == held_out * 5 + 3.75 * held_out * 4096 * 2
    assert run_work(
        RunSizes(composed("qwen3_8b", "capture=hf", "target.dtype=float32")), summary
    ).held_out_bytes == (held_out * 5 + 3.75 * held_out * 4096 * 4)
    small = RunSizes(composed("quickstart", "capture=hf", "capture.codec=exact"))  # whose dtype is float32
    assert run_work(small, summary).store_bytes == 10_000 * 5 + (3 * 10_000 + 7_500) * 128 * 4
    online = run_work(RunSizes(composed("qwen3_8b", "capture=hf_online")), summary)
    assert online.held_out_bytes == work.held_out_bytes
    given = run_work(RunSizes(composed("qwen3_8b", "data.regenerate.enabled=false")), summary)
    of_test = (work.held_out_bytes - given.held_out_bytes) / given.held_out_bytes
    assert of_test == pytest.approx(
        config.data.num_test / (config.data.num_validation + config.data.num_test)
    )
