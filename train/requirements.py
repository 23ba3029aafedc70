"""External requirements of the stages: vLLM's environment, and a Mooncake store."""

from collections.abc import Set
from urllib.parse import urlsplit

from data.addresses import is_loopback
from data.transport.mooncake_store import load_mooncake, reach
from data.vllm.environment import check_mooncake, find_python
from eagle31.errors import UserError
from train.config.capture import CaptureConfig, CaptureMode, CaptureSource, TransportKind
from train.config.run import RunConfig, Stage, has_cells
from train.config.target import TargetEngine
from train.config.vllm import VllmConfig


def check_environment(config: RunConfig) -> None:
    """Raise UserError if a selected stage starts vLLM and vLLM's environment is missing.

    A Mooncake master that the named servers cannot reach is refused, too.
    """
    check_master(config.capture, config.vllm)
    if starts_vllm(config):
        python = find_python()
        if config.capture.transport is TransportKind.mooncake and joins_mooncake(config, set(config.stages)):
            check_mooncake(python)


def check_master(capture: CaptureConfig, vllm: VllmConfig) -> None:
    """Raise UserError if servers on other nodes are given a Mooncake master under a loopback address."""
    host = capture.mooncake.master.rpartition(":")[0].strip("[]")
    remote = [url for url in vllm.servers if not is_loopback(urlsplit(url).hostname)]
    if capture.transport is TransportKind.mooncake and remote and is_loopback(host):
        remedy = f"{remote[0]} is another machine, where this address is its own; give the master's address."
        raise UserError("capture.mooncake.master", capture.mooncake.master, remedy)


def check_store(config: RunConfig, stage: Stage) -> None:
    """Raise UserError if this stage, or a selected later one, needs a Mooncake store and cannot join it."""
    later = set(list(Stage)[list(Stage).index(stage) :])
    if joins_mooncake(config, later & set(config.stages)):
        load_mooncake()
        reach(config.capture.mooncake.master)


def starts_vllm(config: RunConfig) -> bool:
    """Whether a selected stage starts vLLM on this machine."""
    if config.target.engine is TargetEngine.vllm and Stage.evaluate in config.stages:
        return True
    return not config.vllm.servers and any(uses_servers(config, stage) for stage in config.stages)


def uses_servers(config: RunConfig, stage: Stage) -> bool:
    """Whether a stage sends prompts to vLLM servers."""
    answers = config.target.engine is TargetEngine.vllm
    captures = config.capture.source is CaptureSource.vllm
    return {
        Stage.data: answers and config.data.regenerate.enabled,
        Stage.answers: answers,
        Stage.capture: captures,
        Stage.cells: has_cells(config) and (answers or captures),
        Stage.train: captures and config.capture.mode is CaptureMode.online,
    }.get(stage, False)


def joins_mooncake(config: RunConfig, stages: Set[Stage]) -> bool:
    """Whether one of these stages writes states to a Mooncake store or reads them."""
    capture = config.capture
    torchspec = capture.source is CaptureSource.torchspec
    online = capture.mode is CaptureMode.online and (torchspec or capture.transport is TransportKind.mooncake)
    captures = Stage.capture in stages or (has_cells(config) and Stage.cells in stages)
    return (torchspec and captures) or (online and Stage.train in stages)
