"""The weights that a training starts from."""

import pytest
import torch

from eagle31.model.kinds import new_drafter
from tests.eagle31.tiny import DSPARK, EAGLE3, tiny_config
from train.drafter.build import initialize


@pytest.mark.parametrize("changes", [{}, EAGLE3], ids=["eagle3.1", "eagle3"])
def test_an_eagle_drafter_begins_with_the_deepest_state(changes: dict) -> None:
    drafter = new_drafter(tiny_config(hidden_size=20, **changes))
    initialize(drafter)
    states = torch.randn(7, 3, 20) * torch.tensor([1.0, 30.0, 5.0])[:, None]
    deepest = states[:, -1]
    expected = deepest if changes else torch.nn.functional.rms_norm(deepest, (20,), eps=1e-6)
    torch.testing.assert_close(drafter.fuse(states), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes", [{"hidden_size": 16}, DSPARK | {"hidden_size": 20}], ids=["narrower", "dspark"]
)
def test_other_drafters_begin_with_random_products_of_all_states(changes: dict) -> None:
    drafter = new_drafter(tiny_config(**changes))
    initialize(drafter)
    assert drafter.fc.weight.detach().std().item() == pytest.approx(0.02, rel=0.2)
