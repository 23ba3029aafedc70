"""The ways to run that the plan prints: layouts, and commands that compose to what was planned."""

import shlex
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.train.torchrun import ROOT, checked_config, composed
from train.config.vllm import Placement
from train.distributed import World
from train.launch.slurm import Submission, check_rows, render
from train.planning.commands import Command
from train.planning.layout import Layout
from train.planning.placement import Cluster, place_servers
from train.planning.plan import Plan, make_plan
from train.planning.sizes import RunSizes
from train.planning.table import format_plan

GB = 1_000_000_000
# Runs with different placements, codecs and sources.
RUNS: dict[str, tuple[str, ...]] = {
    "kimi_k2_6": (),
    "gpt_oss_20b": ("vllm.engine_args.tensor_parallel_size=2", "data.train='a b.jsonl'"),
    "qwen3_30b_a3b": ("capture=vllm", "train.rows_per_step=8"),
    "minimax_m2_5": ("plan.gpu_memory_gb=40",),
}


@cache
def planned(recipe: str, *arguments: str) -> Plan:
    config = composed(recipe, "stages=[plan]", *arguments)
    return make_plan(config, World(rank=0, local_rank=0, size=1), {})


def ways(plan: Plan) -> list[tuple[Layout, list[Command]]]:
    return [(plan.layout, plan.commands), *plan.others]


@pytest.mark.parametrize("recipe", RUNS)
def test_one_two_and_four_nodes_have_commands_or_a_reason(recipe: str) -> None:
    plan = planned(recipe, *RUNS[recipe])
    assert {way.num_nodes for way, _ in ways(plan)} == {1, 2, 4}
    table = format_plan(plan)
    for layout, typed in ways(plan):
        assert layout.works == bool(typed)
        for command in typed:
            assert command.line in table
        if not layout.works:
            assert (layout.refusal or layout.shortages[0].change) in table


@pytest.mark.parametrize("recipe", RUNS)
def test_the_commands_compose_to_a_run_that_is_not_refused(recipe: str) -> None:
    for layout, typed in ways(planned(recipe, *RUNS[recipe])):
        for command in typed:
            words = shlex.split(command.line)
            if words[0] == "torchrun":
                assert_starts(words, layout)
            elif words[0] == "scripts/serve_target":
                config = checked_config([f"recipe={recipe}", *(one for one in words[2:] if "=" in one)])
                assert words[1] == config.recipe_name
                assert (
                    words[words.index("--host")],
                    words[words.index("--host") + 1],
                ) == ("--host", "0.0.0.0")
            else:
                config = checked_config(words[1:])
                assert config.launcher.nodes == layout.num_nodes
                assert config.launcher.capture_nodes == layout.cluster.capture_nodes


def assert_starts(words: list[str], layout: Layout) -> None:
    script = words.index("train/main.py")
    options = dict(zip(words[1:script:2], words[2:script:2], strict=True))
    config = checked_config(words[script + 1 :])
    cluster = Cluster(
        num_nodes=int(options.get("--nnodes", 1)),
        gpus_per_node=layout.cluster.gpus_per_node,
        processes_per_node=int(options["--nproc-per-node"]),
        gpu_bytes=layout.cluster.gpu_bytes,
    )
    assert config.train.rows_per_step % cluster.num_ranks == 0
    placement = place_servers(config, cluster, RunSizes(config).on_gpus(cluster.num_ranks))
    assert placement.kind is layout.kind
    assert layout.placement is not None
    if placement.kind is Placement.apart:
        # Two nodes may not have the same server.
        assert len(set(config.vllm.servers)) == layout.placement.num_servers
    else:
        assert placement == layout.placement


