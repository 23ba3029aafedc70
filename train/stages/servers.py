"""The vLLM servers across the stages: when they start, what is checked of them, and when they end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from data.generation.vllm import check_unchanged
from data.store.codec import Encoding
from data.transport.protocol import Transport
from data.transport.spool import open_spool
from data.vllm.arguments import CaptureEngine
from data.vllm.client import check_server
from data.vllm.endpoint import Endpoint, check_target
from data.vllm.server_info import ServerInfo
from train.config.capture import CaptureSource
from train.config.run import RunConfig, Stage, uses_servers
from train.config.target import TargetEngine
from train.context import RunContext
from train.distributed import World
from train.inference.online import rank_name
from train.inference.probe import check_servers
from train.stages.capture import writes_stores_directly
from train.stages.training.states import opened_transport, training_encoding

_WRITERS = {Stage.data, Stage.answers}  # have the target write completions


def begin_servers(context: RunContext, unfinished: Sequence[Stage]) -> None:
    """Start the servers that unfinished stages need, or check the ones that the recipe names.

    Every rank calls, before the first stage. Servers that are started load the target while the first stages
    run.

    Raises:
        UserError: a server is not what the run needs, or its states do not arrive.
    """
    users = _users(context, unfinished)
    if users and context.servers.named:
        _check(context, users, captures=context.config.capture.source is CaptureSource.vllm)
    elif users:
        context.servers.start(must_capture(context, users[0]))


def prepare_servers(context: RunContext, stage: Stage, unfinished: Sequence[Stage]) -> None:
    """Wait for the servers that the run has started, and check them. Every rank calls, before the stage.

    Raises:
        UserError: a server does not start, is not what the run needs, or its states do not arrive.
    """
    servers = context.servers
    if servers.named:
        return
    captures = must_capture(context, stage)
    servers.start(captures)
    servers.wait_until_ready()
    if not servers.checked:
        users = [one for one in _users(context, unfinished) if must_capture(context, one) == captures]
        _check(context, users, captures)
        servers.checked = True


def end_servers(context: RunContext, unfinished: Sequence[Stage]) -> None:
    """End the servers that the run has started once no unfinished stage needs them. Every rank calls."""
    if not _users(context, unfinished):
        context.servers.close()


def server_engine(config: RunConfig) -> tuple[CaptureEngine, float]:
    """Return the engine that a vLLM server for this run needs, and how many seconds it may take to start."""
    context = RunContext(config, World(rank=0, local_rank=0, size=1))
    return context.capture_engine(), context.start_seconds


def must_capture(context: RunContext, stage: Stage) -> bool:
    """Return whether the servers of a stage capture as well as write completions.

    In a run that captures through vLLM they do, so that the same ones serve every stage. The exception is
    sampling on a CPU, where vLLM 0.32 ignores temperatures while it captures.
    """
    on_cpu = context.world.device.type == "cpu"
    return context.config.capture.source is CaptureSource.vllm and not (on_cpu and _samples(context, stage))


def _users(context: RunContext, unfinished: Sequence[Stage]) -> list[Stage]:
    return [stage for stage in unfinished if uses_servers(context.config, stage)]


def _samples(context: RunContext, stage: Stage) -> bool:
    return stage is Stage.data and context.config.data.regenerate.temperature > 0


def _check(context: RunContext, users: Sequence[Stage], captures: bool) -> None:
    """Check the servers for these stages; the first process of each node has its states probed."""
    world, servers = context.world, context.servers
    expected, longest = context.captured_target.expected_states(), context.capture_engine().max_tokens

    def check(server: Endpoint, info: ServerInfo) -> None:
        if captures:
            check_server(server, info, expected, None, longest)
        else:
            check_target(server, info, expected, longest)
        if context.config.target.engine is TargetEngine.vllm and _WRITERS & set(users):
            sampled = any(_samples(context, stage) for stage in users)
            check_unchanged(server, info, context.config.data.regenerate.temperature if sampled else 0.0)

    if world.is_main:
        # Servers that only write completions deliver no states.
        with _probed_directory(context, users if captures else []) as spool:
            check_servers(servers.endpoints(everywhere=True), check, spool, key=_probe_key(context))
    if Stage.train in users and world.leads_node:
        with opened_transport(context, training_encoding(context)) as (transport, _):
            check_servers(servers.endpoints(everywhere=False), check, transport, key=_probe_key(context))


def _probe_key(context: RunContext) -> str:
    # A transport is cleared of the keys that begin with the rank's name.
    return f"{rank_name(context.output_dir, context.world.rank)}-probe"


@contextmanager
def _probed_directory(context: RunContext, users: Sequence[Stage]) -> Iterator[Transport | None]:
    """Open a spool in the output directory if the servers write stores there."""
    if Stage.capture not in users or not writes_stores_directly(context.config):
        yield None
        return
    name = f"{rank_name(context.output_dir, context.world.rank)}-probe"
    with open_spool(context.output_dir, name, Encoding(), limit_bytes=0) as spool:
        yield spool
