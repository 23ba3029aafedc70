"""Memory of one training GPU by part: DeepSpeed's state, frozen tensors, and the training step."""

from dataclasses import asdict, dataclass, replace

from eagle31.cost.flops import StepCounts
from eagle31.cost.memory import StepMemory, step_memory
from eagle31.model.config import DrafterConfig

# DeepSpeed's defaults: elements of the buffer in which gradients are reduced, and of the parameters that
# ZeRO 3 keeps gathered.
_BUCKET, _LIVE = 500_000_000, 1_000_000_000
# The driver, NCCL, kernels and the allocator's fragments take the rest.
USABLE_FRACTION = 0.92


@dataclass(frozen=True)
class TrainerSettings:
    """The settings of a recipe that memory depends on."""

    zero_stage: int
    bf16: bool
    offload_optimizer: bool
    offload_parameters: bool
    train_lm_head: bool
    activation_checkpointing: bool
    row_tokens: int
    rows_per_step: int
    world_size: int

    @property
    def itemsize(self) -> int:
        return 2 if self.bf16 else 4

    def __post_init__(self) -> None:
        assert self.world_size >= 1


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on one GPU."""

    weights: int
    gradients: int
    optimizer: int  # float32 weights and Adam's moments
    buffers: int  # for DeepSpeed's reductions and gathers
    frozen: int  # embedding, the target's head, and the draft head if it is not trained
    update: int  # temporary tensors of the optimizer's step, when there are no activations
    step: StepMemory

    @property
    def total(self) -> int:
        """The peak, either in the forward and backward pass or in the optimizer's step."""
        persistent = self.weights + self.gradients + self.optimizer + self.buffers + self.frozen
        return persistent + max(self.step.total, self.update)

    def parts(self) -> dict[str, int]:
        """Return bytes by name, for the table; step and optimizer step never coincide."""
        parts = asdict(self)
        step = parts.pop("step")
        update = parts.pop("update")
        return parts | step | {"optimizer step": update}


def trainer_memory(
    config: DrafterConfig, num_parameters: int, settings: TrainerSettings, counts: StepCounts, device: str
) -> TrainerMemory:
    """Return the memory of training on one rank.

    Args:
        num_parameters: number of trained parameters.
        counts: what the largest row has.
        device: "cuda" or "cpu".
    """
    size, stage = settings.itemsize, settings.zero_stage
    split = [settings.world_size if stage >= needed else 1 for needed in (1, 2, 3)]
    local_optimizer, local_gradients, local_weights = (num_parameters / n for n in split)
    weights = 0 if settings.offload_parameters else local_weights * size
    # Plain float32 has no master weights in addition to the weights.
    moments = 12 if settings.bf16 or stage else 8
    # The float32 gradient of what a rank updates, and on CUDA also the root of the second moment.
    update = local_optimizer * (4 * (moments == 12) + 4 * (device == "cuda"))
    # A CPU's memory is allocated only as pages are written.
    bucket = _BUCKET if device == "cuda" else min(num_parameters, _BUCKET)
    gathered = min(num_parameters, _LIVE) * size if stage == 3 else 0
    return TrainerMemory(
        weights=round(weights),
        gradients=round(local_gradients * size),
        optimizer=0 if settings.offload_optimizer else round(local_optimizer * moments),
        buffers=round(gathered + (bucket * size if stage else 0)),
        frozen=frozen_bytes(config, settings),
        update=0 if settings.offload_optimizer else round(update),
        step=step_memory(
            config,
            counts,
            row_tokens=settings.row_tokens,
            itemsize=size,
            head_trained=settings.train_lm_head,
            activation_checkpointing=settings.activation_checkpointing,
            device=device,
        ),
    )


def frozen_bytes(config: DrafterConfig, settings: TrainerSettings) -> int:
    """Return the bytes of embedding, target head, its draft vocabulary rows, and a frozen draft head."""
    embedding = config.vocab_size * config.hidden_size
    head = config.vocab_size * config.target_hidden_size
    rows = config.draft_vocab_size * config.target_hidden_size if config.pruned else 0
    draft_head = 0 if settings.train_lm_head else config.draft_vocab_size * config.hidden_size
    return (embedding + head + rows + draft_head) * settings.itemsize


def worst_counts(row_tokens: int, num_steps: int) -> StepCounts:
    """Return the counts of a row that the assistant wrote entirely, which takes the most memory."""
    rows = tuple(max(row_tokens - 2 - k, 0) for k in range(num_steps))
    return StepCounts(
        keys=row_tokens, rows=rows, tokens=row_tokens, causal_pairs=0, teachers=max(row_tokens - 2, 0)
    )


def changes(settings: TrainerSettings) -> list[tuple[str, TrainerSettings]]:
    """Return changes that need less memory, the cheapest first; each includes the ones before it."""
    found: list[tuple[str, TrainerSettings]] = []
    now = settings
    for stage in (1, 2):
        if now.zero_stage < stage and now.world_size > 1:
            now = replace(now, zero_stage=stage)
            found.append((f"deepspeed.zero_stage={stage}", now))
    if not now.activation_checkpointing:
        now = replace(now, activation_checkpointing=True)
        found.append(("train.activation_checkpointing=true", now))
    if not now.offload_optimizer:
        now = replace(now, offload_optimizer=True, zero_stage=max(now.zero_stage, 1))
        found.append(("deepspeed.offload_optimizer=true", now))
    if now.zero_stage < 3 and now.world_size > 1:
        now = replace(now, zero_stage=3)
        found.append(("deepspeed.zero_stage=3", now))
    while now.row_tokens > 1024:
        now = replace(now, row_tokens=now.row_tokens // 2)
        found.append((f"train.row_tokens={now.row_tokens} and data.max_tokens no larger", now))
    return found
