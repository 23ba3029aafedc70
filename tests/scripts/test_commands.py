"""What all commands have in common: --help, what they say outside the environment, and messages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs.forked import ROOT, environment
from tests.runs.here import run_command
from tests.train.torchrun import torchrun_command

COMMANDS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "scripts").rglob("*")
    if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env python3")
)
MAIN = "train/main.py"


@pytest.mark.parametrize("script", [*COMMANDS, MAIN])
def test_help_is_help(script: str) -> None:
    done = run_command(script, "--help")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("usage: ")
    if script == MAIN:
        for name in ("recipe=NAME", "quickstart", "qwen3_8b", "docs/configuration.md", "--cfg job"):
            assert name in done.out


def test_cfg_prints_the_full_configuration_and_runs_nothing(tmp_path: Path) -> None:
    settings = ["recipe=quickstart", "train.max_steps=7", f"output_dir={tmp_path}/run"]
    done = run_command(MAIN, *settings, "--cfg", "job")
    assert (done.status, done.err) == (0, "")
    assert "\n  max_steps: 7\n" in done.out
    assert "recipe_name: quickstart\n" in done.out
    assert not (tmp_path / "run").exists()


def test_torchrun_shows_the_message_once_before_its_table_and_in_it() -> None:
    command = torchrun_command(MAIN, "recipe=quick")
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1, "torchrun's own status of any failed process"
    before, _, table = done.stderr.partition("train/main.py FAILED")
    message = "error: recipe=quick: There is no such choice. Did you mean quickstart?"
    assert before.splitlines().count(message) <= 1
    assert message in table, "the table is the end of a long output"
    assert "exitcode  : 2" in table
    assert "UserError" not in done.stderr


def test_commands_outside_the_environment_say_how_to_activate_it(tmp_path: Path) -> None:
    # Those in scripts/setup make environments.
    in_the_environment = [name for name in COMMANDS if not name.startswith("scripts/setup/")]
    started = {
        name: subprocess.Popen(
            [sys.executable, "-I", "-S", str(ROOT / name)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in (*in_the_environment, MAIN)
    }
    for name, process in started.items():
        out, err = process.communicate()
        assert (process.returncode, out) == (2, ""), (name, err)
        assert err.startswith("error: package="), (name, err)
        assert "run `source .venv/bin/activate`" in err
        assert len(err.splitlines()) == 1, (name, err)
    assert os.listdir(tmp_path) == []
