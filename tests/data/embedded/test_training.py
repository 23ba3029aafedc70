from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaForCausalLM

from data.embedded import training
from data.embedded.target import EmbeddedTarget


def test_the_gradient_is_that_of_the_answers_tokens_without_padding(built: EmbeddedTarget) -> None:
    model = LlamaForCausalLM.from_pretrained(built.model)
    generator = torch.Generator().manual_seed(0)
    documents, losses = [], []
    for length in (9, 23, 14):
        ids, mask = torch.randint(3, 300, (length,), generator=generator), torch.arange(length) >= length // 3
        documents.append((ids, mask))
        picked = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        losses.append(-picked[mask[1:]])
    mean = torch.cat(losses).mean()
    expected = torch.autograd.grad(mean, list(model.parameters()))
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):  # a second call would show gradients that were left over
            assert training.set_gradients(model, documents, pool) == pytest.approx(mean.item(), rel=1e-5)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
