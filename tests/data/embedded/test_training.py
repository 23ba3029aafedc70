from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaForCausalLM

from data.embedded import training
from data.embedded.target import EmbeddedTarget
from data.embedded.training import schedule_batches


def test_batches_cover_each_epoch_once_within_batch_tokens() -> None:
    lengths = [3 + 7 * i % 50 for i in range(100)] + [400]
    batches = schedule_batches(lengths, batch_tokens=128, steps=60)
    assert batches == schedule_batches(lengths, batch_tokens=128, steps=60)
    assert len(batches) == 60
    assert all(len(b) == 1 or max(lengths[i] for i in b) * len(b) <= 128 for b in batches)
    first_epoch = batches[: next(n for n in range(61) if sum(map(len, batches[:n])) >= len(lengths))]
    assert sorted(i for b in first_epoch for i in b) == list(range(len(lengths)))


def test_the_loss_ignores_prompts_and_padding(built: EmbeddedTarget) -> None:
    model = LlamaForCausalLM.from_pretrained(built.model)
    generator = torch.Generator().manual_seed(0)
    documents = []
    for length, prompt in ((9, 4), (23, 8)):
        ids = torch.randint(3, 300, (length,), generator=generator)
        documents.append((ids, torch.arange(length) >= prompt))
    total = training.answer_loss(model, documents)
    expected = 0.0
    for ids, mask in documents:
        log_probabilities = model(ids[None]).logits[0, :-1].detach().log_softmax(-1)
        picked = log_probabilities.gather(1, ids[1:, None])[:, 0]
        expected -= float(picked[mask[1:]].sum())
    assert total.item() == pytest.approx(expected, rel=1e-5)


def test_the_gradient_of_two_halves_is_that_of_the_full_batch(built: EmbeddedTarget) -> None:
    model = LlamaForCausalLM.from_pretrained(built.model)
    generator = torch.Generator().manual_seed(0)
    documents = []
    for length in (9, 23, 14):
        ids = torch.randint(3, 300, (length,), generator=generator)
        documents.append((ids, torch.arange(length) >= length // 3))
    mean = training.answer_loss(model, documents) / sum(int(mask[1:].sum()) for _, mask in documents)
    expected = torch.autograd.grad(mean, list(model.parameters()))
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):  # a second call would show gradients that were left over
            assert training.set_gradients(model, documents, pool) == pytest.approx(mean.item(), rel=1e-5)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
