"""The shapes at which steps are timed, and the inputs of all sides: the same weights, states and masks."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from data.batches.row_order import pack_epoch
from data.batches.rows import pack_row
from data.samples import CapturedSample
from eagle31.model.config import DrafterConfig
from eagle31.model.kinds import new_drafter
from eagle31.training.batch import PackedBatch

Document = tuple[Tensor, Tensor]  # input_ids int64 [L], loss_mask bool [L]
NUM_CONVERSATIONS = 2000
_AGENT_TURN = 1024  # tokens of a tool's output and of the answer to it, which has a tenth of them
_LOGIT_STD = 3.0  # makes the target's random distribution neither uniform nor one-hot


@dataclass(frozen=True)
class Shape:
    """A drafter that is as wide as its target, which speculators requires, and the rows of one step."""

    name: str
    content: str  # what fills the rows: "chat", "long prompt", "answers only" or "agent"
    row_tokens: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    num_steps: int = 7
    step_decay: float = 0.8

    def config(self) -> DrafterConfig:
        return DrafterConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            draft_vocab_size=self.draft_vocab_size,
            target_hidden_size=self.hidden_size,
            aux_layer_ids=(2, 8, 13),
            max_position_embeddings=max(2048, self.row_tokens + 64),
        )


_MEDIUM = (512, 8, 4, 64, 1536, 32_768, 8192)
_SMALL = (256, 4, 2, 64, 768, 8192, 2048)
_NARROW = (128, 2, 1, 64, 384, 4096, 1024)
_SMOLLM2_135M = (576, 9, 3, 64, 1536, 49_152, 8192)
_QWEN3_0_6B = (1024, 16, 8, 128, 3072, 151_936, 32_000)
_LARGE = (4096, 32, 8, 128, 14_336, 128_256, 32_000)
SHAPES = {
    "A": Shape("A", "chat", 2048, *_MEDIUM),
    "B": Shape("B", "long prompt", 4096 + 256, *_MEDIUM),
    "C": Shape("C", "answers only", 512, *_SMALL),
    "D": Shape("D", "agent", 16_384, *_MEDIUM),
    "D2k": Shape("D2k", "agent", 2048, *_MEDIUM),
    "D4k": Shape("D4k", "agent", 4096, *_MEDIUM),
    "D8k": Shape("D8k", "agent", 8192, *_MEDIUM),
    "L8k": Shape("L8k", "answers only", 8192, *_NARROW, num_steps=2),
    "L64k": Shape("L64k", "answers only", 65_536, *_NARROW, num_steps=2),
    "S": Shape("S", "chat", 1024, *_SMOLLM2_135M, num_steps=4),
    "Q": Shape("Q", "chat", 1024, *_QWEN3_0_6B),
    "E8k": Shape("E8k", "answers only", 8192, *_LARGE),
    "E8k-agent": Shape("E8k-agent", "agent", 8192, *_LARGE),
}


def synthetic_documents(vocab_size: int) -> list[Document]:
    """Return random tokens with GSM8K's lengths: log-normal, with correlated questions and answers."""
    generator = np.random.Generator(np.random.PCG64(0))
    # Of Llama's or Qwen's pieces of the texts: mean and deviation of the log lengths, and their correlation.
    (q_mean, q_std), (a_mean, a_std), correlation = (3.98, 0.35), (4.68, 0.40), 0.55
    covariance = correlation * q_std * a_std
    logs = generator.multivariate_normal(
        (q_mean, a_mean), [[q_std**2, covariance], [covariance, a_std**2]], NUM_CONVERSATIONS
    )
    lengths = torch.from_numpy(np.exp(logs)).round().long().clamp(4, 600).tolist()
    ids = torch.Generator().manual_seed(0)
    found = []
    for question, answer in lengths:
        # ChatML has three tokens before each turn and two after it, of which the first ends the answer.
        num_tokens = question + answer + 10
        start = num_tokens - answer - 2
        mask = torch.zeros(num_tokens, dtype=torch.bool)
        mask[start : num_tokens - 1] = True
        found.append((torch.randint(vocab_size, (num_tokens,), generator=ids), mask))
    return found


