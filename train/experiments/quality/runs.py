"""The training runs of the sides: how long they are, and their kept weights. Finished runs are reused."""

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from eagle31.export.config_json import config_json
from eagle31.export.layouts import Layout
from eagle31.json_files import read_json, write_json
from eagle31.model.config import DrafterConfig
from train.bench.peers.environment import find_python
from train.experiments.quality.dataset import (
    STAGES,
    Dataset,
    RunFailed,
    end_running,
    load_vocab,
    run_eagle31,
    run_logged,
)
from train.experiments.quality.sides import Side
from train.versions import git_revision, package_versions

WORKER = Path(__file__).with_name("peer_worker.py")
# The steps of a run that is timed, of which the first are left out: they start threads and fill caches.
TIMED_STEPS, WARM_UP_STEPS = 12, 4
RESULT = "run.json"


@dataclass(frozen=True)
class Run:
    """One training run of a side; its learning-rate schedule ends at its last step."""

    side: Side
    steps: int
    keep_every: int
    seed: int
    budget: str  # such as "10 min" or "300 steps"
    threads: int

    @property
    def name(self) -> str:
        return f"{self.side.name}-{self.budget.replace(' ', '')}-seed{self.seed}"


class Runner:
    """Trains runs, several at a time.

    Args:
        directory: has a directory for each run.
        jobs: the number of runs at a time.
    """

    def __init__(self, dataset: Dataset, directory: Path, *, jobs: int) -> None:
        self.dataset = dataset
        self.directory = directory
        self.jobs = jobs
        self.failures: list[str] = []
        self.config = dataset.config(())

    def train(self, runs: Sequence[Run]) -> dict[Run, dict[str, Any]]:
        """Train the runs that are not finished; return the results of those that could be trained.

        A run that fails is reported in `failures`, and the others continue.
        """
        specs = {run: self._spec(run) for run in runs}  # here, because Hydra composes in one thread only
        pool = ThreadPoolExecutor(max_workers=self.jobs)
        futures: dict[Run, Future[dict[str, Any]]] = {
            run: pool.submit(self._train, run, spec) for run, spec in specs.items()
        }
        results = {}
        try:
            for run, future in futures.items():
                try:
                    results[run] = future.result()
                except RunFailed as failure:
                    self.failures.append(f"{run.name}: {failure}")
                    _say(self.failures[-1])
        except BaseException:  # an interruption: the threads wait for their processes
            pool.shutdown(wait=False, cancel_futures=True)
            end_running()
            raise
        pool.shutdown()
        return results

    def seconds_per_step(self, sides: Sequence[Side], threads: int) -> dict[Side, float]:
        """Return the time of a step of each side after its first steps, measured once."""
        runs = {
            side: Run(side, TIMED_STEPS, WARM_UP_STEPS, 0, f"{TIMED_STEPS} timed steps", threads)
            for side in sides
        }
        results = self.train(list(runs.values()))
        found = {}
        for side, run in runs.items():
            if run in results:
                seconds = {one["step"]: one["step_seconds"] for one in results[run]["kept"]}
                timed = seconds[TIMED_STEPS] - seconds[WARM_UP_STEPS]
                found[side] = timed / (TIMED_STEPS - WARM_UP_STEPS)
        return found

    def path(self, run: Run) -> Path:
        return self.directory / run.name

    def _train(self, run: Run, spec: dict[str, Any]) -> dict[str, Any]:
        directory = self.path(run)
        if (directory / RESULT).exists():
            result: dict[str, Any] = read_json(directory / RESULT)
            if result["spec"] == spec:
                return result
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        _say(f"training {run.name}: {run.steps:,} steps")
        started = time.perf_counter()
        train = self._train_peer if run.side.is_peer else self._train_eagle31
        result = train(run, directory)
        wall_seconds = round(time.perf_counter() - started, 1)
        trained = result["kept"][-1]["step_seconds"]
        _say(f"finished {run.name}: {trained:.0f} s of steps, {wall_seconds:.0f} s in all")
        result |= {"spec": spec, "wall_seconds": wall_seconds, "git_revision": git_revision()}
        write_json(directory / RESULT, result)
        return result

    def _spec(self, run: Run) -> dict[str, Any]:
        """Return everything that a run depends on, except for the code, in the form of its JSON file."""
        artifacts = {stage: path.name for stage, path in self.dataset.artifacts.items()}
        spec: dict[str, Any] = asdict(run) | {"artifacts": artifacts, "jobs": self.jobs}
        config = self.dataset.config(run.side.overrides)
        parts = ("train",) if run.side.is_peer else ("drafter", "optim", "deepspeed", "train")
        spec |= {"config": {part: _plain(asdict(getattr(config, part))) for part in parts}}
        plain: dict[str, Any] = json.loads(json.dumps(spec, default=str))
        return plain

    def _train_eagle31(self, run: Run, directory: Path) -> dict[str, Any]:
        link_artifacts(self.dataset, directory)
        arguments = [
            *self.dataset.overrides,
            *run.side.overrides,
            f"output_dir={directory}",
            f"stages=[{','.join((*STAGES, 'train'))}]",
            f"train.max_steps={run.steps}",
            f"train.keep_weights_every={run.keep_every}",
            f"train.validate_every={run.steps}",
            f"train.save_every={run.steps}",
            "train.keep_checkpoints=1",
            f"train.seed={run.seed}",
        ]
        run_eagle31(arguments, directory / "log.txt", run.threads)
        (trained,) = (path.parent for path in directory.glob("artifacts/train-*/stage.json"))
        kept = [
            kept_weights(path, directory)
            for path in sorted(trained.glob("checkpoints/weights/*.safetensors"))
        ]
        for checkpoint in trained.glob("checkpoints/step-*"):
            shutil.rmtree(checkpoint)  # for resuming, which a measurement does not
        return {
            "kept": kept,
            "artifact": str(trained.relative_to(directory)),
            "command": ["python", "train/main.py", *arguments],
            "versions": package_versions(),
        }

    def _train_peer(self, run: Run, directory: Path) -> dict[str, Any]:
        dataset, train = self.dataset, self.config.train
        drafter = dataset.drafter(self.config, len(load_vocab(dataset.artifacts["vocab"]).d2t))
        worker = {
            "peer": run.side.name,
            "store": str(dataset.artifacts["capture"] / "train"),
            "target": str(dataset.target),
            "tensors": str(dataset.tensors),
            "llama_config": llama_config(drafter),
            "published_config": published_config(drafter),
            "draft_vocab_size": drafter.draft_vocab_size,
            "aux_layer_ids": list(drafter.aux_layer_ids),
            "row_tokens": train.row_tokens,
            "rows_per_step": train.rows_per_step,
            "steps": run.steps,
            "keep_every": run.keep_every,
            "seed": run.seed,
            "threads": run.threads,
            "output": str(directory),
        }
        write_json(directory / "worker.json", worker)
        command = [str(find_python(run.side.name)), "-I", str(WORKER), str(directory / "worker.json")]
        run_logged(command, directory / "log.txt", run.threads)
        return {**read_json(directory / "result.json"), "command": command}


