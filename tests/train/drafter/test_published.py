"""Training that starts from a checkpoint, as the stages do it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.target.spec import TargetSpec
from eagle31.errors import UserError
from eagle31.export.read import load_export
from eagle31.export.write import check_config
from eagle31.model.drafter import Drafter
from tests.eagle31.tiny import DSPARK
from tests.train.drafter.tiny_export import (
    edit_config,
    edit_tensors,
    make_published,
    save_target_with_tokenizer,
    write_tiny_export,
)
from train.artifact import Artifact
from train.config.data import DataConfig
from train.config.drafter import DrafterShape, Method
from train.config.run import RunConfig, Stage
from train.config.target import TargetConfig
from train.config.training import Precision
from train.context import RunContext
from train.distributed import World
from train.drafter.build import build_drafter, frozen_rows
from train.stages.data import TOKEN_COUNTS
from train.stages.vocab import load_projected, load_vocab, run_vocab, vocab_inputs

CPU = torch.device("cpu")


def check_drafter(run: RunContext) -> None:
    check_config(run.drafter.config(), run.config.export.layout)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TargetSpec:
    return save_target_with_tokenizer(tmp_path_factory.mktemp("target") / "t")


@pytest.fixture
def checkpoint(spec: TargetSpec, tmp_path: Path) -> Path:
    write_tiny_export(tmp_path / "checkpoint", spec)
    make_published(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def context(spec: TargetSpec, checkpoint: Path | str | None, directory: Path, **shape: Any) -> RunContext:
    """Return the context of a run whose data stage is finished."""
    config = RunConfig(
        target=TargetConfig(model=spec.model),
        drafter=DrafterShape(init_from=None if checkpoint is None else str(checkpoint), **shape),
        data=DataConfig(train="none"),
        recipe_name="test",
        output_dir=str(directory),
    )
    config.deepspeed.precision = Precision.fp32
    made = RunContext(config, World(0, 0, 1))
    data = Artifact.locate(directory, "data", {})
    made.artifacts[Stage.data] = data
    return made


def started(made: RunContext, directory: Path) -> tuple[Drafter, dict[str, torch.Tensor]]:
    """Return the drafter before its first step, and the tensors of the draft vocabulary."""
    directory.mkdir(exist_ok=True)
    check_drafter(made)
    data = made.artifacts[Stage.data].directory
    data.mkdir(exist_ok=True)
    save_file({"counts": torch.ones(made.target.parts.vocab_size, dtype=torch.int64)}, data / TOKEN_COUNTS)
    run_vocab(made, directory)
    vocab = load_vocab(Artifact("vocab", {}, directory))
    drafter, _ = build_drafter(
        made.config, made.drafter, vocab, load_projected(directory), made.world.device, torch.float32
    )
    return drafter, load_file(directory / "vocab.safetensors")


def test_training_starts_with_the_checkpoints_weights_and_vocabulary(
    spec: TargetSpec, checkpoint: Path, tmp_path: Path
) -> None:
    made = context(spec, checkpoint, tmp_path)
    drafter, vocab = started(made, tmp_path / "vocab")
    published = load_export(checkpoint, CPU)
    of_target = {"bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 512}
    assert replace(drafter.config, **of_target) == published.drafter.config
    for name, tensor in published.drafter.state_dict().items():
        assert torch.equal(drafter.state_dict()[name], tensor), name
    saved = load_file(checkpoint / "model.safetensors")
    assert torch.equal(vocab["d2t"], saved["d2t"])
    assert torch.equal(vocab["t2d"], saved["t2d"])
    coverage = json.loads((tmp_path / "vocab" / "vocab.json").read_text())["coverage"]
    assert 0 < coverage < 1


def test_a_frozen_head_comes_from_the_checkpoint(spec: TargetSpec, checkpoint: Path, tmp_path: Path) -> None:
    made = context(spec, checkpoint, tmp_path, train_lm_head=False)
    started(made, tmp_path / "vocab")
    vocab = load_vocab(Artifact("vocab", {}, tmp_path / "vocab"))
    _, frozen = build_drafter(made.config, made.drafter, vocab, {}, made.world.device, torch.float32)
    saved = load_file(checkpoint / "model.safetensors")
    assert frozen.lm_head is not None
    assert torch.equal(frozen.lm_head.weight, saved["lm_head.weight"])
    # The head that is exported.
    _, head = frozen_rows(vocab, made.target.parts, made.drafter.initial, {})
    assert torch.equal(head, saved["lm_head.weight"])


def test_the_rows_of_a_narrower_drafter_are_projected_once(
    spec: TargetSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another number of threads a projection has other signs."""
    made = context(spec, None, tmp_path, hidden_size=16, draft_vocab_size=40, train_lm_head=False)
    _, saved = started(made, tmp_path / "vocab")
    monkeypatch.setattr(torch.linalg, "eigh", lambda *_: pytest.fail("they were projected again"))
    vocab = load_vocab(Artifact("vocab", {}, tmp_path / "vocab"))
    projected = load_projected(tmp_path / "vocab")
    _, frozen = build_drafter(made.config, made.drafter, vocab, projected, made.world.device, torch.float32)
    embed_tokens, lm_head = frozen_rows(vocab, made.target.parts, None, projected)  # what is exported
    assert frozen.lm_head is not None
    assert torch.equal(frozen.embed_tokens, embed_tokens)
    assert torch.equal(frozen.lm_head.weight, lm_head)
    assert (embed_tokens.shape, lm_head.shape) == ((100, 16), (40, 16))
    assert torch.equal(embed_tokens, saved["embed_tokens"])
    wider = context(spec, None, tmp_path, hidden_size=24, draft_vocab_size=40)
    assert vocab_inputs(made) != vocab_inputs(wider)


