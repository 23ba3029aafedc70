"""A recipe on two nodes that share neither loopback nor /dev/shm nor /tmp, on a stand-in. Needs root.

It runs by the command for two nodes in its header: one runs the target, the other one trains.
"""

from pathlib import Path

import psutil
import pytest

from data.capture.vllm.environment import KEY_VARIABLE
from tests.processes import environment_of, wait_for
from tests.recipes.stand_ins import assert_captured, save_stand_in, small_run
from tests.runs.forked import ROOT
from tests.runs.here import run_command
from tests.train.launch.slurm_cluster import running_apart_cluster
from tests.train.small_run import metrics_of

RECIPE = "kimi_k2_6"
STEPS = 3
NUM_LAYERS, AUX_LAYER_IDS = 2, [1, 2]  # a dense one and one with experts; all would take minutes on a CPU
pytestmark = [pytest.mark.usefixtures("vllm_python"), pytest.mark.full("it starts vLLM under Slurm")]


def keys_of_servers(output_dir: Path) -> list[str]:
    """Return the key in the environment of the run's scripts/serve_target; nothing before it starts."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if f"output_dir={output_dir}" in command and str(ROOT / "scripts" / "serve_target") in command[:4]:
            found.append(environment_of(process).get(KEY_VARIABLE, ""))
    return [key for key in found if key]


def test_a_server_on_another_node(tmp_path: Path) -> None:
    """The nodes share the output directory."""
    stand_in = save_stand_in(RECIPE, tmp_path / "stand_in", num_hidden_layers=NUM_LAYERS)
    output_dir = tmp_path / "run"
    output_dir.mkdir()
    run = [*small_run(RECIPE, stand_in, output_dir), f"train.max_steps={STEPS}"]
    run += [f"drafter.aux_layer_ids={AUX_LAYER_IDS}"]
    run.append("data.regenerate.temperature=0")  # on a CPU, servers that capture ignore the temperature
    run.append("stages=[plan,data,vocab,answers,capture,train,export]")  # to decode starts vLLM twice more
    with running_apart_cluster([stand_in.train.parent, output_dir]) as cluster:
        assert cluster.machines is not None
        _, second = cluster.machines.members
        options = [f"recipe={RECIPE}", "--nodes=2", "--target-nodes=1"]
        options += ["--gpus-per-node=0", "--cpus-per-task=1"]
        shown = run_command("scripts/submit", "--dry-run", *options, *run)
        assert shown.status == 0, shown.err
        script = tmp_path / "slurm.sh"
        script.write_text(shown.out)
        number = cluster.call("sbatch", "--parsable", str(script)).strip()
        keys: list[str] = []
        wait_for(lambda: keys.extend(keys_of_servers(output_dir)) or bool(keys))
        under_way = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        wait_for(lambda: cluster.job_fields(number)["JobState"] not in under_way)
        log = (output_dir / f"slurm-{number}.out").read_text()
        assert cluster.job_fields(number)["JobState"] == "COMPLETED", log[-10000:]
        assert len([one for one in metrics_of(output_dir) if one["kind"] == "train"]) == STEPS
    assert (output_dir / "export" / "model.safetensors").exists()
    assert_captured(output_dir, stand_in.model, online=True)
    assert (output_dir / f"server-{second.name}-8000.log").exists()
    assert f"http://{second.address}:8000" in (output_dir / "config.yaml").read_text()
    for path in output_dir.rglob("*"):
        assert not path.is_file() or keys[0].encode() not in path.read_bytes(), path
