"""The pipeline: runs the selected stages in order and reuses the ones that are finished."""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from omegaconf import OmegaConf

from data.batches.row_schedule import check_divisible
from data.locks import try_lock
from data.store import DamagedShard
from eagle31.errors import UserError
from eagle31.json_files import write_json, write_text
from train.artifact import Artifact, has_trained
from train.command import FAILURE
from train.config.run import RunConfig, Stage, needed_stages, pushes, selected_stages
from train.context import RunContext
from train.distributed import World, read_when_set, shared_values, wait_for
from train.doctor.examine import check_start
from train.doctor.failures import naming_full_disk
from train.evaluation.cells import CELLS
from train.leftovers import remove_leftovers
from train.lifetime.activity import ACTIVITY
from train.lifetime.stops import STOPPED_FILE
from train.optim.learning_rates import with_rates
from train.optim.short_runs import FoundRate
from train.planning.at_hand import check_gpu_memory, cluster_at_hand
from train.planning.sizes import RunSizes
from train.reporting.hub import check_push, push_run
from train.requirements import check_environment, check_store, uses_servers
from train.stages.answers import answers_inputs, run_answers
from train.stages.capture import capture_inputs, run_capture
from train.stages.cells import cells_inputs, link_cells, run_cells
from train.stages.continuing import begin_training, link_results, share_continued, share_earlier
from train.stages.data import data_inputs, run_data
from train.stages.evaluate import evaluate_inputs, run_evaluate
from train.stages.export import export_inputs, link_export, run_export
from train.stages.find_lr import check_stored, find_rates
from train.stages.plan import announce_plan, announce_work
from train.stages.report import run_report
from train.stages.servers import begin_servers, end_servers, prepare_servers
from train.stages.train import check_rows, run_train, train_inputs
from train.stages.vocab import run_vocab, vocab_inputs
from train.versions import git_revision, package_versions

_UNFINISHED = "stages/unfinished"


@dataclass(frozen=True)
class StageRun:
    """The functions of a stage."""

    inputs: Callable[[RunContext], dict[str, Any]]  # returns everything that the result depends on
    run: Callable[[RunContext, Path], dict[str, Any]]  # fills the directory and returns a summary
    files: tuple[str, ...] = ()  # patterns of the files that later stages read
    every_rank: bool = False  # otherwise rank 0 runs it and the others wait


# Shards are checked when they are read.
_STORES = ("*/manifest.json", "*/index.safetensors", "*/capture.json")
_METRICS, _BEST = "metrics.jsonl", "checkpoints/best/*"
STAGES = {
    Stage.data: StageRun(data_inputs, run_data, ("train/*", "held_out.json", "training_prompts.npy")),
    Stage.vocab: StageRun(vocab_inputs, run_vocab, ("vocab.json", "vocab.safetensors")),
    Stage.answers: StageRun(answers_inputs, run_answers, ("validation/*", "test/*")),
    Stage.capture: StageRun(capture_inputs, run_capture, _STORES, every_rank=True),
    Stage.cells: StageRun(cells_inputs, run_cells, ("*.json",), every_rank=True),
    Stage.train: StageRun(train_inputs, run_train, (_METRICS, _BEST), every_rank=True),
    Stage.export: StageRun(
        # Not README.md, which the report writes again.
        export_inputs,
        run_export,
        ("checkpoint/config.json", "checkpoint/*.safetensors", "checkpoint/verification/*"),
    ),
    Stage.evaluate: StageRun(evaluate_inputs, run_evaluate, ("evaluation.json",)),
}


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
            run_stages(context)


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
    before: list[Stage] = [one for one in stages[: stages.index(Stage.train)] if one in STAGES]
    before.remove(Stage.cells)
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
        check_links(context.output_dir)
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


def check_ranks(context: RunContext) -> None:
    """Check that each rank has as many rows of a step, or say what empty ones a resumed training has.

    Raises:
        UserError: the rows cannot be divided equally, and there is no training to resume.
    """
    train, size = context.config.train, context.world.size
    try:
        check_divisible(train.rows_per_step, train.rows_per_step_start, size)
    except UserError as error:
        if not has_trained(context.output_dir):
            raise
        print(
            f"train: the {error.value} rows of a step cannot be divided equally among {size} processes: "
            f"{-error.value % size} more rows are empty",  # type: ignore[operator]
            flush=True,
        )


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
    elif stage is Stage.cells:
        link_cells(context)
    elif stage is Stage.export:
        link_export(context)
    elif stage is Stage.report:
        print(run_report(context))
    elif stage is Stage.push and pushes(config):
        _say(context, f"push: {push_run(context.output_dir, config.hub)}")


