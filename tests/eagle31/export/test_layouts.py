import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle31.errors import UserError
from eagle31.export.layouts import Layout, Verifier, layout_of, write_config
from eagle31.export.published_config import read_config
from eagle31.export.read import LoadedExport, TargetDefaults, load_export
from eagle31.export.verification import draft_logits
from eagle31.export.write import write_export
from eagle31.model.config import DrafterConfig, MlaShape
from eagle31.model.vocab import build_draft_vocab
from tests.eagle31.tiny import MLA, VOCAB, WIDE_MLA, random_batch, tiny_config, tiny_drafter

CPU = torch.device("cpu")
VERIFIER = Verifier("org/target", ("Qwen3ForCausalLM",), 3)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 16.0,
}
LATENT_YARN = {
    **{"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 16},
    **{"mscale": 1.0, "mscale_all_dim": 1.0},
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}


def written(config: DrafterConfig, layout: Layout = Layout.vllm) -> dict[str, Any]:
    return json.loads(json.dumps(write_config(config, layout, "float32", VERIFIER)))


def export(directory: Path, layout: Layout = Layout.vllm, **changes: Any) -> torch.Tensor:
    """Returns what the drafter drafts on a fixed batch."""
    config = tiny_config(**changes)
    drafter, frozen = tiny_drafter(config, torch.float32)
    counts = torch.arange(VOCAB)
    vocab = build_draft_vocab(counts, config.draft_vocab_size, [0])
    state = {name: p.detach() for name, p in drafter.named_parameters()}
    common: dict[str, Any] = {"dtype": "float32", "provenance": {}, "verifier": VERIFIER}
    write_export(directory, config, state, vocab, frozen.embed_tokens, layout=layout, **common)
    return drafted(LoadedExport(drafter, frozen.embed_tokens, None, {}))


def drafted(loaded: LoadedExport) -> torch.Tensor:
    batch = random_batch((24,), loaded.drafter.config, dtype=torch.float32)
    return draft_logits(loaded.drafter, loaded.embed_tokens, batch, torch.arange(8), 3)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def rename(directory: Path, rule: Any) -> None:
    path = directory / "model.safetensors"
    save_file({rule(name): tensor for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("rope", [DEFAULT_ROPE, LLAMA3, YARN])
def test_config_round_trip(layout: Layout, rope: dict) -> None:
    config = tiny_config(rope_parameters=rope, norm_before_residual=True, bos_token_id=1, eos_token_id=[2, 3])
    read = read_config(written(config, layout))
    assert (read.config, read.layout, read.notes) == (config, layout, ())


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fc_norm": False, "norm_output": False},
        {"norm_before_residual": True, "draft_vocab_size": VOCAB},
        {"num_hidden_layers": 2, "aux_layer_ids": (1, 3), "rope_parameters": LLAMA3},
    ],
)
def test_what_is_read_back_drafts_the_same(tmp_path: Path, layout: Layout, changes: dict) -> None:
    expected = export(tmp_path / "e", layout, **changes)
    assert torch.equal(drafted(load_export(tmp_path / "e", CPU)), expected)


@pytest.mark.parametrize("changes", [MLA, WIDE_MLA])
@pytest.mark.parametrize("rope", [DEFAULT_ROPE, LATENT_YARN])
def test_mla_is_read_back(tmp_path: Path, changes: dict, rope: dict) -> None:
    config = tiny_config(**changes, rope_parameters=rope, eos_token_id=[2, 3])
    read = read_config(written(config))
    assert (read.config, read.layout, read.notes) == (config, Layout.vllm, ())
    expected = export(tmp_path / "e", **changes, rope_parameters=rope)
    assert torch.equal(drafted(load_export(tmp_path / "e", CPU)), expected)


def test_mla_as_others_publish_it(tmp_path: Path) -> None:
    """The older names, and a number of key heads that says nothing."""
    expected = export(tmp_path / "e", **MLA, rope_parameters=LATENT_YARN)
    rope = {key: value for key, value in LATENT_YARN.items() if key not in ("rope_type", "rope_theta")}
    changes = {"num_key_value_heads": 1, "rope_scaling": rope | {"type": "yarn"}}
    edit_config(tmp_path / "e", **changes, eagle_aux_hidden_state_layer_ids=None, t2d=None)
    rename(tmp_path / "e", lambda name: name.replace("midlayer.", "layers.0."))
    assert torch.equal(drafted(load_export(tmp_path / "e", CPU)), expected)


def test_missing_widths_of_mla_are_those_vllm_takes() -> None:
    raw = written(tiny_config(**MLA))
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
        del raw[name]
    shape = read_config(raw).config.mla
    assert shape == MlaShape(
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=4, v_head_dim=128
    )


def test_a_type_that_vllm_does_not_serve_is_read_with_a_note() -> None:
    read = read_config(written(tiny_config(**MLA)) | {"model_type": "deepseek_v3"})
    assert read.config == tiny_config(**MLA)
    assert "does not serve" in read.notes[0]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mla_use_nope": True}, "mla_use_nope"),
        ({"model_type": "llama"}, "model_type"),
        ({"q_lora_rank": None}, "q_lora_rank"),
    ],
)
def test_mla_with_other_parts_is_refused(changes: dict, field: str) -> None:
    with pytest.raises(UserError) as raised:
        read_config(written(tiny_config(**MLA)) | changes)
    assert raised.value.field == field


def test_mla_has_no_speculators_layout() -> None:
    with pytest.raises(UserError, match=r"export\.layout"):
        write_config(tiny_config(**MLA), Layout.speculators, "float32", VERIFIER)


def test_speculators_layout_is_what_a_bare_vllm_serve_reads(tmp_path: Path) -> None:
    export(tmp_path / "e", Layout.speculators)
    raw = json.loads((tmp_path / "e" / "config.json").read_text())
    assert "model_type" not in raw  # vLLM takes it for a speculators checkpoint only without
    assert raw["speculators_model_type"] == "eagle3"
    spec = raw["speculators_config"]
    assert spec["verifier"]["name_or_path"] == "org/target"
    assert spec["proposal_methods"][0]["speculative_tokens"] == 3
    # vLLM reads these from the top level alone, norm_before_residual with a default of true.
    assert (raw["fc_norm"], raw["norm_output"], raw["norm_before_residual"]) == (True, True, False)
    assert raw["transformer_layer_config"]["num_aux_hidden_states"] == 3
    names = set(load_file(tmp_path / "e" / "model.safetensors"))
    assert "layers.0.self_attn.q_proj.weight" in names
    assert not any("midlayer" in name for name in names)


@pytest.mark.parametrize(
    "rule",
    [
        lambda name: name.replace("midlayer.", "layers.0."),
        lambda name: name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}",
        lambda name: f"model.{name.replace('midlayer.', 'layers.0.')}",
    ],
    ids=["layers.0", "model.midlayer", "model.layers.0"],
)
def test_published_tensor_names(tmp_path: Path, rule: Any) -> None:
    expected = export(tmp_path / "e")
    rename(tmp_path / "e", rule)
    assert torch.equal(drafted(load_export(tmp_path / "e", CPU)), expected)


