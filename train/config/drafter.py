"""The recipe's schema for the drafter."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Attention(Enum):
    gqa = "gqa"
    mla = "mla"


@dataclass
class DrafterShape:
    """null takes the value of the checkpoint to start from, or the target's."""

    attention: Attention | None = None  # null: the checkpoint's, else gqa, whatever the target has

    init_from: str | None = None  # a published or exported drafter: directory or hub id
    init_revision: str | None = None

    num_hidden_layers: int = 1
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None  # of gqa
    q_lora_rank: int | None = None  # of mla, as the next four
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    rms_norm_eps: float | None = None
    # rope_type, rope_theta and the scaling's keys; empty takes the target's (Hydra sets no key below null)
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    max_position_embeddings: int | None = None
    aux_layer_ids: list[int] | None = None  # decoder layers already applied; null: 2, n // 2, n - 3
    draft_vocab_size: int | None = None  # null: the target's whole vocabulary
    # They overrule the checkpoint to start from: EAGLE 3 goes on as 3.1 with fc_norm weights of one.
    fc_norm: bool = True
    norm_output: bool = True
    norm_before_residual: bool = False
    train_lm_head: bool = True
