"""What several stages share: the target, its tokenizer, the drafter's shape."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.capture.hf import HiddenStateCapture, check_head
from data.checkpoint import Checkpoint
from data.embedded.target import EmbeddedTarget, ensure_embedded_target
from data.target import (
    TargetModules,
    TargetParts,
    TargetSpec,
    check_aux_layer_ids,
    default_aux_layer_ids,
    load_target,
    load_target_parts,
    load_tokenizer,
    locate,
)
from eagle31.config import DrafterConfig
from eagle31.errors import UserError
from eagle31.export import LoadedExport
from train.artifact import Artifact
from train.config import DrafterShape, RunConfig, Stage
from train.distributed import World
from train.published import (
    fetch_checkpoint,
    open_published,
    starting_ids,
    starting_notes,
    starting_shape,
)

EMBEDDED = "embedded"


@dataclass
class RunContext:
    """One run. What is costly is made at first use and kept."""

    config: RunConfig
    world: World
    artifacts: dict[Stage, Artifact] = field(default_factory=dict)
    reused: set[str] = field(default_factory=set)  # stages whose finished result was found

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    @cached_property
    def embedded(self) -> EmbeddedTarget:
        """The embedded target and its conversations; trained here if this machine has none yet."""
        return ensure_embedded_target(Path(self.config.cache_dir) / "embedded", progress=self.world.is_main)

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
        )

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.spec, self.config.target.chat_template)

    @cached_property
    def parts(self) -> TargetParts:
        return load_target_parts(self.spec)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        ids = set(self.parts.eos_token_ids)
        if self.tokenizer.eos_token_id is not None:
            ids.add(self.tokenizer.eos_token_id)
        return tuple(sorted(ids))

    @cached_property
    def initial(self) -> LoadedExport | None:
        """The drafter to start from, in float32 on the CPU."""
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
        """Of the weights to start from."""
        directory = self.initial_directory
        return None if directory is None else Checkpoint(str(directory.resolve())).fingerprint()

    @cached_property
    def shape(self) -> DrafterShape:
        """The recipe's, completed by the checkpoint to start from.

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
    def template_kwargs(self) -> dict:
        return dict(self.config.data.template_kwargs)

    @property
    def train_source(self) -> str:
        if self.config.data.train == EMBEDDED:
            return str(self.embedded.train)
        return self.config.data.train

    @property
    def eval_source(self) -> str | None:
        if self.config.data.eval == EMBEDDED:
            return str(self.embedded.held_out)
        return self.config.data.eval

    @property
    def dtype(self) -> torch.dtype:
        """Of training."""
        return torch.bfloat16 if self.config.deepspeed.precision.value == "bf16" else torch.float32

    def drafter_config(self, draft_vocab_size: int) -> DrafterConfig:
        """The drafter's shape: what the recipe sets, else the target's."""
        shape = self.shape
        target = self.parts.config.get_text_config()
        hidden_size = shape.hidden_size or self.parts.hidden_size
        heads = shape.num_attention_heads or target.num_attention_heads
        default_head_dim = getattr(target, "head_dim", None) or hidden_size // heads
        return DrafterConfig(
            hidden_size=hidden_size,
            intermediate_size=shape.intermediate_size or target.intermediate_size,
            num_hidden_layers=shape.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=shape.num_key_value_heads or target.num_key_value_heads,
            head_dim=shape.head_dim or default_head_dim,
            rms_norm_eps=shape.rms_norm_eps or target.rms_norm_eps,
            rope_parameters=rope_parameters(shape.rope_parameters, getattr(target, "rope_parameters", None)),
            max_position_embeddings=shape.max_position_embeddings or target.max_position_embeddings,
            vocab_size=self.parts.vocab_size,
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=self.parts.hidden_size,
            aux_layer_ids=self.aux_layer_ids,
            fc_norm=shape.fc_norm,
            norm_output=shape.norm_output,
            norm_before_residual=shape.norm_before_residual,
            bos_token_id=target.bos_token_id,
            eos_token_id=target.eos_token_id,
        )

    def check_drafter(self) -> None:
        """Refuses a shape, or a checkpoint to start from, that does not fit the target.

        Raises:
            UserError: names what does not fit; before any stage has run.
        """
        self.drafter_config(self.shape.draft_vocab_size or self.parts.vocab_size)

    def load_target(self) -> tuple[PreTrainedModel, TargetModules]:
        """The frozen target, loaded anew: stages that use it let it go when they are done."""
        model = load_target(self.spec, self.world.device)
        return model, locate(model, self.spec)

    def open_capture(self) -> HiddenStateCapture:
        """The target with its hooks, after checking that its head gives its logits."""
        model, modules = self.load_target()
        capture = HiddenStateCapture(model, modules, self.aux_layer_ids)
        check_head(capture, self.parts.head)
        return capture


def rope_parameters(own: dict | None, target: dict | None) -> dict:
    """The recipe's, else the target's.

    Raises:
        UserError: there are none, or one set per layer type, of which the drafter can have only one.
    """
    chosen = dict(own or target or {})
    if "rope_theta" not in chosen or any(isinstance(value, dict) for value in chosen.values()):
        raise UserError(
            "drafter.rope_parameters",
            chosen or None,
            "The target has no single set to take over; give one, such as "
            "{rope_type: default, rope_theta: 10000.0}.",
        )
    chosen.setdefault("rope_type", "default")
    return chosen
