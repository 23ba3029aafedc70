import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3TextConfig,
    GraniteConfig,
    HyperCLOVAXConfig,
    MiniCPM3Config,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    RecurrentGemmaConfig,
)

from data.target.loading import load_target
from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from eagle31.errors import UserError
from tests.data.target.tiny_target import (
    HIDDEN_SIZE,
    NUM_LAYERS,
    VOCAB_SIZE,
    final_hidden_and_logits,
    make_capture,
    save_model,
    save_target,
)

CPU = torch.device("cpu")
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_QWEN35 = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.mark.parametrize(("family", "sharded", "tied"), [("llama", True, True), ("qwen3", False, False)])
def test_a_head_read_from_the_checkpoint_gives_the_models_logits(
    tmp_path: Path, family: str, sharded: bool, tied: bool
) -> None:
    spec = save_target(tmp_path, family, tied, sharded)
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    parts = load_target_parts(spec)
    final_hidden, logits = final_hidden_and_logits(spec)
    torch.testing.assert_close(parts.head(final_hidden), logits, rtol=0, atol=0)
    model = load_target(spec, CPU)
    assert torch.equal(parts.embed_tokens, model.get_input_embeddings().weight)
    assert (parts.num_layers, parts.hidden_size, parts.vocab_size) == (NUM_LAYERS, HIDDEN_SIZE, VOCAB_SIZE)
    assert parts.eos_token_ids == (2,)
    assert not any(p.requires_grad for p in parts.head.parameters())


@pytest.mark.parametrize(
    ("recommended", "sampling"),
    [
        ({"do_sample": True, "top_k": 20, "top_p": 0.95}, {"temperature": 1.0, "top_k": 20, "top_p": 0.95}),
        ({"temperature": 0.6, "top_k": -1, "min_p": 0.1}, {"temperature": 0.6, "top_k": 0, "min_p": 0.1}),
        ({"repetition_penalty": 1.05}, {"temperature": 1.0, "top_k": 0, "repetition_penalty": 1.05}),
        ({"do_sample": False}, {"temperature": 0.0}),
    ],
)
def test_the_recommended_sampling_is_what_vllm_would_serve_with(
    tmp_path: Path, recommended: dict, sampling: dict
) -> None:
    spec = save_target(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    assert load_target_parts(spec).sampling == sampling


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        pytest.param(Gemma3TextConfig(**_SMALL), True, id="gemma3"),
        pytest.param(Qwen3_5TextConfig(**_SMALL, **_QWEN35), False, id="qwen3.5"),
    ],
)
def test_captured_states_give_the_logits_with_a_norm_that_scales_by_one_plus_its_weight(
    tmp_path: Path, config: PreTrainedConfig, tied: bool
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(replaced(config, tie_word_embeddings=tied))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, -0.5, 0.5)
    save_model(model, tmp_path)
    spec = TargetSpec(str(tmp_path), dtype="float32")
    capture = make_capture(spec, (1, 2, 4))
    ids = torch.arange(10)
    [(_, last)] = capture.capture([ids])
    head = load_target_parts(spec).head
    with torch.no_grad():
        logits = load_target(spec, CPU)(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(head(last), logits, rtol=1e-5, atol=1e-5)
    plain = nn.functional.rms_norm(last, (HIDDEN_SIZE,), head.norm.weight, 1e-6) @ head.weight.T
    assert not torch.allclose(plain, logits, atol=1e-2)


_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        (GraniteConfig(**_SMALL, logits_scaling=6.0), 1 / 6),  # divides
        (HyperCLOVAXConfig(**_SMALL, logits_scaling=6.0), 6.0),
        (CohereConfig(**_SMALL, logit_scale=0.0625), 0.0625),
        (MiniCPM3Config(**_SMALL | _LATENT, dim_model_base=8), 8 / HIDDEN_SIZE),  # of the states
    ],
)
def test_the_head_has_the_scale_that_the_targets_code_applies(
    tmp_path: Path, config: PreTrainedConfig, scale: float
) -> None:
    torch.manual_seed(0)
    save_model(AutoModelForCausalLM.from_config(config), tmp_path)
    spec = TargetSpec(str(tmp_path), dtype="float32")
    head = load_target_parts(spec).head
    final_hidden, logits = final_hidden_and_logits(spec)
    assert head.scale == pytest.approx(scale, rel=1e-6)
    torch.testing.assert_close(head(final_hidden), logits)
    torch.testing.assert_close(head.rows(torch.arange(7))(final_hidden), logits[..., :7])


def test_a_target_that_does_more_to_its_logits_is_refused(tmp_path: Path) -> None:
    # Its cap has another name than those of other families.
    config = RecurrentGemmaConfig(**_SMALL, lru_width=HIDDEN_SIZE, logits_soft_cap=5.0)
    save_model(AutoModelForCausalLM.from_config(config), tmp_path)
    with pytest.raises(UserError, match="RecurrentGemmaForCausalLM does more to its logits"):
        load_target_parts(TargetSpec(str(tmp_path)))


def replaced(config: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
    return type(config).from_dict(config.to_dict() | changes)


def test_rows_gives_the_logits_of_the_draft_vocabulary(tmp_path: Path) -> None:
    head = load_target_parts(save_target(tmp_path)).head
    t2d = torch.rand(VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) < 0.3
    hidden = torch.randn(4, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(head.rows(t2d.nonzero().squeeze(1))(hidden), head(hidden)[:, t2d])


def test_the_dtype_is_the_checkpoints_or_the_requested_one(tmp_path: Path) -> None:
    spec = save_target(tmp_path)
    assert load_target(spec, CPU).dtype == load_target_parts(spec).embed_tokens.dtype == torch.float32
    spec = replace(spec, dtype="bfloat16")
    parts = load_target_parts(spec)
    assert (
        load_target(spec, CPU).dtype == parts.embed_tokens.dtype == parts.head.weight.dtype == torch.bfloat16
    )
    with pytest.raises(UserError, match=r"target\.dtype=int8"):
        load_target_parts(replace(spec, dtype="int8"))
