"""What the stages of a run share: its settings, results, target, drafter and servers."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from data.target.parts import CapturedTarget
from train.artifact import Artifact
from train.config.capture import CaptureSource
from train.config.run import RunConfig, Stage
from train.distributed import World
from train.drafter.chosen import ChosenDrafter
from train.drafter.shape import fitted
from train.engines.servers import RunServers, ServerSettings, server_settings
from train.engines.torchspec import TorchSpecEngines
from train.plan.cluster import cluster_at_hand
from train.plan.placement import TargetPlacement, place_target
from train.plan.sizes import RunSizes
from train.target import Target


@dataclass
class RunContext:
    """One run, as its stages get it. Expensive values are made at first use and kept."""

    config: RunConfig
    world: World
    started: float = field(default_factory=time.time)  # in seconds since the epoch
    artifacts: dict[Stage, Artifact] = field(default_factory=dict)
    reused: set[str] = field(default_factory=set)  # names of the stages that were finished already
    stop_reason: Callable[[], str | None] = lambda: None  # why training is to stop

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    @cached_property
    def target(self) -> Target:
        kwargs = dict(self.config.data.template_kwargs)
        return Target(self.config.target, kwargs, progress=self.world.is_main)

    @cached_property
    def drafter(self) -> ChosenDrafter:
        shape = fitted(self.config.drafter, self.target.parts.vocab_size)
        return ChosenDrafter(shape, self.target, announced=self.world.is_main)

    @property
    def captured_target(self) -> CapturedTarget:
        return CapturedTarget(self.target.spec, self.target.parts, self.drafter.aux_layer_ids)

    def placement(self, *, captures: bool) -> TargetPlacement:
        """Return where the target captures, or where it only writes.

        Raises:
            UserError: it cannot run there.
        """
        return place_target(RunSizes(self.config), cluster_at_hand(self.world), writing=not captures)

    @cached_property
    def servers(self) -> RunServers:
        """The vLLM servers of this run; none is started yet."""

        def settings(captures: bool) -> ServerSettings:
            placement = self.placement(captures=captures)
            target = self.captured_target
            return server_settings(self.config, target, placement.engine_args, placement.devices)

        log = self.output_dir / f"vllm-{self.world.node_rank}.log"
        return RunServers(self.config.vllm, settings, self.world, log)

    @cached_property
    def torchspec(self) -> TorchSpecEngines:
        """TorchSpec's engines of this run; none is started yet."""
        log_dir = self.output_dir / "torchspec"
        return TorchSpecEngines(self.config, self.world, lambda: self.captured_target, log_dir)

    @property
    def capturing(self) -> RunServers | TorchSpecEngines | None:
        """The engines in other processes that capture; None: transformers does, in the run's own."""
        return {
            CaptureSource.hf: None,
            CaptureSource.vllm: self.servers,
            CaptureSource.torchspec: self.torchspec,
        }[self.config.capture.source]
