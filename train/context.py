"""The state that the stages of a run share: the target, its tokenizer, the drafter's shape."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.capture.hf import HiddenStateCapture, check_head
from data.embedded.target import EmbeddedTarget, ensure_embedded_target
from data.generation.answers import AnswerGenerator
from data.sampling import Sampling
from data.target.architecture import check_architecture
from data.target.aux_layers import check_aux_layer_ids, default_aux_layer_ids
from data.target.checkpoint import Checkpoint
from data.target.loading import load_target
from data.target.modules import TargetModules, locate
from data.target.parts import TargetParts, load_target_parts
from data.target.spec import TargetSpec
from data.target.tokenizer import load_tokenizer
from data.vllm.arguments import CaptureEngine
from eagle31.export.layouts import check_layout
from eagle31.export.read import LoadedExport
from eagle31.model.config import DrafterConfig
from train.artifact import Artifact
from train.config.drafter import DrafterShape
from train.config.run import RunConfig, Stage
from train.config.target import EMBEDDED, TargetEngine
from train.config.training import OptimConfig
from train.distributed import World
from train.drafter.published import (
    fetch_checkpoint,
    open_published,
    starting_ids,
    starting_notes,
    starting_shape,
)
from train.drafter.shape import complete_shape
from train.inference.completions import transformers_generator, vllm_generator
from train.inference.inputs import target_inputs, transformers_inputs, vllm_inputs
from train.inference.servers import RunServers, ServerSettings, start_limit
from train.inference.target import CapturedTarget
from train.inference.vllm import capture_engine
from train.optim.learning_rates import with_rates
from train.plan.placement import ServerPlacement, run_placement
from train.plan.target import target_size
from train.trainer.continuation import EarlierTraining


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
    begun_split: dict[str, Any] = field(default_factory=dict)  # settings of `SPLIT` with which it was begun

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def cache_dir(self) -> Path:
        return Path(self.config.cache_dir)

    @cached_property
    def embedded(self) -> EmbeddedTarget:
        """The embedded target and its conversations, trained at first use on this machine."""
        return ensure_embedded_target(self.cache_dir / "embedded", progress=self.world.is_main)

    @cached_property
    def spec(self) -> TargetSpec:
        target = self.config.target
        return TargetSpec(
            model=str(self.embedded.model) if target.model == EMBEDDED else target.model,
            revision=target.revision,
            dtype=target.dtype,
            trust_remote_code=target.trust_remote_code,
            attn_implementation=target.attn_implementation,
            device_map=target.device_map,
            layers_path=target.layers_path,
            norm_path=target.norm_path,
            embed_path=target.embed_path,
            lm_head_path=target.lm_head_path,
        )

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.spec, self.config.target.chat_template)

    @cached_property
    def parts(self) -> TargetParts:
        return load_target_parts(self.spec, self.cache_dir)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a completion."""
        ids = set(self.parts.eos_token_ids)
        if self.tokenizer.eos_token_id is not None:
            ids.add(self.tokenizer.eos_token_id)
        return tuple(sorted(ids))

    @cached_property
    def initial(self) -> LoadedExport | None:
        """The checkpoint in `drafter.init_from`, in float32 on the CPU."""
        if self.initial_directory is None:
            return None
        ids = starting_ids(self.initial_directory, self.config.drafter.aux_layer_ids)
        return open_published(self.initial_directory, self.parts, ids, "drafter.init_from")

    @cached_property
    def initial_directory(self) -> Path | None:
        shape = self.config.drafter
        if shape.init_from is None:
            return None
        return fetch_checkpoint(shape.init_from, shape.init_revision, "drafter.init_from")

    @cached_property
    def initial_fingerprint(self) -> str | None:
        """The fingerprint of the weights in `drafter.init_from`."""
        directory = self.initial_directory
        return None if directory is None else Checkpoint(str(directory.resolve())).fingerprint(self.cache_dir)

    @cached_property
    def shape(self) -> DrafterShape:
        """The recipe's shape, completed by the checkpoint in `drafter.init_from`.

        Raises:
            UserError: the two contradict each other, or the checkpoint is for another target.
        """
        if self.initial is None:
            return self.config.drafter
        shape = starting_shape(self.config.drafter, self.initial.drafter.config)
        if self.world.is_main:
            for note in starting_notes(shape, self.initial, self.parts):
                print(f"init_from: {note}")
        return shape

    @cached_property
    def aux_layer_ids(self) -> tuple[int, ...]:
        ids = self.shape.aux_layer_ids
        if ids is None:
            return default_aux_layer_ids(self.parts.num_layers)
        return check_aux_layer_ids(ids, self.parts.num_layers)

    @property
    def captured_target(self) -> CapturedTarget:
        return CapturedTarget(self.spec, self.parts, self.aux_layer_ids)

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
            stall_seconds=60 * self.config.capture.stall_minutes,
        )

    @property
    def start_seconds(self) -> float:
        """How long a vLLM server of the target may take to start."""
        minutes = self.config.vllm.start_minutes
        if minutes is not None:
            return 60 * minutes
        return start_limit(target_size(self.config.target, self.parts.config).checkpoint_bytes)

    def capture_engine(self, further_args: Mapping[str, Any] = MappingProxyType({})) -> CaptureEngine:
        """Return the vLLM engine that captures and writes everything that this run needs.

        Args:
            further_args: arguments of the engine in addition to `vllm.engine_args`.
        """
        config = self.config
        regenerate = config.data.regenerate
        written = config.data.max_tokens + regenerate.max_new_tokens if regenerate.enabled else 0
        return capture_engine(
            self.captured_target,
            config.capture,
            config.vllm.engine_args | dict(further_args),
            # A sample fits a row, and so does a held-out prompt with its completion. A regenerated sample is
            # cut to `data.max_tokens` only after it is written.
            max_tokens=max(config.train.row_tokens, written),
            output_dir=self.output_dir,
        )

    def open_generator(self) -> AbstractContextManager[AnswerGenerator]:
        """Open the engine that writes the target's completions; what it holds is free at the end."""
        config = self.config
        if config.target.engine is TargetEngine.hf:
            settings = config.data.regenerate
            return transformers_generator(
                self.spec, self.world.device, settings.batch_size, settings.processes
            )
        servers, expected = self.servers, self.captured_target.expected_states()
        return vllm_generator(servers.endpoints(everywhere=True), expected, servers.patience_seconds)

    def completion_inputs(self) -> dict[str, Any]:
        """Return what the target's completions depend on apart from the prompts and the sampling settings."""
        config, engine = self.config, self.config.target.engine
        in_vllm = engine is TargetEngine.vllm
        return (
            target_inputs(config.target, self.parts.fingerprint)
            | {"engine": engine.value}
            | (vllm_inputs(config.vllm.engine_args) if in_vllm else transformers_inputs(config.target))
        )

    def sampling(self, max_new_tokens: int, temperature: float) -> Sampling:
        """Return how a completion of this run is written."""
        return Sampling(max_new_tokens, self.eos_token_ids, temperature, self.config.seed)

    @property
    def template_kwargs(self) -> dict:
        return dict(self.config.data.template_kwargs)

    @property
    def train_seed(self) -> int:
        """The seed of the drafter's first weights and of the order of the training samples."""
        seed = self.config.train.seed
        return self.config.seed if seed is None else seed

    def located(self, source: str, evaluation: bool) -> str:
        """Return a source of conversations, or the path of the embedded target's."""
        if source != EMBEDDED:
            return source
        return str(self.embedded.held_out if evaluation else self.embedded.train)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the training step."""
        return torch.bfloat16 if self.config.deepspeed.precision.value == "bf16" else torch.float32

    def drafter_config(self, draft_vocab_size: int) -> DrafterConfig:
        """Return the drafter's complete shape: the values that the recipe sets, else the target's."""
        return complete_shape(
            self.shape, self.parts.config, self.aux_layer_ids, self.parts.vocab_size, draft_vocab_size
        )

    @cached_property
    def optim(self) -> OptimConfig:
        """The settings of the optimizer, with the rule's learning rates where the recipe gives none."""
        return with_rates(self.config.optim, self.drafter_config(self.parts.vocab_size))

    def check_drafter(self) -> None:
        """Check, before any stage runs, that the shape and `drafter.init_from` fit the target.

        Raises:
            UserError: names what does not fit.
        """
        check_architecture(self.config.target.architecture, self.parts.config)
        config = self.drafter_config(self.shape.draft_vocab_size or self.parts.vocab_size)
        check_layout(config, self.config.export.layout)

    def load_target(self) -> tuple[PreTrainedModel, TargetModules]:
        """Load the frozen target; a stage that uses it drops it when it is done."""
        model = load_target(self.spec, self.world.device)
        return model, locate(model, self.spec)

    def open_capture(self) -> HiddenStateCapture:
        """Load the target with its capture hooks, and check that its head gives its logits."""
        model, modules = self.load_target()
        capture = HiddenStateCapture(model, modules, self.aux_layer_ids)
        check_head(capture, self.parts.head)
        return capture
