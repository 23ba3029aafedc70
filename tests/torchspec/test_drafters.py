"""TorchSpec's drafters and ours: losses, gradients and checkpoints."""

import json
import runpy
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from data.target.head import TargetHead
from eagle31.export.config_json import config_json
from eagle31.export.layouts import IDS, WEIGHTS, Layout
from eagle31.export.read import LoadedExport, load_export
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch, supervised_drafts
from eagle31.training.step import rollout_loss
from tests.eagle31.export.exports import LATENT_YARN, drafted
from tests.eagle31.tiny import EAGLE3, MLA, VOCAB, random_batch, tiny_config, tiny_drafter
from train.trainer.engine import ensure_process_group

NUM_STEPS, STEP_DECAY, NUM_TOKENS = 4, 0.8, 24
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


def torchspec_losses(drafter: Any, frozen: FrozenParts, batch: PackedBatch, mask: Tensor) -> Tensor:
    """Return the losses of the steps, means over the rows in `mask`, as its trainer has them."""
    from torchspec import Eagle3Model
    from torchspec.models.eagle3 import compute_lazy_target_padded, compute_target_p_padded
    from torchspec.utils.tensor import padding

    head = frozen.target_head
    assert isinstance(head, nn.Linear)
    # The token and the teacher of a row are those of the next.
    final = padding(batch.final_hidden_states[None], left=False)
    if hasattr(drafter, "t2d"):
        everywhere = torch.ones(1, len(mask))
        target = compute_target_p_padded(final, head.weight, drafter.t2d, everywhere, NUM_STEPS)
        target = replace(target, position_mask=None)  # which leaves out tokens outside the draft vocabulary
    else:
        target = compute_lazy_target_padded(final, head.weight, NUM_STEPS)
    model = Eagle3Model(drafter, length=NUM_STEPS, attention_backend="sdpa", loss_type="forward_kl")
    with torch.compiler.set_stance("force_eager"):
        losses, *_ = model(
            padding(batch.input_ids[None], left=False),
            torch.ones(1, len(mask), dtype=torch.long),
            target,
            mask[None],
            batch.aux_hidden_states.flatten(1)[None],
        )
    return torch.stack(losses)


def losses_of_both(changes: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the sum of each step's losses over the supervised rows, ours and TorchSpec's."""
    drafter, frozen = tiny_drafter(tiny_config(**changes), torch.float32)
    batch = random_batch((NUM_TOKENS,), drafter.config, dtype=torch.float32)
    theirs = torchspec_drafter(drafter, frozen)
    supervised = supervised_drafts(batch.loss_mask, batch.document_ids, NUM_STEPS)
    assert supervised.sum(0).min() > 0
    found = []
    with torch.no_grad():
        for step, rows in enumerate(supervised.unbind(1)):
            # Its mask moves with the steps: index j is row j - k at step k. Its losses are means.
            losses = torchspec_losses(theirs, frozen, batch, rows.roll(step).float())
            found.append(losses[step] * rows.sum())
    _, sums = rollout_loss(drafter, frozen, batch, num_steps=NUM_STEPS, step_decay=STEP_DECAY)
    return sums.loss.float(), torch.stack(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": LLAMA3},
        {"draft_vocab_size": VOCAB, **EAGLE3},
        {"rope_parameters": LATENT_YARN | {"beta_fast": 32.0, "beta_slow": 1.0}, **MLA},
    ],
)
def test_losses_are_torchspecs(changes: dict[str, Any]) -> None:
    ours, theirs = losses_of_both(changes)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_gradients_are_torchspecs() -> None:
    drafter, frozen = tiny_drafter(tiny_config(), torch.float32)
    batch = random_batch((NUM_TOKENS,), drafter.config, dtype=torch.float32)
    theirs = torchspec_drafter(drafter, frozen)

    # All rows whose prediction is within the document; its losses are means.
    mask = (torch.arange(NUM_TOKENS) < NUM_TOKENS - 2).float()
    losses = torchspec_losses(theirs, frozen, batch, mask)
    sum(STEP_DECAY**k * (NUM_TOKENS - 2 - k) * losses[k] for k in range(NUM_STEPS)).backward()
    whole = PackedBatch(**{**vars(batch), "loss_mask": torch.ones_like(batch.loss_mask)})
    rollout_loss(drafter, frozen, whole, num_steps=NUM_STEPS, step_decay=STEP_DECAY)[0].backward()
    found = {name.replace("midlayer.", "layers.0."): p.grad for name, p in theirs.named_parameters()}
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(
            parameter.grad, found[name], rtol=1e-4, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_benchmarks_train_its_drafter(tmp_path: Path) -> None:
    """Its packed rows, with the mask of documents that is added, have our loss; what is kept is read."""
    from scripts.bench.peers import TorchSpec, drafter_spec
    from scripts.bench.step_inputs import Shape, packed_rows, random_batch, random_weights

    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    sizes |= {"intermediate_size": 24, "vocab_size": VOCAB, "draft_vocab_size": VOCAB}
    shape = Shape("torchspec", "answers only", 32, **sizes)
    config = shape.config()
    weights = random_weights(config, torch.Generator().manual_seed(0))
    batch = random_batch(shape, packed_rows(shape, 1)[0], torch.Generator().manual_seed(1))
    drafter = Drafter(config)
    drafter.load_state_dict({name: weights[name] for name in drafter.state_dict()})
    head = nn.Linear(config.hidden_size, VOCAB, bias=False)
    head.load_state_dict({"weight": weights["target_head"]})
    norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
    frozen = FrozenParts(weights["target_embed"], TargetHead(norm, head), None, None)
    _, sums = rollout_loss(drafter, frozen, batch, num_steps=shape.num_steps, step_decay=shape.step_decay)

    spec = drafter_spec(config) | {"published_config": config_json(config, Layout.vllm, "float32")}
    trainer = TorchSpec(spec, weights, CPU, torch.float32)
    trainer.begin(steps=4)
    supervised = supervised_drafts(batch.loss_mask, batch.document_ids, shape.num_steps)
    with torch.compiler.set_stance("force_eager"):
        # Its mask moves with the steps.
        loss = trainer.loss(trainer.inputs(vars(batch) | {"loss_mask": supervised[:, 0]}))
        loss.backward()
    decays = shape.step_decay ** torch.arange(shape.num_steps)
    torch.testing.assert_close(loss, (decays * sums.loss / sums.num_rows).sum().float(), rtol=1e-5, atol=1e-5)
    trainer.update()
    save_file({name: tensor.contiguous() for name, tensor in trainer.weights().items()}, tmp_path / WEIGHTS)
    trainer.write_config(tmp_path)
    kept = load_export(tmp_path, CPU).drafter
    assert not torch.equal(kept.fc.weight, drafter.fc.weight)


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
