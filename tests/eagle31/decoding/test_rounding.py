"""Gaps between logits, and what rounding explains of them."""

import torch

from eagle31.decoding.rounding import gaps_and_bounds


def test_gaps_are_from_the_largest_logit() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.5], [3.0, 3.0, 0.0], [1.0, -8.0, 2.0]], dtype=torch.bfloat16)
    gaps, bounds = gaps_and_bounds(logits, torch.tensor([2, 0, 1]), torch.bfloat16)
    assert gaps.tolist() == [1.5, 0.0, 10.0]
    assert torch.isclose(bounds[2] / bounds[1], torch.tensor(8 / 3))  # of the larger magnitude
    gaps, bounds = gaps_and_bounds(logits, torch.tensor([-1, 0, 1]), torch.float32)
    assert gaps[0] == torch.inf
    assert bounds.max() < 1e-3


def test_rounding_in_bf16_stays_within_the_bound() -> None:
    """The best tokens of one product, computed from terms that are rounded in two orders."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2000, 512), torch.randn(64, 512) / 16
    order = torch.randperm(512)
    halves = [(hidden[:, part].bfloat16() @ weight[:, part].bfloat16().T) for part in order.chunk(2)]
    chosen = (halves[0] + halves[1]).argmax(-1)
    gaps, bounds = gaps_and_bounds(hidden.bfloat16() @ weight.bfloat16().T, chosen, torch.bfloat16)
    assert (gaps > 0).any()
    assert (gaps <= bounds).all()
    exact = hidden @ weight.T
    gaps, bounds = gaps_and_bounds(exact - exact.amax(-1, keepdim=True), chosen, torch.bfloat16)
    assert (gaps <= bounds).all()  # the errors are the same where the largest logits are near 0
    others, bounds = gaps_and_bounds(halves[0] + halves[1], chosen.roll(1), torch.bfloat16)
    assert (others > bounds).float().mean() > 0.9
