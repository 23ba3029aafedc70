"""The drafter's complete shape, from the recipe and the target's config."""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from data.target.architecture import active_intermediate_size, first_layer, head_width
from eagle31.errors import UserError
from eagle31.model.config import DrafterConfig, DSparkShape
from eagle31.model.shapes import ATTENTIONS, AttentionShape, MlaShape
from train.config.drafter import Attention, DrafterShape, Method
from train.config.run import RunConfig


def fitted(shape: DrafterShape, vocab_size: int) -> DrafterShape:
    """Return the recipe's shape, with null for a draft vocabulary that is not smaller than the target's."""
    smaller = (shape.draft_vocab_size or vocab_size) < vocab_size
    return shape if smaller else replace(shape, draft_vocab_size=None)


def complete_shape(
    shape: DrafterShape,
    target_config: PreTrainedConfig,
    aux_layer_ids: tuple[int, ...],
    vocab_size: int,
    draft_vocab_size: int,
) -> DrafterConfig:
    """Return the values that the recipe sets, else the target's.

    The feed-forward network takes the width that one token passes through in the target.

    Raises:
        UserError: neither gives a value, or values contradict each other.
    """
    target = first_layer(target_config)
    hidden_size = _given(shape.hidden_size, target.hidden_size)
    heads = _given(shape.num_attention_heads, target.num_attention_heads)
    intermediate_size = _given(shape.intermediate_size, active_intermediate_size(target))
    if intermediate_size is None:
        remedy = "The target's config has no width of its feed-forward network; set it."
        raise UserError("drafter.intermediate_size", None, remedy)
    window = sliding_window(shape, target)
    return DrafterConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=heads,
        **attention_heads(shape, target, heads, hidden_size),
        rms_norm_eps=getattr(target, "rms_norm_eps", 1e-6),
        rope_parameters=rope_parameters(shape.rope_parameters, target, window),
        max_position_embeddings=_given(shape.max_position_embeddings, target.max_position_embeddings),
        sliding_window=window,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layer_ids=aux_layer_ids,
        fc_norm=shape.fc_norm,
        norm_output=shape.norm_output,
        norm_before_residual=bool(shape.norm_before_residual),
        dspark=_dspark(shape, target.eos_token_id),
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
    )


def _dspark(shape: DrafterShape, eos_token_id: int | list[int] | None) -> DSparkShape | None:
    """Return what DSpark has in addition; None for EAGLE."""
    if shape.method is not Method.dspark:
        return None
    end = eos_token_id[0] if isinstance(eos_token_id, list) else eos_token_id
    return DSparkShape(shape.block_size, _given(shape.mask_token_id, end or 0), shape.markov_rank)


def check_positions(config: RunConfig, positions: int) -> None:
    """Raise UserError for samples that are longer than the drafter's longest sequences."""
    given, longest = config.drafter.max_position_embeddings, config.data.max_tokens
    if positions >= longest:
        return
    if given is not None:
        remedy = f"Samples have up to data.max_tokens={longest} tokens; raise it, or lower data.max_tokens."
        raise UserError("drafter.max_position_embeddings", given, remedy)
    remedy = f"The target has {positions} positions (max_position_embeddings); lower it to that at most."
    raise UserError("data.max_tokens", longest, remedy)


def _given(setting: Any, default: Any) -> Any:
    """Return the recipe's setting, which check_drafter has refused if it is 0, else the default."""
    return default if setting is None else setting


def sliding_window(shape: DrafterShape, target: Any) -> int | None:
    """Return the recipe's window, else the one that vLLM would give a drafter without one.

    vLLM serves a drafter whose config.json has no window with that of its target, if the target has the same
    window in all layers.

    Source: `create_engine_config` in engine/arg_utils.py and `Attention` of vLLM.
    """
    if shape.sliding_window is not None or "sliding_window" not in _attention(shape).optional_parts:
        return shape.sliding_window
    types = getattr(target, "layer_types", None)
    if types is not None and any(one != "sliding_attention" for one in types):
        return None
    return getattr(target, "sliding_window", None) or None


def attention_heads(shape: DrafterShape, target: Any, num_heads: int, hidden_size: int) -> dict[str, Any]:
    """Return `attention`, `num_key_value_heads` and `head_dim` of `DrafterConfig`.

    Raises:
        UserError: a width is given by neither, or belongs to another kind of attention.
    """
    chosen = _attention(shape)
    for kind in ATTENTIONS.values():
        for name in kind.widths():
            if kind is not chosen and getattr(shape, name) is not None:
                remedy = f"It is a setting of {kind.title}; set drafter.attention={kind.name} too."
                raise UserError(f"drafter.{name}", getattr(shape, name), remedy)
    if not issubclass(chosen, MlaShape):
        return {
            "attention": chosen(),
            "num_key_value_heads": shape.num_key_value_heads
            or getattr(target, "num_key_value_heads", num_heads),
            "head_dim": shape.head_dim or head_width(target) or hidden_size // num_heads,
        }
    widths = {name: _given(getattr(shape, name), getattr(target, name, None)) for name in chosen.widths()}
    for name, value in widths.items():
        if value is None:
            raise UserError(f"drafter.{name}", None, "The target has no such width; set it.")
    latent = chosen(**widths)
    if shape.head_dim not in (None, latent.head_dim):
        remedy = "With MLA it is drafter.qk_nope_head_dim + drafter.qk_rope_head_dim; remove it."
        raise UserError("drafter.head_dim", shape.head_dim, remedy)
    return {"attention": latent, "num_key_value_heads": num_heads, "head_dim": latent.head_dim}


def _attention(shape: DrafterShape) -> type[AttentionShape]:
    return ATTENTIONS[(shape.attention or Attention.gqa).value]


def rope_parameters(recipe: dict, target: Any, window: int | None) -> dict:
    """Return the recipe's RoPE parameters, else the target's.

    Args:
        window: the drafter's sliding window.

    Raises:
        UserError: neither gives any, or the target's are for kinds of layers that the drafter has not.
    """
    found, kind = getattr(target, "rope_parameters", None) or {}, rope_kind(target, window)
    chosen = dict(recipe or (found if kind is None else found[kind]))
    if "rope_theta" not in chosen or any(isinstance(value, dict) for value in chosen.values()):
        raise UserError(
            "drafter.rope_parameters",
            chosen or None,
            "The target has no single set of them; set one, such as "
            "{rope_type: default, rope_theta: 10000.0}.",
        )
    chosen.setdefault("rope_type", "default")
    return chosen


def rope_kind(target: Any, window: int | None) -> str | None:
    """Return the kind of layers that attend as the drafter does, if the target has RoPE parameters for it."""
    kind = "full_attention" if window is None else "sliding_attention"
    found = (getattr(target, "rope_parameters", None) or {}).get(kind)
    return kind if isinstance(found, dict) else None
