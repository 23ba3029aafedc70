"""A drafter's first weights from the target's own layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from data.target.spec import TargetSpec
from eagle31.errors import UserError
from eagle31.model.config import DrafterConfig, MlaShape
from eagle31.model.drafter import Drafter
from tests.data.target.small_configs import DEEPSEEK
from tests.data.target.tiny_target import HIDDEN_SIZE, NUM_LAYERS, save_model, save_target
from train.drafter.build import initialize
from train.drafter.target_weights import FromTarget, check_target_weights, start_from_target, with_norm

GQA: dict[str, Any] = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "draft_vocab_size": 20,
    "target_hidden_size": HIDDEN_SIZE,
    "aux_layer_ids": (0, 2, 5),
}
MLA = GQA | {
    "num_key_value_heads": 4,
    "head_dim": 12,
    "mla": MlaShape(q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
}


def started(config: DrafterConfig, given: FromTarget) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the drafter's weights before and after."""
    torch.manual_seed(0)
    drafter = Drafter(config)
    initialize(drafter)
    before = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    check_target_weights(config, given)
    start_from_target(drafter, given)
    return before, drafter.state_dict()


def layer_of(directory: Path, index: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{index}."
    files = [load_file(path) for path in directory.glob("*.safetensors")]
    stored = {name: weight for file in files for name, weight in file.items()}
    return {name.removeprefix(prefix): w for name, w in stored.items() if name.startswith(prefix)}


def test_a_layer_of_sharded_files_becomes_the_half_that_reads_the_state(tmp_path: Path) -> None:
    spec = save_target(tmp_path, sharded=True)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config = DrafterConfig(**GQA, num_hidden_layers=2)
    before, after = started(config, FromTarget(spec, ("fc", "attention", "mlp"), -2))
    first, second = layer_of(tmp_path, NUM_LAYERS - 3), layer_of(tmp_path, NUM_LAYERS - 2)
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"layers.0.self_attn.{name}.weight"
        assert torch.equal(after[key][:, HIDDEN_SIZE:], first[f"self_attn.{name}.weight"])
        assert torch.equal(after[key][:, :HIDDEN_SIZE], before[key][:, :HIDDEN_SIZE])
    assert torch.equal(after["layers.0.hidden_norm.weight"], first["input_layernorm.weight"])
    assert torch.equal(after["layers.0.input_layernorm.weight"], torch.ones(HIDDEN_SIZE))
    for name, weight in second.items():
        assert torch.equal(after[f"layers.1.{name}"], weight), name
    assert torch.equal(after["fc.weight"][:, -HIDDEN_SIZE:], torch.eye(HIDDEN_SIZE))
    assert not after["fc.weight"][:, :-HIDDEN_SIZE].any()
    kept = [name for name in before if torch.equal(before[name], after[name])]
    assert {name for name in kept if not name.startswith("fc_norm")} == {
        "norm.weight",
        "lm_head.weight",
        "layers.0.input_layernorm.weight",
    }


def test_norms_of_queries_and_keys_become_the_scale_of_their_projections(tmp_path: Path) -> None:
    spec = save_target(tmp_path, "qwen3")
    _, after = started(DrafterConfig(**GQA, num_hidden_layers=1), FromTarget(spec, ("attention",), -1))
    layer = layer_of(tmp_path, NUM_LAYERS - 1)
    generator = torch.Generator().manual_seed(1)
    normed = torch.randn(4000, HIDDEN_SIZE, generator=generator) * layer["input_layernorm.weight"]
    for name, num_heads in (("q", 4), ("k", 2)):
        projected = normed @ after[f"layers.0.self_attn.{name}_proj.weight"][:, HIDDEN_SIZE:].t()
        heads = (normed @ layer[f"self_attn.{name}_proj.weight"].t()).unflatten(-1, (num_heads, -1))
        exact = torch.nn.functional.rms_norm(heads, (8,)) * layer[f"self_attn.{name}_norm.weight"]
        found = projected.unflatten(-1, (num_heads, -1))
        # The direction is exact but for the norm's weights, and the length is right on average.
        assert torch.nn.functional.cosine_similarity(found, exact, dim=-1).min() > 0.999
        assert found.square().mean() == pytest.approx(float(exact.square().mean()), rel=0.15)


def test_a_norm_over_all_heads_is_one_scale() -> None:
    projection = torch.arange(1.0, 9.0).reshape(4, 2)
    scaled = with_norm(projection, torch.ones(4), torch.ones(2))
    torch.testing.assert_close(scaled / projection, torch.full((4, 2), float(scaled[0, 0])))
    assert scaled.square().sum(-1).mean() == pytest.approx(1.0)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> TargetSpec:
    """A target with MLA, one dense layer and two with experts."""
    directory = tmp_path_factory.mktemp("latent")
    torch.manual_seed(0)
    save_model(DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK)), directory)
    return TargetSpec(model=str(directory))


def test_latent_attention_starts_from_a_layer_with_experts(latent: TargetSpec) -> None:
    config = DrafterConfig(**MLA, num_hidden_layers=1)
    before, after = started(config, FromTarget(latent, ("attention",), -1))
    layer = layer_of(Path(latent.model), 2)
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):
        key = f"layers.0.self_attn.{name}.weight"
        assert torch.equal(after[key][:, HIDDEN_SIZE:], layer[f"self_attn.{name}.weight"])
        assert torch.equal(after[key][:, :HIDDEN_SIZE], before[key][:, :HIDDEN_SIZE])
    for name in ("q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj", "o_proj"):
        key = f"self_attn.{name}.weight"
        assert torch.equal(after[f"layers.0.{key}"], layer[key]), name
    # The dense layer's feed-forward network has the drafter's shape.
    _, after = started(config, FromTarget(latent, ("mlp",), 0))
    assert torch.equal(
        after["layers.0.mlp.up_proj.weight"], layer_of(Path(latent.model), 0)["mlp.up_proj.weight"]
    )


@pytest.mark.parametrize(
    ("changes", "parts", "layer", "field", "message"),
    [
        ({}, ("mlp",), -1, "drafter.init_from_target", "no mlp.gate_proj.weight"),
        ({"intermediate_size": 47}, ("mlp",), 0, "drafter.init_from_target", "drafter.intermediate_size"),
        (GQA | {"mla": None}, ("attention",), 0, "drafter.init_from_target", "drafter.attention"),
        ({"hidden_size": 24}, ("fc",), -1, "drafter.hidden_size", "set it to 32"),
        ({}, ("attention",), 3, "drafter.init_target_layer", "layers 0 to 2"),
        ({"num_hidden_layers": 2}, ("attention",), 0, "drafter.init_target_layer", "needs 2"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_read(
    latent: TargetSpec, changes: dict[str, Any], parts: tuple[str, ...], layer: int, field: str, message: str
) -> None:
    config = DrafterConfig(**{"num_hidden_layers": 1} | MLA | changes)
    with pytest.raises(UserError, match=message) as caught:
        check_target_weights(config, FromTarget(latent, parts, layer))
    assert caught.value.field == field


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    spec = save_target(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = f"model.layers.{NUM_LAYERS - 1}.self_attn.q_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, path, metadata={"format": "pt"})
    config = DrafterConfig(**GQA, num_hidden_layers=1)
    with pytest.raises(UserError, match="float8") as caught:
        started(config, FromTarget(spec, ("attention",), -1))
    assert caught.value.field == "drafter.init_from_target"
    started(config, FromTarget(spec, ("attention", "mlp"), 0))
