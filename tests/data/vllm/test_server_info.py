"""The files that describe vLLM's engines in their roots."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from data.vllm.server_info import ServerInfo, info_path, remove_ended, remove_info, write_info
from tests.train.torchrun import ROOT

INFO = ServerInfo("a", "target", None, (1,), 2, 8, "float32", "cpu", 50, 20, ())
_START = """
import sys
from data.vllm.server_info import ServerInfo, write_info
write_info(ServerInfo("killed", "target", None, (1,), 2, 8, "float32", "cpu", 50, 20, (sys.argv[1],)))
print("written", flush=True)
input()
"""


def test_the_file_of_a_killed_engine_is_removed_by_the_next_one(tmp_path: Path) -> None:
    left = info_path(str(tmp_path), "killed")
    command = [sys.executable, "-c", _START, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"written\n"
        remove_ended(tmp_path)
        assert left.exists(), "the engine runs"
        engine.kill()
    assert left.exists()
    elsewhere = json.loads(left.read_text())
    elsewhere["engine"]["machine"] = "another"
    others = {"elsewhere": json.dumps(elsewhere), "damaged": "{", "earlier": json.dumps(INFO.to_json())}
    for name, content in others.items():
        info_path(str(tmp_path), name).write_text(content)
    info = replace(INFO, roots=(str(tmp_path),))
    write_info(info)
    assert {path.name for path in tmp_path.iterdir()} == {f".vllm-{name}.json" for name in (*others, "a")}
    remove_info(info)
    assert not info_path(str(tmp_path), "a").exists()
