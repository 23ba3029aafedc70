"""The peers compute eagle31's losses on the weights and rows of the benchmark."""

import argparse
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from data.target.head import TargetHead
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.reference import reference_loss
from scripts.bench.step_inputs import Shape, packed_rows, random_weights, write_inputs
from tests.scripts.bench.commands import command

ROOT = Path(__file__).resolve().parents[3]
SHAPE = Shape(
    "peers",
    "answers only",
    row_tokens=384,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=256,
    draft_vocab_size=128,
    num_steps=3,
)
UNPRUNED = replace(SHAPE, draft_vocab_size=SHAPE.vocab_size)


@pytest.fixture
def loss_of_peer(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str, Shape], float]:
    if not request.config.getoption("--full"):
        pytest.skip("starts the peers: --full")

    def peer_loss(name: str, shape: Shape) -> float:
        subprocess.run(
            [ROOT / "scripts" / "setup" / "peers", name], check=True, stdout=subprocess.DEVNULL, timeout=1100
        )
        path = tmp_path / "inputs.safetensors"
        write_inputs(path, shape, packed_rows(shape, 1), "float32")
        step = command("step")
        side = {"side": name, "head": step.PEER_HEADS[name]}
        arguments = argparse.Namespace(threads=1, dtype="float32", device="cpu")
        spec = step.side_spec(side, shape, path, 1, arguments)
        with step.SideProcess(name, spec, tmp_path / "log") as process:
            process.answer()
            loss: float = process.ask(do="round", row=0)["loss"]
            return loss

    return peer_loss


def our_loss(tmp_path: Path, shape: Shape, norm_output: bool) -> tuple[float, Tensor]:
    """Return the sum over steps of the mean over positions, and the teacher's distributions."""
    rows = packed_rows(shape, 1)
    (batch,) = write_inputs(tmp_path / "ours.safetensors", shape, rows, "float32")
    weights = random_weights(shape.config(), torch.Generator().manual_seed(0))
    config = replace(shape.config(), norm_output=norm_output)
    drafter = Drafter(config)
    drafter.load_state_dict({name: weights[name] for name in drafter.state_dict()})
    head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
    head.load_state_dict({"weight": weights["target_head"]})
    target_head = TargetHead(nn.RMSNorm(shape.hidden_size, eps=1e-6), head)
    ids = weights["draft_target_ids"]
    frozen = FrozenParts(weights["target_embed"], target_head, ids, None)
    _, sums = reference_loss(drafter, frozen, batch, num_steps=shape.num_steps, step_decay=shape.step_decay)
    decays = shape.step_decay ** torch.arange(shape.num_steps)
    means = sums.loss / (shape.row_tokens - 2 - torch.arange(shape.num_steps))
    with torch.no_grad():
        teacher = target_head(batch.final_hidden_states)[:, ids].softmax(-1)
    return float((means * decays).sum()), teacher


def test_speculators_loss_is_ours_without_the_entropy(
    loss_of_peer: Callable[[str, Shape], float], tmp_path: Path
) -> None:
    found = loss_of_peer("speculators", SHAPE)
    ours, teacher = our_loss(tmp_path, SHAPE, norm_output=True)
    entropy = -torch.xlogy(teacher, teacher).sum(-1).mean()
    decays = (SHAPE.step_decay ** torch.arange(SHAPE.num_steps)).sum()
    # It supervises one more position at the end of a row.
    assert found == pytest.approx(ours - float(entropy * decays), rel=0.01)


def test_specforges_loss_is_ours_without_norm_output(
    loss_of_peer: Callable[[str, Shape], float], tmp_path: Path
) -> None:
    """It feeds back the state before the norm, and leaves out tokens outside the draft vocabulary."""
    found = loss_of_peer("specforge", UNPRUNED)
    ours, _ = our_loss(tmp_path, UNPRUNED, norm_output=False)
    # It divides by all positions, including those at the end of a row that predict nothing.
    assert found == pytest.approx(ours, rel=0.02)
