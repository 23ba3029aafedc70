"""What the stages of a run share: its settings, results, target, drafter and servers."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from data.capture.vllm.arguments import CaptureEngine
from data.target.architecture import check_architecture
from eagle31.export.write import check_config
from train.artifact import Artifact
from train.config.capture import TransportKind
from train.config.run import RunConfig, Stage
from train.config.training import OptimConfig
from train.distributed import World
from train.drafter.chosen import ChosenDrafter
from train.engines.servers import CapturedTarget, RunServers, ServerSettings, start_limit
from train.engines.transport import server_roots
from train.plan.placement import ServerPlacement, run_placement
from train.plan.target import target_size
from train.target import Target
from train.trainer.checkpoints import EarlierTraining
from train.trainer.learning_rate import with_rates


@dataclass
class RunContext:
    """One run. Expensive values are made at first use and kept."""

    config: RunConfig
    world: World
    started: float = field(default_factory=time.time)  # in seconds since the epoch
    artifacts: dict[Stage, Artifact] = field(default_factory=dict)
    reused: set[str] = field(default_factory=set)  # names of the stages that were finished already
    earlier: EarlierTraining | None = None  # the training that this run's can continue
    continued: EarlierTraining | None = None  # the one that it does continue

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def cache_dir(self) -> Path:
        return Path(self.config.cache_dir)

    @cached_property
    def target(self) -> Target:
        return Target(
            self.config.target,
            self.cache_dir,
            dict(self.config.data.template_kwargs),
            progress=self.world.is_main,
        )

    @cached_property
    def drafter(self) -> ChosenDrafter:
        return ChosenDrafter(self.config.drafter, self.target, announced=self.world.is_main)

    @property
    def captured_target(self) -> CapturedTarget:
        return CapturedTarget(self.target.spec, self.target.parts, self.drafter.aux_layer_ids)

    @cached_property
    def servers(self) -> RunServers:
        """The vLLM servers of this run; none is started yet."""
        log = self.output_dir / f"vllm-{self.world.node_rank}.log"
        return RunServers(self.config.vllm, self._server_settings, self.world, log)

    @cached_property
    def placement(self) -> ServerPlacement | None:
        """Where this run's vLLM servers are; None for a run without any.

        Raises:
            UserError: they cannot run there.
        """
        return run_placement(self.config, self.world)

    def _server_settings(self) -> ServerSettings:
        placement = self.placement
        assert placement is not None
        return ServerSettings(
            engine=self.capture_engine(placement.engine_args),
            devices=placement.devices,
            limit_seconds=self.start_seconds,
        )

    @property
    def start_seconds(self) -> float:
        """How long a vLLM server of the target may take to start."""
        return start_limit(target_size(self.config.target, self.target.parts.config).checkpoint_bytes)

    def capture_engine(self, further_args: Mapping[str, Any] = MappingProxyType({})) -> CaptureEngine:
        """Return the vLLM engine that captures and writes everything that this run needs.

        Args:
            further_args: arguments of the engine in addition to `vllm.engine_args`.
        """
        config = self.config
        regenerate = config.data.regenerate
        written = config.data.max_tokens + regenerate.max_new_tokens if regenerate.enabled else 0
        over_mooncake = config.capture.transport is TransportKind.mooncake
        return self.captured_target.vllm_engine(
            config.vllm.engine_args | dict(further_args),
            # A sample fits a row, and so does a held-out prompt with its completion. A regenerated sample is
            # cut to `data.max_tokens` only after it is written.
            max_tokens=max(config.train.row_tokens, written),
            roots=server_roots(config.capture, self.output_dir),
            mooncake_masters=[config.capture.mooncake.master] if over_mooncake else [],
        )

    @property
    def train_seed(self) -> int:
        """The seed of the drafter's first weights and of the order of the training samples."""
        seed = self.config.train.seed
        return self.config.seed if seed is None else seed

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the training step."""
        return torch.bfloat16 if self.config.deepspeed.precision.value == "bf16" else torch.float32

    @cached_property
    def optim(self) -> OptimConfig:
        """The settings of the optimizer, with the rule's learning rates where the recipe gives none."""
        return with_rates(self.config.optim, self.drafter.config(self.target.parts.vocab_size))

    def check_drafter(self) -> None:
        """Check, before any stage runs, that the shape and `drafter.init_from` fit the target.

        Raises:
            UserError: names what does not fit.
        """
        check_architecture(self.config.target.architecture, self.target.parts.config)
        check_config(self.drafter.config(), self.config.export.layout)
