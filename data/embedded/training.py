"""Pre-training the embedded target."""

import copy
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3ForCausalLM

from data.embedded.corpus import ChatExample
from data.progress import Progress
from eagle31.kernels.newton_schulz import orthogonalize

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
    warmup_steps: int = 10
    max_document_tokens: int = 512
    max_grad_norm: float = 1.0
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


class Muon(torch.optim.Optimizer):
    """Muon in the parameters' dtype, for matrices of one shape in each group.

    torch.optim.Muon computes in bfloat16, which processors without bfloat16 units emulate at a hundredth of
    the speed.

    Source: Keller Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024).
    """

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for parameter in matrices:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        super().__init__([{"params": group} for group in by_shape.values()], {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            directions = []
            for parameter in group["params"]:
                buffer = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                directions.append(parameter.grad.lerp(buffer, group["momentum"]))
            rows, columns = directions[0].shape
            step_size = group["lr"] * max(1.0, rows / columns) ** 0.5
            for parameter, update in zip(
                group["params"], orthogonalize(torch.stack(directions)), strict=True
            ):
                parameter.add_(update, alpha=-step_size)


def build_optimizers(
    model: CausalModel, settings: TrainingSettings
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for the other parameters."""
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if ".layers." in name and p.ndim == 2]
    embeddings = [p for name, p in named.items() if "embed_tokens" in name]
    taken = {id(p) for p in (*matrices, *embeddings)}
    groups = [
        {"params": embeddings, "lr": settings.embedding_learning_rate},
        {"params": [p for p in named.values() if id(p) not in taken], "lr": settings.learning_rate},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    return Muon(matrices, lr=settings.matrix_learning_rate), adamw


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
    model: CausalModel, documents: list[Document], settings: TrainingSettings, progress: bool = True
) -> None:
    """Train `model` in place; the learning rates warm up and fall linearly to 0."""
    optimizers = build_optimizers(model, settings)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    lengths = [len(ids) for ids, _ in documents]
    batches = schedule_batches(lengths, settings.batch_tokens, settings.steps, settings.seed)
    gradients = GradientWorkers(model)
    with Progress("train the embedded target", settings.steps, "steps", shown=progress) as bar:
        for step, batch in enumerate(batches):
            loss = gradients([documents[i] for i in batch])
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            factor = min(1.0, (step + 1) / settings.warmup_steps) * (1 - step / settings.steps)
            for optimizer, rates in zip(optimizers, peaks, strict=True):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * factor
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            bar.note(f"loss {loss:.2f}")
            bar.update()
