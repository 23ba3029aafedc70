"""Engines of the tests that answer in a few milliseconds."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithPast

from data.capture.dispatch import Refused
from data.generation.answers import Turn
from data.sampling import Sampling


def tiny_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a random Llama for the tokenizer of the tests' templates, which ends its turn now and then."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()

    def end_turns(_: nn.Module, __: tuple, inputs: dict, output: CausalLMOutputWithPast) -> None:
        assert output.logits is not None
        output.logits[inputs["input_ids"][:, -1] % 3 == 2, -1, tokenizer.eos_token_id] = 1e4

    model.register_forward_hook(end_turns, with_kwargs=True)
    return model


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: Sequence[int], stops: Sequence[int], limit: int) -> list[int]:
    """Return the model's likeliest tokens, one at a time and without a cache."""
    answer: list[int] = []
    while len(answer) < limit and not (answer and answer[-1] in stops):
        logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits
        answer.append(int(logits[0, -1].argmax()))
    return answer


class OneAtATime:
    """A generator that answers one prompt at a time, at once.

    Args:
        answer: maps a prompt to its answer.
        fails_after: it is interrupted after so many answers.
        refuses: indices of conversations that get no answer.
    """

    group_size = num_groups = 1

    def __init__(
        self,
        answer: Callable[[Sequence[int]], list[int]],
        engine: str = "one",
        fails_after: int | None = None,
        refuses: Sequence[int] = (),
    ) -> None:
        self.answer, self.engine, self.fails_after, self.refuses = answer, engine, fails_after, refuses
        self.order: list[int] = []
        self.seeds: list[tuple[int, ...]] = []

    def submit(self, group: Sequence[Turn], sampling: Sampling) -> Future[list[list[int]]]:
        [one] = group
        finished: Future[list[list[int]]] = Future()
        if one.index in self.refuses:
            finished.set_exception(Refused("too long"))
        elif len(self.order) == self.fails_after:
            raise InterruptedError
        else:
            self.seeds.append(one.seed)
            self.order.append(one.index)
            finished.set_result([self.answer(one.prompt)])
        return finished
