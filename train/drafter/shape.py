"""The drafter's shape: what the recipe sets, else the target's."""

from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from data.target.architecture import active_intermediate_size
from eagle31.errors import UserError
from eagle31.model.config import DrafterConfig, MlaShape
from train.config.drafter import Attention, DrafterShape


def complete_shape(
    shape: DrafterShape,
    target_config: PreTrainedConfig,
    aux_layer_ids: tuple[int, ...],
    vocab_size: int,
    draft_vocab_size: int,
) -> DrafterConfig:
    """What the recipe sets, else the target's; the feed-forward network takes the target's active width.

    Raises:
        UserError: a value is given by neither, or the two do not go together.
    """
    target = target_config.get_text_config()
    hidden_size = shape.hidden_size or target.hidden_size
    heads = shape.num_attention_heads or target.num_attention_heads
    intermediate_size = shape.intermediate_size or active_intermediate_size(target)
    if intermediate_size is None:
        remedy = "The target does not tell how wide its feed-forward network is; give it."
        raise UserError("drafter.intermediate_size", None, remedy)
    return DrafterConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=heads,
        **attention_heads(shape, target, heads, hidden_size),
        rms_norm_eps=shape.rms_norm_eps or target.rms_norm_eps,
        rope_parameters=rope_parameters(shape.rope_parameters, getattr(target, "rope_parameters", None)),
        max_position_embeddings=shape.max_position_embeddings or target.max_position_embeddings,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layer_ids=aux_layer_ids,
        fc_norm=shape.fc_norm,
        norm_output=shape.norm_output,
        norm_before_residual=shape.norm_before_residual,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
    )


def attention_heads(shape: DrafterShape, target: Any, num_heads: int, hidden_size: int) -> dict[str, Any]:
    """The recipe's heads, else the target's: `num_key_value_heads`, `head_dim` and `mla` of `DrafterConfig`.

    Raises:
        UserError: a width of MLA is not given, and the target has none.
    """
    if shape.attention is Attention.mla:
        mla = latent_shape(shape, target)
        if shape.head_dim not in (None, mla.head_dim):
            remedy = "MLA has drafter.qk_nope_head_dim + drafter.qk_rope_head_dim; leave it out."
            raise UserError("drafter.head_dim", shape.head_dim, remedy)
        return {"num_key_value_heads": num_heads, "head_dim": mla.head_dim, "mla": mla}
    for name in (one.name for one in fields(MlaShape)):
        if getattr(shape, name) is not None:
            remedy = "It is of MLA; give drafter.attention=mla too."
            raise UserError(f"drafter.{name}", getattr(shape, name), remedy)
    # The head_dim that transformers gives a target with MLA is that of the rotated part.
    latent = getattr(target, "kv_lora_rank", None) is not None
    own_width = target.v_head_dim if latent else getattr(target, "head_dim", None)
    return {
        "num_key_value_heads": shape.num_key_value_heads or target.num_key_value_heads,
        "head_dim": shape.head_dim or own_width or hidden_size // num_heads,
    }


def latent_shape(shape: DrafterShape, target: Any) -> MlaShape:
    """MLA's widths, those of a target with MLA where the recipe gives none.

    Raises:
        UserError: one is not given, and the target has none.
    """
    widths: dict[str, int] = {}
    for name in (one.name for one in fields(MlaShape)):
        own = getattr(shape, name)
        value = getattr(target, name, None) if own is None else own
        if value is None:
            raise UserError(f"drafter.{name}", None, "The target has none to take over; give it.")
        widths[name] = value
    return MlaShape(**widths)


def rope_parameters(own: dict | None, target: dict | None) -> dict:
    """The recipe's, else the target's.

    Raises:
        UserError: there are none, or one set per layer type, of which the drafter can have only one.
    """
    chosen = dict(own or target or {})
    if "rope_theta" not in chosen or any(isinstance(value, dict) for value in chosen.values()):
        raise UserError(
            "drafter.rope_parameters",
            chosen or None,
            "The target has no single set to take over; give one, such as "
            "{rope_type: default, rope_theta: 10000.0}.",
        )
    chosen.setdefault("rope_type", "default")
    return chosen