def test_eagle31_starts_from_eagle3_with_new_norms(
    spec: TargetSpec, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_tiny_export(tmp_path / "e", spec, fc_norm=False, norm_output=False)
    drafter, _ = started(context(spec, tmp_path / "e", tmp_path), tmp_path / "vocab")
    assert drafter.config.fc_norm
    assert drafter.config.norm_output
    for norm in drafter.fc_norm:
        assert torch.equal(norm.get_parameter("weight"), torch.ones(32))
    printed = capsys.readouterr().out
    assert "fc_norm changes from False to True; its new weights are ones." in printed
    assert "norm_output changes from False" in printed
    saved = load_file(tmp_path / "e" / "model.safetensors")
    assert torch.equal(drafter.fc.weight, saved["fc.weight"])


def test_a_window_may_change(spec: TargetSpec, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_tiny_export(tmp_path / "e", spec, sliding_window=6)
    for recipe, after in ((None, 6), (9, 9)):
        made = context(spec, tmp_path / "e", tmp_path, sliding_window=recipe)
        check_drafter(made)
        assert made.drafter.config(40).sliding_window == after
        assert ("sliding_window changes from 6" in capsys.readouterr().out) == (after != 6)


def test_positions_reach_those_of_the_target(spec: TargetSpec, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
    write_tiny_export(tmp_path / "llama3", spec, max_position_embeddings=64)
    write_tiny_export(tmp_path / "yarn", spec, max_position_embeddings=64, rope_parameters=yarn)
    for name, setting, after in (("llama3", None, 2048), ("llama3", 99, 99), ("yarn", None, 64)):
        made = context(spec, tmp_path / name, tmp_path, max_position_embeddings=setting)
        check_drafter(made)
        found, published = made.drafter.config(40), load_export(tmp_path / name, CPU).drafter.config
        assert (published.max_position_embeddings, found.max_position_embeddings) == (64, after)
        assert found.served_rope == published.served_rope  # the length before the scaling stays


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ({"intermediate_size": 48}, "24"),
        ({"method": Method.dspark}, "eagle"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, "llama3"),
    ],
)
def test_a_conflict_names_both(
    spec: TargetSpec, checkpoint: Path, tmp_path: Path, shape: dict, found: str
) -> None:
    [(name, given)] = shape.items()
    with pytest.raises(UserError) as raised:
        check_drafter(context(spec, checkpoint, tmp_path, **shape))
    assert raised.value.field == f"drafter.{name}"
    assert str(getattr(given, "value", given)) in str(raised.value)
    assert found in str(raised.value)


@pytest.mark.parametrize(
    ("name", "given", "found"),
    [("markov_rank", 0, "has 5"), ("block_size", 4, "has 3"), ("mask_token_id", 8, "has 7")],
)
def test_a_dspark_checkpoint_is_trained_further_as_what_it_is(
    spec: TargetSpec, tmp_path: Path, name: str, given: int, found: str
) -> None:
    written = write_tiny_export(tmp_path / "checkpoint", spec, **DSPARK)
    same: dict[str, Any] = {"method": Method.dspark, "num_hidden_layers": 2, "draft_vocab_size": 40}
    same |= {"fc_norm": False, "norm_output": False, "block_size": 3, "markov_rank": 5}
    made = context(spec, tmp_path / "checkpoint", tmp_path, **same)
    check_drafter(made)
    assert made.drafter.config(40).dspark == written.config.dspark
    with pytest.raises(UserError, match=f"drafter.{name}={given}: .*{found}"):
        check_drafter(context(spec, tmp_path / "checkpoint", tmp_path, **same | {name: given}))


def test_ids_that_count_layer_outputs_can_be_corrected(
    spec: TargetSpec, checkpoint: Path, tmp_path: Path
) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}
    edit_config(checkpoint, lambda raw: raw.update(ids, eagle_config=ids))
    made = context(spec, checkpoint, tmp_path, aux_layer_ids=[1, 2, 5])
    check_drafter(made)
    assert made.drafter.aux_layer_ids == (1, 2, 5)


def test_a_map_that_does_not_ascend_is_refused(spec: TargetSpec, checkpoint: Path, tmp_path: Path) -> None:
    def swap(tensors: dict[str, Any]) -> None:
        tensors["d2t"][0], tensors["d2t"][1] = tensors["d2t"][1] + 1, tensors["d2t"][0] - 1

    edit_tensors(checkpoint, swap)
    with pytest.raises(UserError, match="ascend"):
        started(context(spec, checkpoint, tmp_path), tmp_path / "vocab")
