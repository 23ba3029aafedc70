import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DeepseekV3Config, PreTrainedModel

from data.target.architecture import model_class
from data.target.checkpoint import Checkpoint, comparable_fingerprints
from data.target.loading import load_target
from data.target.modules import locate
from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from data.target.tokenizer import load_tokenizer
from eagle31.errors import UserError
from tests.data.conversations.chat_templates import byte_level_tokenizer
from tests.data.store.samples import flip_last_byte
from tests.data.target.small_configs import DEEPSEEK, HIDDEN, LAYERS, VOCAB
from tests.data.target.tiny_target import save_model, save_target


def test_a_checkpoint_without_safetensors_is_a_user_error(tmp_path: Path) -> None:
    spec = save_target(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="safetensors"):
        load_target_parts(spec)


PLAIN_SHARD, QUANTIZED_SHARD = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "weights, a pointer": ("model.safetensors", lambda content: POINTER),
    "weights, cut": ("model.safetensors", lambda content: content[:-100]),
    "weights, a header of zeros": ("model.safetensors", lambda content: bytes(200) + content[200:]),
    "config, cut": ("config.json", lambda content: content[:50]),
    "config, of another number of layers": (
        "config.json",
        lambda content: json.dumps(json.loads(content) | {"layer_types": ["full_attention"] * 99}).encode(),
    ),
    "generation config, cut": ("generation_config.json", lambda content: content[:5]),
    "index, another": ("model.safetensors.index.json", lambda content: b'{"metadata": {}}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_of_the_target_is_named(tmp_path: Path, damage: str) -> None:
    spec, (name, alter) = save_target(tmp_path), DAMAGES[damage]
    path = tmp_path / name
    path.write_bytes(alter(path.read_bytes() if path.exists() else b""))
    with pytest.raises(UserError, match=re.escape(str(path))):
        load_target_parts(spec)
    if name in ("model.safetensors", "config.json"):  # transformers does without the others
        with pytest.raises(UserError, match=re.escape(str(path))):
            load_target(spec, torch.device("cpu"))


@pytest.mark.parametrize("content", [POINTER, b'{"version": "1.0", "trunc'])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    byte_level_tokenizer(None).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    load_tokenizer(TargetSpec(str(tmp_path)))
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "tokenizer.json"))):
        load_tokenizer(TargetSpec(str(tmp_path)))