@pytest.mark.parametrize("recipe", ["kimi_k2_6", "gpt_oss_20b"])
def test_the_lines_for_slurm_render(recipe: str) -> None:
    for layout, typed in ways(planned(recipe, *RUNS[recipe])):
        for line in (command.line for command in typed if command.where == "Slurm"):
            arguments = shlex.split(line)[1:]
            config = checked_config(arguments)
            check_rows(config.train, config.launcher)
            output_dir = Path(config.output_dir)
            assert output_dir.is_absolute()
            submission = Submission(arguments, recipe, output_dir, sys.executable, ROOT)
            script = render(submission, config.launcher)
            assert f"#SBATCH --nodes={layout.num_nodes}" in script
            assert ("scripts/serve_target" in script) == (layout.kind is Placement.apart)


def test_the_flagship_runs_as_typed_on_one_node() -> None:
    plan = planned("kimi_k2_6")
    assert (plan.layout.num_nodes, plan.layout.kind) == (1, Placement.shared)
    assert [one.line for one in plan.commands] == [
        "torchrun --nproc-per-node 8 train/main.py recipe=kimi_k2_6"
    ]


def test_more_nodes_run_the_target_where_it_takes_more_flops() -> None:
    plan = planned("kimi_k2_6")
    apart = {one.num_nodes: one.cluster.capture_nodes for one, _ in ways(plan) if one.kind is Placement.apart}
    assert apart == {2: 1, 4: 3}
    # Without regeneration, and with a target of few active parameters, fewer nodes run the target.
    cheap = planned(
        "gpt_oss_20b", "data.regenerate.enabled=false", "vllm.placement=apart", "plan.num_nodes=4"
    )
    assert cheap.layout.cluster.capture_nodes == 2


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("plan.num_nodes=3",), {(3, "apart"), (3, "shared")}),
        (("plan.num_nodes=1", "vllm.placement=split"), {(1, "split")}),
        (("launcher=slurm", "launcher.nodes=2", "launcher.capture_nodes=1"), {(2, "apart")}),
        (("vllm.servers=[http://a:1,http://b:1]",), {(1, "apart")}),
    ],
)
def test_which_ways_are_planned(settings: tuple[str, ...], expected: set[Any]) -> None:
    found = {
        (one.num_nodes, one.kind.value) for one, _ in ways(planned("gpt_oss_20b", *settings)) if one.kind
    }
    assert found == expected


def test_the_number_of_servers_is_the_number_that_are_named_or_started() -> None:
    one = planned("kimi_k2_6", "vllm.servers=[http://a:1]").layout
    assert one.target is not None
    assert (one.target.num_replicas, "1 server named" in one.target.where) == (1, True)
    several = [way for way, _ in ways(planned("kimi_k2_6")) if way.num_nodes == 4]
    assert {(way.kind, way.target.num_replicas) for way in several if way.target} == {
        (Placement.apart, 3),
        (Placement.shared, 4),
    }


def test_hours_count_regeneration() -> None:
    settings = ("plan.num_nodes=1", "vllm.placement=shared")
    plain = planned("kimi_k2_6", "data.regenerate.enabled=false", *settings).layout.hours
    bound = planned("kimi_k2_6", *settings).layout.hours
    known = planned("kimi_k2_6", "plan.decode_tokens_per_second_per_gpu=1000", *settings).layout.hours
    assert plain is not None and bound is not None and known is not None  # noqa: PT018
    assert (plain.regenerate, plain.is_bound, bound.is_bound, known.is_bound) == (0, False, True, False)
    # 400,000 samples of 3,000 tokens, of which 70 % are generated on 8 GPUs; the rest is prefilled.
    assert bound.regenerate == pytest.approx(bound.capture, rel=0.001)
    prefill = 0.3 * (bound.regenerate or 0)
    assert known.regenerate == pytest.approx(prefill + 840e6 / 8000 / 3600, rel=0.001)
    assert known.total == pytest.approx(sum([known.regenerate or 0, known.capture or 0, known.train or 0]))


def test_stages_at_once_take_as_long_as_the_longest() -> None:
    for layout, _ in ways(planned("gpt_oss_20b", "data.regenerate.enabled=false")):
        found = layout.hours
        if found is None:
            assert not layout.works
            continue
        parts = (found.capture or 0, found.train or 0)
        assert found.total == pytest.approx(sum(parts) if layout.kind is Placement.shared else max(parts))
