"""Recipes on nodes that share neither loopback nor /dev/shm nor /tmp, on stand-ins. Needs root.

Each runs by the command for two nodes in its header.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from data.vllm.environment import KEY_VARIABLE, check_mooncake
from eagle31.json_files import read_json
from tests.processes import environment_of
from tests.recipes.headers import RECIPES, header_commands
from tests.recipes.stand_ins import StandIn, save_stand_in, small_run
from tests.train.launch.machines import Machine
from tests.train.launch.slurm_cluster import Cluster, running_apart_cluster, wait_for
from tests.train.small_run import assert_agreement, metrics_of
from tests.train.torchrun import ROOT

RECIPE = "kimi_k2_6"  # runs always
ON_TWO_NODES = [recipe for recipe in RECIPES if header_commands(recipe, "scripts/submit")]
STEPS = 3
NUM_LAYERS, AUX_LAYER_IDS = 4, [1, 2, 3]
UP_TO_TRAINING = "stages=[data,vocab,answers,capture,train]"
RUN_SECONDS = 500
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("preloaded_servers", "preloaded_children"),
]


def small_stand_in(recipe: str, directory: Path) -> StandIn:
    # All layers take minutes to load and to run on a CPU.
    return save_stand_in(recipe, directory, num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def stand_in(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return small_stand_in(RECIPE, tmp_path_factory.mktemp("stand_in"))


@contextmanager
def nodes(stand_in: StandIn, output_dir: Path, shared: bool) -> Iterator[tuple[Cluster, Machine, Machine]]:
    """Start two nodes that see the stand-in, each with its own output directory unless that is shared."""
    output_dir.mkdir()
    seen = [stand_in.train.parent, *([output_dir] if shared else [])]
    # Also where the test's directory is not in /tmp.
    own = [] if shared else [output_dir]
    with running_apart_cluster(seen, own) as cluster:
        assert cluster.machines is not None
        first, second = cluster.machines.members
        yield cluster, first, second


def submit(cluster: Cluster, stand_in: StandIn, output_dir: Path, *more: str, recipe: str = RECIPE) -> str:
    """Submit a run by the command for two nodes in the recipe's header; return the job's number."""
    [header] = header_commands(recipe, "scripts/submit")
    assert header.pop() == f"output_dir=/shared/{recipe}"
    without_gpus = ["launcher.gpus_per_node=0", "launcher.cpus_per_task=1"]
    run = [*small_run(recipe, stand_in, output_dir), f"train.max_steps={STEPS}"]
    run += [f"drafter.aux_layer_ids={AUX_LAYER_IDS}", *more]
    printed = cluster.call(sys.executable, "scripts/submit", *header, *without_gpus, *run)
    return printed.split()[1].rstrip(",")


def wait_for_success(cluster: Cluster, job: str, output_dir: Path) -> None:
    """Wait for the job's end; `output_dir` is the path under which this process finds the log."""
    under_way = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
    wait_for(lambda: cluster.job_fields(job)["JobState"] not in under_way, RUN_SECONDS)
    log = output_dir / f"slurm-{job}.out"
    assert cluster.job_fields(job)["JobState"] == "COMPLETED", log.read_text()[-10000:]


def assert_trained(output_dir: Path) -> None:
    losses = [record["loss"] for record in metrics_of(output_dir) if record["kind"] == "train"]
    assert len(losses) == STEPS


def key_of_servers(output_dir: Path) -> str | None:
    """Return the key in the environment of the run's scripts/serve_target; None: it has not started yet."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if f"output_dir={output_dir}" in command and str(ROOT / "scripts" / "serve_target") in command[:4]:
            return environment_of(process).get(KEY_VARIABLE)
    return None


@pytest.mark.parametrize("recipe", ON_TWO_NODES)
def test_a_server_on_another_node_with_a_shared_output_directory(
    recipe: str, vllm_python: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if recipe != RECIPE and not request.config.getoption("--full"):
        pytest.skip(f"{RECIPE} runs always, the other recipes with --full")
    stand_in, output_dir = small_stand_in(recipe, tmp_path / "stand_in"), tmp_path / "run"
    with nodes(stand_in, output_dir, shared=True) as (cluster, _, second):
        job = submit(cluster, stand_in, output_dir, recipe=recipe)
        wait_for(lambda: key_of_servers(output_dir) is not None)
        key = key_of_servers(output_dir)
        wait_for_success(cluster, job, output_dir)
    assert_trained(output_dir)
    [evaluation] = [read_json(path) for path in output_dir.glob("artifacts/evaluate-*/evaluation.json")]
    assert_agreement(evaluation)
    assert (output_dir / f"server-{second.name}-8000.log").exists()
    assert f"http://{second.address}:8000" in (output_dir / "config.yaml").read_text()
    assert key
    for path in output_dir.rglob("*"):
        assert not path.is_file() or key.encode() not in path.read_bytes(), path


@pytest.mark.full("another run on two nodes")
def test_a_server_on_another_node_with_nothing_shared_but_mooncake(
    stand_in: StandIn,
    vllm_python: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_mooncake(vllm_python)
    monkeypatch.setattr(sys, "executable", sys.executable)  # the job finds mooncake_master next to it
    output_dir = tmp_path / "run"
    through = ["capture.transport=mooncake", "capture.mooncake.segment_gb=0.05"]
    with nodes(stand_in, output_dir, shared=False) as (cluster, first, second):
        job = submit(cluster, stand_in, output_dir, *through)
        wait_for_success(cluster, job, first.path(output_dir))
        assert_trained(first.path(output_dir))
        assert not list(second.path(output_dir).rglob("*.safetensors"))


@pytest.mark.full("it starts two servers")
def test_two_nodes_that_train_have_a_server_each(stand_in: StandIn, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    with nodes(stand_in, output_dir, shared=True) as (cluster, _, _):
        job = submit(cluster, stand_in, output_dir, "launcher.capture_nodes=0", UP_TO_TRAINING)
        wait_for_success(cluster, job, output_dir)
    assert_trained(output_dir)
    assert all((output_dir / f"vllm-{number}.log").exists() for number in range(2))
