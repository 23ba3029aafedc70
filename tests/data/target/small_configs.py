"""Sizes of small targets as keyword arguments of transformers' configs."""

from typing import Any

VOCAB, HIDDEN, LAYERS = 96, 32, 3
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "pad_token_id": None,
}
DEEPSEEK: dict[str, Any] = SMALL | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