def test_damaged_weights_that_only_the_engine_reads_are_named(tmp_path: Path) -> None:
    spec = save_target(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    files = {name: "layers.safetensors" if ".mlp." in name else "rest.safetensors" for name in weights}
    for file in set(files.values()):
        save_file({name: weights[name] for name in weights if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    load_target_parts(spec)
    (tmp_path / "layers.safetensors").write_bytes(POINTER)
    with pytest.raises(UserError, match=r"layers\.safetensors: The file is a Git LFS pointer"):
        load_target_parts(spec)


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    checkpoint = TargetSpec(str(tmp_path)).checkpoint
    with pytest.raises(UserError, match="pip install compressed-tensors"), checkpoint.loading():
        raise ImportError("compressed-tensors is required: pip install compressed-tensors")


def _scale_tensors(directory: Path, names: str) -> None:
    weights = load_file(directory / "model.safetensors")
    scaled = {name: tensor * 1.5 if names in name else tensor for name, tensor in weights.items()}
    assert any(names in name for name in weights)
    save_file(scaled, directory / "model.safetensors", metadata={"format": "pt"})


def _flip_a_byte_in_place(directory: Path) -> None:
    path = directory / "model.safetensors"
    before = path.stat()
    flip_last_byte(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _rename_a_shard(directory: Path) -> None:
    (directory / "shards").mkdir()
    (directory / "model.safetensors").rename(directory / "shards" / "one.safetensors")
    index = {"weight_map": dict.fromkeys(["lm_head.weight"], "shards/one.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


CHANGES: dict[str, Callable[[Path], object]] = {
    "one tensor": lambda path: _scale_tensors(path, "layers.1.mlp.down_proj"),
    "a byte, in place": _flip_a_byte_in_place,
    "generation config": lambda path: (path / "generation_config.json").write_text("{}"),
    "code": lambda path: (path / "modeling_own.py").write_text("# code"),
    "a shard in a folder": _rename_a_shard,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_the_fingerprint_changes_with_all_that_the_model_computes_with(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    spec = save_target(tmp_path / "a")
    original = spec.checkpoint.fingerprint()
    change(tmp_path / "a")
    changed = spec.checkpoint.fingerprint()
    assert changed != original
    assert comparable_fingerprints(changed, original)


def test_the_fingerprint_is_of_the_content_and_not_of_other_files(tmp_path: Path) -> None:
    spec = save_target(tmp_path / "a")
    original = spec.checkpoint.fingerprint()
    assert save_target(tmp_path / "b").checkpoint.fingerprint() == original
    assert load_target_parts(spec).fingerprint == original
    (tmp_path / "a" / "README.md").write_text("text")
    (tmp_path / "a" / "tokenizer_config.json").write_text("{}")
    assert spec.checkpoint.fingerprint() == original
    commit, earlier_kind = "0" * 40, "0" * 64
    assert not comparable_fingerprints(original, commit)
    assert not comparable_fingerprints(original, earlier_kind)


def _save_quantized(directory: Path) -> PreTrainedModel:
    """Save two shards in DeepSeek's layout, one of them with the plain tensors that are needed."""
    torch.manual_seed(0)
    config = DeepseekV3Config(**DEEPSEEK)
    model = model_class(config).from_config(config).eval().to(torch.bfloat16)
    nn.init.uniform_(locate(model).final_norm.get_parameter("weight"), 0.5, 1.5)
    save_model(model, directory)
    stored = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    needed, others = {}, {}
    for name, tensor in stored.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")) or name.endswith("model.norm.weight"):
            needed[name] = tensor
        elif name.endswith("_proj.weight"):  # FP8 with a scale for each block
            others |= {name: tensor.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
        else:
            others[name] = tensor
    shards = {PLAIN_SHARD: needed, QUANTIZED_SHARD: others}
    for file, tensors in shards.items():
        save_file(tensors, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    written = json.loads((directory / "config.json").read_text())
    quantization = {"quantization_config": {"quant_method": "fp8"}}
    (directory / "config.json").write_text(json.dumps(written | quantization))
    return model


def test_only_the_plain_tensors_of_a_quantized_checkpoint_are_read(tmp_path: Path) -> None:
    modules = locate(_save_quantized(tmp_path))
    (tmp_path / QUANTIZED_SHARD).unlink()
    spec = TargetSpec(str(tmp_path))
    parts = load_target_parts(spec)
    assert (parts.num_layers, parts.hidden_size, parts.vocab_size) == (LAYERS, HIDDEN, VOCAB)
    assert parts.embed_tokens.dtype == torch.bfloat16
    assert torch.equal(parts.embed_tokens, modules.embed_tokens.get_parameter("weight"))
    hidden = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        assert torch.equal(parts.head(hidden), modules.lm_head(modules.final_norm(hidden)))
    tensors = load_file(tmp_path / PLAIN_SHARD)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / PLAIN_SHARD, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lm_head\.weight is torch\.float8_e4m3fn"):
        load_target_parts(spec)


@pytest.mark.parametrize(
    ("stored", "says"), [("lm_head.weight_packed", "must not be quantized"), (None, "download it again")]
)
def test_a_missing_tensor_is_blamed_on_what_is_there_instead(
    tmp_path: Path, stored: str | None, says: str
) -> None:
    spec, path = save_target(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(path)
    head = tensors.pop("lm_head.weight")
    save_file(tensors | ({stored: head} if stored else {}), path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"no tensor lm_head\.weight.*{says}"):
        load_target_parts(spec)


@pytest.mark.parametrize(
    ("name", "has_head"),
    [
        ("model.layers.3.mlp.up_proj.weight", False),
        ("vision_tower.encoder.layers.20.norm.weight", False),
        ("model.layers.4.eh_proj.weight", True),  # DeepSeek V3, GLM
        ("model.language_model.layers.4.enorm.weight", True),
        ("mtp.fc.weight", True),  # Qwen3.5
        ("model.mtp_layers.0.input_proj.weight", True),  # MiMo
    ],
)
def test_an_mtp_head_is_found_by_the_names_of_its_weights(tmp_path: Path, name: str, has_head: bool) -> None:
    tensors = {"model.layers.0.norm.weight": torch.ones(1), name: torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert Checkpoint(str(tmp_path)).has_mtp_head(num_layers=4) == has_head
