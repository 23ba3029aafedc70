"""The batch script, and the arguments that scripts/submit refuses. Takes about 15 s."""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from data.transport.mooncake_store import outward_address
from eagle31.errors import UserError
from tests.processes import command_of, listening
from tests.train.launch.slurm_cluster import debian_packages, free_ports
from tests.train.torchrun import checked_config, environment, preloaded_python, torchrun_command
from train.config.compose import CHECKOUT
from train.config.launcher import LauncherConfig, LauncherKind, check_launcher, time_seconds
from train.config.training import TrainConfig
from train.launch.slurm import (
    Submission,
    check_capture_nodes,
    check_rows,
    mooncake_port,
    render,
    run_arguments,
)
from train.stop import STOPPED, STOPPED_FILE

NEEDED = ["target.model=somewhere", "data.train=some.jsonl"]


def script(
    launcher: LauncherConfig,
    *arguments: str,
    output_dir: str = "/shared/run",
    mooncake_port: int | None = None,
) -> str:
    python = "/env/bin/python"
    submission = Submission(
        arguments, "any_target", Path(output_dir), python, CHECKOUT, mooncake_port=mooncake_port
    )
    return render(submission, launcher)


def options_of(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_options_reach_sbatch() -> None:
    launcher = LauncherConfig(
        LauncherKind.slurm,
        gpus_per_node=4,
        nodes=3,
        cpus_per_task=32,
        mem="512G",
        partition="gpu",
        account="lab",
        qos="long",
        constraint="a100&ib",
        time="1-12:00:00",
        signal_seconds=600,
        sbatch=["--reservation=x"],
        setup=["module load cuda"],
    )
    check_launcher(launcher)
    text = script(launcher)
    assert options_of(text) == [
        "--job-name=eagle31-any_target",
        "--output=/shared/run/slurm-%j.out",
        "--open-mode=append",
        "--nodes=3",
        "--ntasks-per-node=1",
        "--requeue",
        "--signal=B:USR1@600",
        "--gpus-per-node=4",
        "--cpus-per-task=32",
        "--mem=512G",
        "--partition=gpu",
        "--account=lab",
        "--qos=long",
        "--constraint=a100&ib",
        "--time=1-12:00:00",
        "--reservation=x",
    ]
    assert "\nmodule load cuda\n" in text
    assert "--nnodes=3 --nproc-per-node=4" in text
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600" in text


def test_omitted_options_are_left_to_the_cluster() -> None:
    options = options_of(script(LauncherConfig(LauncherKind.slurm)))
    assert "--exclusive" in options
    names = ("--gpus", "--cpus", "--mem", "--partition", "--account", "--qos", "--constraint", "--time")
    assert not [option for option in options if option.startswith(names)]


@pytest.mark.parametrize(("capture_nodes", "master"), [(0, None), (2, None), (1, 50051)])
def test_script_passes_shellcheck_and_forwards_the_arguments(
    tmp_path: Path, capture_nodes: int, master: int | None
) -> None:
    arguments = ["data.train=a b's $HOME.jsonl", "recipe=any_target", "data.template_kwargs={a: [1,2]}"]
    launcher = LauncherConfig(LauncherKind.slurm, nodes=4, capture_nodes=capture_nodes)
    path = tmp_path / "slurm.sh"
    path.write_text(script(launcher, *arguments, mooncake_port=master))
    shellcheck = debian_packages() / "usr" / "bin" / "shellcheck"
    checked = subprocess.run([shellcheck, path], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout
    array = path.read_text().partition("\nrun=(")[2].partition("\n)\n")[0]
    printed = subprocess.check_output(["bash", "-c", f"run=({array}\n); printf '%s\\n' \"${{run[@]}}\""])
    assert printed.decode().splitlines() == ["recipe=any_target", arguments[0], arguments[2]]


def test_tokens_stay_in_the_environment(tmp_path: Path) -> None:
    names = ("HF_TOKEN", "WANDB_API_KEY", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    tokens = dict.fromkeys(names, "planted")
    command = [
        preloaded_python(),
        "scripts/submit",
        "--dry-run",
        "recipe=any_target",
        "launcher=slurm",
        "launcher.nodes=2",
        "launcher.capture_nodes=1",
        "capture=vllm_online",
        "capture.transport=mooncake",
        *NEEDED,
    ]
    done = subprocess.run(
        [*command, f"output_dir={tmp_path}/run"],
        cwd=CHECKOUT,
        env=environment() | tokens,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --gpus-per-node=8" in done.stdout
    assert "serve_target" in done.stdout
    assert "mooncake_master" in done.stdout
    assert "planted" not in done.stdout + done.stderr
    assert "#SBATCH --export" not in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "port"),
    [
        ((), None),
        (("capture=vllm_online", "capture.mooncake.master=node7:50051"), None),
        (("capture=vllm_online", "capture.transport=mooncake"), 50051),
        (
            (
                "capture=vllm_online",
                "capture.transport=mooncake",
                "capture.mooncake.master=localhost:4000",
            ),
            4000,
        ),
        (
            ("capture=vllm_online", "capture.transport=mooncake", "capture.mooncake.master=node7:50051"),
            None,
        ),
        (("capture=vllm", "capture.transport=mooncake"), None),
    ],
)
def test_a_job_starts_the_mooncake_master_that_its_run_needs(
    arguments: tuple[str, ...], port: int | None
) -> None:
    config = checked_config(["recipe=any_target", *NEEDED, *arguments])
    assert mooncake_port(config.capture) == port


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("2:00:05", 7205),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-12:30:05", 131405),
    ],
)
def test_times_are_read_as_sbatch_reads_them(text: str, seconds: int) -> None:
    assert time_seconds(text) == seconds


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("capture_nodes", 2),
        ("mem", "lots"),
        ("mem", "-1"),
        ("time", "1h"),
        ("time", "1-"),
        ("time", "1:2:3:4"),
        ("time", "5"),
        ("time", "0"),
        ("partition", "two words"),
        ("account", 'a"b'),
        ("constraint", "a#b"),
        ("qos", ""),
        ("sbatch", ["reservation"]),
        ("sbatch", ["--a\n--b"]),
    ],
)
def test_invalid_options_are_refused_before_submission(key: str, value: object) -> None:
    launcher = LauncherConfig(LauncherKind.slurm, nodes=2)
    setattr(launcher, key, value)
    with pytest.raises(UserError) as caught:
        check_launcher(launcher)
    assert caught.value.field == f"launcher.{key}"
    assert caught.value.remedy.endswith(".")


