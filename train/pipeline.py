"""The pipeline: runs the selected stages in order and reuses the ones that are finished."""

import gc
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

from data.capture.vllm.environment import check_engine_args, find_python
from data.store import DamagedShard
from data.target.tokenizer import tokenizer_fingerprint
from eagle31.errors import UserError
from eagle31.export.write import check_config
from eagle31.json_files import read_json, write_json, write_text
from train.artifact import (
    EXPORT,
    TRAINING,
    Artifact,
    artifacts_dir,
    check_links,
    exclusive,
    remove_leftovers,
    remove_leftovers_of_results,
)
from train.config.run import RunConfig, Stage, needed_stages, starts_vllm
from train.context import RunContext
from train.distributed import World, made_by_main, wait_for_ranks, wait_until
from train.engines.servers import server_settings
from train.launch.start import check_eagle3, check_environment, check_named, check_start
from train.plan.cluster import cluster_at_hand
from train.plan.earlier import note_settings
from train.plan.plan import check_gpu_memory, make_plan
from train.plan.sizes import RunSizes
from train.plan.table import format_plan, hours_lines, work_lines
from train.stages.answers import answers_inputs, check_answers, run_answers
from train.stages.capture import capture_inputs, run_capture
from train.stages.continuing import begin_training, link_training
from train.stages.data import data_inputs, run_data
from train.stages.evaluate import evaluate_inputs, run_evaluate
from train.stages.export import export_inputs, link_export, reopen_if_damaged, run_export
from train.stages.report import run_report
from train.stages.servers import begin_servers, end_engines, prepare_engines
from train.stages.train import check_ranks, check_rows, run_train, train_inputs
from train.stages.vocab import run_vocab, vocab_inputs
from train.stop import STOPPED_FILE, Stopped
from train.tracking import check_wandb
from train.trainer.learning_rate import with_rates
from train.versions import git_revision, package_versions

RUN_FILE = "run.json"  # in the output directory
SEEN_SECONDS = 90.0  # until all nodes see a file; NFS keeps what it knows of a directory for up to a minute


@dataclass(frozen=True)
class StageRun:
    """The functions of a stage."""

    inputs: Callable[[RunContext], dict[str, Any]]  # returns everything that the result depends on
    run: Callable[[RunContext, Path], dict[str, Any]]  # fills the directory and returns a summary
    every_rank: bool = False  # otherwise rank 0 runs it
    after: Callable[[RunContext], None] | None = None  # what rank 0 does with the result, also a reused one


def check_amounts(context: RunContext) -> None:
    """Print what the run takes, now that the number of tokens is known, and check that it can train on them.

    Raises:
        UserError: they do not fill the rows of a step.
    """
    if Stage.data.value not in context.reused:
        plan = make_plan(context.config, context.world)
        lines = [*work_lines(plan.work), *hours_lines(plan.first.hours)]
        print("plan: " + "; ".join(f"{name} {value}" for name, value in lines), flush=True)
    if Stage.train in context.config.stages:
        check_rows(context.config, context.artifacts[Stage.data])


STAGES = {
    Stage.data: StageRun(data_inputs, run_data, every_rank=True, after=check_amounts),
    Stage.vocab: StageRun(vocab_inputs, run_vocab),
    Stage.answers: StageRun(answers_inputs, run_answers, after=check_answers),
    Stage.capture: StageRun(capture_inputs, run_capture, every_rank=True),
    Stage.train: StageRun(train_inputs, run_train, every_rank=True, after=link_training),
    Stage.export: StageRun(export_inputs, run_export, after=link_export),
    Stage.evaluate: StageRun(evaluate_inputs, run_evaluate),
}


def run_pipeline(config: RunConfig, world: World, given: Sequence[str] = ()) -> None:
    """Run the selected stages. Every rank calls; rank 0 decides what is done.

    Args:
        given: the arguments of the command, for the commands that the plan prints.

    Raises:
        UserError: bad input, or a selected stage needs one that is neither selected nor finished.
    """
    world.use_device()
    config = replace(config, stages=[stage for stage in Stage if stage in config.stages])
    context = RunContext(config, world)
    quiet_libraries(world)
    with begun(context, given) if world.is_main else nullcontext():
        if set(config.stages) != {Stage.plan}:
            with closing_engines(context):
                run_stages(context)
        elif world.is_main:
            check_named(config)


