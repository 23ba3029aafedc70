"""A row's forward and backward pass with the drafter of a recipe, whose weights and states are random."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from data.target.head import TargetHead
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.model.kinds import new_drafter
from eagle31.training.batch import PackedBatch
from eagle31.training.step import rollout_loss, schedule_batch
from train.plan.sizes import RunSizes, trainer_settings


class RowStep:
    """Forward and backward of one row of a recipe's drafter, with random weights and states.

    The row is the plan's: documents of `plan.document_tokens`, each with one answer at its end. The step is
    one without metrics, as most are.
    """

    def __init__(self, sizes: RunSizes, device: torch.device) -> None:
        config, train = sizes.drafter, sizes.config.train
        settings = trainer_settings(sizes.config, num_ranks=1)
        dtype = torch.bfloat16 if settings.bf16 else torch.float32
        self.drafter, self.frozen = random_parts(config, settings.train_lm_head, dtype, device)
        self.train = train
        in_chunks = train.rollout_chunk is not None
        row = typical_row(sizes, dtype, torch.device("cpu") if in_chunks else device)
        self.schedule = schedule_batch(
            row, train.ttt_steps, device, config.key_reach, train.rollout_chunk, train.max_drafts_per_row
        )
        self.batch = row.to(device, states=not in_chunks)

    def run(self, backward: Callable[[Tensor], None]) -> None:
        self.drafter.zero_grad(set_to_none=True)
        loss, _ = rollout_loss(
            self.drafter,
            self.frozen,
            self.batch,
            num_steps=self.train.ttt_steps,
            step_decay=self.train.step_decay,
            with_metrics=False,
            schedule=self.schedule,
        )
        backward(loss)


def random_parts(
    config: DrafterConfig, train_lm_head: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Drafter, FrozenParts]:
    """Return a drafter with random weights and random frozen parts."""
    width, target = config.hidden_size, config.target_hidden_size
    with torch.device(device), _default_dtype(dtype):
        drafter = new_drafter(config, with_head=train_lm_head)
        head = TargetHead(nn.RMSNorm(target), nn.Linear(target, config.vocab_size, bias=False))
        ids = torch.arange(config.draft_vocab_size) if config.pruned else None
        embedding = torch.randn(config.vocab_size, width)
        lm_head = None
        if not train_lm_head:
            lm_head = nn.Linear(width, config.draft_vocab_size, bias=False).requires_grad_(False)
    return drafter, FrozenParts(embedding, head, ids, lm_head)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def typical_row(sizes: RunSizes, dtype: torch.dtype, states_on: torch.device) -> PackedBatch:
    """Return a row with random tokens and states; the other tensors are on the CPU."""
    config, num_tokens = sizes.drafter, sizes.config.train.row_tokens
    length = _document_tokens(sizes)
    token = torch.arange(num_tokens)
    # The last document may be cut; its answer is at its end too.
    lengths = (num_tokens - token // length * length).clamp(max=length)
    num_aux, width = len(config.aux_layer_ids), config.target_hidden_size
    # On the CPU zeros, whose pages take no time and no memory until they are read.
    states = torch.zeros if states_on.type == "cpu" else torch.randn
    return PackedBatch(
        input_ids=torch.randint(config.vocab_size, (num_tokens,)),
        loss_mask=token % length >= lengths * (1 - sizes.config.plan.assistant_fraction),
        document_ids=token // length,
        position_ids=token % length,
        aux_hidden_states=states(num_tokens, num_aux, width, dtype=dtype, device=states_on),
        final_hidden_states=states(num_tokens, width, dtype=dtype, device=states_on),
    )


def _document_tokens(sizes: RunSizes) -> int:
    config = sizes.config
    return min(config.plan.document_tokens or config.data.max_tokens, config.train.row_tokens)