def test_log_path_that_sbatch_would_misread_is_refused() -> None:
    with pytest.raises(UserError, match="output_dir"):
        script(LauncherConfig(LauncherKind.slurm), output_dir="/shared/my run")
    with pytest.raises(UserError, match="output_dir"):
        script(LauncherConfig(LauncherKind.slurm), output_dir="/shared/%j")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["launcher=slurm", *NEEDED], "recipe"),
        (["recipe=any_target", "launcher=slurm"], "target.model"),
        (["recipe=any_target", "launcher=slurm", "launcher.node=2", *NEEDED], "launcher.node"),
        (["recipe=any_target", "launcher=slurm", "launcher.time=soon", *NEEDED], "launcher.time"),
        (["recipe=any_target", "launcher=pbs", *NEEDED], "launcher"),
    ],
)
def test_recipe_is_checked_first(arguments: list[str], field: str) -> None:
    with pytest.raises(UserError) as caught:
        checked_config(arguments)
    assert caught.value.field == field


def test_rows_must_be_a_multiple_of_the_processes_that_train() -> None:
    launcher = LauncherConfig(LauncherKind.slurm, nodes=3, capture_nodes=1, gpus_per_node=4)
    check_rows(TrainConfig(rows_per_step=16, rows_per_step_start=8), launcher)
    with pytest.raises(UserError, match=r"train\.rows_per_step=12: .* processes, 8"):
        check_rows(TrainConfig(rows_per_step=12), launcher)
    with pytest.raises(UserError, match=r"train\.rows_per_step_start=4: .* processes, 8"):
        check_rows(TrainConfig(rows_per_step=16, rows_per_step_start=4), launcher)


# Replacements of the commands that the batch script calls; srun plays the run.
COMMANDS = {
    "srun": 'echo $$ > "$HERE/pid"; trap "exit 143" TERM; touch "$HERE/started"; while :; do sleep 0.1; done',
    "scontrol": 'case "$1 $2" in "show hostnames") echo n1 ;; requeue*) touch "$HERE/requeued" ;; esac',
    "squeue": "echo 1.0 train",
    "scancel": 'mkdir -p "$ADDED"; touch "$ADDED/kept"; kill "$(cat "$HERE/pid")"',
}


def start_job(
    tmp_path: Path,
    commands: dict[str, str],
    added: str,
    restarts: int,
    *,
    nodes: int = 1,
    mooncake_port: int | None = None,
) -> subprocess.Popen[str]:
    """Start the batch script with replacements of the commands that it calls."""
    (tmp_path / "bin").mkdir()
    for name, body in commands.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    before = tmp_path / "run" / "artifacts" / "train-0"
    before.mkdir(parents=True)
    (before / "kept").touch()
    launcher = LauncherConfig(LauncherKind.slurm, max_requeues=2, nodes=nodes)
    text = script(launcher, output_dir=str(tmp_path / "run"), mooncake_port=mooncake_port)
    (tmp_path / "slurm.sh").write_text(text.replace("/env/bin/python", sys.executable))
    variables = {"HERE": str(tmp_path), "ADDED": str(tmp_path / added), "SLURM_RESTART_COUNT": str(restarts)}
    variables |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_CPUS_ON_NODE": "1"}
    variables |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", tmp_path / "slurm.sh"], env=environment() | variables, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("stops", [True, False], ids=["stops", "fails"])
def test_a_run_that_stops_by_itself_is_requeued_and_one_that_fails_is_not(
    tmp_path: Path, stops: bool
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / STOPPED_FILE).touch()  # an earlier run's
    srun = f'touch "$HERE/run/{STOPPED_FILE}"; exit 1' if stops else "exit 1"
    job = start_job(tmp_path, COMMANDS | {"srun": srun}, added="elsewhere", restarts=0)
    printed, _ = job.communicate(timeout=30)
    assert ("slurm: queued again" in printed) == stops == (tmp_path / "requeued").exists()
    assert job.returncode == (STOPPED if stops else 1)


@pytest.mark.parametrize(
    ("restarts", "added", "last_line"),
    [
        (0, "elsewhere", "slurm: queued again"),
        (1, "run/artifacts/train-0/step-00000002", "slurm: queued again"),
        (1, "run/artifacts/.data-0.partial", "slurm: not queued again: nothing was added to "),
        (2, "run/artifacts/train-0/step-00000002", "slurm: not queued again: started again 2 times "),
    ],
)
def test_job_is_requeued_while_it_progresses_and_not_forever(
    tmp_path: Path, restarts: int, added: str, last_line: str
) -> None:
    job = start_job(tmp_path, COMMANDS, added=added, restarts=restarts)
    while not (tmp_path / "started").exists():
        assert job.poll() is None
        time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)
    printed, _ = job.communicate(timeout=30)
    assert printed.splitlines()[-1].startswith(last_line)
    queued = last_line == "slurm: queued again"
    assert (tmp_path / "requeued").exists() == queued
    assert job.returncode == (STOPPED if queued else 143)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_mooncake_master_listens_no_further_than_the_other_nodes_need(tmp_path: Path, nodes: int) -> None:
    own = outward_address()
    if find_spec("mooncake") is None or (nodes == 2 and own is None):
        pytest.skip("needs Mooncake, and for two nodes an address that other machines reach")
    scontrol = f'case "$1 $2" in "show hostnames") echo n1 ;; --oneliner*) echo " NodeAddr={own} " ;; esac'
    srun = 'touch "$HERE/started"; until [ -e "$HERE/done" ]; do sleep 0.1; done'
    [port] = free_ports(1)
    commands = COMMANDS | {"srun": srun, "scontrol": scontrol}
    job = start_job(tmp_path, commands, "elsewhere", 0, nodes=nodes, mooncake_port=port)
    while not (tmp_path / "started").exists():
        assert job.poll() is None, (tmp_path / "run" / "mooncake-1.log").read_text()
        time.sleep(0.05)
    [master] = [one for one in psutil.Process(job.pid).children() if "mooncake_master" in command_of(one)[:1]]
    listens = {address for address, _ in listening(master)}
    (tmp_path / "done").touch()
    job.communicate(timeout=30)
    psutil.wait_procs([master], timeout=10)
    assert not master.is_running()
    assert listens == ({"127.0.0.1"} if nodes == 1 else {"127.0.0.1", own})


