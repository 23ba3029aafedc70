"""The vLLM servers across the stages: when they start, what is checked of them, and when they end."""

from collections.abc import Sequence
from functools import partial

from data.capture.vllm.arguments import CaptureEngine, check_final_states
from data.capture.vllm.client import VllmClient, check_states, check_target
from data.capture.vllm.server_info import ServerInfo
from data.generation.vllm import check_unchanged
from train.config.capture import CaptureSource
from train.config.data import SELF
from train.config.run import RunConfig, Stage, uses_servers, uses_torchspec
from train.context import RunContext
from train.distributed import World
from train.engines.probe import check_servers, probe_states
from train.engines.servers import server_settings
from train.engines.transport import open_run_spool, rank_name
from train.plan.target import longest_prompt

_CAPTURERS = {Stage.capture, Stage.train}
_WRITERS = {Stage.data, Stage.answers}  # have the target write completions


def begin_servers(context: RunContext, unfinished: Sequence[Stage]) -> None:
    """Start the servers that unfinished stages need, or check the ones that the recipe names.

    Every rank calls, before the first stage. Servers that are started load the target while the first stages
    run.

    Raises:
        UserError: a server is not what the run needs, or its states do not arrive.
    """
    users = [stage for stage in unfinished if uses_servers(context.config, stage)]
    if context.servers.named:
        for stage in users:
            _check(context, stage)
    elif users:
        context.servers.start(must_capture(context.config, users[0]))


def prepare_engines(context: RunContext, stage: Stage) -> None:
    """Wait for the servers that the run has started, and check them; start TorchSpec's engines.

    Every rank calls, before the stage.

    Raises:
        UserError: a server or engine does not start, is not what the run needs, or its states do not arrive.
    """
    if uses_servers(context.config, stage) and not context.servers.named:
        context.servers.start(must_capture(context.config, stage))
        context.servers.wait_until_ready()
        _check(context, stage)
    if uses_torchspec(context.config, stage):
        context.torchspec.start()


def end_engines(context: RunContext, unfinished: Sequence[Stage]) -> None:
    """End the servers and engines of the run once no unfinished stage needs them. Every rank calls."""
    if not any(uses_servers(context.config, stage) for stage in unfinished):
        context.servers.close()
    if not any(uses_torchspec(context.config, stage) for stage in unfinished):
        context.torchspec.close(together=True)


def server_engine(config: RunConfig) -> tuple[CaptureEngine, float]:
    """Return the engine that a vLLM server for this run needs, and how many seconds it may take to start.

    Raises:
        UserError: vLLM does not capture what training needs of this target.
    """
    context = RunContext(config, World(rank=0, local_rank=0, size=1))
    check_final_states(context.target.parts.config)
    settings = server_settings(config, context.captured_target)
    return settings.engine, settings.limit_seconds


def must_capture(config: RunConfig, stage: Stage) -> bool:
    """Return whether the servers that a run starts for a stage capture.

    Training data is written by plain ones: their cache holds no hidden states, and vLLM schedules
    asynchronously and verifies no draft. The few answers to held-out prompts come from those that capture.
    """
    return config.capture.source is CaptureSource.vllm and stage is not Stage.data


def _check(context: RunContext, stage: Stage) -> None:
    """Check the servers for a stage; the first process of each node has its states probed."""
    config, world, servers, target = context.config, context.world, context.servers, context.captured_target
    longest = longest_prompt(config)
    samples = stage is Stage.data and (config.data.regenerate.temperature != 0 or config.data.train == SELF)

    def check(server: VllmClient, info: ServerInfo) -> None:
        if must_capture(config, stage):
            check_states(target, longest, server, info)
        else:
            check_target(target, longest, server, info)
        if stage in _WRITERS:
            check_unchanged(server, info, samples=samples)

    if world.is_main:
        check_servers(servers.clients(everywhere=True), check)
    if stage in _CAPTURERS and world.leads_node:
        with open_run_spool(config, world.rank, "exact") as spool:
            key = f"{rank_name(context.output_dir, world.rank)}-probe"
            probe = partial(probe_states, spool=spool, key=key, head=target.parts.head)
            check_servers(servers.clients(everywhere=False), check, probe)
