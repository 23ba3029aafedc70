"""A step's time by part, measured next to what `scripts/bench/step --roofline` predicts."""

import pytest
import torch

from scripts.bench.gpu_rates import gpu_rates
from scripts.bench.recorder import PARTS
from scripts.bench.roofline import measure, predict, predicted_seconds
from tests.gpu.conftest import Figure
from tests.gpu.runs import Check
from tests.gpu.test_step import SMALL, sizes_of


@pytest.mark.at_most(60)
@pytest.mark.parametrize("recipe", SMALL)
def test_every_part_of_a_step_is_measured(check: Check, figure: Figure, recipe: str) -> None:
    sizes, _, _ = sizes_of(check, recipe)
    name = "H200" if check.small else torch.cuda.get_device_name(check.device)
    rates = gpu_rates(name)
    if rates is None:
        pytest.skip(f"the rates of {name} are not known")
    found = predict(sizes)
    by_part, seconds = measure(sizes, check.device, rounds=1 if check.small else 5)
    for part in PARTS:
        expected = sum(predicted_seconds(one, rates) for one in found.operations if one.part == part)
        figure(part, f"{1000 * by_part.get(part, 0.0):.2f} ms, predicted {1000 * expected:.2f} ms for {name}")
    figure("forward and backward", 1000 * seconds, "ms")
    figure("MFU", found.formula_flops / seconds / rates.peak)
    assert set(by_part) == {one.part for one in found.operations}
    assert all(time > 0 for time in by_part.values())
