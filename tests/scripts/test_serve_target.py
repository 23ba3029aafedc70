"""What `scripts/serve_target` starts; tests/data/capture/vllm run what is started so."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from data.capture.vllm.environment import KEY_VARIABLE
from data.target.spec import TargetSpec
from tests.data.target.tiny_target import save_target
from tests.runs.forked import run
from tests.runs.here import run_command

KEY = "the-key-of-this-test"
# Prints how it is called; the server on the port 8124 ends with a status, others stay.
FAKE = """
import json, os, sys, time
if "-c" in sys.argv:  # a check of vLLM's environment, which has no Mooncake
    sys.exit(1)
print(json.dumps([os.getpid(), sys.argv[1:], os.environ.get("VLLM_API_KEY")]), flush=True)
if "8123" in sys.argv:
    time.sleep(600)
sys.exit(1)
"""


def fake_python(directory: Path) -> Path:
    """Return a Python for vLLM that prints how it is called."""
    python = directory / "python"
    python.write_text(f"#!{sys.executable}\n{FAKE}")
    python.chmod(0o755)
    return python


def recipe(spec: TargetSpec, output_dir: Path) -> list[str]:
    settings = [f"target.model={spec.model}", "data.train=none", "deepspeed.precision=fp32"]
    settings.append("data.regenerate.enabled=false")
    return [
        "recipe=any_target",
        *settings,
        f"output_dir={output_dir}",
        "data.max_tokens=100",
        "train.row_tokens=128",
        "evaluate.max_new_tokens=28",
    ]


def test_servers_of_a_recipe_end_together(tmp_path: Path) -> None:
    spec, output_dir = save_target(tmp_path / "target"), tmp_path / "out"
    arguments = ["drafter.aux_layer_ids=[0,2]", "+vllm.engine_args.tensor_parallel_size=2", "--servers", "2"]
    command = [*recipe(spec, output_dir), *arguments, "--host", "0.0.0.0", "--port", "8123"]
    variables = {"EAGLE31_VLLM_PYTHON": str(fake_python(tmp_path)), KEY_VARIABLE: KEY}
    output = run("scripts/serve_target", *command, status=2, variables=variables, torchrun=False)
    assert "vLLM ended with status 1 before it was ready" in output
    [printed] = [line for line in output.splitlines() if line.startswith("vllm.servers=")]
    # What other nodes use.
    first, second = printed.removeprefix("vllm.servers=[").removesuffix("]").split(",")
    address = first.removeprefix("http://").removesuffix(":8123")
    assert (first, second) == (f"http://{address}:8123", f"http://{address}:8124")
    assert address not in ("0.0.0.0", "127.0.0.1", "localhost")
    logs = sorted(output_dir.glob("server-*.log"))
    assert [path.name[-9:] for path in logs] == ["-8123.log", "-8124.log"]
    process, options, key = json.loads(logs[0].read_text())
    assert not psutil.pid_exists(process)  # although only the other one has failed
    assert key == KEY
    assert KEY not in printed + str(options)
    given = {name: value for name, value in pairwise(options) if name.startswith("--")}
    assert (given["--host"], given["--port"]) == ("0.0.0.0", "8123")
    assert (given["--max-model-len"], given["--tensor-parallel-size"]) == ("129", "2")
    settings = json.loads(given["--kv-transfer-config"])["kv_connector_extra_config"]
    # An online run of the recipe finds its spool below one of the roots.
    assert (settings["aux_layer_ids"], settings["roots"]) == ([0, 2], [str(output_dir), "/dev/shm"])


def test_other_machines_are_served_with_a_key_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    done = run_command("scripts/serve_target", "recipe=any_target", "--host", "0.0.0.0")
    assert (done.status, done.out) == (2, "")
    assert "VLLM_API_KEY=: Other machines reach the server at --host 0.0.0.0" in done.err
    assert "export VLLM_API_KEY=$(openssl rand -hex 32)" in done.err