@contextmanager
def begun(context: RunContext, given: Sequence[str]) -> Iterator[None]:
    """Hold the output directory, after a check that the run can write there; print the plan. On rank 0."""
    config, output_dir = context.config, context.output_dir
    check_start(config)
    if Stage.train in config.stages:
        check_wandb()
    with exclusive(output_dir):
        remove_leftovers(output_dir)
        remove_leftovers_of_results(artifacts_dir(config))
        (output_dir / STOPPED_FILE).unlink(missing_ok=True)
        print(format_plan(make_plan(config, context.world, given)), flush=True)
        write_configuration(config)
        yield


@contextmanager
def closing_engines(context: RunContext) -> Iterator[None]:
    """End at last what this rank has started."""
    try:
        yield
    except Stopped:
        wait_for_ranks(context.world)  # torchrun ends all as soon as one ends
        raise
    finally:
        context.servers.close()
        context.torchspec.close(together=False)


def run_stages(context: RunContext) -> None:
    """Run the selected stages in order, after checking what they need."""
    stages, is_main = needed_stages(context.config), context.world.is_main
    names, results, inputs = made_by_main(lambda: checked_stages(context, stages), context.world)
    context.artifacts = {
        Stage(name): Artifact.locate(Path(results), name, one) for name, one in inputs.items()
    }
    unfinished = [*map(Stage, names)]
    check_node(context, unfinished)
    begin_servers(context, unfinished)
    training = context.artifacts.get(Stage.train)
    if is_main and training is not None and not training.finished:
        # Now, because a training to continue may delete its checkpoint during other stages.
        with training.locked():
            begin_training(context)
    for stage in [stage for stage in stages if stage in STAGES]:
        run_stage(context, stage, stage in unfinished)
        unfinished = [one for one in unfinished if one is not stage]
        end_engines(context, unfinished)
        if is_main and (after := STAGES[stage].after) is not None:
            after(context)
    if is_main and Stage.report in stages:
        print(run_report(context))


def run_stage(context: RunContext, stage: Stage, unfinished: bool) -> None:
    """Have a stage's result made, unless it is there. Every rank calls."""
    artifact, world = context.artifacts[stage], context.world
    with artifact.locked() if unfinished and world.is_main else nullcontext():
        # Another run may have made it in the meantime.
        if not (unfinished and made_by_main(lambda: not artifact.finished, world)):
            return reuse(context, stage)
        prepare_engines(context, stage)
        started = time.perf_counter() - made_by_main(lambda: begin_stage(context, stage), world)
        if world.is_main or STAGES[stage].every_rank:
            try:
                summary = STAGES[stage].run(context, artifact.directory)
            except DamagedShard:
                # On every rank, because the launcher may end rank 0 before it gets here.
                context.artifacts[Stage.capture].reopen()
                raise
            release_memory(context)
        if world.is_main:
            seconds = time.perf_counter() - started
            artifact.finish(seconds, summary)
            print(f"{stage.value}: done in {seconds:.1f} s{_shown(summary)}", flush=True)


def reuse(context: RunContext, stage: Stage) -> None:
    """Note that a stage's result was there."""
    if context.world.is_main:
        directory = context.artifacts[stage].directory
        context.reused.add(stage.value)
        note_settings(context.config, stage, directory)
        print(f"{stage.value}: reused, {directory}", flush=True)


def begin_stage(context: RunContext, stage: Stage) -> float:
    """Begin the directory of a stage's result, and return what `Artifact.begin` does. Rank 0 calls."""
    artifact = context.artifacts[stage]
    print(f"{stage.value}: {artifact.directory}", flush=True)
    artifact.directory.mkdir(parents=True, exist_ok=True)
    note_settings(context.config, stage, artifact.directory)
    return artifact.begin()


def check_node(context: RunContext, unfinished: Sequence[Stage]) -> None:
    """Check that this rank can take part.

    Raises:
        UserError: this rank does not see rank 0's files, or would load other models, or its node's GPUs are
            too small.
    """
    run_file, rank = context.output_dir / RUN_FILE, context.world.rank
    run, models = made_by_main(lambda: [read_json(run_file), _model_fingerprints(context)], context.world)

    def seen() -> bool:
        try:
            return read_json(run_file) == run
        except OSError:  # on NFS also while it is replaced
            return False

    if not wait_until(seen, SEEN_SECONDS):
        remedy = f"Rank {rank} does not find there what rank 0 has written; "
        remedy += "give a directory on a file system that all nodes mount at the same path."
        raise UserError("output_dir", context.output_dir, remedy)
    if (own := _model_fingerprints(context)) != models:
        found = f"Rank {rank} finds files with these fingerprints, and rank 0 {models}"
        fields = "target.model, target.chat_template, drafter.init_from"
        raise UserError(fields, own, f"{found}; give every node the same.")
    if context.world.leads_node:
        check_gpu_memory(context.config, cluster_at_hand(context.world), [*unfinished])


def _model_fingerprints(context: RunContext) -> list[str | None]:
    """Return the fingerprints of the models, the tokenizer and its template that every rank loads."""
    target = context.target
    text = [tokenizer_fingerprint(target.tokenizer), target.template_fingerprint]
    return [target.parts.fingerprint, *text, context.drafter.initial_fingerprint]


def checked_stages(context: RunContext, stages: Sequence[Stage]) -> tuple[list[str], str, dict[str, Any]]:
    """Check what the stages need, and locate their results. Rank 0 calls.

    Returns:
        The names of the stages that have no result yet, the directory of the results, and the inputs of all.

    Raises:
        UserError: a stage cannot run here, or a stage without a result is not selected.
    """
    config, world = context.config, context.world
    for captures in (False, True):
        context.placement(captures=captures)  # refuses what cannot run on these nodes
    check_links(context.output_dir, (EXPORT, TRAINING))
    check_environment(config)
    check_eagle3(config)
    check_config(context.drafter.config(), config.export.layout)  # refuses what does not fit the target
    print(f"target: every engine computes it in {context.target.parts.dtype_name}", flush=True)
    unfinished = unfinished_stages(context, stages)
    if Stage.train in config.stages:
        check_ranks(config, world.size, context.artifacts[Stage.train].directory)
    if config.vllm.engine_args and starts_vllm(replace(config, stages=unfinished)):
        engine = server_settings(config, context.captured_target).engine
        check_engine_args(find_python(), engine.command_line(captures=False), config.vllm.engine_args)
    for stage in unfinished:
        if stage not in config.stages:
            remedy = f"They need stage '{stage.value}', which has no result for this configuration; add it."
            raise UserError("stages", [one.value for one in config.stages], remedy)
    inputs = {stage.value: one.inputs for stage, one in context.artifacts.items()}
    return [one.value for one in unfinished], str(artifacts_dir(config)), inputs


def unfinished_stages(context: RunContext, stages: Sequence[Stage]) -> list[Stage]:
    """Locate the result of each stage, and return the stages that have none yet."""
    # The vocab stage reads the directory of a training that continues another.
    continues = context.config.train.continue_from is not None
    for stage in [stage for stage in STAGES if stage in stages or continues]:
        inputs = STAGES[stage].inputs(context)
        context.artifacts[stage] = Artifact.locate(artifacts_dir(context.config), stage.value, inputs)
    if Stage.export in stages:
        reopen_if_damaged(context.artifacts[Stage.export])
    return [stage for stage, one in context.artifacts.items() if stage in stages and not one.finished]


def release_memory(context: RunContext) -> None:
    """Free the GPU memory that a stage used, because the next may start an engine in another process."""
    if torch.cuda.is_available():
        gc.collect()  # engines and modules refer to each other
        context.target.parts.head.cpu()
        torch.cuda.empty_cache()


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
        directory / RUN_FILE,
        {
            "git_revision": git_revision(),
            "versions": package_versions(),
            "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
    )


def _shown(summary: dict[str, Any]) -> str:
    shown = [f"{key}={_short(value)}" for key, value in summary.items() if isinstance(value, int | float)]
    return f" ({', '.join(shown)})" if shown else ""


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
