"""The pipeline: runs the selected stages in order and reuses the ones that are finished."""

import fcntl
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from omegaconf import OmegaConf

from data.batches.loader import check_divisible
from data.store import DamagedShard
from eagle31.errors import UserError
from eagle31.json_files import write_json, write_text
from train.artifact import Artifact
from train.config.capture import check_ranks
from train.config.run import RunConfig, Stage
from train.context import RunContext
from train.distributed import World, wait_for
from train.reporting.hub import check_push
from train.requirements import check_environment, check_store
from train.stages.answers import answers_inputs, run_answers
from train.stages.capture import capture_inputs, run_capture
from train.stages.data import data_inputs, run_data
from train.stages.evaluate import evaluate_inputs, run_evaluate
from train.stages.export import export_inputs, link_export, run_export
from train.stages.plan import announce_plan, announce_work
from train.stages.push import push_run
from train.stages.report import run_report
from train.stages.train import check_rows, run_train, train_inputs
from train.stages.vocab import run_vocab, vocab_inputs
from train.versions import git_revision, package_versions


@dataclass(frozen=True)
class StageRun:
    """The functions of a stage."""

    inputs: Callable[[RunContext], dict[str, Any]]  # returns everything that the result depends on
    run: Callable[[RunContext, Path], dict[str, Any]]  # fills the directory and returns a summary
    every_rank: bool = False  # otherwise rank 0 runs it and the others wait


STAGES = {
    Stage.data: StageRun(data_inputs, run_data),
    Stage.vocab: StageRun(vocab_inputs, run_vocab),
    Stage.answers: StageRun(answers_inputs, run_answers),
    Stage.capture: StageRun(capture_inputs, run_capture, every_rank=True),
    Stage.train: StageRun(train_inputs, run_train, every_rank=True),
    Stage.export: StageRun(export_inputs, run_export),
    Stage.evaluate: StageRun(evaluate_inputs, run_evaluate),
}


def run_pipeline(config: RunConfig, world: World) -> None:
    """Run the selected stages. Every rank calls.

    Raises:
        UserError: bad input, or a selected stage needs one that is neither selected nor finished.
    """
    context = RunContext(config, world)
    quiet_libraries(world)
    with exclusive(Path(config.output_dir)) if world.is_main else nullcontext():
        if world.is_main:
            write_configuration(config)
            announce_plan(context)
        if set(config.stages) != {Stage.plan}:
            run_stages(context)


def run_stages(context: RunContext) -> None:
    """Run the selected stages in order, after checking what they need."""
    config, world = context.config, context.world
    selected = set(config.stages)
    stages = list(Stage)
    num_needed = 1 + max(stages.index(stage) for stage in selected)
    check_ranks(config.capture, config.vllm, world.size)
    if Stage.train in selected:
        check_divisible(config.train.rows_per_step, world.size)
    if world.is_main:
        check_environment(config)
    context.check_drafter()
    if pushes(config):
        check_push(config.hub)
    for stage in stages[:num_needed]:
        if stage is Stage.plan:
            continue
        if stage is Stage.report:
            if world.is_main:
                print(run_report(context))
            continue
        if stage is Stage.push:
            if world.is_main and pushes(config):
                _say(context, f"push: {push_run(context.output_dir, config.hub)}")
            continue
        run_stage(context, stage, stage in selected)
        if stage is Stage.data and world.is_main and stage.value not in context.reused:
            announce_work(context)
        if stage is Stage.data and world.is_main and Stage.train in selected:
            check_rows(context)
        if stage is Stage.export and world.is_main:
            link_export(context)


def pushes(config: RunConfig) -> bool:
    """Whether the run ends with a push: without hub.repo_id only if push is the one selected stage."""
    return Stage.push in config.stages and (config.hub.repo_id is not None or config.stages == [Stage.push])


def run_stage(context: RunContext, stage: Stage, selected: bool) -> None:
    """Reuse the stage's finished result, or make it."""
    definition, world = STAGES[stage], context.world
    artifact = Artifact.locate(context.output_dir / "artifacts", stage.value, definition.inputs(context))
    context.artifacts[stage] = artifact
    if artifact.finished:
        context.reused.add(stage.value)
        _say(context, f"{stage.value}: reused, {artifact.directory}")
        return
    if not selected:
        raise UserError(
            "stages",
            [one.value for one in context.config.stages],
            f"They need stage '{stage.value}', which has no result for this configuration; add it.",
        )
    if not world.is_main and not definition.every_rank:
        wait_for(artifact.manifest_path)
        return
    if world.is_main:
        check_store(context.config, stage)
    artifact.directory.mkdir(parents=True, exist_ok=True)
    _say(context, f"{stage.value}: {artifact.directory}")
    started = time.perf_counter()
    try:
        summary = definition.run(context, artifact.directory)
    except DamagedShard:
        # On every rank, because the launcher may end rank 0 before it gets here.
        context.artifacts[Stage.capture].reopen()
        raise
    release_memory(context)
    if world.is_main:
        artifact.finish(time.perf_counter() - started, summary)
        _say(context, f"{stage.value}: done in {time.perf_counter() - started:.1f} s{_shown(summary)}")
    wait_for(artifact.manifest_path)


def release_memory(context: RunContext) -> None:
    """Free the GPU memory that a stage used, because the next may start an engine in another process."""
    if torch.cuda.is_available():
        gc.collect()  # engines and modules refer to each other
        context.parts.head.cpu()
        torch.cuda.empty_cache()


@contextmanager
def exclusive(output_dir: Path) -> Iterator[None]:
    """Lock the output directory for this run; the kernel releases the lock when the process ends.

    Raises:
        UserError: another run holds it, possibly workers that outlived their launcher.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    with open(output_dir / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                "output_dir",
                output_dir,
                "Another run is using this directory; wait for it or end it.",
            ) from None
        yield


def quiet_libraries(world: World) -> None:
    """Show other libraries' progress bars only on rank 0 and on a terminal."""
    if not (world.is_main and sys.stderr.isatty()):
        transformers.utils.logging.disable_progress_bar()
        datasets.disable_progress_bars()


def write_configuration(config: RunConfig) -> None:
    """Write the resolved configuration, the git revision and package versions to the output directory."""
    directory = Path(config.output_dir)
    write_text(directory / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))
    write_json(
        directory / "run.json",
        {
            "git_revision": git_revision(),
            "versions": package_versions(),
            "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
    )


def _say(context: RunContext, line: str) -> None:
    if context.world.is_main:
        print(line, flush=True)


def _shown(summary: dict[str, Any]) -> str:
    shown = [f"{key}={_short(value)}" for key, value in summary.items() if isinstance(value, int | float)]
    return f" ({', '.join(shown)})" if shown else ""


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
