"""What a rollout reads."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from eagle31.training.rollout import rollout
from tests.eagle31.tiny import MLA, random_batch, tiny_config, tiny_drafter


@pytest.mark.parametrize(
    ("window", "layers", "changes"),
    [(None, 1, {}), (None, 2, MLA), (6, 1, {}), (4, 2, {})],
)
def test_a_row_reads_the_states_of_its_document_up_to_its_own_within_the_window(
    window: int | None, layers: int, changes: dict[str, Any]
) -> None:
    """Step k of row t reads the hidden states at the positions t + k - W + 1 to t, further by each layer."""
    config = tiny_config(num_hidden_layers=layers, sliding_window=window, **changes)
    drafter, frozen = tiny_drafter(config)
    batch = random_batch((40, 60), config, seed=1)
    aux = batch.aux_hidden_states.clone().requires_grad_()
    rows = torch.arange(100)
    steps = rollout(drafter, frozen.embed_tokens, replace(batch, aux_hidden_states=aux), rows, 3)
    for step, normed in enumerate(steps):
        for row in (0, 3, 39, 40, 47, 99):
            (grad,) = torch.autograd.grad(normed[row].sum(), aux, retain_graph=True)
            touched = torch.nonzero(grad.abs().sum((1, 2)) > 0).squeeze(1).tolist()
            reach = 100 if window is None else layers * (window - 1)
            # The states of earlier steps read further to the left than those of this one.
            assert touched == list(range(max(40 if row >= 40 else 0, row - reach), row + 1)), (step, row)
