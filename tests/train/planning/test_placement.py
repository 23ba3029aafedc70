"""Where servers are placed, over topologies and settings, and what is refused."""

from copy import copy
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from omegaconf import OmegaConf

from eagle31.errors import UserError
from tests.train.torchrun import composed
from train.config.run import RunConfig, check
from train.config.vllm import Placement
from train.planning.memory import USABLE_FRACTION
from train.planning.placement import Cluster, ServerPlacement, place_servers, serves_training
from train.planning.server_memory import CAPTURED_SEQUENCES, Parallelism
from train.planning.sizes import RunSizes

GB = 1_000_000_000
ONE_GPU_EACH = "vllm.engine_args.tensor_parallel_size=1"
ONE_GPU = Cluster(1, 1, 1, 80 * GB)
NODE = Cluster(1, 8, 8, 141 * GB)
HALF = Cluster(1, 8, 4, 141 * GB)
TWO, FOUR = replace(NODE, num_nodes=2), replace(NODE, num_nodes=4)
CPU = Cluster(1, 0, 2, None)
UNKNOWN = replace(NODE, gpu_bytes=None)
SMALL = replace(NODE, gpu_bytes=24 * GB)
SPARE = replace(NODE, capture_nodes=1)
SPARE_SMALL = replace(SPARE, gpu_bytes=24 * GB)
CLUSTERS = {
    "1x1": ONE_GPU,
    "1x8": NODE,
    "1x8 with 4 processes": HALF,
    "2x8": TWO,
    "4x8": FOUR,
    "CPU": CPU,
    "two CPU nodes": replace(CPU, num_nodes=2),
    "unknown memory": UNKNOWN,
    "small GPUs": SMALL,
    "a capture node": SPARE,
    "two capture nodes": replace(TWO, capture_nodes=2),
    "a capture node with small GPUs": SPARE_SMALL,
}
RECIPES = ("kimi_k2_6", "gpt_oss_20b", "qwen3_8b")
SETTINGS: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "offline": ("capture=vllm",),
    "shared": ("vllm.placement=shared",),
    "split": ("vllm.placement=split",),
    "apart": ("vllm.placement=apart",),
    "a server": ("vllm.servers=[http://node9:8000]",),
    "three servers": ("vllm.servers=[http://a:1,http://b:1,http://c:1]", "vllm.placement=apart"),
    "a loopback server": ("vllm.servers=[http://127.0.0.1:8000]",),
    "a server and shared": ("vllm.servers=[http://a:1]", "vllm.placement=shared"),
    "a server and a fraction": ("vllm.servers=[http://a:1]", "vllm.gpu_memory_fraction=0.5"),
    "a fraction": ("vllm.gpu_memory_fraction=0.5",),
    "a large fraction": ("vllm.gpu_memory_fraction=0.9", "vllm.placement=shared"),
    "16 GPUs": ("vllm.engine_args.tensor_parallel_size=16",),
    "4 GPUs": ("vllm.engine_args.tensor_parallel_size=4",),
    "2 x 8 GPUs": ("vllm.engine_args.tensor_parallel_size=8", "vllm.engine_args.data_parallel_size=2"),
    "8 engines": (
        "vllm.engine_args.tensor_parallel_size=1",
        "vllm.engine_args.data_parallel_size=8",
        "vllm.engine_args.enable_expert_parallel=true",
    ),
    "regeneration": ("data.regenerate.enabled=true", "target.engine=vllm"),
}
CASES = list(product(RECIPES, CLUSTERS, SETTINGS))


@cache
def configured(recipe: str, *settings: str) -> RunConfig:
    # The dense recipe captures offline by default.
    source = ("capture=vllm_online", "target.engine=vllm") if recipe == "qwen3_8b" else ()
    config = composed(recipe, *source, *settings)
    check(config)
    return config