def unfinished_stages(
    context: RunContext, needed: Sequence[Stage], problem: UserError | None = None
) -> list[Stage]:
    """Locate the result of each stage, and return the stages that have none yet, as rank 0 sees it.

    Args:
        problem: why there is no training to continue.

    Raises:
        UserError: the training to continue cannot be continued with these settings.
    """
    for stage in needed:
        if stage in STAGES:
            if stage is Stage.train:
                share_continued(context, STAGES[stage].inputs(context), problem)
            inputs = STAGES[stage].inputs(context)
            artifact = Artifact.locate(context.output_dir / "artifacts", stage.value, inputs)
            context.artifacts[stage] = artifact
    values = shared_values()
    if context.world.is_main:
        link_results(context, [stage for stage in needed if stage in STAGES])
        found = [one.value for one in STAGES if one in needed and not is_finished(context, one)]
        check_training(context, needed, exports=Stage.export.value in found)
        values.set(_UNFINISHED, json.dumps(found))
    return [Stage(name) for name in json.loads(read_when_set(values, _UNFINISHED))]


def is_finished(context: RunContext, stage: Stage) -> bool:
    """Return whether a stage's result is there as it was written. A damaged one is made again, and is named.

    `check_training` compares the files of a training, which is not repeated without a word from the user.
    """
    artifact = context.artifacts[stage]
    if artifact.finished:
        damage = None if stage is Stage.train else artifact.damage(cache_dir=context.cache_dir)
    elif artifact.manifest_path.exists():
        damage = f"{artifact.manifest_path} was altered"
    else:
        return False
    if damage is None:
        return True
    print(f"{stage.value}: made again, because {damage}", file=sys.stderr, flush=True)
    if artifact.directory.is_symlink():  # to another run's result
        artifact.directory.unlink()
    else:
        artifact.reopen()  # before any rank looks
    return False


def check_training(context: RunContext, needed: Sequence[Stage], *, exports: bool) -> None:
    """Check the files of a finished training that this run reads.

    Raises:
        UserError: one is missing or was altered.
    """
    if Stage.train not in needed or not context.artifacts[Stage.train].finished:
        return
    artifact = context.artifacts[Stage.train]
    files = ([_BEST] if exports else []) + ([_METRICS] if Stage.report in context.config.stages else [])
    damage = artifact.damage(files, context.cache_dir)
    if damage is not None:
        remedy = f"{damage}. Restore the file, or delete this directory to train again."
        raise UserError("train", artifact.directory, remedy)


def check_links(output_dir: Path) -> None:
    """Raise UserError where a stage would replace something that no run has made."""
    for name in ("export", CELLS):
        path = output_dir / name
        if path.exists() and not path.is_symlink():
            remedy = f"It is not the link that a run makes to its {name}; move it elsewhere."
            raise UserError("output_dir", path, remedy)


def check_selected(context: RunContext, stage: Stage) -> None:
    """Raise UserError if a stage without a result is not selected."""
    selected = context.config.stages
    if stage not in selected:
        raise UserError(
            "stages",
            [one.value for one in selected],
            f"They need stage '{stage.value}', which has no result for this configuration; add it.",
        )


def run_stage(context: RunContext, stage: Stage, unfinished: Sequence[Stage]) -> None:
    """Reuse the stage's finished result, or make it."""
    definition, world, artifact = STAGES[stage], context.world, context.artifacts[stage]
    ACTIVITY.enter(stage.value)
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
        with naming_full_disk(artifact.directory):
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
    lock = try_lock(output_dir / ".lock", on_lost=lambda: _end_run(output_dir))
    if lock is None:
        raise UserError(
            "output_dir", output_dir, "Another run is using this directory; wait for it or end it."
        )
    with lock:
        yield


def _end_run(output_dir: Path) -> None:
    # At once: whatever this run still wrote would be among the files of the other one.
    message = f"error: Another run has taken over {output_dir}, because this one did not answer."
    print(message, file=sys.stderr, flush=True)
    os._exit(FAILURE)


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
