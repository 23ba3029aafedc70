import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
)

from data.target.aux_layers import check_aux_layer_ids, default_aux_layer_ids
from data.target.fingerprints import target_fingerprint, tokenizer_fingerprint
from data.target.loading import load_target, load_tokenizer
from data.target.modules import locate
from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from eagle31.errors import UserError
from tests.data.target.tiny_target import (
    HIDDEN_SIZE,
    NUM_LAYERS,
    VOCAB_SIZE,
    make_capture,
    save_model,
    save_target,
)

CPU = torch.device("cpu")


def _last_hidden_and_logits(spec: TargetSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """What enters the model's own final norm, and the logits that come out of the model."""
    model = load_target(spec, CPU)
    kept = []
    hook = locate(model, spec).final_norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        logits = model(input_ids=torch.arange(10)[None]).logits
    hook.remove()
    return kept[0], logits


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_parts_read_from_the_checkpoint_give_the_models_logits(
    tmp_path: Path, family: str, sharded: bool, tied: bool
) -> None:
    spec = save_target(tmp_path, family, tied, sharded)
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    parts = load_target_parts(spec)
    final_hidden, logits = _last_hidden_and_logits(spec)
    torch.testing.assert_close(parts.head(final_hidden), logits, rtol=0, atol=0)
    model = load_target(spec, CPU)
    assert torch.equal(parts.embed_tokens, model.get_input_embeddings().weight)
    assert (parts.num_layers, parts.hidden_size, parts.vocab_size) == (NUM_LAYERS, HIDDEN_SIZE, VOCAB_SIZE)
    assert parts.eos_token_ids == (2,)
    assert not any(p.requires_grad for p in parts.head.parameters())


def test_parts_need_only_the_files_that_hold_them(tmp_path: Path) -> None:
    spec = save_target(tmp_path, sharded=True)
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {
        weight_map[name] for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    }
    others = set(weight_map.values()) - needed
    assert others
    for file in others:
        (tmp_path / file).unlink()
    assert load_target_parts(spec).vocab_size == VOCAB_SIZE


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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(GemmaConfig(**_SMALL), id="gemma"),
        pytest.param(Gemma3TextConfig(**_SMALL), id="gemma3"),
        pytest.param(Qwen3_5TextConfig(**_SMALL, **_QWEN35), id="qwen3.5"),
    ],
)
def test_captured_states_give_the_logits_of_a_norm_that_scales_by_one_plus_its_weight(
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


def replaced(config: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
    return type(config).from_dict(config.to_dict() | changes)


def test_rows_are_the_draft_vocabularys_logits(tmp_path: Path) -> None:
    head = load_target_parts(save_target(tmp_path)).head
    t2d = torch.rand(VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) < 0.3
    hidden = torch.randn(4, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(head.rows(t2d)(hidden), head(hidden)[:, t2d])


def test_dtype_is_the_checkpoints_or_the_one_asked_for(tmp_path: Path) -> None:
    spec = save_target(tmp_path)
    assert load_target(spec, CPU).dtype == load_target_parts(spec).embed_tokens.dtype == torch.float32
    spec = replace(spec, dtype="bfloat16")
    parts = load_target_parts(spec)
    assert (
        load_target(spec, CPU).dtype == parts.embed_tokens.dtype == parts.head.weight.dtype == torch.bfloat16
    )
    with pytest.raises(UserError, match=r"target\.dtype=int8"):
        load_target_parts(replace(spec, dtype="int8"))


def test_target_is_frozen_and_in_eval_mode(tmp_path: Path) -> None:
    model = load_target(save_target(tmp_path), CPU)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


def _save_llava(directory: Path) -> TargetSpec:
    text = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=4,
        patch_size=2,
    )
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=VOCAB_SIZE - 1)
    save_model(LlavaForConditionalGeneration(config), directory)
    return TargetSpec(str(directory))


def test_multimodal_wrapper(tmp_path: Path) -> None:
    spec = _save_llava(tmp_path)
    model = load_target(spec, CPU)
    modules = locate(model, spec)
    assert modules.decoder is model.model.language_model
    assert len(modules.layers) == 3
    # Its checkpoint keeps names of an older layout.
    final_hidden, logits = _last_hidden_and_logits(spec)
    parts = load_target_parts(spec)
    torch.testing.assert_close(parts.head(final_hidden), logits, rtol=0, atol=0)
    assert torch.equal(parts.embed_tokens, modules.embed_tokens.weight)


def test_explicit_paths_override(tmp_path: Path) -> None:
    spec = save_target(tmp_path)
    model = load_target(spec, CPU)
    model.model.blocks_of_mine = model.model.layers
    modules = locate(
        model, replace(spec, layers_path="model.blocks_of_mine", norm_path="model.layers.0.input_layernorm")
    )
    assert modules.layers is model.model.layers
    assert modules.final_norm is model.model.layers[0].input_layernorm
    model.model.words, model.to_words = model.model.embed_tokens, model.lm_head
    for owner in (model, model.model):
        owner.get_input_embeddings = owner.get_output_embeddings = lambda: None
    with pytest.raises(UserError, match=r"target\.embed_path"):
        locate(model, spec)
    with pytest.raises(UserError, match=r"target\.lm_head_path"):
        locate(model, replace(spec, embed_path="model.words"))
    modules = locate(model, replace(spec, embed_path="model.words", lm_head_path="to_words"))
    assert (modules.embed_tokens, modules.lm_head) == (model.model.embed_tokens, model.lm_head)


def test_what_is_not_found_is_named(tmp_path: Path) -> None:
    spec = save_target(tmp_path)
    model = load_target(spec, CPU)
    with pytest.raises(UserError, match=r"target\.layers_path=model\.nothing"):
        locate(model, replace(spec, layers_path="model.nothing"))
    with pytest.raises(UserError, match=r"target\.layers_path=model\.norm: Is a LlamaRMSNorm"):
        locate(model, replace(spec, layers_path="model.norm"))
    del model.model.norm
    with pytest.raises(UserError, match=r"target\.norm_path.*model\.norm, model\.final_layernorm"):
        locate(model, spec)
    del model.model.layers
    with pytest.raises(UserError, match=r"target\.layers_path.*model\.layers, model\.h"):
        locate(model, spec)


@pytest.mark.parametrize("model", ["/no/such/directory", "./nowhere", "no-such-org/no-such-model"])
def test_absent_model_is_the_users_error(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for ask in (load_target_parts, load_tokenizer, target_fingerprint, lambda spec: load_target(spec, CPU)):
        with pytest.raises(UserError, match=f"target.model={model}"):
            ask(TargetSpec(model))


def test_checkpoint_without_safetensors(tmp_path: Path) -> None:
    spec = save_target(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="safetensors"):
        load_target_parts(spec)


def test_fingerprint_follows_the_weights_and_the_config(tmp_path: Path) -> None:
    spec = save_target(tmp_path / "a")
    original = target_fingerprint(spec)
    assert target_fingerprint(save_target(tmp_path / "b")) == original
    assert load_target_parts(spec).fingerprint == original
    weights = tmp_path / "a" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    changed = target_fingerprint(spec)
    assert changed != original
    config = tmp_path / "a" / "config.json"
    config.write_text(config.read_text().replace("rms_norm_eps", "another_eps"))
    assert target_fingerprint(spec) not in (original, changed)


def _tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=words[0], pad_token=words[0])


def test_tokenizer_and_its_fingerprint(tmp_path: Path) -> None:
    _tokenizer(["[UNK]", "a", "b"]).save_pretrained(tmp_path)
    save_target(tmp_path)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    tokenizer = load_tokenizer(TargetSpec(str(tmp_path)), str(template))
    assert tokenizer.chat_template == "{{ messages }}"
    fingerprint = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "a b"], padding=True, truncation=True, max_length=1)
    assert tokenizer_fingerprint(tokenizer) == fingerprint
    assert tokenizer_fingerprint(_tokenizer(["[UNK]", "b", "a"])) != fingerprint
    with pytest.raises(UserError, match="chat_template_file"):
        load_tokenizer(TargetSpec(str(tmp_path)), str(tmp_path / "absent.jinja"))


def test_default_aux_layer_ids() -> None:
    assert default_aux_layer_ids(32) == (2, 16, 29)
    for num_layers in range(1, 70):
        ids = default_aux_layer_ids(num_layers)
        assert check_aux_layer_ids(ids, num_layers) == ids
        assert len(ids) == min(3, num_layers)


@pytest.mark.parametrize("ids", [(), (2, 1), (1, 1, 2), (-1, 2), (1, 6)])
def test_bad_aux_layer_ids(ids: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"drafter\.aux_layer_ids"):
        check_aux_layer_ids(ids, num_layers=5)