def packed_rows(shape: Shape, num_rows: int) -> list[list[Document]]:
    """Return rows of a shape."""
    if shape.content == "chat":
        chats = synthetic_documents(shape.vocab_size)
        chats = [chat for chat in chats if len(chat[0]) <= shape.row_tokens]
        epoch = pack_epoch([len(ids) for ids, _ in chats], shape.row_tokens, seed=0, epoch=0)
        rows = [[chats[i] for i in row] for row in epoch]
        # Without the emptiest rows, the last of an epoch, which are not typical.
        full = sorted(rows, key=lambda row: -sum(len(ids) for ids, _ in row))[: max(1, len(rows) * 3 // 4)]
        order = np.random.Generator(np.random.PCG64(0)).permutation(len(full))[:num_rows]
        return [full[i] for i in order]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(shape.vocab_size, (num_rows, shape.row_tokens), generator=generator)
    token = torch.arange(shape.row_tokens)
    if shape.content == "agent":
        mask = token % _AGENT_TURN >= _AGENT_TURN * 9 // 10
    else:
        mask = token >= (shape.row_tokens - 256 if shape.content == "long prompt" else 0)
    return [[(row, mask)] for row in ids]


def random_batch(shape: Shape, row: Sequence[Document], generator: torch.Generator) -> PackedBatch:
    """Return random hidden states for the documents, packed and padded to the shape's row."""
    width, num_aux = shape.hidden_size, len(shape.config().aux_layer_ids)
    scales = torch.tensor([1.0, 4.0, 20.0])[:, None]  # deeper layers have larger states
    samples = [
        CapturedSample(
            input_ids=ids,
            loss_mask=mask,
            aux_hidden_states=torch.randn(len(ids), num_aux, width, generator=generator) * scales,
            final_hidden_states=torch.randn(len(ids), width, generator=generator),
        )
        for ids, mask in row
    ]
    return pack_row(samples, shape.row_tokens)


def random_weights(config: DrafterConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the drafter's weights by name, float32, and the target's with the prefix `target_`.

    The names of the draft vocabulary's tensors begin with `draft_`; d2t and t2d are the peers' form of it.
    """
    with torch.device("meta"):
        drafter = new_drafter(config)
    weights = {
        name: torch.ones(meta.shape)
        if meta.ndim == 1
        else torch.randn(meta.shape, generator=generator) * meta.shape[1] ** -0.5
        for name, meta in drafter.state_dict().items()
    }
    size = (config.vocab_size, config.target_hidden_size)
    ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return weights | {
        "target_embed": torch.randn(size, generator=generator) * 0.02,
        "target_head": torch.randn(size, generator=generator) * _LOGIT_STD * config.target_hidden_size**-0.5,
        "target_norm": torch.ones(config.target_hidden_size),
        "draft_target_ids": ids,
        "draft_d2t": ids - torch.arange(len(ids)),
        "draft_t2d": t2d,
    }


def write_inputs(
    path: Path, shape: Shape, rows: Sequence[Sequence[Document]], dtype: str
) -> list[PackedBatch]:
    """Write the file for `step_side.py` with floating point values in `dtype`, and return its rows."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"weights/{name}": value for name, value in random_weights(shape.config(), generator).items()}
    batches = [random_batch(shape, row, generator) for row in rows]
    for index, batch in enumerate(batches):
        for field in fields(batch):
            tensors[f"{index}/{field.name}"] = getattr(batch, field.name).contiguous()
    floating_dtype: torch.dtype = getattr(torch, dtype)
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(floating_dtype) if tensor.is_floating_point() else tensor
    save_file(tensors, path)
    return batches
