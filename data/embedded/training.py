"""Pre-training the embedded target, with checkpoints that resume bit-identically."""

import copy
import math
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3ForCausalLM

from data.embedded.corpus import ChatExample
from data.embedded.muon import Muon
from data.progress import Progress
from eagle31.tensor_files import load_pickled

CausalModel: TypeAlias = LlamaForCausalLM | Qwen3ForCausalLM
Document: TypeAlias = tuple[Tensor, Tensor]  # input_ids int64 [T], loss_mask bool [T]


@dataclass(frozen=True)
class TrainingSettings:
    """Training settings; the fixed number of steps makes the result independent of the machine's speed."""

    steps: int = 400
    batch_tokens: int = 2048
    matrix_learning_rate: float = 0.03  # Muon, for the layers' matrices
    embedding_learning_rate: float = 0.03  # AdamW; high, because a rare token is updated only a few times
    learning_rate: float = 6e-3  # AdamW, for lm_head and norms
    min_learning_rate_ratio: float = 0.02
    warmup_steps: int = 10
    max_document_tokens: int = 512
    max_grad_norm: float = 1.0
    checkpoint_seconds: float = 20.0
    seed: int = 0


def encode(
    tokenizer: PreTrainedTokenizerFast, examples: list[ChatExample], max_tokens: int
) -> list[Document]:
    """Render with the chat template and cut at `max_tokens`; the mask covers answers and their end tokens."""
    encoded: Any = tokenizer.apply_chat_template(
        cast(Any, [example["messages"] for example in examples]),
        return_dict=True,
        return_assistant_tokens_mask=True,
        truncation=True,
        max_length=max_tokens,
    )
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    return [(torch.tensor(ids), torch.tensor(mask, dtype=torch.bool)) for ids, mask in pairs]


def schedule_batches(lengths: list[int], batch_tokens: int, steps: int, seed: int) -> list[list[int]]:
    """Return the document indices of each step.

    A step's documents have similar lengths and, with padding, at most `batch_tokens` tokens. The steps of an
    epoch are shuffled.
    """
    rng = random.Random(seed)
    batches: list[list[int]] = []
    while len(batches) < steps:
        order = list(range(len(lengths)))
        rng.shuffle(order)
        order.sort(key=lambda i: lengths[i] // 16)  # a stable sort keeps the shuffled order within a bucket
        epoch: list[list[int]] = [[]]
        width = 0
        for i in order:
            width = max(width, lengths[i])
            if epoch[-1] and width * (len(epoch[-1]) + 1) > batch_tokens:
                epoch.append([])
                width = lengths[i]
            epoch[-1].append(i)
        rng.shuffle(epoch)
        batches += epoch
    return batches[:steps]


def answer_loss(model: CausalModel, documents: list[Document]) -> Tensor:
    """Return the sum of the answer tokens' negative log-likelihoods (float32, nats).

    Documents are padded on the right, where a causal model does not attend to the padding, so no attention
    mask is needed.
    """
    ids = torch.nn.utils.rnn.pad_sequence([d[0] for d in documents], batch_first=True)  # [B, T]
    mask = torch.nn.utils.rnn.pad_sequence([d[1] for d in documents], batch_first=True)[:, 1:]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]  # [B, T - 1, H]
    # The lm_head is as large as several layers, so it is applied to the answers only.
    logits = model.lm_head(hidden[mask]).float()
    return F.cross_entropy(logits, ids[:, 1:][mask], reduction="sum")


def num_answer_tokens(documents: list[Document]) -> int:
    """Return the number of tokens that `answer_loss` sums over."""
    return sum(int(mask[1:].sum()) for _, mask in documents)


@torch.no_grad()
def evaluate(model: CausalModel, documents: list[Document], rows: int = 8) -> float:
    """Return the loss in nats per answer token."""
    starts = range(0, len(documents), rows)
    total = sum(float(answer_loss(model, documents[start : start + rows])) for start in starts)
    return total / num_answer_tokens(documents)


