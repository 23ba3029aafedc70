"""The training step as a run makes it, in DeepSpeed, on random states."""

import deepspeed
import torch
from torch import Tensor, nn

from data.target.head import TargetHead
from eagle31.model.config import DrafterConfig
from eagle31.model.frozen import FrozenParts
from eagle31.model.kinds import new_drafter
from eagle31.training.batch import PackedBatch
from eagle31.training.step import schedule_batch
from train.plan.memory import TrainerSettings
from train.trainer.engine import TrainedModule, deepspeed_config, initialize_model_engine


def build_engine(
    config: DrafterConfig, settings: TrainerSettings, num_steps: int, device: torch.device
) -> deepspeed.DeepSpeedEngine:
    """Return a drafter with random weights and random frozen parts in DeepSpeed; the process group exists."""
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    width, target = config.hidden_size, config.target_hidden_size
    with torch.device(device):  # the largest drafter takes half a minute to initialize on a CPU
        drafter = new_drafter(config, with_head=settings.train_lm_head)
        head = TargetHead(nn.RMSNorm(target), nn.Linear(target, config.vocab_size, bias=False)).to(dtype)
        ids = torch.arange(config.draft_vocab_size) if config.pruned else None
        embedding = torch.randn(config.vocab_size, width, dtype=dtype)
        lm_head = None
        if not settings.train_lm_head:
            lm_head = nn.Linear(width, config.draft_vocab_size, bias=False).to(dtype).requires_grad_(False)
    frozen = FrozenParts(embedding, head, ids, lm_head)
    module = TrainedModule(drafter, frozen, num_steps, 0.8)
    return initialize_model_engine(
        module,
        deepspeed_config(
            zero_stage=settings.zero_stage,
            bf16=settings.bf16,
            micro_batches=settings.rows_per_step,
            world_size=1,
            offload_optimizer=False,
        ),
        lr=1e-4,
        matrix_lr=0.02 if settings.muon else None,
    )


def random_row(
    config: DrafterConfig, num_tokens: int, prompt_tokens: int, dtype: torch.dtype, device: torch.device
) -> PackedBatch:
    """Return a row of one document; the assistant wrote everything after the prompt."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    mask = torch.ones(num_tokens, dtype=torch.bool, device=device)
    mask[:prompt_tokens] = False
    return PackedBatch(
        input_ids=torch.randint(config.vocab_size, (num_tokens,), generator=generator, device=device),
        loss_mask=mask,
        document_ids=torch.zeros(num_tokens, dtype=torch.long, device=device),
        position_ids=torch.arange(num_tokens, device=device),
        aux_hidden_states=random(num_tokens, len(config.aux_layer_ids), config.target_hidden_size),
        final_hidden_states=random(num_tokens, config.target_hidden_size),
    )


def update(
    engine: deepspeed.DeepSpeedEngine,
    batch: PackedBatch,
    *,
    with_metrics: bool = True,
    chunk_rows: int | None = None,
) -> None:
    """Run forward and backward on the row once per micro-batch, and the optimizer's step."""
    module = engine.module
    key_reach = module.drafter.config.key_reach
    schedule = schedule_batch(batch, module.num_steps, key_reach=key_reach, chunk_rows=chunk_rows)
    for _ in range(engine.gradient_accumulation_steps()):
        loss, _ = engine(batch, schedule, with_metrics)
        engine.backward(loss / len(batch.input_ids))
        engine.step()
