"""Checkpoints of TorchSpec's drafters are read as ours."""

import json
import runpy
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from eagle31.export.config_json import config_json
from eagle31.export.layouts import IDS, Layout
from eagle31.export.read import LoadedExport, load_export
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from tests.eagle31.export.exports import drafted
from tests.eagle31.tiny import VOCAB, tiny_config, tiny_drafter
from train.trainer.process_groups import ensure_process_group

CPU = torch.device("cpu")
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 8}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}

pytestmark = pytest.mark.usefixtures("torchspec")


def torchspec_drafter(drafter: Drafter, frozen: FrozenParts) -> Any:
    """Return TorchSpec's drafter with the same config.json and the same weights."""
    from torchspec import AutoDraftModelConfig, AutoEagle3DraftModel

    raw = config_json(drafter.config, Layout.vllm, "float32") | {"pad_token_id": None}
    found = AutoEagle3DraftModel.from_config(AutoDraftModelConfig.from_dict(raw))
    weights = {name.replace("layers.0.", "midlayer."): value for name, value in drafter.state_dict().items()}
    weights["embed_tokens.weight"] = frozen.embed_tokens
    if frozen.draft_target_ids is not None:
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        weights["t2d"][frozen.draft_target_ids] = True
        weights["d2t"] = frozen.draft_target_ids - torch.arange(drafter.config.draft_vocab_size)
    found.load_state_dict(weights)
    return found


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its checkpoints need: a process group, which stays for other tests, and no CUDA."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ensure_process_group()


def trained(directory: Path, **changes: Any) -> tuple[Namespace, Tensor]:
    """Save a checkpoint after one step as its trainer does, and return the trainer and what is drafted."""
    from torchspec import Eagle3Model
    from torchspec.training import checkpoint
    from torchspec.training.optimizer import BF16Optimizer

    drafter, frozen = tiny_drafter(tiny_config(**changes), torch.float32)
    model = Eagle3Model(torchspec_drafter(drafter, frozen))
    model.draft_model.freeze_embedding()
    optimizer = BF16Optimizer(model.draft_model, lr=0.0)
    for parameter in optimizer.model_params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    args = Namespace(checkpoint_dir=str(directory), load_path=str(directory))
    trainer = Namespace(
        model=model, optimizer=optimizer, lr_scheduler=optimizer.scheduler, global_step=1, args=args
    )
    checkpoint.save(trainer, step=0)
    raw = config_json(drafter.config, Layout.vllm, "float32")
    # As its JSON files are: without the layers that the drafter reads.
    raw = {key: value for key, value in raw.items() if key not in (IDS, "eagle_config")}
    (directory / "drafter.json").write_text(json.dumps(raw))
    return trainer, drafted(LoadedExport(drafter, frozen.embed_tokens, None, {}))


def converter(torchspec: Path, *arguments: object) -> dict[str, Any]:
    """Run tools/convert_to_hf.py, and return its names."""
    argv, sys.argv = sys.argv, ["convert_to_hf", *map(str, arguments)]
    try:
        return runpy.run_path(
            str(torchspec / "tools/convert_to_hf.py"), run_name="__main__" if arguments else "tools"
        )
    finally:
        sys.argv = argv


@pytest.mark.usefixtures("one_rank")
def test_its_checkpoint_is_read_with_its_draft_vocabulary(torchspec: Path, tmp_path: Path) -> None:
    _, expected = trained(tmp_path)
    model = tmp_path / "iter_0000001/model"
    with pytest.raises(ValueError, match="--prune-vocab"):  # which trains no such drafter: it prunes again
        converter(torchspec, "--input-dir", model, "--config", tmp_path / "drafter.json")

    directory = tmp_path / "read"
    directory.mkdir()
    dcp_to_torch_save(model, directory / "pytorch_model.bin")
    (tmp_path / "drafter.json").rename(directory / "config.json")
    loaded = load_export(directory, CPU, aux_layer_ids=(0, 2, 5))
    assert loaded.draft_target_ids is not None
    assert torch.equal(drafted(loaded), expected)


@pytest.mark.usefixtures("one_rank")
def test_what_its_converter_writes_is_read_with_the_layer_ids_of_its_engines(
    torchspec: Path, tmp_path: Path
) -> None:
    _, expected = trained(tmp_path, draft_vocab_size=VOCAB, rope_parameters=LLAMA3)
    path, ids = tmp_path / "drafter.json", [1, 3, 5]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eagle_config": {IDS: ids}}))
    converter(torchspec, "--input-dir", tmp_path / "iter_0000001", "--config", path, "--vllm")
    loaded = load_export(tmp_path / "iter_0000001_hf", CPU)
    assert torch.equal(drafted(loaded), expected)
    # They count its engines' layers from 0, and vLLM's from 1; only those of kimi_k2 become vLLM's.
    assert loaded.drafter.config.aux_layer_ids == tuple(ids)