def initialize(model: torch.nn.Module, seed: int) -> None:
    """Initialize for a short run: layers start as the identity, inputs have unit scale, logits are small."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(parameter)
        elif name.endswith("embed_tokens.weight"):
            torch.nn.init.normal_(parameter, std=0.5, generator=generator)
        elif name.endswith("lm_head.weight"):
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
        elif parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)


def learning_rate_factor(step: int, settings: TrainingSettings) -> float:
    """Return the learning rates' factor: linear warm-up, then cosine decay to `min_learning_rate_ratio`."""
    warmup = min(1.0, (step + 1) / settings.warmup_steps)
    low = settings.min_learning_rate_ratio
    return warmup * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * step / settings.steps)))


def build_optimizers(
    model: CausalModel, settings: TrainingSettings
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Build Muon for the layers' matrices and AdamW for the other parameters."""
    matrices: list[torch.nn.Parameter] = []
    embeddings: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if ".layers." in name and parameter.ndim == 2:
            matrices.append(parameter)
        else:
            (embeddings if "embed_tokens" in name else others).append(parameter)
    groups = [
        {"params": embeddings, "lr": settings.embedding_learning_rate},
        {"params": others, "lr": settings.learning_rate},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers = (Muon(matrices, lr=settings.matrix_learning_rate), adamw)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["peak_lr"] = group["lr"]
    return optimizers


class GradientWorkers:
    """Two threads that each compute the gradient of half a batch with half of torch's threads.

    For such small matrices this is faster than using all cores for each product. The replica shares the
    model's weights and has separate gradients. There are two on every machine, so that every machine sums in
    the same order.
    """

    def __init__(self, model: CausalModel) -> None:
        self.num_threads = torch.get_num_threads()
        self.replicas = (model, copy.deepcopy(model))
        for original, replicated in zip(*(replica.parameters() for replica in self.replicas), strict=True):
            replicated.data = original.data
        self.pool = ThreadPoolExecutor(max_workers=2)

    def __call__(self, documents: list[Document]) -> float:
        """Set the model's gradients to those of the mean loss per answer token, and return that loss."""
        num_tokens = num_answer_tokens(documents)
        halves = [half for half in (documents[0::2], documents[1::2]) if half]

        def backward(replica: CausalModel, half: list[Document]) -> float:
            loss = answer_loss(replica, half) / num_tokens
            loss.backward()
            return loss.item()

        torch.set_num_threads(max(self.num_threads // 2, 1))
        loss = sum(self.pool.map(backward, self.replicas, halves))
        torch.set_num_threads(self.num_threads)
        for original, replicated in zip(*(replica.parameters() for replica in self.replicas), strict=True):
            if len(halves) == 2:
                original.grad.add_(replicated.grad)
                replicated.grad = None
        return loss


def pretrain(
    model: CausalModel,
    documents: list[Document],
    settings: TrainingSettings,
    checkpoint: Path,
    progress: bool = True,
) -> None:
    """Train `model` in place; resume from `checkpoint` if it exists, and keep it up to date."""
    optimizers = build_optimizers(model, settings)
    lengths = [len(ids) for ids, _ in documents]
    batches = schedule_batches(lengths, settings.batch_tokens, settings.steps, settings.seed)
    start = _load_checkpoint(checkpoint, model, optimizers)
    gradients = GradientWorkers(model)
    saved_at = time.monotonic()
    bar = Progress("train the embedded target", settings.steps, "steps", initial=start, shown=progress)
    with bar:
        for step in range(start, settings.steps):
            loss = gradients([documents[i] for i in batches[step]])
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak_lr"] * learning_rate_factor(step, settings)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            bar.note(f"loss {loss:.2f}")
            bar.update()
            if time.monotonic() - saved_at >= settings.checkpoint_seconds:
                save_checkpoint(checkpoint, model, optimizers, step + 1)
                saved_at = time.monotonic()


def save_checkpoint(
    path: Path, model: CausalModel, optimizers: Sequence[torch.optim.Optimizer], next_step: int
) -> None:
    """Save everything that a step changes: the weights, the optimizers' states and the step number."""
    written = path.with_name(path.name + ".partial")
    moments = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"model": model.state_dict(), "optimizers": moments, "next_step": next_step}, written)
    os.replace(written, path)


def _load_checkpoint(path: Path, model: CausalModel, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    if not path.exists():
        return 0
    state = load_pickled(path)
    model.load_state_dict(state["model"])
    for optimizer, moments in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(moments)
    return int(state["next_step"])
