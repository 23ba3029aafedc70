"""A random Llama that answers in a few milliseconds, for the tokenizer of the tests' templates."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def tiny_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
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
    return LlamaForCausalLM(config).eval()
