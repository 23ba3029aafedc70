"""The recipe's schema for the drafter."""

from dataclasses import dataclass
from typing import Any

from omegaconf import II

from eagle31.choice import Choice
from train.config.setting import setting


class Attention(Choice):
    gqa = "gqa", "grouped-query attention"
    gqa_qk_norm = "gqa_qk_norm", "gqa with norms of queries and keys, as in Qwen3"
    mla = "mla", "multi-head latent attention"


class Method(Choice):
    eagle = "eagle", "EAGLE 3 and 3.1: a chain of steps, in which hidden states recurse"
    dspark = "dspark", "DSpark: all tokens in one pass, which a Markov head chooses from left to right"


@dataclass
class DrafterShape:
    """The drafter's architecture. null takes the value of the checkpoint in init_from, else the target's.

    fc_norm and norm_output are never taken from init_from: an EAGLE 3 checkpoint is trained further as
    EAGLE 3.1, with fc_norm weights that start at one.
    """

    method: Method = setting(
        Method.eagle, "How the drafter drafts. drafter=dspark sets all that DSpark needs."
    )
    block_size: int = setting(
        II("evaluate.draft_tokens"), "Tokens of a draft that vLLM makes by default, for dspark.", ge=1
    )
    markov_rank: int = setting(
        256, "Rank of the Markov head, for dspark. 0: there is none, which makes it DFlash.", ge=0
    )
    mask_token_id: int | None = setting(
        None,
        "Token whose embedding stands for the tokens that are not known yet, for dspark. null: the target's "
        "end token, after which nothing is drafted, or token 0 if its config has none.",
        ge=0,
    )
    attention: Attention | None = setting(
        None, "Kind of attention. null: that of init_from, else gqa, whatever the target has."
    )

    init_from: str | None = setting(
        None,
        "Drafter checkpoint to start training from, exported or published: directory or Hub id. null: "
        "random weights.",
    )
    init_revision: str | None = setting(
        None, "Branch, tag or commit of init_from. null: the Hub's default branch."
    )

    num_hidden_layers: int = setting(1, "Number of decoder layers.", ge=1, le=64)
    hidden_size: int | None = setting(None, "Width of the hidden states. null: the target's.", ge=1)
    intermediate_size: int | None = setting(
        None,
        "Width of the feed-forward network. null: that of the target, for a mixture of experts the width "
        "of all experts that one token passes through.",
        ge=1,
    )
    num_attention_heads: int | None = setting(None, "Number of query heads. null: the target's.", ge=1)
    num_key_value_heads: int | None = setting(
        None, "Number of key-value heads, for gqa. null: the target's.", ge=1
    )
    head_dim: int | None = setting(None, "Width of a head, for gqa. null: the target's.", ge=1)
    q_lora_rank: int | None = setting(None, "Rank of the query's latent, for mla. null: the target's.", ge=1)
    kv_lora_rank: int | None = setting(
        None, "Rank of the key-value latent, for mla. null: the target's.", ge=1
    )
    qk_nope_head_dim: int | None = setting(
        None, "Width of a head's part without RoPE, for mla. null: the target's.", ge=1
    )
    qk_rope_head_dim: int | None = setting(
        None, "Width of a head's part with RoPE, for mla. null: the target's.", ge=1
    )
    v_head_dim: int | None = setting(None, "Width of a value head, for mla. null: the target's.", ge=1)
    rope_parameters: dict[str, Any] = setting(
        {},
        "RoPE: rope_type, rope_theta and the keys of a scaling, such as factor. Empty: the target's; if it "
        "has some for each kind of layer, those of full_attention, or with a window of sliding_attention.",
    )
    max_position_embeddings: int | None = setting(
        None, "Longest sequence that vLLM drafts for. null: the target's.", ge=1
    )
    sliding_window: int | None = setting(
        None,
        "Sliding window: the number of positions that the drafter's attention reads, the current one "
        "included; not for mla. null: that of init_from, else that of a target whose layers all have one, "
        "which vLLM would also use, else none. docs/study.md has an ablation.",
        ge=1,
    )
    aux_layer_ids: list[int] | None = setting(
        None,
        "Captured layers, counted as decoder layers already applied: 0 is the embedding output. null: 2, "
        "n // 2 and n - 3 for a target of n layers.",
        ge=0,
    )
    draft_vocab_size: int | None = setting(
        32_000, "The most tokens that can be drafted, the most frequent ones. null: all tokens.", ge=1
    )
    fc_norm: bool = setting(True, "Whether each captured state is normalized before the fusion (EAGLE 3.1).")
    norm_output: bool = setting(
        True, "Whether the next step receives the state after the final norm (EAGLE 3.1)."
    )
    norm_before_residual: bool | None = setting(
        None, "Whether the layer's residual is the normalized input. null: that of init_from, else false."
    )
    train_lm_head: bool = setting(
        True, "Whether the draft head is trained; otherwise it stays the target's rows."
    )