@cache
def sizes_of(recipe: str) -> RunSizes:
    sizes = RunSizes(configured(recipe))
    assert sizes.target.checkpoint_bytes
    assert sizes.num_parameters
    return sizes


def placed(recipe: str, cluster: Cluster, config: RunConfig) -> ServerPlacement:
    sizes = sizes_of(recipe).on_gpus(cluster.num_ranks) if cluster.gpu_bytes else None
    return place_servers(config, cluster, sizes)


@pytest.mark.parametrize(("recipe", "cluster", "setting"), CASES)
def test_a_placement_is_sound_or_refused_with_a_change_that_works(
    recipe: str, cluster: str, setting: str, request: pytest.FixtureRequest
) -> None:
    if recipe != RECIPES[0] and not request.config.getoption("--full"):
        pytest.skip(f"{RECIPES[0]} runs always, the other recipes with --full")
    where, config = CLUSTERS[cluster], configured(recipe, *SETTINGS[setting])
    try:
        found = placed(recipe, where, config)
    except UserError as error:
        config = changed(config, changes_in(error))
        found = placed(recipe, where, config)
    assert_sound(found, recipe, where, config)


def changes_in(error: UserError) -> tuple[str, ...]:
    return tuple(word.removesuffix(".") for word in error.remedy.split() if "=" in word)


def changed(config: RunConfig, changes: tuple[str, ...]) -> RunConfig:
    whole = OmegaConf.from_dotlist([change for change in changes if "." not in change.partition("=")[0]])
    found: RunConfig = copy(config)
    if whole:
        found = OmegaConf.to_object(OmegaConf.merge(config, whole))  # type: ignore[assignment]
    for change in changes:
        section, dot, setting = change.partition(".")
        if dot and "=" not in section:
            # One section alone: a whole configuration takes ten times as long.
            after = OmegaConf.merge(getattr(found, section), OmegaConf.from_dotlist([setting]))
            setattr(found, section, OmegaConf.to_object(after))
    check(found)
    return found


def assert_sound(found: ServerPlacement, recipe: str, cluster: Cluster, config: RunConfig) -> None:
    training = set(range(cluster.processes_per_node))
    if config.vllm.servers:
        assert (found.kind, found.num_servers) == (Placement.apart, len(config.vllm.servers))
    if found.kind is Placement.apart:
        assert config.vllm.servers or cluster.capture_nodes
        assert (found.devices, found.memory_fraction) == (None, None)
        return
    assert config.vllm.placement in (Placement.auto, found.kind)
    assert found.num_servers == cluster.num_nodes
    if cluster.gpus_per_node == 0:
        assert (found.devices, found.memory_fraction, found.gpus) == (None, None, 0)
        return
    assert found.devices is not None
    assert found.memory_fraction is not None
    assert len(found.devices) == found.gpus == len(set(found.devices))
    assert set(found.devices) <= set(range(cluster.gpus_per_node))
    parallel = Parallelism.of({**config.vllm.engine_args, **found.engine_args})
    assert parallel.gpus == found.gpus
    if found.kind is Placement.split:
        assert not training & set(found.devices)
    if cluster.gpu_bytes is None:
        return
    sizes = sizes_of(recipe).on_gpus(cluster.num_ranks)
    server = sizes.server(config, parallel)
    assert server.total(CAPTURED_SEQUENCES) <= found.memory_fraction * cluster.gpu_bytes + GB * 0.15
    if found.kind is Placement.shared and serves_training(config):
        taken = found.memory_fraction * cluster.gpu_bytes + sizes.trainer(config)
        assert taken <= USABLE_FRACTION * cluster.gpu_bytes


