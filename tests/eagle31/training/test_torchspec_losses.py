"""Losses and gradients compared with TorchSpec's Eagle3Model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.batch import PackedBatch, supervised_drafts
from eagle31.training.objectives import Loss
from eagle31.training.step import rollout_loss
from tests.eagle31.tiny import EAGLE3, VOCAB, random_batch, tiny_config, tiny_drafter

NUM_STEPS, STEP_DECAY, NUM_TOKENS = 4, 0.8, 24


def torchspec_drafter(drafter: Drafter, frozen: FrozenParts) -> Any:
    """Return TorchSpec's drafter with the same weights, made from the keys of its JSON file."""
    from torchspec import AutoDraftModelConfig, AutoEagle3DraftModel

    config = drafter.config
    names = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    names += ["vocab_size", "draft_vocab_size", "target_hidden_size", "rms_norm_eps", "rope_theta"]
    names += ["fc_norm", "norm_output", "max_position_embeddings"]
    keys = {name: getattr(config, name) for name in names}
    architecture = {"architectures": ["LlamaForCausalLMEagle3"], "pad_token_id": None}
    found = AutoEagle3DraftModel.from_config(AutoDraftModelConfig.from_dict(keys | architecture))
    weights = {name.replace("layers.0.", "midlayer."): value for name, value in drafter.state_dict().items()}
    weights["embed_tokens.weight"] = frozen.embed_tokens
    if config.pruned:
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        weights["t2d"][frozen.draft_target_ids] = True
        weights["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    found.load_state_dict(weights)
    return found


def torchspec_losses(
    drafter: Any, frozen: FrozenParts, batch: PackedBatch, mask: Tensor, loss: Loss
) -> list[Tensor]:
    """Return the loss of each step, a mean over the rows in `mask`, as TorchSpec's trainer has it."""
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
    kind = {Loss.kl: "forward_kl", Loss.lk_lambda: "lk_lambda"}[loss]
    model = Eagle3Model(drafter, length=NUM_STEPS, attention_backend="sdpa", loss_type=kind)
    with torch.compiler.set_stance("force_eager"):
        found = model(
            padding(batch.input_ids[None], left=False),
            torch.ones(1, len(mask), dtype=torch.long),
            target,
            mask[None],
            batch.aux_hidden_states.flatten(1)[None],
        )
    return found[0]


@pytest.mark.usefixtures("torchspec")
@pytest.mark.parametrize(
    ("loss", "changes"),
    [
        (Loss.kl, {"draft_vocab_size": 29}),
        (Loss.kl, {"draft_vocab_size": VOCAB, **EAGLE3}),
        (Loss.lk_lambda, {"draft_vocab_size": VOCAB}),
    ],
)
def test_losses_are_torchspecs(loss: Loss, changes: dict[str, Any]) -> None:
    config: DrafterConfig = tiny_config(
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, **changes
    )
    drafter, frozen = tiny_drafter(config, torch.float32)
    batch = random_batch((NUM_TOKENS,), config, dtype=torch.float32)
    theirs = torchspec_drafter(drafter, frozen)

    # Its mask moves with the steps: index j is row j - k at step k. With one row in it, means are sums.
    expected = torch.zeros(NUM_TOKENS, NUM_STEPS)
    with torch.no_grad():
        for j in range(NUM_TOKENS):
            mask = (torch.arange(NUM_TOKENS) == j).float()
            for step, value in enumerate(torchspec_losses(theirs, frozen, batch, mask, loss)):
                if j >= step:
                    expected[j - step, step] = value
    supervised = supervised_drafts(batch.loss_mask, batch.document_ids, NUM_STEPS)
    assert supervised.sum(0).min() > 0
    options = {"num_steps": NUM_STEPS, "step_decay": STEP_DECAY, "objective": loss}
    _, sums = rollout_loss(drafter, frozen, batch, **options)
    torch.testing.assert_close(sums.loss.float(), (expected * supervised).sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("torchspec")
@pytest.mark.parametrize("draft_vocab_size", [29, VOCAB])
def test_gradients_are_torchspecs(draft_vocab_size: int) -> None:
    config: DrafterConfig = tiny_config(draft_vocab_size=draft_vocab_size)
    drafter, frozen = tiny_drafter(config, torch.float32)
    batch = random_batch((NUM_TOKENS,), config, dtype=torch.float32)
    theirs = torchspec_drafter(drafter, frozen)

    # All rows whose prediction is within the document; its losses are means.
    mask = (torch.arange(NUM_TOKENS) < NUM_TOKENS - 2).float()
    losses = torchspec_losses(theirs, frozen, batch, mask, Loss.kl)
    torch.stack([STEP_DECAY**k * (NUM_TOKENS - 2 - k) * losses[k] for k in range(NUM_STEPS)]).sum().backward()
    whole = PackedBatch(**{**vars(batch), "loss_mask": torch.ones_like(batch.loss_mask)})
    loss, _ = rollout_loss(drafter, frozen, whole, num_steps=NUM_STEPS, step_decay=STEP_DECAY)
    loss.backward()
    found = {name.replace("midlayer.", "layers.0."): p.grad for name, p in theirs.named_parameters()}
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(
            parameter.grad, found[name], rtol=1e-4, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )
