"""The batch script that scripts/submit writes, and what it refuses."""

import subprocess
from pathlib import Path

import pytest

from eagle31.errors import UserError
from tests.runs.here import run_command
from tests.train.launch.slurm_cluster import debian_packages
from train.config.compose import composed
from train.launch.slurm import Job, check_job, render

NEEDED = ["target.model=somewhere", "data.train=some.jsonl"]
TOKENS = ("HF_TOKEN", "WANDB_API_KEY", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def script(job: Job, *arguments: str, output_dir: str = "/shared/run") -> str:
    return render(job, "any_target", arguments, Path(output_dir), "/env/bin/python")


def options_of(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_options_reach_sbatch_and_tokens_stay_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in TOKENS:
        monkeypatch.setenv(name, "planted")
    options = ["--nodes=3", "--target-nodes", "1", "--gpus-per-node=4", "--save-seconds=600"]
    options += ["--partition", "gpu", "--time=1-12:00:00", "--cpus-per-task=32", "--sbatch=--reservation=x"]
    options += ["--setup", "module load cuda", "--container-image=a.sqsh", "--mount=/data", "--dry-run"]
    run = ["recipe=any_target", "capture=vllm_online", *NEEDED]
    directories = [f"output_dir={tmp_path}/run", "artifacts_dir=/results"]
    done = run_command("scripts/submit", *options, *run, *directories)
    assert done.status == 0, done.err
    assert options_of(done.out) == [
        "--job-name=eagle31-any_target",
        f"--output={tmp_path}/run/slurm-%j.out",
        "--open-mode=append",
        "--nodes=3",
        "--ntasks-per-node=1",
        "--requeue",
        "--signal=B:USR1@600",
        "--gpus-per-node=4",
        "--partition=gpu",
        "--time=1-12:00:00",
        "--cpus-per-task=32",
        "--reservation=x",
    ]
    for part in ("\nmodule load cuda\n", "--nnodes=2 --nproc-per-node=4", "serve_target"):
        assert part in done.out
    assert done.out.count(" --container-image=a.sqsh --container-mounts=") == 2
    assert done.out.count(",/data:/data,/results:/results ") == 2
    assert "here=(\n    python3\n)" in done.out
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600" in done.out
    assert "planted" not in done.out + done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("target_nodes", [0, 1])
def test_script_passes_shellcheck_and_forwards_the_arguments(tmp_path: Path, target_nodes: int) -> None:
    arguments = ["data.train=a b's $HOME.jsonl", "recipe=any_target", "data.template_kwargs={a: [1,2]}"]
    path = tmp_path / "slurm.sh"
    path.write_text(script(Job(nodes=4, target_nodes=target_nodes), *arguments))
    shellcheck = debian_packages() / "usr" / "bin" / "shellcheck"
    checked = subprocess.run([shellcheck, path], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    array = path.read_text().partition("\nrun=(")[2].partition("\n)\n")[0]
    printed = subprocess.check_output(["bash", "-c", f"run=({array}\n); printf '%s\\n' \"${{run[@]}}\""])
    assert printed.decode().splitlines() == ["recipe=any_target", arguments[0], arguments[2]]


def test_a_job_that_has_its_nodes_alone_has_their_memory() -> None:
    assert options_of(script(Job()))[-2:] == ["--exclusive", "--mem=0"]
    for option in ("--mem=9G", "--mem-per-gpu=9G"):
        assert options_of(script(Job(sbatch=[option])))[-2:] == ["--exclusive", option]
    assert "--mem=0" not in options_of(script(Job(sbatch=["--cpus-per-task=4"])))


def test_log_path_that_sbatch_would_misread_is_refused() -> None:
    for output_dir in ("/shared/my run", "/shared/%j"):
        with pytest.raises(UserError, match="output_dir"):
            script(Job(), output_dir=output_dir)


@pytest.mark.parametrize(
    ("job", "settings", "field"),
    [
        (Job(nodes=0), (), "--nodes"),
        (Job(nodes=3), (), "train.rows_per_step"),
        (Job(nodes=2, target_nodes=1), ("capture=hf", "target.engine=hf"), "--target-nodes"),
        (Job(nodes=2, target_nodes=1), ("vllm.servers=[http://a:1]",), "--target-nodes"),
    ],
)
def test_what_a_job_could_not_run_is_refused(job: Job, settings: tuple[str, ...], field: str) -> None:
    config = composed(["recipe=kimi_k2_6", *settings])
    with pytest.raises(UserError) as caught:
        check_job(job, config, resumes=False)
    assert caught.value.field == field
    check_job(Job(nodes=3), config, resumes=True)


def test_the_recipe_is_checked_first_and_sbatch_has_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    done = run_command("scripts/submit", "recipe=any_target")
    assert (done.status, done.err.startswith("error: target.model=")) == (2, True)
    done = run_command("scripts/submit", "recipe=any_target", *NEEDED, f"output_dir={tmp_path}/run")
    assert (done.status, "command=sbatch" in done.err) == (2, True)
