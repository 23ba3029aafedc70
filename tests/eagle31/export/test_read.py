import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle31.errors import UserError
from eagle31.export.layouts import Layout
from eagle31.export.read import TargetDefaults, load_export
from tests.eagle31.export.exports import (
    LATENT_YARN,
    LLAMA3,
    drafted,
    edit_config,
    export,
    rename,
)
from tests.eagle31.tiny import BIASES, DFLASH, DSPARK, MLA, QK_NORM, VOCAB, WIDE_MLA

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout.vllm, {"norm_before_residual": True, "draft_vocab_size": VOCAB}),
        (Layout.vllm, WIDE_MLA | {"rope_parameters": LATENT_YARN}),
        (Layout.speculators, QK_NORM | {"attention_bias": True, "aux_layer_ids": (0, 1, 2, 3, 5)}),
        (Layout.vllm, BIASES),
        (Layout.vllm, DSPARK),
        (Layout.vllm, DFLASH),
        (Layout.sglang, {"num_hidden_layers": 3}),
        (Layout.speculators, {"num_hidden_layers": 2, "aux_layer_ids": (1, 3), "rope_parameters": LLAMA3}),
    ],
)
def test_what_is_read_back_drafts_the_same(tmp_path: Path, layout: Layout, changes: dict) -> None:
    expected = export(tmp_path / "e", layout, **changes)
    assert torch.equal(drafted(load_export(tmp_path / "e", CPU)), expected)


@pytest.mark.parametrize("first_layer", ["midlayer.", "layers.0."])
def test_published_tensor_names(tmp_path: Path, first_layer: str) -> None:
    expected = export(tmp_path / "e")
    rename(tmp_path / "e", lambda name: f"model.{name.replace('midlayer.', first_layer)}")
    assert torch.equal(drafted(load_export(tmp_path / "e", CPU)), expected)


def test_mla_as_others_publish_it(tmp_path: Path) -> None:
    """Reads older names, and ignores the number of key heads."""
    expected = export(tmp_path / "e", **MLA, rope_parameters=LATENT_YARN)
    rope = {key: value for key, value in LATENT_YARN.items() if key not in ("rope_type", "rope_theta")}
    changes = {"num_key_value_heads": 1, "rope_scaling": rope | {"type": "yarn"}}
    edit_config(tmp_path / "e", **changes, eagle_aux_hidden_state_layer_ids=None, t2d=None)
    rename(tmp_path / "e", lambda name: name.replace("midlayer.", "layers.0."))
    assert torch.equal(drafted(load_export(tmp_path / "e", CPU)), expected)


def test_sharded_weights(tmp_path: Path) -> None:
    expected = export(tmp_path / "e")
    whole = tmp_path / "e" / "model.safetensors"
    tensors = load_file(whole)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / "e" / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "e" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    whole.unlink()
    assert torch.equal(drafted(load_export(tmp_path / "e", CPU)), expected)
    (tmp_path / "e" / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"b\.safetensors"):
        load_export(tmp_path / "e", CPU)


@pytest.mark.parametrize(
    ("index", "remedy"),
    [
        ("{", "It cannot be read"),
        ('{"weight_map": {}}', "It names no file"),
        ('{"weight_map": {"a": "../a.safetensors"}}', r"It names '\.\./a\.safetensors'"),
    ],
)
def test_an_index_has_to_name_files_next_to_it(tmp_path: Path, index: str, remedy: str) -> None:
    export(tmp_path / "e")
    (tmp_path / "e" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=rf"^model\.safetensors\.index\.json=.*: {remedy}"):
        load_export(tmp_path / "e", CPU)


def test_weights_of_torch_save(tmp_path: Path) -> None:
    export(tmp_path / "e")
    expected = drafted(load_export(tmp_path / "e", CPU))
    whole = tmp_path / "e" / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    torch.save(tensors, tmp_path / "e" / "pytorch_model.bin")
    assert torch.equal(drafted(load_export(tmp_path / "e", CPU)), expected)


