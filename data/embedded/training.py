"""Pre-training the embedded target."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from data.embedded.corpus import ChatExample
from data.progress import Progress
from eagle31.kernels.newton_schulz import orthogonalize

Document: TypeAlias = tuple[Tensor, Tensor]  # input_ids int64 [T], loss_mask bool [T]

_MATRIX_RATE, _MOMENTUM = 0.03, 0.95  # Muon, for the layers' matrices
_EMBEDDING_RATE = 0.03  # AdamW; high, because a rare token is updated only a few times
_REST_RATE = 6e-3  # AdamW, for lm_head and norms
_MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class TrainingSettings:
    """Training settings; the fixed number of steps makes the result independent of the machine's speed."""

    steps: int = 400
    batch_tokens: int = 2048
    warmup_steps: int = 10
    max_document_tokens: int = 512


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


def schedule_batches(lengths: list[int], batch_tokens: int, steps: int) -> list[list[int]]:
    """Return the document indices of each step.

    A step's documents have similar lengths and, with padding, at most `batch_tokens` tokens. The steps of an
    epoch are shuffled.
    """
    rng = random.Random(0)
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


def answer_loss(model: LlamaForCausalLM, documents: list[Document]) -> Tensor:
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


@torch.no_grad()
def muon_step(matrices: list[Tensor], momenta: list[Tensor], learning_rate: float) -> None:
    """Update matrices of one shape, and their momenta.

    torch.optim.Muon computes in bfloat16, which processors without bfloat16 units emulate at a hundredth of
    the speed.

    Source: Keller Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024).
    """
    directions = []
    for parameter, momentum in zip(matrices, momenta, strict=True):
        assert parameter.grad is not None
        momentum.lerp_(parameter.grad, 1 - _MOMENTUM)
        directions.append(parameter.grad.lerp(momentum, _MOMENTUM))
    rows, columns = matrices[0].shape
    step_size = learning_rate * max(1.0, rows / columns) ** 0.5
    for parameter, update in zip(matrices, orthogonalize(torch.stack(directions)), strict=True):
        parameter.add_(update, alpha=-step_size)


def set_gradients(model: LlamaForCausalLM, documents: list[Document], pool: ThreadPoolExecutor) -> float:
    """Set the model's gradients to those of the mean loss per answer token, and return that loss.

    Two threads each compute the gradient of half the documents with half of torch's threads. For such small
    matrices this is faster than using all cores for each product. There are two on every machine, so that
    every machine sums in the same order.
    """
    parameters = [one for one in model.parameters() if one.requires_grad]
    num_tokens = sum(int(mask[1:].sum()) for _, mask in documents)

    def gradient(half: list[Document]) -> tuple[float, tuple[Tensor, ...]]:
        loss = answer_loss(model, half) / num_tokens
        return loss.item(), torch.autograd.grad(loss, parameters)

    num_threads = torch.get_num_threads()
    torch.set_num_threads(max(num_threads // 2, 1))
    found = list(pool.map(gradient, filter(None, (documents[0::2], documents[1::2]))))
    torch.set_num_threads(num_threads)
    for parameter, *parts in zip(parameters, *(gradients for _, gradients in found), strict=True):
        parameter.grad = sum(parts[1:], start=parts[0])
    return sum(loss for loss, _ in found)


def pretrain(
    model: LlamaForCausalLM, documents: list[Document], settings: TrainingSettings, progress: bool
) -> None:
    """Train `model` in place; the learning rates warm up and fall linearly to 0."""
    matrices: dict[torch.Size, list[Tensor]] = {}
    embeddings: list[Tensor] = []
    rest: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if ".layers." in name and parameter.ndim == 2:
            matrices.setdefault(parameter.shape, []).append(parameter)
        else:
            (embeddings if "embed_tokens" in name else rest).append(parameter)
    momenta = {shape: [torch.zeros_like(one) for one in some] for shape, some in matrices.items()}
    adamw = torch.optim.AdamW([{"params": embeddings}, {"params": rest}], betas=(0.9, 0.95), weight_decay=0.0)
    batches = schedule_batches([len(ids) for ids, _ in documents], settings.batch_tokens, settings.steps)
    with (
        ThreadPoolExecutor(2) as pool,
        Progress("train the embedded target", settings.steps, "steps", shown=progress) as bar,
    ):
        for step, batch in enumerate(batches):
            loss = set_gradients(model, [documents[i] for i in batch], pool)
            torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
            warmup = min(1.0, (step + 1) / settings.warmup_steps)
            factor = warmup * (1 - step / settings.steps)
            for shape, some in matrices.items():
                muon_step(some, momenta[shape], _MATRIX_RATE * factor)
            for group, rate in zip(adamw.param_groups, (_EMBEDDING_RATE, _REST_RATE), strict=True):
                group["lr"] = rate * factor
            adamw.step()
            bar.note(f"loss {loss:.2f}")
            bar.update()
