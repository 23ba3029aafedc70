"""The pipeline: runs the selected stages in order and reuses the ones that are finished."""

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from omegaconf import OmegaConf

from data.locks import try_lock
from data.store import DamagedShard
from eagle31.errors import UserError
from eagle31.json_files import write_json, write_text
from train.artifact import check_links, link_result
from train.config.run import RunConfig, Stage, needed_stages, pushes, selected_stages, uses_servers
from train.context import RunContext
from train.distributed import World, wait_for
from train.launch.doctor import check_environment, check_start, check_store
from train.leftovers import remove_leftovers
from train.optim.learning_rates import with_rates
from train.optim.short_runs import FoundRate
from train.plan.placement import cluster_at_hand
from train.plan.plan import check_gpu_memory
from train.plan.sizes import RunSizes
from train.reporting.hub import check_push, push_run
from train.stages.find_lr import check_stored, find_rates
from train.stages.plan import announce_plan, announce_work
from train.stages.report import run_report
from train.stages.servers import begin_servers, end_servers, prepare_servers
from train.stages.table import STAGES
from train.stages.train import check_ranks, check_rows
from train.stages.training.continuing import begin_training, share_earlier
from train.stages.unfinished import check_selected, unfinished_stages
from train.stop import STOPPED_FILE, Stopped
from train.versions import git_revision, package_versions

LOCK_FILE = ".lock"  # in the output directory
_EXPORT = "export"


def run_pipeline(config: RunConfig, world: World) -> None:
    """Run the selected stages. Every rank calls.

    Raises:
        UserError: bad input, or a selected stage needs one that is neither selected nor finished.
    """
    world.use_device()
    config = replace(config, stages=selected_stages(config))
    context = RunContext(config, world)
    quiet_libraries(world)
    if world.is_main:
        check_start(config)
    with exclusive(Path(config.output_dir)) if world.is_main else nullcontext():
        if world.is_main:
            remove_leftovers(Path(config.output_dir))
            (Path(config.output_dir) / STOPPED_FILE).unlink(missing_ok=True)
            announce_plan(context)
            write_configuration(config)
        if set(config.stages) != {Stage.plan}:
            try:
                run_stages(context)
            except Stopped as stopped:
                if world.is_main:
                    stopped.write(context.output_dir)
                wait_for(context.output_dir / STOPPED_FILE)  # torchrun ends all ranks as soon as one ends
                raise


def search_rates(config: RunConfig, world: World, num_steps: int) -> list[FoundRate]:
    """Return learning rates from short runs, after the stages before training. Every rank calls.

    Args:
        num_steps: of each short run.

    Raises:
        UserError: bad input, or no rate is best.
    """
    check_stored(config)
    world.use_device()
    stages = list(Stage)
    before = [one for one in stages[: stages.index(Stage.train)] if one in STAGES]
    context = RunContext(replace(config, stages=before), world)
    quiet_libraries(world)
    if world.is_main:
        check_start(config)
    with exclusive(Path(config.output_dir)) if world.is_main else nullcontext():
        run_stages(context)
        return find_rates(context, num_steps)


def run_stages(context: RunContext) -> None:
    """Run the selected stages in order, after checking what they need."""
    config, world = context.config, context.world
    selected, needed = set(config.stages), needed_stages(config)
    if Stage.train in selected and world.is_main:
        check_ranks(context)
    _ = context.placement  # refuses what cannot run on these nodes
    if world.is_main:
        check_links(context.output_dir, (_EXPORT,))
        check_environment(config)
    context.check_drafter()
    if pushes(config):
        check_push(config.hub)
    problem = share_earlier(context) if Stage.vocab in needed else None
    unfinished = unfinished_stages(context, needed, problem)
    check_gpu_memory(config, cluster_at_hand(world), unfinished)
    for stage in unfinished:
        check_selected(context, stage)
    try:
        begin_servers(context, unfinished)
        if Stage.train in unfinished and world.is_main and context.continued is not None:
            begin_training(context)  # now: the earlier training may delete its checkpoint during other stages
        for stage in needed:
            if stage in STAGES:
                run_stage(context, stage, unfinished)
            if stage in unfinished:
                unfinished.remove(stage)
            end_servers(context, unfinished)
            conclude(context, stage)
    finally:
        context.servers.close()


def conclude(context: RunContext, stage: Stage) -> None:
    """Do on rank 0 what follows a stage: update the plan, link the export, report, push."""
    config = context.config
    if not context.world.is_main:
        return
    if stage is Stage.data:
        if stage.value not in context.reused:
            announce_work(context)
        if Stage.train in config.stages:
            check_rows(context)
    elif stage is Stage.export:
        link_result(context.output_dir, _EXPORT, context.artifacts[stage].directory / "checkpoint")
    elif stage is Stage.report:
        print(run_report(context))
    elif stage is Stage.push and pushes(config):
        _say(context, f"push: {push_run(context.output_dir, config.hub)}")


def run_stage(context: RunContext, stage: Stage, unfinished: Sequence[Stage]) -> None:
    """Reuse the stage's finished result, or make it."""
    definition, world, artifact = STAGES[stage], context.world, context.artifacts[stage]
    if stage not in unfinished:
        context.reused.add(stage.value)
        _say(context, f"{stage.value}: reused, {artifact.directory}")
        return
    if uses_servers(context.config, stage):
        prepare_servers(context, stage, unfinished)
    if not world.is_main and not definition.every_rank:
        wait_for(artifact.manifest_path)
        return
    if world.is_main:
        check_store(context.config, stage)
        if stage is Stage.train:
            begin_training(context)
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
        seconds = time.perf_counter() - started
        artifact.finish(seconds, summary, definition.files, context.cache_dir)
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
    """Lock the output directory for this run until it ends.

    Raises:
        UserError: another run holds it.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    lock = try_lock(output_dir / LOCK_FILE)
    if lock is None:
        raise UserError(
            "output_dir", output_dir, "Another run is using this directory; wait for it or end it."
        )
    with lock:
        yield


def quiet_libraries(world: World) -> None:
    """Show other libraries' progress bars only on rank 0 and on a terminal."""
    if not (world.is_main and sys.stderr.isatty()):
        transformers.utils.logging.disable_progress_bar()
        datasets.disable_progress_bars()


def write_configuration(config: RunConfig) -> None:
    """Write the resolved configuration, the git revision and package versions to the output directory."""
    directory = Path(config.output_dir)
    config = replace(config, optim=with_rates(config.optim, RunSizes(config).drafter))
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