@pytest.mark.parametrize(
    ("cluster", "settings", "kind", "num_servers", "devices"),
    [
        (NODE, (), Placement.shared, 1, range(8)),
        (TWO, (), Placement.shared, 2, range(8)),
        (ONE_GPU, (), Placement.shared, 1, range(1)),
        (HALF, (), Placement.split, 1, range(4, 8)),
        (HALF, ("vllm.placement=shared",), Placement.shared, 1, range(8)),
        (CPU, (), Placement.shared, 1, None),
        (SPARE, (), Placement.apart, 8, None),
        (NODE, ("vllm.servers=[http://127.0.0.1:1]",), Placement.apart, 1, None),
        (NODE, ("vllm.servers=[http://a:1,http://b:1]",), Placement.apart, 2, None),
    ],
)
def test_where_servers_of_single_gpus_go(
    cluster: Cluster, settings: tuple[str, ...], kind: Placement, num_servers: int, devices: Any
) -> None:
    found = placed("gpt_oss_20b", cluster, configured("gpt_oss_20b", ONE_GPU_EACH, *settings))
    expected = None if devices is None else tuple(devices)
    assert (found.kind, found.num_servers, found.devices) == (kind, num_servers, expected)


def test_engines_are_repeated_until_the_server_has_all_gpus() -> None:
    assert (
        placed("gpt_oss_20b", HALF, configured("gpt_oss_20b", ONE_GPU_EACH)).engine_args["data_parallel_size"]
        == 4
    )
    one = placed(
        "gpt_oss_20b", HALF, configured("gpt_oss_20b", ONE_GPU_EACH, "vllm.engine_args.data_parallel_size=1")
    )
    assert one.devices == (4,)
    assert "data_parallel_size" not in one.engine_args


def test_auto_shares_where_the_free_gpus_are_too_few() -> None:
    found = placed("kimi_k2_6", HALF, configured("kimi_k2_6"))
    assert (found.kind, found.gpus) == (Placement.shared, 8)


def test_offline_servers_have_what_waiting_processes_leave() -> None:
    offline = placed("kimi_k2_6", NODE, configured("kimi_k2_6", "capture=vllm")).memory_fraction
    online = placed("kimi_k2_6", NODE, configured("kimi_k2_6")).memory_fraction
    assert online is not None
    assert offline is not None
    assert online < offline < 0.9


@pytest.mark.parametrize(
    ("cluster", "settings", "field", "remedy"),
    [
        (TWO, ("vllm.servers=[http://localhost:8000]",), "vllm.servers", "vllm.servers=[http://NODE:8000]"),
        (SPARE, ("vllm.servers=[http://127.0.0.1:8000]",), "vllm.servers", "vllm.servers=[http://NODE:8000]"),
        (NODE, ("vllm.placement=split",), "vllm.placement", "vllm.placement=auto"),
        (NODE, ("vllm.placement=apart",), "vllm.placement", "vllm.placement=auto"),
        (CPU, ("vllm.placement=split",), "vllm.placement", "vllm.placement=auto"),
        (CPU, ("vllm.gpu_memory_fraction=0.5",), "vllm.gpu_memory_fraction", "vllm.gpu_memory_fraction=null"),
        (
            NODE,
            ("vllm.gpu_memory_fraction=0.9",),
            "vllm.gpu_memory_fraction",
            "vllm.gpu_memory_fraction=null",
        ),
        (
            NODE,
            ("vllm.engine_args.tensor_parallel_size=16",),
            "vllm.engine_args.tensor_parallel_size",
            "vllm.engine_args.tensor_parallel_size=8",
        ),
        (replace(NODE, gpu_bytes=80 * GB), (), "vllm.placement", "vllm.servers=[http://NODE:8000]"),
    ],
)
def test_the_refusal_names_field_and_change(
    cluster: Cluster, settings: tuple[str, ...], field: str, remedy: str
) -> None:
    with pytest.raises(UserError) as caught:
        placed("kimi_k2_6", cluster, configured("kimi_k2_6", *settings))
    assert caught.value.field == field
    assert remedy in caught.value.remedy
    placed("kimi_k2_6", cluster, configured("kimi_k2_6", *settings, *changes_in(caught.value)))
