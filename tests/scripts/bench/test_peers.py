"""The peers compute eagle31's losses on the weights and rows of the benchmark."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from data.target.head import TargetHead
from eagle31.model.frozen import FrozenParts
from eagle31.model.kinds import new_drafter
from scripts.bench.step_inputs import Shape, packed_rows, random_weights, write_inputs
from tests.eagle31.naive import naive_loss
from tests.runs.forked import ROOT
from tests.scripts.bench.commands import command

SHAPE = Shape("peers", "answers only", 384, 64, 4, 2, 16, 96, 256, 128, num_steps=3)
UNPRUNED = replace(SHAPE, draft_vocab_size=SHAPE.vocab_size)


def losses(name: str, shape: Shape, path: Path, norm_output: bool) -> tuple[float, float, Tensor]:
    """Return the loss of the peer, ours (the sum over steps of means over positions), and the teacher."""
    subprocess.run([ROOT / "scripts/setup/peers", name], check=True, stdout=subprocess.DEVNULL)
    (batch,) = write_inputs(path, shape, packed_rows(shape, 1), "float32")
    [found] = command("step").run_side(name, shape, path, "cpu", "float32")["loss"]
    weights = random_weights(shape.config(), torch.Generator().manual_seed(0))
    drafter = new_drafter(replace(shape.config(), norm_output=norm_output))
    drafter.load_state_dict({name: weights[name] for name in drafter.state_dict()})
    head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
    head.load_state_dict({"weight": weights["target_head"]})
    target_head = TargetHead(nn.RMSNorm(shape.hidden_size, eps=1e-6), head)
    ids = weights["draft_target_ids"]
    frozen = FrozenParts(weights["target_embed"], target_head, ids, None)
    _, sums = naive_loss(drafter, frozen, batch, num_steps=shape.num_steps, step_decay=shape.step_decay)
    means = sums.loss / (shape.row_tokens - 2 - torch.arange(shape.num_steps))
    with torch.no_grad():
        teacher = target_head(batch.final_hidden_states)[:, ids].softmax(-1)
    return found, float((means * decays(shape)).sum()), teacher


def decays(shape: Shape) -> Tensor:
    return shape.step_decay ** torch.arange(shape.num_steps)


@pytest.mark.full("starts the peers")
def test_speculators_loss_is_ours_without_the_entropy(tmp_path: Path) -> None:
    found, ours, teacher = losses("speculators", SHAPE, tmp_path / "inputs.safetensors", norm_output=True)
    entropy = -torch.xlogy(teacher, teacher).sum(-1).mean()
    # It supervises one more position at the end of a row.
    assert found == pytest.approx(ours - float(entropy * decays(SHAPE).sum()), rel=0.01)


@pytest.mark.full("starts the peers")
def test_specforges_loss_is_ours_without_norm_output(tmp_path: Path) -> None:
    """It feeds back the state before the norm, and leaves out tokens outside the draft vocabulary."""
    found, ours, _ = losses("specforge", UNPRUNED, tmp_path / "inputs.safetensors", norm_output=False)
    # It divides by all positions, including those at the end of a row that predict nothing.
    assert found == pytest.approx(ours, rel=0.02)