def test_sharded_weights(tmp_path: Path) -> None:
    expected = export(tmp_path / "e")
    whole = tmp_path / "e" / "model.safetensors"
    tensors = load_file(whole)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in shards.items():
        save_file({name: tensors[name] for name in own}, tmp_path / "e" / file)
    weight_map = {name: file for file, own in shards.items() for name in own}
    (tmp_path / "e" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    whole.unlink()
    assert torch.equal(drafted(load_export(tmp_path / "e", CPU)), expected)
    (tmp_path / "e" / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"b\.safetensors"):
        load_export(tmp_path / "e", CPU)


def test_missing_keys_have_vllms_defaults() -> None:
    raw = written(tiny_config(hidden_size=24, target_hidden_size=24, num_key_value_heads=4))
    dropped = (
        *("fc_norm", "norm_output", "norm_before_residual", "draft_vocab_size", "target_hidden_size"),
        *("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_scaling"),
        *("num_aux_hidden_states", "eagle_aux_hidden_state_layer_ids"),
    )
    config = read_config({key: value for key, value in raw.items() if key not in dropped}).config
    assert (config.fc_norm, config.norm_output, config.norm_before_residual) == (False, False, False)
    assert (config.draft_vocab_size, config.target_hidden_size) == (VOCAB, 24)
    assert (config.head_dim, config.num_key_value_heads, config.rms_norm_eps) == (6, 4, 1e-6)
    assert config.rope_parameters == DEFAULT_ROPE
    assert config.aux_layer_ids == (0, 2, 5)  # from eagle_config


def test_speculators_norm_before_residual_is_on_by_default() -> None:
    raw = written(tiny_config(), Layout.speculators)
    del raw["norm_before_residual"]
    assert read_config(raw).config.norm_before_residual


@pytest.mark.parametrize("rope", [LLAMA3, YARN])
def test_rope_in_its_newer_spelling(rope: dict) -> None:
    raw = written(tiny_config()) | {"rope_parameters": rope}
    del raw["rope_theta"], raw["rope_scaling"]
    assert read_config(raw).config.served_rope == rope


def test_ids_left_out_are_vllms_default_or_asked_for() -> None:
    raw = written(tiny_config())
    del raw["eagle_aux_hidden_state_layer_ids"], raw["eagle_config"]
    read = read_config(raw, num_target_layers=36)
    assert read.config.aux_layer_ids == (2, 18, 33)
    assert "[2, 18, 33]" in read.notes[0]
    with pytest.raises(UserError, match=r"drafter\.aux_layer_ids=\[\.\.\.\]"):
        read_config(raw)
    assert read_config(raw, aux_layer_ids=[1, 2, 3]).config.aux_layer_ids == (1, 2, 3)


def test_ids_that_count_layer_outputs_are_noted() -> None:
    raw = written(tiny_config(aux_layer_ids=(1, 17, 32)))
    read = read_config(raw, num_target_layers=36)
    assert read.config.aux_layer_ids == (1, 17, 32)
    assert "[2, 18, 33]" in read.notes[0]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, "architectures"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_aux_hidden_states": 4}, "eagle_aux_hidden_state_layer_ids"),
        ({"hidden_size": None}, "config.json"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "drafter.rope_parameters.rope_type"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(changes: dict, field: str) -> None:
    with pytest.raises(UserError) as raised:
        read_config(written(tiny_config()) | changes)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type"),
        ({"transformer_layer_config": None}, "transformer_layer_config"),
        ({"transformer_layer_config": {"model_type": "qwen3"}}, "transformer_layer_config.model_type"),
    ],
)
def test_speculators_parts_that_are_refused(changes: dict, field: str) -> None:
    raw = written(tiny_config(), Layout.speculators) | changes
    assert layout_of(raw) is Layout.speculators
    with pytest.raises(UserError) as raised:
        read_config(raw)
    assert raised.value.field == field


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    export(tmp_path / "e")
    (tmp_path / "e" / "model.safetensors").rename(tmp_path / "e" / "pytorch_model.bin")
    with pytest.raises(UserError, match="convert them"):
        load_export(tmp_path / "e", CPU)


def test_what_a_checkpoint_leaves_to_its_target(tmp_path: Path) -> None:
    export(tmp_path / "e", target_hidden_size=16, draft_vocab_size=VOCAB)
    path = tmp_path / "e" / "model.safetensors"
    tensors = load_file(path)
    embed_tokens, lm_head = tensors.pop("embed_tokens.weight"), tensors.pop("lm_head.weight")
    save_file(tensors, path)
    loaded = load_export(tmp_path / "e", CPU, target=TargetDefaults(6, embed_tokens, lm_head))
    assert torch.equal(loaded.embed_tokens, embed_tokens)
    assert torch.equal(loaded.drafter.lm_head.weight, lm_head)
    with pytest.raises(UserError, match=r"embed_tokens\.weight"):
        load_export(tmp_path / "e", CPU)
    wider = TargetDefaults(6, torch.zeros(VOCAB, 20), torch.zeros(VOCAB, 20))
    with pytest.raises(UserError, match=r"embed_tokens\.weight"):
        load_export(tmp_path / "e", CPU, target=wider)


def test_a_draft_vocabulary_is_checked(tmp_path: Path) -> None:
    export(tmp_path / "e")
    path = tmp_path / "e" / "model.safetensors"
    tensors = load_file(path)
    for d2t in (tensors["d2t"] + torch.arange(29), tensors["d2t"][:5]):
        save_file(tensors | {"d2t": d2t}, path)
        with pytest.raises(UserError, match="d2t"):
            load_export(tmp_path / "e", CPU)
    del tensors["d2t"]
    save_file(tensors, path)
    with pytest.raises(UserError, match="d2t"):
        load_export(tmp_path / "e", CPU)