def budget_steps(minutes: float, seconds_per_step: float) -> int:
    """Return the steps that fit a budget."""
    return max(1, round(60 * minutes / seconds_per_step))


def link_artifacts(dataset: Dataset, directory: Path) -> None:
    """Make the shared data's artifacts those of a run's output directory, in which it trains alone."""
    (directory / "artifacts").mkdir()
    for path in dataset.artifacts.values():
        (directory / "artifacts" / path.name).symlink_to(os.path.abspath(path))


def kept_weights(path: Path, directory: Path) -> dict[str, Any]:
    """Return the step of kept weights and what it took to train them."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    return {
        "step": int(metadata["step"]),
        "step_seconds": float(metadata["step_seconds"]),
        "supervised_positions": int(metadata["supervised_positions"]),
        "checkpoint": str(path.relative_to(directory)),
    }


def llama_config(config: DrafterConfig) -> dict[str, Any]:
    """Return the arguments of transformers' LlamaConfig for the peers' decoder layer."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(config.served_rope),
    }


def published_config(config: DrafterConfig) -> dict[str, Any]:
    """Return the config.json of a drafter that SpecForge trains; it feeds back the state before the norm."""
    return config_json(config, Layout.vllm, "float32") | {"norm_output": False}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {key: getattr(value, "value", value) for key, value in values.items()}


def _say(line: str) -> None:
    # In one piece, because two threads write.
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stderr.flush()
