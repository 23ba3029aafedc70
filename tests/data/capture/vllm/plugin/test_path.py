"""What vLLM's processes import of ours."""

import ast
import subprocess
import sys
from pathlib import Path

from data.capture.vllm.environment import ROOT, capture_environment

# What runs in a vLLM process but does not import vLLM itself.
IMPORTS = """
import sys
import eagle31_vllm
import data.capture.vllm.plugin.delivery, data.capture.vllm.plugin.gate
import data.capture.vllm.capture_request, data.capture.vllm.server_info
print(*(module.__file__ for name, module in sys.modules.items() if name.split(".")[0] in ("data", "eagle31")))
"""
ALLOWED = {"numpy", "safetensors", "torch", "tqdm", "mooncake", "data", "eagle31", *sys.stdlib_module_names}


def run(python: Path, script: Path, directory: Path, **variables: str) -> list[str]:
    done = subprocess.run(
        [python, script],
        cwd=directory,
        env=capture_environment(python) | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.split()


def test_vllms_processes_import_only_what_they_need(vllm_python: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IMPORTS)
    files = run(vllm_python, script, tmp_path)
    assert str(ROOT / "data" / "capture" / "vllm" / "plugin" / "gate.py") in files
    imported = {
        name.split(".")[0]
        for file in files
        for node in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert imported <= ALLOWED
