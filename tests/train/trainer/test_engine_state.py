from types import SimpleNamespace

import deepspeed
import pytest
from torch import nn

from eagle31.errors import UserError
from train.trainer.engine_state import check_internals


class DeepSpeedZeroOptimizer:
    single_partition_of_fp32_groups, _global_grad_norm = (), 0.0


@pytest.mark.parametrize(
    ("optimizer", "lacking"),
    [
        (DeepSpeedZeroOptimizer(), r"DeepSpeedZeroOptimizer\.averaged_gradients, Parameter\._hp_mapping"),
        (object(), r"object\.weights at ZeRO 2, Parameter\._hp_mapping"),
    ],
)
def test_what_another_deepspeed_lacks_is_named(optimizer: object, lacking: str) -> None:
    class Engine(SimpleNamespace):
        __hash__ = object.__hash__

    engine = Engine(
        module=nn.Linear(2, 2),
        optimizer=optimizer,
        basic_optimizer=None,
        gradient_average=True,
        zero_optimization=lambda: True,
        zero_optimization_stage=lambda: 2,
    )
    version = deepspeed.__version__.replace("+", r"\+")
    with pytest.raises(UserError, match=f"deepspeed={version}: It has no {lacking}; install the version"):
        check_internals(engine)  # type: ignore[arg-type]
