"""Memory of one training GPU by part: what DeepSpeed keeps, what stays frozen, what a step takes."""

from dataclasses import asdict, dataclass, replace

from eagle31.cost.flops import StepCounts
from eagle31.cost.memory import StepMemory, step_memory
from eagle31.model.config import DrafterConfig

# DeepSpeed's own defaults: elements of the buffer in which gradients are reduced, and of the parameters that
# ZeRO 3 keeps gathered.
_BUCKET, _LIVE = 500_000_000, 1_000_000_000
# The driver, NCCL, kernels and the allocator's fragments take the rest.
USABLE_FRACTION = 0.92


@dataclass(frozen=True)
class TrainerSettings:
    """What a recipe chooses that memory depends on."""

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
    buffers: int  # in which DeepSpeed reduces and gathers
    frozen: int  # embedding, target's head, draft head where it is not trained
    update: int  # of the optimizer's step, when there are no activations
    step: StepMemory

    @property
    def total(self) -> int:
        """The peak, which lies in the forward and backward pass or in the optimizer's step."""
        standing = self.weights + self.gradients + self.optimizer + self.buffers + self.frozen
        return standing + max(self.step.total, self.update)

    def parts(self) -> dict[str, int]:
        """By name, for the table; the last two are never there together."""
        own = asdict(self)
        step = own.pop("step")
        update = own.pop("update")
        own |= {name: step[name] for name in step}
        return own | {"optimizer step": update}


def trainer_memory(
    config: DrafterConfig, num_parameters: int, settings: TrainerSettings, counts: StepCounts, device: str
) -> TrainerMemory:
    """Of the drafter with `num_parameters` trained parameters, on a row with these counts."""
    size, stage, share = settings.itemsize, settings.zero_stage, settings.world_size
    split = [share if stage >= needed else 1 for needed in (1, 2, 3)]
    own_optimizer, own_gradients, own_weights = (num_parameters / n for n in split)
    weights = 0 if settings.offload_parameters else own_weights * size
    # Plain float32 has no master weights beside the weights.
    moments = 12 if settings.bf16 or stage else 8
    # The float32 gradient of what a rank updates, and on CUDA the root of the second moment beside it.
    update = own_optimizer * (4 * (moments == 12) + 4 * (device == "cuda"))
    # The CPU gives out pages as they are written.
    bucket = _BUCKET if device == "cuda" else min(num_parameters, _BUCKET)
    gathered = min(num_parameters, _LIVE) * size if stage == 3 else 0
    return TrainerMemory(
        weights=round(weights),
        gradients=round(own_gradients * size),
        optimizer=0 if settings.offload_optimizer else round(own_optimizer * moments),
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
    """The embedding, the target's head, its rows of the draft vocabulary, and a draft head that is frozen."""
    embedding = config.vocab_size * config.hidden_size
    head = config.vocab_size * config.target_hidden_size
    rows = config.draft_vocab_size * config.target_hidden_size if config.pruned else 0
    own_head = 0 if settings.train_lm_head else config.draft_vocab_size * config.hidden_size
    return (embedding + head + rows + own_head) * settings.itemsize


def worst_counts(row_tokens: int, num_steps: int) -> StepCounts:
    """Of a row whose every token is the assistant's: no other takes more memory."""
    rows = tuple(max(row_tokens - 2 - k, 0) for k in range(num_steps))
    return StepCounts(
        keys=row_tokens, rows=rows, tokens=row_tokens, causal_pairs=0, teachers=max(row_tokens - 2, 0)
    )


def changes(settings: TrainerSettings) -> list[tuple[str, TrainerSettings]]:
    """What makes it smaller, the cheapest first; each builds on the ones before."""
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
