"""Changes of a configuration with which its servers can be placed."""

import copy
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from eagle31.errors import UserError
from train.config.capture import CaptureMode
from train.config.run import RunConfig, Stage, check
from train.config.vllm import Placement

Change = dict[str, Any]  # values by key
NODE_SERVER = "http://NODE:8000"  # a server that was started on another node


def repaired(config: RunConfig, works: Callable[[RunConfig], bool], gpus_per_node: int) -> Change:
    """Return the first change after which the configuration works.

    Args:
        works: whether the servers of a configuration can be placed.
    """
    for change in _candidates(config, gpus_per_node):
        changed = applied(config, change)
        try:
            check(changed)
        except UserError:
            continue
        if works(changed):
            return change
    raise AssertionError("servers on other nodes always work")


def applied(config: RunConfig, change: Change) -> RunConfig:
    """Return a copy of the configuration with these values."""
    changed = copy.deepcopy(config)
    for key, value in change.items():
        *groups, name = key.split(".")
        owner: Any = changed
        for group in groups:
            owner = owner[group] if isinstance(owner, dict) else getattr(owner, group)
        if isinstance(owner, dict):
            owner[name] = value
        else:
            setattr(owner, name, value)
    return changed


def assignments(change: Change) -> str:
    """Return the change as `key=value`, as the command line takes it."""
    return " ".join(f"{key}={_shown(value)}" for key, value in change.items())


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(_shown, value))}]"
    return str(value.value if isinstance(value, Enum) else value)


def _candidates(config: RunConfig, gpus_per_node: int) -> Iterator[Change]:
    """Yield changes to try, the smallest first."""
    steps = [*_of_placement(config), *smaller_training(config), *_of_parallelism(config, gpus_per_node)]
    yield from steps
    placement: Change = {"vllm.placement": Placement.auto}
    for step in steps:
        yield placement | step
    if config.capture.mode is CaptureMode.online:
        offline: Change = {"capture.mode": CaptureMode.offline}
        yield offline
        for step in steps:
            yield offline | step
    # Servers that are started by hand have all of their GPUs.
    elsewhere: Change = {"vllm.servers": [NODE_SERVER]}
    for further in (
        {},
        {"vllm.gpu_memory_fraction": None},
        placement,
        placement | {"vllm.gpu_memory_fraction": None},
    ):
        yield elsewhere | further
        without = [stage for stage in config.stages if stage is not Stage.evaluate]
        yield elsewhere | further | {"stages": without}


def _of_placement(config: RunConfig) -> Iterator[Change]:
    if config.vllm.gpu_memory_fraction is not None:
        yield {"vllm.gpu_memory_fraction": None}
    for kind in (Placement.auto, Placement.shared, Placement.split):
        if kind is not config.vllm.placement:
            yield {"vllm.placement": kind}
    if config.vllm.gpu_memory_fraction is not None:
        yield {"vllm.gpu_memory_fraction": None, "vllm.placement": Placement.auto}


def smaller_training(config: RunConfig) -> Iterator[Change]:
    """Yield changes with which training needs less memory, each with the ones before it."""
    change: Change = {}
    for stage in (1, 2):
        if config.deepspeed.zero_stage < stage:
            change["deepspeed.zero_stage"] = stage
            yield dict(change)
    if not config.train.activation_checkpointing:
        change["train.activation_checkpointing"] = True
        yield dict(change)
    if not config.deepspeed.offload_optimizer:
        change["deepspeed.offload_optimizer"] = True
        yield dict(change)


def _of_parallelism(config: RunConfig, gpus_per_node: int) -> Iterator[Change]:
    arguments = config.vllm.engine_args
    tensor = "vllm.engine_args.tensor_parallel_size"
    sizes = [1 << power for power in range(11) if 1 << power <= gpus_per_node]
    now = int(arguments.get("tensor_parallel_size", 1))
    # Larger ones first where memory is short; the largest that is left where GPUs are.
    for size in [*(one for one in sizes if one > now), *reversed([one for one in sizes if one < now])]:
        yield {tensor: size}
        if "data_parallel_size" in arguments:
            yield {tensor: size, "vllm.engine_args.data_parallel_size": 1}
    if "data_parallel_size" in arguments:
        yield {"vllm.engine_args.data_parallel_size": 1}
    if "gpu_memory_utilization" in arguments:
        yield {"vllm.engine_args.gpu_memory_utilization": 0.9}