def test_what_a_checkpoint_leaves_to_its_target(tmp_path: Path) -> None:
    export(tmp_path / "e", target_hidden_size=16, draft_vocab_size=VOCAB)
    path = tmp_path / "e" / "model.safetensors"
    tensors = load_file(path)
    embed_tokens, lm_head = tensors.pop("embed_tokens.weight"), tensors.pop("lm_head.weight")
    save_file(tensors, path)
    head = torch.nn.Parameter(lm_head.double())
    loaded = load_export(tmp_path / "e", CPU, target=TargetDefaults(6, embed_tokens, head))
    assert head.dtype is torch.float64  # it is still the target's
    assert torch.equal(loaded.embed_tokens, embed_tokens)
    assert torch.equal(loaded.drafter.lm_head.weight, lm_head)
    with pytest.raises(UserError, match=r"embed_tokens\.weight"):
        load_export(tmp_path / "e", CPU)
    wider = TargetDefaults(6, torch.zeros(VOCAB, 20), torch.zeros(VOCAB, 20))
    with pytest.raises(UserError, match=r"target_hidden_size="):
        load_export(tmp_path / "e", CPU, target=wider)
    load_export(tmp_path / "e", CPU, target=TargetDefaults(5, embed_tokens, head))  # as deep as its last id
    with pytest.raises(UserError, match=r"layer_ids=\[0, 2, 5\]: The target has ids from 0 to 4"):
        load_export(tmp_path / "e", CPU, target=TargetDefaults(4, embed_tokens, head))
    with pytest.raises(UserError, match=r"layer_ids=\[-1, 2, 5\]: The target has ids from 0 to 5"):
        load_export(
            tmp_path / "e", CPU, target=TargetDefaults(5, embed_tokens, head), aux_layer_ids=[-1, 2, 5]
        )


def test_dspark_as_deepspec_publishes_it(tmp_path: Path) -> None:
    expected = export(tmp_path / "e", **DSPARK, target_hidden_size=16, draft_vocab_size=VOCAB)
    path = tmp_path / "e" / "model.safetensors"
    tensors = load_file(path) | {"confidence_head.proj.weight": torch.ones(1, 21)}
    target = TargetDefaults(6, tensors.pop("embed_tokens.weight"), tensors.pop("lm_head.weight"))
    save_file(tensors, path)
    edit_config(tmp_path / "e", enable_confidence_head=True, confidence_head_with_markov=True)
    loaded = load_export(tmp_path / "e", CPU, target=target)
    assert torch.equal(drafted(loaded), expected)
    assert loaded.drafter.config.aux_layer_ids == (0, 2, 5)  # target_layer_ids: -1, 1 and 4
    assert ["confidence head" in note for note in loaded.notes] == [True]
    edit_config(tmp_path / "e", markov_head_type="gated")
    with pytest.raises(UserError, match="markov_head_type=gated"):
        load_export(tmp_path / "e", CPU, target=target)


def test_a_draft_vocabulary_is_checked(tmp_path: Path) -> None:
    export(tmp_path / "e")
    path = tmp_path / "e" / "model.safetensors"
    tensors = load_file(path)
    for d2t in (tensors["d2t"] + torch.arange(29), tensors["d2t"][:5]):
        save_file(tensors | {"d2t": d2t}, path)
        with pytest.raises(UserError, match="d2t"):
            load_export(tmp_path / "e", CPU)
    d2t = tensors.pop("d2t")
    save_file(tensors, path)
    with pytest.raises(UserError, match="d2t"):
        load_export(tmp_path / "e", CPU)
    export(tmp_path / "full", draft_vocab_size=VOCAB)
    path = tmp_path / "full" / "model.safetensors"
    save_file(load_file(path) | {"d2t": d2t}, path)
    with pytest.raises(UserError, match=r"d2t=.*nothing to map"):
        load_export(tmp_path / "full", CPU)


def test_damaged_exports_are_refused(tmp_path: Path) -> None:
    export(tmp_path / "e")
    with pytest.raises(UserError, match=r"such as the export/ of a run"):
        load_export(tmp_path, CPU)
    weights = tmp_path / "e" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"model\.safetensors=.*: It is damaged"):
        load_export(tmp_path / "e", CPU)
