"""Where servers are placed, over nodes and settings, and what is refused."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from eagle31.errors import UserError
from tests.train.torchrun import composed
from train.config.run import check
from train.plan.cluster import Cluster
from train.plan.memory import USABLE_FRACTION
from train.plan.placement import Kind, TargetPlacement, place_target
from train.plan.sizes import RunSizes
from train.plan.target import Parallelism

GB = 1_000_000_000
NODE = Cluster(1, 8, 8, 141 * GB)
HALF = replace(NODE, processes_per_node=4)
TWO = replace(NODE, num_nodes=2)
CPU = Cluster(1, 0, 2, None)
SMALL = replace(NODE, gpu_bytes=80 * GB)
APART = replace(NODE, target_nodes=1)
TENSOR = "vllm.engine_args.tensor_parallel_size"
FRACTION = "gpu_memory_utilization"
UTILIZATION = f"vllm.engine_args.{FRACTION}"


@cache
def sizes_of(recipe: str, *settings: str) -> RunSizes:
    config = composed(recipe, *settings)
    check(config)
    return RunSizes(config)


def placed(recipe: str, cluster: Cluster, *settings: str) -> TargetPlacement:
    return place_target(sizes_of(recipe, *settings), cluster)


@pytest.mark.parametrize(
    ("recipe", "cluster", "settings", "kind", "num_servers", "devices"),
    [
        ("gpt_oss_20b", NODE, (f"{TENSOR}=1",), "shared", 1, range(8)),
        ("gpt_oss_20b", HALF, (f"{TENSOR}=1",), "split", 1, range(4, 8)),
        ("gpt_oss_20b", CPU, (f"{TENSOR}=1",), "shared", 1, None),
        ("gpt_oss_20b", APART, (f"{TENSOR}=1",), "apart", 8, None),
        ("gpt_oss_20b", TWO, ("vllm.servers=[http://a:1,http://b:1]",), "apart", 2, None),
        ("kimi_k2_6", NODE, (), "shared", 1, range(8)),
        ("kimi_k2_6", HALF, (), "shared", 1, range(8)),  # four GPUs are too few for it
    ],
)
def test_where_servers_go(
    recipe: str, cluster: Cluster, settings: tuple[str, ...], kind: Kind, num_servers: int, devices: Any
) -> None:
    found = placed(recipe, cluster, *settings)
    expected = None if devices is None else tuple(devices)
    assert (found.kind, found.num_replicas, found.devices) == (kind, num_servers, expected)
    if found.devices is not None and cluster.gpu_bytes is not None:
        assert_fits(found, cluster, sizes_of(recipe, *settings))


def test_servers_that_only_write_have_all_gpus_before_training_has_any() -> None:
    for recipe, cluster in (("gpt_oss_20b", HALF), ("kimi_k2_6", NODE)):
        sizes = sizes_of(recipe, *([f"{TENSOR}=1"] if recipe == "gpt_oss_20b" else []))
        writes, captures = place_target(sizes, cluster, writing=True), place_target(sizes, cluster)
        assert (writes.kind, writes.devices) == ("shared", tuple(range(8)))
        larger = writes.engine_args[FRACTION] > captures.engine_args[FRACTION]
        assert larger or captures.kind == "split"
    by_hand = place_target(sizes, replace(NODE, num_nodes=1, target_nodes=1), writing=True)
    assert by_hand.kind == "apart"  # those that scripts/serve_target starts write, too


def assert_fits(found: TargetPlacement, cluster: Cluster, sizes: RunSizes) -> None:
    """Check that the server has the GPUs of its engines, and that their memory is enough."""
    assert cluster.gpu_bytes is not None
    assert found.server is not None
    assert found.gpus == len(found.devices or ())
    assert Parallelism.of({**sizes.config.vllm.engine_args, **found.engine_args}).gpus == found.gpus
    taken = found.engine_args[FRACTION] * cluster.gpu_bytes
    assert found.server.least <= taken + 0.001 * cluster.gpu_bytes  # rounded down
    if found.kind == "shared" and sizes.config.capture.mode.value == "online":
        training = sizes.trainer(cluster.num_ranks, "cuda").total
        assert taken + training <= USABLE_FRACTION * cluster.gpu_bytes


@pytest.mark.parametrize(
    ("cluster", "settings", "field", "remedy"),
    [
        (TWO, ("vllm.servers=[http://localhost:8000]",), "vllm.servers", "the node's address"),
        (NODE, (f"{UTILIZATION}=0.9",), UTILIZATION, "training 37.7 GB"),
        (NODE, (f"{TENSOR}=16",), TENSOR, "there are 8 on a node"),
        (SMALL, (), TENSOR, "vLLM needs 84.2 GB (weights 74.4)"),
        (replace(APART, gpu_bytes=80 * GB), (), TENSOR, "vLLM needs 84.2 GB of each of its 8 GPUs"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_the_numbers(
    cluster: Cluster, settings: tuple[str, ...], field: str, remedy: str
) -> None:
    with pytest.raises(UserError) as caught:
        placed("kimi_k2_6", cluster, *settings)
    assert caught.value.field == field
    assert remedy in caught.value.remedy
