"""Memory of one training GPU by part: DeepSpeed's state, frozen tensors, and the training step."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod

from eagle31.cost.flops import StepCounts
from eagle31.cost.memory import StepMemory, step_memory, validation_memory
from eagle31.model.config import DrafterConfig
from eagle31.training.rollout import CHUNK_ROWS
from train.config.training import TrainConfig
from train.trainer.matrices import matrix_shapes, orthogonalization_bytes

# DeepSpeed's default: elements of the buffer in which gradients are reduced.
_BUCKET = 500_000_000
_WIDE = 4  # float32
# The driver, NCCL, kernels and the allocator's fragments take the rest.
USABLE_FRACTION = 0.92
# Measured peaks are within this fraction of the estimate.
TOLERANCE = 0.15


@dataclass(frozen=True)
class TrainerSettings:
    """The settings of a recipe that memory depends on."""

    zero_stage: int
    bf16: bool
    offload_optimizer: bool
    train_lm_head: bool
    rollout_chunk: int | None
    draft_tokens: int  # of validation
    row_tokens: int
    rows_per_step: int
    world_size: int
    muon: bool = False

    @property
    def itemsize(self) -> int:
        return 2 if self.bf16 else 4

    @property
    def accumulates_alone(self) -> bool:
        """Whether DeepSpeed's bf16 optimizer holds all gradients in one float32 tensor, without buckets."""
        return self.bf16 and self.zero_stage == 1 and not self.offload_optimizer


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on one GPU."""

    weights: int
    gradients: int  # float32
    optimizer: int  # the moments, and with ZeRO the float32 weights; the average of the weights
    buffers: int  # for DeepSpeed's reductions and gathers
    frozen: int  # embedding, the target's head, and the draft head if it is not trained
    update: int  # temporary tensors of the optimizer's step, when there are no activations
    validation: int  # temporary tensors of validation
    step: StepMemory

    @property
    def held(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.buffers + self.frozen

    @property
    def total(self) -> int:
        """The peak in the forward and backward pass, in the optimizer's step or in validation."""
        return self.held + max(self.step.total, self.update, self.validation)

    def parts(self) -> dict[str, int]:
        """Return bytes by name, for the table; step, optimizer step and validation never coincide."""
        parts = asdict(self)
        step = parts.pop("step")
        apart = {"optimizer step": parts.pop("update"), "validation": parts.pop("validation")}
        return parts | step | apart


def trainer_memory(
    config: DrafterConfig,
    tensors: Mapping[str, Sequence[int]],
    settings: TrainerSettings,
    counts: StepCounts,
    device: str,
) -> TrainerMemory:
    """Return the memory of training on one rank.

    Args:
        tensors: shapes of the trained weights by name.
        counts: what the largest row has.
        device: "cuda" or "cpu".
    """
    size, stage = settings.itemsize, settings.zero_stage
    num_parameters = sum(map(prod, tensors.values()))
    matrices = matrix_shapes(tensors) if settings.muon else []
    # Adam's two moments or Muon's one, and with ZeRO the float32 weights.
    states = num_parameters * (3 if stage else 2) - sum(map(prod, matrices))
    split = [settings.world_size if stage >= needed else 1 for needed in (1, 2, 3)]
    local_gradients, local_weights = (num_parameters / n for n in split[1:])
    # At ZeRO 0 in bf16 the float32 weights are the model's, and a step computes with rounded ones.
    weight_bytes = size if stage or not settings.bf16 else _WIDE + size
    weights = local_weights * weight_bytes
    # A row in chunks adds up its gradients before DeepSpeed does.
    own_gradients = 0 if settings.rollout_chunk is None else num_parameters
    return TrainerMemory(
        weights=round(weights),
        gradients=round((local_gradients + own_gradients) * _WIDE),
        optimizer=0 if settings.offload_optimizer else round(states / split[0] * _WIDE),
        buffers=reduction_buffers(num_parameters, settings, device),
        frozen=frozen_bytes(config, settings),
        update=round(update_bytes(num_parameters, matrices, settings, device)),
        validation=validation_memory(
            config,
            row_tokens=settings.row_tokens,
            num_steps=settings.draft_tokens,
            itemsize=size,
            chunk_rows=settings.rollout_chunk or CHUNK_ROWS,
            device=device,
        ),
        step=step_memory(
            config,
            counts,
            row_tokens=settings.row_tokens,
            itemsize=size,
            head_trained=settings.train_lm_head,
            rollout_chunk=settings.rollout_chunk,
            device=device,
        ),
    )


def reduction_buffers(num_parameters: int, settings: TrainerSettings, device: str) -> int:
    """Return the bytes of DeepSpeed's gradient buckets, and of the weights that ZeRO 3 gathers for a step."""
    if settings.zero_stage == 0 or settings.accumulates_alone:
        return 0
    # A CPU's memory is allocated only as pages are written.
    bucket = _BUCKET if device == "cuda" else min(num_parameters, _BUCKET)
    gathered = num_parameters * settings.itemsize if settings.zero_stage == 3 else 0
    return gathered + bucket * (settings.itemsize if settings.zero_stage == 2 else _WIDE)


def update_bytes(
    num_parameters: int, matrices: Sequence[Sequence[int]], settings: TrainerSettings, device: str
) -> float:
    """Return the bytes of temporary tensors in the last reduction and in the optimizer's step.

    Args:
        matrices: shapes of the weights that Muon updates.
    """
    reduced = min(num_parameters, _BUCKET)
    orthogonalized = 0
    if matrices:
        orthogonalized = orthogonalization_bytes(
            matrices,
            num_ranks=settings.world_size,
            partitioned=settings.zero_stage > 0,
            itemsize=2 if device == "cuda" else settings.itemsize,
        )
    if settings.zero_stage == 0:
        return max(reduced * _WIDE, orthogonalized)  # gradients, flattened, and freed after the reduction
    if settings.accumulates_alone or settings.offload_optimizer:
        return orthogonalized
    if settings.bf16 and settings.zero_stage == 2:
        # Gradients, flattened, and copied to float32; the float32 ones stay for the optimizer.
        return max(reduced * (settings.itemsize + _WIDE), reduced * _WIDE + orthogonalized)
    return num_parameters / settings.world_size * _WIDE + orthogonalized


def frozen_bytes(config: DrafterConfig, settings: TrainerSettings) -> int:
    """Return the bytes of embedding, target head, its draft vocabulary rows, and a frozen draft head."""
    embedding = config.vocab_size * config.hidden_size
    head = config.vocab_size * config.target_hidden_size
    rows = config.draft_vocab_size * config.target_hidden_size if config.pruned else 0
    draft_head = 0 if settings.train_lm_head else config.draft_vocab_size * config.hidden_size
    return (embedding + head + rows + draft_head) * settings.itemsize


def worst_counts(train: TrainConfig) -> StepCounts:
    """Return the counts of a row that the assistant wrote entirely, which takes the most memory."""
    last, most = train.row_tokens - 2, train.max_drafts_per_row or train.row_tokens
    rows = tuple(min(most, max(last - k, 0)) for k in range(train.ttt_steps))
    return StepCounts(keys=train.row_tokens, rows=rows, causal_pairs=0, teachers=rows[0])
