"""What `scripts/serve_target` starts; tests/data/vllm run what is started so."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from data.target.spec import TargetSpec
from data.vllm.environment import ROOT
from tests.data.target.tiny_target import NUM_LAYERS, save_target


def serve(tmp_path: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """With a Python that writes down how it is called, and ends with a status."""
    python = tmp_path / "python"
    shows = 'import json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ.get("PYTHONPATH")]))\n'
    shows += f"sys.exit({status})\n"
    python.write_text(f"#!{sys.executable}\n{shows}")
    python.chmod(0o755)
    command = [sys.executable, str(ROOT / "scripts" / "serve_target"), *arguments]
    environment = os.environ | {"EAGLE31_VLLM_PYTHON": str(python)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def recipe(spec: TargetSpec, output_dir: Path) -> list[str]:
    settings = [f"target.model={spec.model}", "data.train=none", "deepspeed.precision=fp32"]
    return [
        "any_target",
        *settings,
        f"output_dir={output_dir}",
        "data.max_tokens=100",
        "train.row_tokens=128",
        "evaluate.max_new_tokens=28",
    ]


def test_a_recipes_server(tmp_path: Path) -> None:
    spec, output_dir = save_target(tmp_path / "target"), tmp_path / "out"
    arguments = ["drafter.aux_layer_ids=[0,2]", "+vllm.engine_args.tensor_parallel_size=2"]
    done = serve(tmp_path, *recipe(spec, output_dir), *arguments, "--port", "8123")
    assert done.returncode == 0, done.stderr
    printed, started = done.stdout.splitlines()
    assert printed == "vllm.servers=[http://127.0.0.1:8123]"
    (_, module, *options), python_path = json.loads(started)
    assert module == "vllm.entrypoints.openai.api_server"
    assert {path.name for path in Path(python_path).glob("*.py")} == {"eagle31_vllm.py"}
    given = dict(pairwise(options))
    assert given["--model"] == spec.model
    assert (given["--host"], given["--port"]) == ("127.0.0.1", "8123")
    assert (given["--dtype"], given["--max-model-len"], given["--tensor-parallel-size"]) == (
        "float32",
        "129",
        "2",
    )
    speculative = json.loads(given["--speculative-config"])
    assert speculative["method"] == "extract_hidden_states"
    ids = speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert ids == [0, 2, NUM_LAYERS]
    settings = json.loads(given["--kv-transfer-config"])["kv_connector_extra_config"]
    assert (settings["aux_layer_ids"], settings["roots"]) == ([0, 2], [str(output_dir)])


def test_a_server_that_could_not_put_into_mooncake_is_not_started(tmp_path: Path) -> None:
    spec, output_dir = save_target(tmp_path / "target"), tmp_path / "out"
    through = ["capture=vllm_online", "capture.transport=mooncake"]
    done = serve(tmp_path, *recipe(spec, output_dir), *through, status=1)
    assert done.returncode == 2
    assert "pip install 'mooncake-transfer-engine" in done.stderr
    assert "vllm.servers=" not in done.stdout
