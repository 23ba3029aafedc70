import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle31.errors import UserError
from eagle31.export import write
from eagle31.export.config_json import config_json
from eagle31.export.layouts import Layout
from eagle31.export.read import load_export
from eagle31.export.write import write_export
from eagle31.model.vocab import DraftVocab, build_draft_vocab
from tests.eagle31.export.exports import export
from tests.eagle31.tiny import QK_NORM, VOCAB, tiny_config, tiny_drafter

CPU = torch.device("cpu")


def vocab_of(size: int) -> DraftVocab:
    counts = torch.randint(0, 50, (VOCAB,), generator=torch.Generator().manual_seed(0))
    return build_draft_vocab(counts, size, [0])


def test_weights_in_bf16_are_read_back(tmp_path: Path) -> None:
    config = tiny_config(num_hidden_layers=2)
    drafter, frozen = tiny_drafter(config, torch.float32)
    vocab, embed = vocab_of(config.draft_vocab_size), frozen.embed_tokens.to(torch.bfloat16)
    state = {name: p.detach() for name, p in drafter.named_parameters()}
    provenance = {"target": "x"}
    write_export(tmp_path / "e", config, state, vocab, embed, dtype="bfloat16", provenance=provenance)
    loaded = load_export(tmp_path / "e", CPU)
    for name, parameter in loaded.drafter.named_parameters():
        assert torch.equal(parameter, state[name].bfloat16().float()), name
    assert torch.equal(loaded.embed_tokens, embed.float())
    assert loaded.draft_target_ids is not None
    assert torch.equal(loaded.draft_target_ids, vocab.target_ids)
    assert loaded.config["eagle31"]["target"] == "x"


def test_full_vocabulary_has_no_mapping(tmp_path: Path) -> None:
    export(tmp_path / "e", draft_vocab_size=VOCAB)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "e" / "model.safetensors"))
    assert load_export(tmp_path / "e", CPU).draft_target_ids is None


def test_after_attention_with_norms_of_queries_there_is_no_bias(tmp_path: Path) -> None:
    """vLLM's Qwen3 has biases of queries, keys and values alone."""
    export(tmp_path / "e", **QK_NORM, attention_bias=True)
    names = load_file(tmp_path / "e" / "model.safetensors")
    biases = {name for name in names if name.endswith(".bias")}
    assert biases == {f"midlayer.self_attn.{name}_proj.bias" for name in "qkv"}


def test_an_older_export_is_replaced_completely(tmp_path: Path) -> None:
    export(tmp_path / "e")
    (tmp_path / "e" / "stale").touch()
    export(tmp_path / "e")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["config.json", "e", "model.safetensors"]


def test_while_an_older_export_is_removed_there_is_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(tmp_path / "e")
    remove, there = shutil.rmtree, []

    def removing(path: Path, **options: bool) -> None:
        remove(path, **options)
        there.append((tmp_path / "e" / "config.json").exists())

    monkeypatch.setattr(shutil, "rmtree", removing)
    export(tmp_path / "e")
    assert all(there)


@pytest.mark.parametrize(
    ("name", "value", "dtype", "field"),
    [
        ("norm.weight", float("nan"), "float32", "norm.weight"),
        ("embed_tokens.weight", float("inf"), "float32", "embed_tokens.weight"),
        ("norm.weight", 70_000.0, "float16", "export.dtype"),
    ],
)
def test_weights_that_are_not_finite_are_refused(
    tmp_path: Path, name: str, value: float, dtype: str, field: str
) -> None:
    config = tiny_config()
    drafter, frozen = tiny_drafter(config, torch.float32)
    state = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    (state | {"embed_tokens.weight": frozen.embed_tokens})[name][0] = value
    with pytest.raises(UserError, match=rf"^{field}="):
        write_export(
            tmp_path / "e", config, state, vocab_of(29), frozen.embed_tokens, dtype=dtype, provenance={}
        )
    assert not (tmp_path / "e").exists()


def test_what_reads_back_differently_is_refused_and_leaves_the_older_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(tmp_path / "e")
    before = (tmp_path / "e" / "config.json").read_bytes()
    for changes, field in (
        ({"norm_output": False}, "norm_output"),
        ({"sliding_window": 999}, "sliding_window"),
    ):
        wrong = tiny_config(**changes)
        monkeypatch.setattr(write, "config_json", lambda _, *rest, config=wrong: config_json(config, *rest))
        with pytest.raises(UserError, match=f"{field}="):
            export(tmp_path / "e")
    assert (tmp_path / "e" / "config.json").read_bytes() == before


@pytest.mark.parametrize("layout", list(Layout))
def test_a_shape_that_cannot_be_exported_is_refused_without_weights(layout: Layout) -> None:
    parts = {} if layout is Layout.sglang else {"sliding_window": 9, "norm_before_residual": True}
    write.check_config(tiny_config(num_hidden_layers=2, **parts), layout)
    with pytest.raises(UserError) as raised:
        write.check_config(tiny_config(hidden_size=18), layout)
    assert (raised.value.field, raised.value.value) == ("drafter.hidden_size", 18)