SLOW_TO_SAVE = """
import signal, sys, time
from pathlib import Path
def save(*_):
    time.sleep(20)
    Path(sys.argv[1], "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
Path(sys.argv[1], "started").touch()
time.sleep(60)
"""


def test_torchrun_kills_after_the_timeout_that_the_script_sets(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_TO_SAVE)
    command = torchrun_command(str(tmp_path / "slow.py"), str(tmp_path))
    grace = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    process = subprocess.Popen(command, env=environment() | grace, stderr=subprocess.DEVNULL)
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGTERM)
    process.wait(timeout=60)
    assert not (tmp_path / "saved").exists()


def test_the_launchers_keys_are_not_forwarded_to_the_run() -> None:
    arguments = [
        "recipe=any_target",
        "launcher=slurm",
        "launcher.nodes=2",
        "train.max_steps=1",
        "+launcher.qos=q",
    ]
    assert run_arguments(arguments) == ["recipe=any_target", "train.max_steps=1"]


def test_a_run_says_that_the_launcher_has_no_effect(tmp_path: Path) -> None:
    arguments = ["recipe=qwen3_0_6b", "stages=[plan]", "launcher=slurm", f"output_dir={tmp_path}"]
    done = subprocess.run(
        [preloaded_python(), "train/main.py", *arguments],
        cwd=CHECKOUT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.startswith("note: launcher has no effect here; it is for scripts/submit")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (("launcher.kind=local",), "launcher.capture_nodes"),
        (("capture=hf", "target.engine=hf"), "launcher.capture_nodes"),
        (("vllm.servers=[http://a:1]",), "launcher.capture_nodes"),
        (("vllm.placement=shared",), "vllm.placement"),
        (("vllm.placement=split",), "vllm.placement"),
        (("vllm.gpu_memory_fraction=0.5",), "vllm.gpu_memory_fraction"),
        (("launcher.gpus_per_node=null",), "launcher.gpus_per_node"),
    ],
)
def test_nodes_for_servers_that_the_run_would_not_use_are_refused(
    settings: tuple[str, ...], field: str
) -> None:
    arguments = ["recipe=kimi_k2_6", "launcher=slurm", "launcher.nodes=2", "launcher.capture_nodes=1"]
    check_capture_nodes(checked_config(arguments))
    with pytest.raises(UserError) as caught:
        check_capture_nodes(checked_config([*arguments, *settings]))
    assert caught.value.field == field


@pytest.mark.parametrize("num_processes", [1, 2])
def test_one_process_on_this_machine_needs_no_torchrun(num_processes: int) -> None:
    setting = f"launcher.gpus_per_node={num_processes}"
    command = [preloaded_python(), "scripts/submit", "--dry-run", "recipe=quickstart", setting]
    printed = subprocess.run(
        command, cwd=CHECKOUT, env=environment(), capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert printed.split()[-2:] == [str(CHECKOUT / "train" / "main.py"), "recipe=quickstart"]
    assert (f"--nproc-per-node={num_processes}" in printed) == (num_processes > 1)
    assert ("torch.distributed.run" in printed) == (num_processes > 1)
