"""Drafters in the layouts of other trainers, each with the keys and the names that its code writes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.target.parts import load_target_parts
from eagle31.export.config_json import config_json
from eagle31.export.layouts import TORCHSPEC_PREFIX, Layout
from eagle31.export.read import load_export
from eagle31.export.write import write_export
from eagle31.model.drafter import Drafter
from tests.eagle31.tiny import EAGLE3, MLA, QK_NORM
from tests.train.drafter.test_published import context, started
from tests.train.drafter.tiny_export import save_target_with_tokenizer, write_tiny_export
from train.artifact import Artifact
from train.drafter.published import open_published
from train.stages.vocab import load_vocab

CPU = torch.device("cpu")
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INNER_IDS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True}

Json = dict[str, Any]


def llama(raw: Json, architecture: str) -> Json:
    return {
        key: raw[key] for key in (*SIZES, "head_dim", "rms_norm_eps", "vocab_size", "draft_vocab_size")
    } | {
        **{"architectures": [architecture], "model_type": "llama", "hidden_act": "silu"},
        **{"attention_bias": False, "max_position_embeddings": 512, "rope_theta": 10000.0},
        **{"rope_scaling": None, "sliding_window": None, "use_sliding_window": False},
    }


def specforge(raw: Json) -> Json:
    return llama(raw, "LlamaForCausalLMEagle3") | {
        **{"fc_norm": True, "norm_output": True, "eagle_config": INNER_IDS, "tie_word_embeddings": False}
    }


def angelslim(raw: Json) -> Json:
    return llama(raw, "Eagle3LlamaForCausalLM") | {
        **{"target_model_type": "qwen3_vl", "modal_type": "VLM", "tie_word_embeddings": True},
        "rope_scaling": {"mrope_section": [1, 1, 1], "rope_type": "default"},
    }


def torchspec(raw: Json) -> Json:
    keys = (*SIZES, *vars(MLA["attention"]), "rms_norm_eps", "vocab_size", "draft_vocab_size", "rope_theta")
    return {key: raw[key] for key in keys} | {
        **{"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "hidden_act": "silu"},
        "eagle_config": INNER_IDS | {"use_last_layernorm": True, "use_mtp_layernorm": False},
    }


def deepspec(raw: Json) -> Json:
    """The target's config with other keys, by transformers 5."""
    return {key: raw[key] for key in (*SIZES, "head_dim", "rms_norm_eps", "vocab_size")} | {
        **{"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "hidden_act": "silu"},
        **{"attention_bias": False, "dtype": "bfloat16", "rope_parameters": ROPE, "sliding_window": None},
        **{"layer_types": ["full_attention"], "max_position_embeddings": 512, "max_window_layers": 5},
        **{"num_target_layers": 5, "target_layer_ids": [0, 1, 2, 3, 4], "tie_word_embeddings": False},
        **{
            "ttt_length": 7,
            "step_loss_decay": 0.8,
            "draft_num_hidden_layers": 1,
            "use_sliding_window": False,
        },
    }


def speculators(raw: Json) -> Json:
    layer = {key: raw[key] for key in (*SIZES, "head_dim", "rms_norm_eps", "vocab_size")} | {
        **{"model_type": "qwen3", "hidden_act": "silu", "rope_parameters": ROPE, "attention_bias": True},
        **{"max_position_embeddings": 512, "layer_types": ["full_attention"], "use_sliding_window": False},
    }
    return {
        **{"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "dtype": "bfloat16"},
        **{"draft_vocab_size": 40, "embed_requires_grad": False, "target_hidden_size": None},
        **{"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True, "norm_output": False},
        **{"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "tie_word_embeddings": False},
        "speculators_config": {
            **{"algorithm": "eagle3", "default_proposal_method": "greedy"},
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
    }


def layers(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


# What each has in its config.json, its tensors' names, the file of its weights, and what the drafter is.
LAYOUTS: dict[str, tuple[Callable[[Json], Json], Callable[[str], str], str, Json]] = {
    "speculators": (
        speculators,
        layers,
        "model.safetensors",
        EAGLE3
        | QK_NORM
        | {"norm_before_fc": True, "norm_before_residual": True, "attention_bias": True}
        | {"aux_layer_ids": (1, 2, 3)},
    ),
    "specforge": (specforge, str, "model.safetensors", {"aux_layer_ids": (2, 3, 5)}),
    "angelslim": (angelslim, str, "pytorch_model.bin", EAGLE3 | {"aux_layer_ids": (1, 2, 4)}),
    "deepspec": (
        deepspec,
        layers,
        "model.safetensors",
        EAGLE3 | QK_NORM | {"aux_layer_ids": (1, 2, 3, 4, 5), "draft_vocab_size": 100},
    ),
    "torchspec": (
        torchspec,
        lambda name: TORCHSPEC_PREFIX + name,
        "pytorch_model.bin",
        EAGLE3 | MLA | {"aux_layer_ids": (2, 3, 5), "max_position_embeddings": 4096},
    ),
}


@pytest.mark.parametrize("trainer", LAYOUTS)
def test_a_drafter_of_another_trainer_is_read_trained_on_and_exported_for_vllm(
    trainer: str, tmp_path: Path
) -> None:
    write_config, rename, file, parts = LAYOUTS[trainer]
    spec = save_target_with_tokenizer(tmp_path / "target")
    directory = tmp_path / trainer
    written = write_tiny_export(directory, spec, **{"rope_parameters": ROPE} | parts)
    made_here = load_export(directory, CPU)
    publish(directory, write_config, rename, file)

    ids = [*written.config.aux_layer_ids]
    stated = trainer in ("speculators", "deepspec")  # the others count layer outputs, or say nothing
    given = {} if stated else {"aux_layer_ids": ids}
    read = open_published(directory, load_target_parts(spec), None if stated else ids, "checkpoint")
    assert_same(read.drafter, written)
    assert torch.equal(read.embed_tokens, made_here.embed_tokens)

    free = ("fc_norm", "norm_output", "max_position_embeddings")
    flags = {name: getattr(written.config, name) for name in free}
    made = context(spec, directory, tmp_path, **given, **flags)
    drafter, _ = started(made, tmp_path / "vocab")
    assert_same(drafter, written)

    vocab = load_vocab(Artifact("vocab", {}, tmp_path / "vocab"))
    state = {name: p.detach() for name, p in drafter.named_parameters()}
    write_export(
        tmp_path / "again",
        made.drafter.config(),
        state,
        vocab,
        made.target.parts.embed_tokens,
        dtype="float32",
        provenance={},
    )
    again = load_export(tmp_path / "again", CPU)
    assert_same(again.drafter, written)
    assert again.config["architectures"] == config_json(written.config, Layout.vllm, "")["architectures"]


def publish(
    directory: Path, write_config: Callable[[Json], Json], rename: Callable[[str], str], file: str
) -> None:
    config, whole = directory / "config.json", directory / "model.safetensors"
    config.write_text(json.dumps(write_config(json.loads(config.read_text()))))
    tensors = load_file(whole)
    del tensors["embed_tokens.weight"]
    tensors = {rename(name): tensor for name, tensor in tensors.items()}
    whole.unlink()
    if file == whole.name:
        save_file(tensors, whole)
    else:
        torch.save(tensors, directory / file)


def assert_same(found: Drafter, expected: Drafter) -> None:
    targets = {"bos_token_id": None, "eos_token_id": None}
    configs = [
        vars(one.config) | targets | {"rope_parameters": one.config.served_rope} for one in (found, expected)
    ]
    assert configs[0] == configs[1]
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
