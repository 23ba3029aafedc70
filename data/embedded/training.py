"""Pre-training of the embedded target: rows of similar length, checkpoints that resume to the last bit."""

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
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from data.embedded.corpus import ChatExample
from data.embedded.muon import Muon
from data.progress import Progress

Document: TypeAlias = tuple[Tensor, Tensor]  # input_ids int64 [T], loss_mask bool [T]


@dataclass(frozen=True)
class TrainingSettings:
    """A fixed number of steps, so that the result does not depend on the machine's speed."""

    steps: int = 400
    batch_tokens: int = 2048
    matrix_learning_rate: float = 0.03  # Muon: the layers' matrices
    embedding_learning_rate: float = 0.03  # AdamW: a rare token is updated a few times only
    learning_rate: float = 6e-3  # AdamW: lm_head and norms
    min_learning_rate_ratio: float = 0.02
    warmup_steps: int = 10
    max_document_tokens: int = 512
    max_grad_norm: float = 1.0
    checkpoint_seconds: float = 20.0
    seed: int = 0


def encode(
    tokenizer: PreTrainedTokenizerFast, conversations: list[ChatExample], max_tokens: int
) -> list[Document]:
    """Renders with the chat template, at most `max_tokens`; the mask is true on answers and end tokens."""
    encoded: Any = tokenizer.apply_chat_template(
        cast(Any, [c["messages"] for c in conversations]),
        return_dict=True,
        return_assistant_tokens_mask=True,
        truncation=True,
        max_length=max_tokens,
    )
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    return [(torch.tensor(ids), torch.tensor(mask, dtype=torch.bool)) for ids, mask in pairs]


def plan_batches(lengths: list[int], batch_tokens: int, steps: int, seed: int) -> list[list[int]]:
    """Indices of each step's documents: similar lengths, at most `batch_tokens` with padding, shuffled."""
    rng = random.Random(seed)
    batches: list[list[int]] = []
    while len(batches) < steps:
        order = list(range(len(lengths)))
        rng.shuffle(order)
        order.sort(key=lambda i: lengths[i] // 16)  # stable: the shuffle decides within a bucket
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


def answer_loss(model: LlamaForCausalLM, documents: list[Document]) -> Tensor:
    """Sum of the answer tokens' negative log-likelihoods (float32, nats).

    Rows are padded on the right, where a causal model's other positions cannot see it: no attention mask.
    """
    ids = torch.nn.utils.rnn.pad_sequence([d[0] for d in documents], batch_first=True)  # [B, T]
    mask = torch.nn.utils.rnn.pad_sequence([d[1] for d in documents], batch_first=True)[:, 1:]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]  # [B, T - 1, H]
    # Only answers go through the head, whose matrix is as large as several layers.
    logits = model.lm_head(hidden[mask]).float()
    return F.cross_entropy(logits, ids[:, 1:][mask], reduction="sum")


def num_answer_tokens(documents: list[Document]) -> int:
    """How many tokens `answer_loss` sums over."""
    return sum(int(mask[1:].sum()) for _, mask in documents)


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, documents: list[Document], rows: int = 8) -> float:
    """Nats per answer token."""
    starts = range(0, len(documents), rows)
    total = sum(float(answer_loss(model, documents[start : start + rows])) for start in starts)
    return total / num_answer_tokens(documents)


def initialize(model: LlamaForCausalLM, seed: int) -> None:
    """Weights for a short run: layers that start as the identity, inputs of unit scale, small logits."""
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


def schedule(step: int, settings: TrainingSettings) -> float:
    """Factor of the learning rates: linear warm-up, then a cosine down to `min_learning_rate_ratio`."""
    warmup = min(1.0, (step + 1) / settings.warmup_steps)
    low = settings.min_learning_rate_ratio
    return warmup * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * step / settings.steps)))


def build_optimizers(
    model: LlamaForCausalLM, settings: TrainingSettings
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest."""
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
    """Two halves of a batch at once, each in a thread of its own with half of torch's threads.

    At this size that is faster than all cores in one matrix product after the other. The replica shares the
    model's weights and has gradients of its own. There are two whatever the machine, so that every machine
    adds up the same sums.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.num_threads = torch.get_num_threads()
        self.replicas = (model, copy.deepcopy(model))
        for shared, own in zip(*(replica.parameters() for replica in self.replicas), strict=True):
            own.data = shared.data
        self.pool = ThreadPoolExecutor(max_workers=2)

    def __call__(self, documents: list[Document]) -> float:
        """Leaves the gradient of the mean loss per answer token in the model, and returns that loss."""
        num_tokens = num_answer_tokens(documents)
        halves = [half for half in (documents[0::2], documents[1::2]) if half]

        def backward(replica: LlamaForCausalLM, half: list[Document]) -> float:
            loss = answer_loss(replica, half) / num_tokens
            loss.backward()
            return loss.item()

        torch.set_num_threads(max(self.num_threads // 2, 1))
        loss = sum(self.pool.map(backward, self.replicas, halves))
        torch.set_num_threads(self.num_threads)
        for shared, own in zip(*(replica.parameters() for replica in self.replicas), strict=True):
            if len(halves) == 2:
                shared.grad.add_(own.grad)
                own.grad = None
        return loss


def pretrain(
    model: LlamaForCausalLM,
    documents: list[Document],
    settings: TrainingSettings,
    checkpoint: Path,
    progress: bool = True,
) -> None:
    """Trains `model` in place; goes on from `checkpoint` where it exists, and keeps it up to date."""
    optimizers = build_optimizers(model, settings)
    lengths = [len(ids) for ids, _ in documents]
    batches = plan_batches(lengths, settings.batch_tokens, settings.steps, settings.seed)
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
                    group["lr"] = group["peak_lr"] * schedule(step, settings)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            bar.note(f"loss {loss:.2f}")
            bar.update()
            if time.monotonic() - saved_at >= settings.checkpoint_seconds:
                save_checkpoint(checkpoint, model, optimizers, step + 1)
                saved_at = time.monotonic()


def save_checkpoint(
    path: Path, model: LlamaForCausalLM, optimizers: Sequence[torch.optim.Optimizer], next_step: int
) -> None:
    """Weights, the optimizers' moments and the step to go on with; nothing else changes from step to step."""
    written = path.with_name(path.name + ".partial")
    moments = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"model": model.state_dict(), "optimizers": moments, "next_step": next_step}, written)
    os.replace(written, path)


def _load_checkpoint(path: Path, model: LlamaForCausalLM, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, moments in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(moments)
    return int(state["next_step"])
