"""What all commands have in common: --help, what they say outside the environment, and messages."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.torchrun import ROOT, environment, preloaded_python, torchrun_command

COMMANDS = sorted(
    path
    for path in (ROOT / "scripts").rglob("*")
    if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env python3")
)


def test_the_commands_are_found() -> None:
    assert ROOT / "scripts" / "evaluate" in COMMANDS
    assert ROOT / "scripts" / "bench" / "step" in COMMANDS


@pytest.mark.parametrize("script", [*COMMANDS, ROOT / "train" / "main.py"], ids=lambda path: path.name)
def test_help_is_help(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(sys, "path", list(sys.path))  # a command puts the repository's root there
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: ")
    assert "--help" in printed.out
    assert printed.err == ""


def main_py(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "train/main.py", *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_entrys_help_shows_the_recipes_and_where_the_keys_are_explained() -> None:
    done = main_py("--help", python=preloaded_python())
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("recipe=NAME", "quickstart", "qwen3_8b", "docs/configuration.md", "--cfg job"):
        assert name in done.stdout
    assert (ROOT / "docs" / "configuration.md").is_file()


def test_cfg_prints_the_full_configuration_and_runs_nothing(tmp_path: Path) -> None:
    settings = ["recipe=quickstart", "train.max_steps=7", f"output_dir={tmp_path}/run"]
    done = main_py(*settings, "--cfg", "job", python=preloaded_python())
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n  max_steps: 7\n" in done.stdout
    assert "recipe_name: quickstart\n" in done.stdout
    assert not (tmp_path / "run").exists()


MISTAKE = "recipe=quick"
MESSAGE = "error: recipe=quick: There is no such choice. Did you mean quickstart?"


def test_a_mistake_is_one_line_and_status_2() -> None:
    done = main_py(MISTAKE)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{MESSAGE}\n")


@pytest.mark.usefixtures("preloaded_children")
@pytest.mark.parametrize("num_processes", [1, 2])
def test_torchrun_shows_the_message_once_before_its_table_and_in_it(num_processes: int) -> None:
    command = torchrun_command("train/main.py", MISTAKE, num_processes=num_processes)
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, "torchrun's own status of any failed process"
    before, _, table = done.stderr.partition("train/main.py FAILED")
    assert before.splitlines().count(MESSAGE) <= 1
    assert MESSAGE in table, "the table is the end of a long output"
    assert "exitcode  : 2" in table
    assert "UserError" not in done.stderr


def test_commands_outside_the_environment_say_how_to_activate_it(tmp_path: Path) -> None:
    # Those in scripts/setup make environments.
    found = [path for path in COMMANDS if path.parent.name != "setup"]
    in_the_environment = [str(path.relative_to(ROOT)) for path in found]
    assert in_the_environment
    started = {
        name: subprocess.Popen(
            [sys.executable, "-I", "-S", str(ROOT / name)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in (*in_the_environment, "train/main.py")
    }
    for name, process in started.items():
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (2, ""), (name, err)
        assert err.startswith("error: package="), (name, err)
        assert "run `source .venv/bin/activate`" in err
        assert len(err.splitlines()) == 1, (name, err)
    assert os.listdir(tmp_path) == []
