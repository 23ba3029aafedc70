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
        num_hidden_layers=3,
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
    modules = locate(model)
    assert modules.decoder is model.model.language_model
    assert len(modules.layers) == 3
    # The checkpoint has the tensor names of an older layout.
    final_hidden, logits = final_hidden_and_logits(spec)
    parts = load_target_parts(spec)
    torch.testing.assert_close(parts.head(final_hidden), logits, rtol=0, atol=0)
    assert torch.equal(parts.embed_tokens, modules.embed_tokens.weight)


@pytest.mark.parametrize("missing", ["lm_head", "model.norm", "model.layers", "model.embed_tokens"])
def test_a_missing_module_is_a_user_error(missing: str, tmp_path: Path) -> None:
    model = load_target(save_target(tmp_path), CPU)
    owner, _, name = missing.rpartition(".")
    setattr(model.get_submodule(owner), name, None)
    with pytest.raises(UserError, match=rf"target\.model={tmp_path}: LlamaForCausalLM has no"):
        locate(model)
