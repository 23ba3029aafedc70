"""External requirements of the stages: vLLM's environment, and a Mooncake store."""

from collections.abc import Set
from urllib.parse import urlsplit

from data.addresses import is_loopback
from data.transport.mooncake_store import check_joinable, check_master
from data.vllm.environment import check_mooncake, find_python
from train.config.capture import CaptureMode, CaptureSource, TransportKind
from train.config.run import RunConfig, Stage
from train.config.target import TargetEngine
from train.config.vllm import VllmConfig


def check_environment(config: RunConfig) -> None:
    """Raise UserError if a selected stage starts vLLM and vLLM's environment is missing.

    A Mooncake master that the named servers cannot reach is refused, too.
    """
    check_master(config.capture.mooncake.master, mooncake_clients(config))
    if starts_vllm(config):
        python = find_python()
        if engine_joins_mooncake(config):
            check_mooncake(python)


def check_store(config: RunConfig, stage: Stage) -> None:
    """Raise UserError if this stage, or a selected later one, needs a Mooncake store and cannot join it."""
    later = set(list(Stage)[list(Stage).index(stage) :])
    if joins_mooncake(config, later & set(config.stages)):
        check_joinable(config.capture.mooncake.master)


def starts_vllm(config: RunConfig) -> bool:
    """Whether a selected stage starts vLLM on this machine."""
    if config.target.engine is TargetEngine.vllm and Stage.evaluate in config.stages:
        return True
    return not config.vllm.servers and any(uses_servers(config, stage) for stage in config.stages)


def remote_servers(vllm: VllmConfig) -> list[str]:
    """Return the URLs of the recipe's servers that are on other machines."""
    return [url for url in vllm.servers if not is_loopback(urlsplit(url).hostname)]


def mooncake_clients(config: RunConfig) -> list[str]:
    """Return the URLs of servers on other machines that put into the Mooncake store."""
    return remote_servers(config.vllm) if config.capture.transport is TransportKind.mooncake else []


def engine_joins_mooncake(config: RunConfig) -> bool:
    """Whether an engine that the run starts puts into the Mooncake store."""
    through = config.capture.transport is TransportKind.mooncake
    return through and starts_vllm(config) and joins_mooncake(config, set(config.stages))


def uses_servers(config: RunConfig, stage: Stage) -> bool:
    """Whether a stage sends prompts to vLLM servers."""
    answers = config.target.engine is TargetEngine.vllm
    captures = config.capture.source is CaptureSource.vllm
    return {
        Stage.data: answers and config.data.regenerate.enabled,
        Stage.answers: answers,
        Stage.capture: captures,
        Stage.train: captures and config.capture.mode is CaptureMode.online,
    }.get(stage, False)


def joins_mooncake(config: RunConfig, stages: Set[Stage]) -> bool:
    """Whether one of these stages writes states to a Mooncake store or reads them."""
    capture = config.capture
    online = capture.mode is CaptureMode.online and capture.transport is TransportKind.mooncake
    return online and Stage.train in stages
