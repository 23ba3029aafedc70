"""Losses and gradients of EAGLE 3 compared with TorchSpec's Eagle3Model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch, supervised_drafts
from eagle31.training.step import rollout_loss
from tests.eagle31.tiny import VOCAB, random_batch, tiny_config, tiny_drafter
from tests.torchspec_python import run_there, torchspec_python

NUM_STEPS, STEP_DECAY, NUM_TOKENS = 4, 0.8, 24
SCRIPT = Path(__file__).with_name("torchspec_losses.py")


def theirs(drafter: Drafter, frozen: FrozenParts, batch: PackedBatch, directory: Path) -> dict[str, Tensor]:
    config, head = drafter.config, frozen.target_head
    assert isinstance(head, nn.Linear)
    names = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    names += [
        "vocab_size",
        "draft_vocab_size",
        "target_hidden_size",
        "rms_norm_eps",
        "max_position_embeddings",
    ]
    given = {f"config.{name}": torch.tensor(getattr(config, name), dtype=torch.float64) for name in names}
    for name in set(names) - {"rms_norm_eps"}:
        given[f"config.{name}"] = given[f"config.{name}"].long()
    for name, weight in drafter.state_dict().items():
        given[f"drafter.{name.replace('layers.0.', 'midlayer.')}"] = weight
    given["drafter.embed_tokens.weight"] = frozen.embed_tokens
    given |= {"input_ids": batch.input_ids, "aux": batch.aux_hidden_states.flatten(1)}
    given |= {"last": batch.final_hidden_states, "target_head": head.weight.detach()}
    given |= {"num_steps": torch.tensor(NUM_STEPS), "step_decay": torch.tensor(STEP_DECAY)}
    if frozen.draft_target_ids is not None:
        given["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        given["t2d"][frozen.draft_target_ids] = True
    save_file({name: value.contiguous() for name, value in given.items()}, directory / "given.safetensors")
    run_there(SCRIPT, [directory / "given.safetensors", directory / "found.safetensors"])
    return load_file(directory / "found.safetensors")


@pytest.mark.parametrize("draft_vocab_size", [29, VOCAB])
def test_eagle3_losses_and_gradients_are_torchspecs(draft_vocab_size: int, tmp_path: Path) -> None:
    torchspec_python()
    config: DrafterConfig = tiny_config(
        fc_norm=False, norm_output=False, draft_vocab_size=draft_vocab_size, max_position_embeddings=64
    )
    drafter, frozen = tiny_drafter(config, torch.float32)
    batch = random_batch((NUM_TOKENS,), config, dtype=torch.float32)
    found = theirs(drafter, frozen, batch, tmp_path)

    supervised = supervised_drafts(batch.loss_mask, batch.document_ids, NUM_STEPS)
    assert supervised.sum(0).min() > 0
    options = {"num_steps": NUM_STEPS, "step_decay": STEP_DECAY}
    _, sums = rollout_loss(drafter, frozen, batch, **options)
    torch.testing.assert_close(sums.loss.float(), (found["losses"] * supervised).sum(0), rtol=1e-5, atol=1e-5)

    whole = PackedBatch(**{**vars(batch), "loss_mask": torch.ones_like(batch.loss_mask)})
    loss, _ = rollout_loss(drafter, frozen, whole, **options)
    loss.backward()
    for name, parameter in drafter.named_parameters():
        expected = found[f"gradient.{name.replace('layers.0.', 'midlayer.')}"]
        torch.testing.assert_close(
            parameter.grad, expected, rtol=1e-4, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )
