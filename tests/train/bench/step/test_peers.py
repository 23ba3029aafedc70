"""The peers compute on the weights and rows that they are given what we do: their losses are ours."""

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
from eagle31.training.objectives import Objective
from eagle31.training.reference import reference_loss
from train.bench.step.inputs import random_weights, write_inputs
from train.bench.step.shapes import Shape
from train.bench.step.sides import PEER_SIDES, SideProcess
from train.bench.step.text import packed_rows

ROOT = Path(__file__).resolve().parents[4]
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


@pytest.fixture
def measured_loss(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], float]:
    if not request.config.getoption("--full"):
        pytest.skip("starts the peers: --full")

    def measure(name: str) -> float:
        subprocess.run([ROOT / "scripts" / "setup" / "peers", name], check=True, stdout=subprocess.DEVNULL)
        path = tmp_path / "inputs.safetensors"
        write_inputs(path, SHAPE, packed_rows(SHAPE, 1, None)[0], "float32")
        with SideProcess(
            PEER_SIDES[name],
            SHAPE,
            path,
            1,
            threads=1,
            dtype="float32",
            device="cpu",
            log_path=tmp_path / "log",
        ) as side:
            side.start()
            loss: float = side.ask("round", row=0)["loss"]
            return loss

    return measure


def our_loss(tmp_path: Path, objective: Objective, norm_output: bool) -> tuple[float, Tensor]:
    """Summed over steps, of the mean over drafted rows; and the teacher's distribution at each place."""
    rows, _ = packed_rows(SHAPE, 1, None)
    (batch,) = write_inputs(tmp_path / "ours.safetensors", SHAPE, rows, "float32")
    weights = random_weights(SHAPE.config(), torch.Generator().manual_seed(0))
    config = replace(SHAPE.config(), norm_output=norm_output)
    drafter = Drafter(config)
    drafter.load_state_dict({name: weights[name] for name in drafter.state_dict()})
    head = nn.Linear(SHAPE.hidden_size, SHAPE.vocab_size, bias=False)
    head.load_state_dict({"weight": weights["target_head"]})
    target_head = TargetHead(nn.RMSNorm(SHAPE.hidden_size, eps=1e-6), head)
    ids = weights["draft_target_ids"]
    frozen = FrozenParts(weights["target_embed"], target_head, ids, None)
    _, sums = reference_loss(
        drafter, frozen, batch, num_steps=SHAPE.num_steps, step_decay=SHAPE.step_decay, objective=objective
    )
    decays = SHAPE.step_decay ** torch.arange(SHAPE.num_steps)
    # By drafted rows, those that the objective leaves out included.
    means = sums.loss / (SHAPE.row_tokens - 2 - torch.arange(SHAPE.num_steps))
    with torch.no_grad():
        teacher = target_head(batch.final_hidden_states)[:, ids].softmax(-1)
    return float((means * decays).sum()), teacher


def test_speculators_loss_is_ours_less_the_entropy(
    measured_loss: Callable[[str], float], tmp_path: Path
) -> None:
    found = measured_loss("speculators")
    ours, teacher = our_loss(tmp_path, Objective(), norm_output=True)
    entropy = -torch.xlogy(teacher, teacher).sum(-1).mean()
    decays = (SHAPE.step_decay ** torch.arange(SHAPE.num_steps)).sum()
    # It counts one row more at the row's end.
    assert found == pytest.approx(ours - float(entropy * decays), rel=0.01)


def test_specforges_loss_is_ours_without_norm_output(
    measured_loss: Callable[[str], float], tmp_path: Path
) -> None:
    """It feeds back the state before the norm, and counts where the target's greedy token can be drafted."""
    found = measured_loss("specforge")
    ours, _ = our_loss(tmp_path, Objective(count_outside_vocab=False), norm_output=False)
    # It divides by all rows, those at the row's end that predict nothing included.
    assert found == pytest.approx(ours, rel=0.02)
