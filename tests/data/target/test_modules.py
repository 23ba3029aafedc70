from pathlib import Path

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from data.target.loading import load_target
from data.target.modules import locate
from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from eagle31.errors import UserError
from tests.data.target.tiny_target import VOCAB_SIZE, final_hidden_and_logits, save_model, save_target

CPU = torch.device("cpu")


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


def test_modules_inside_a_multimodal_wrapper(tmp_path: Path) -> None:
    spec = _save_llava(tmp_path)
    model = load_target(spec, CPU)
    modules = locate(model, spec)
    assert modules.decoder is model.model.language_model
    assert len(modules.layers) == 3
    # The checkpoint has the tensor names of an older layout.
    final_hidden, logits = final_hidden_and_logits(spec)
    parts = load_target_parts(spec)
    torch.testing.assert_close(parts.head(final_hidden), logits, rtol=0, atol=0)
    assert torch.equal(parts.embed_tokens, modules.embed_tokens.weight)


def test_a_missing_module_is_a_user_error_with_what_was_tried(tmp_path: Path) -> None:
    spec = save_target(tmp_path)
    model = load_target(spec, CPU)
    get_embeddings = type(model).get_input_embeddings
    for owner in (model, model.model):
        owner.get_input_embeddings = lambda: None
    with pytest.raises(UserError, match=r"target\.model=.*LlamaModel\.get_input_embeddings"):
        locate(model, spec)
    for owner in (model, model.model):
        owner.get_input_embeddings = get_embeddings.__get__(owner)
    del model.model.norm
    with pytest.raises(UserError, match=r"target\.model=.*model\.norm, model\.final_layernorm"):
        locate(model, spec)
    del model.model.layers
    with pytest.raises(UserError, match=r"target\.model=.*model\.layers, model\.h"):
        locate(model, spec)
